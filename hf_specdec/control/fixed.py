"""The same plan in every round with as many rows."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..state import DecodeView, Plan
from ..stats import StepRecord
from .base import SCHEDULES, Controller, Schedule, Scope


class FixedController(Controller):
    """Grants the largest plan, always.

    Args:
        largest: gives it for a number of rows.
    """

    def __init__(self, largest: Callable[[int], Plan]):
        self._largest = largest
        self._sizes: Counter[int] = Counter()

    def plan(self, view: DecodeView, rooms: Sequence[int]) -> Plan:
        """The largest."""
        return self._largest(view.rows)

    def observe(self, record: StepRecord) -> None:
        """Count the round."""
        self._sizes[record.nodes] += 1

    def report(self) -> dict[str, Any]:
        """Rounds by block size."""
        sizes = {str(nodes): rounds for nodes, rounds in sorted(self._sizes.items())}
        return {"schedule": Constant.name, "rounds_by_nodes": sizes}


@dataclass(frozen=True)
class Constant(Schedule):
    """The largest plan in every round."""

    name: ClassVar[str] = "constant"

    def build(self, scope: Scope) -> FixedController:
        """The controller of one call."""
        return FixedController(scope.largest)


SCHEDULES[Constant.name] = Constant
