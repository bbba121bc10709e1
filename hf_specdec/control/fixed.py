"""The same plan in every round with as many rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..state import DecodeView, Plan
from .base import SCHEDULES, Controller, Schedule, Scope


class FixedController(Controller):
    """Grants the largest plan, always.

    Args:
        largest: gives it for a number of rows.
    """

    def __init__(self, largest: Callable[[int], Plan]):
        self._largest = largest

    def plan(self, view: DecodeView, rooms: Sequence[int]) -> Plan:
        """The largest."""
        return self._largest(view.rows)


@dataclass(frozen=True)
class Constant(Schedule):
    """The largest plan in every round."""

    name: ClassVar[str] = "constant"

    def build(self, scope: Scope) -> FixedController:
        """The controller of one call."""
        return FixedController(scope.largest)


SCHEDULES[Constant.name] = Constant
