"""What a length policy is. A plan for a round may use past rounds only."""

from abc import ABC, abstractmethod
from collections.abc import Callable

from ..state import DecodeView, Plan
from ..stats import StepRecord


class Controller(ABC):
    """Grants each round a plan and learns from what came of it. One object per call."""

    @abstractmethod
    def plan(self, view: DecodeView) -> Plan:
        """The plan of the coming round; depth 0 means: do not draft."""

    def observe(self, record: StepRecord) -> None:
        """Called after each round."""


SCHEDULES: dict[str, Callable[[Callable[[int], Plan]], Controller]] = {}
"""Policies by name; each is called with a function that gives the largest plan for a number of rows."""
