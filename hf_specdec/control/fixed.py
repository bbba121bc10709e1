"""The same plan in every round with as many rows."""

from collections.abc import Callable

from ..state import DecodeView, Plan
from .base import SCHEDULES, Controller


class FixedController(Controller):
    """Grants the largest plan, always.

    Args:
        largest: gives it for a number of rows.
    """

    def __init__(self, largest: Callable[[int], Plan]):
        self._largest = largest

    def plan(self, view: DecodeView) -> Plan:
        """The largest."""
        return self._largest(view.rows)


SCHEDULES["constant"] = FixedController
