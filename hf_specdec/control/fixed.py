"""The same draft length in every round."""

from ..state import DecodeView, Plan
from .base import SCHEDULES, Controller


class FixedController(Controller):
    """Grants chains of `length` tokens, always."""

    def __init__(self, length: int):
        self._plan = Plan.chain(length)

    def plan(self, view: DecodeView) -> Plan:
        """The same plan."""
        return self._plan


SCHEDULES["constant"] = FixedController
