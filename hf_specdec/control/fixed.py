"""The same draft length in every round with as many rows."""

from collections.abc import Callable

from ..state import DecodeView, Plan
from .base import SCHEDULES, Controller


class FixedController(Controller):
    """Grants chains of the largest length, always.

    Args:
        length: gives it for a number of rows.
    """

    def __init__(self, length: Callable[[int], int]):
        self._length = length

    def plan(self, view: DecodeView) -> Plan:
        """A chain."""
        return Plan.chain(self._length(view.rows))


SCHEDULES["constant"] = FixedController
