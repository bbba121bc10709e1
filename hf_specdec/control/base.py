"""What a policy for the size of drafts is: settings (`Schedule`) and the state of one call (`Controller`).

A plan for a round may use past rounds only. What was drafted may be pruned by what it is, except where it was drawn
for a verifier that reads draft probabilities: the loop does not ask there.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from ..errors import unknown_name
from ..state import DecodeView, Plan
from ..stats import StepRecord
from ..tree import DraftTree


class Controller(ABC):
    """Grants each round a plan and learns from what came of it. One object per call."""

    @property
    def teaches(self) -> bool:
        """Drafters are told what the target found likely in the prompt."""
        return True

    def start(self, tokens: int, seconds: float) -> None:
        """Called once after the prompt's forward.

        Args:
            tokens: positions that went through it, over all rows.
            seconds: how long it took.
        """

    @abstractmethod
    def plan(self, view: DecodeView, rooms: Sequence[int]) -> Plan:
        """The plan of the coming round; depth 0 means: do not draft.

        Args:
            rooms: tokens that each row may still emit.
        """

    def prune(self, view: DecodeView, tree: DraftTree) -> DraftTree:
        """The part of a proposed tree that is worth its forward pass."""
        return tree

    def observe(self, record: StepRecord) -> None:
        """Called after each round."""

    def finish(self) -> None:
        """Called once when the call ends, also when it ends with an exception."""

    def report(self) -> dict[str, Any]:
        """What was chosen and why, JSON-able, for `SpeculationStats.choices`."""
        return {}


@dataclass(frozen=True)
class Scope:
    """What a controller may know of its call.

    Args:
        largest: gives the largest plan for a number of rows.
        drafter: whose `looks_up`, `runs_model`, `drafts_untaught`, `usual_gain` and `forwards` count.
        model: the target.
        strategy: name and settings of the draft strategy, as text.
        rows: of the batch at the start.
    """

    largest: Callable[[int], Plan]
    drafter: Any
    model: Any
    strategy: str = ""
    rows: int = 1


@dataclass(frozen=True)
class Schedule(ABC):
    """Settings of a policy. Reusable and safe to share between threads.

    Attributes:
        reach: how many times the strategy's default a draft that costs by the token may have where the user gives no
            size.
    """

    name: ClassVar[str] = ""
    reach: ClassVar[int] = 1

    @abstractmethod
    def build(self, scope: Scope) -> Controller:
        """The controller of one call. Raises `SpecDecError` when the settings do not fit it."""

    def to_dict(self) -> dict[str, Any]:
        """The settings by field name, for YAML and JSON."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


SCHEDULES: dict[str, type[Schedule]] = {}
"""Policies by name."""


def as_schedule(given: Any) -> Schedule:
    """The schedule that a name, a schedule, or a dict with `name` and settings stands for.

    Raises:
        SpecDecError: it stands for none.
    """
    if isinstance(given, Schedule):
        return given
    settings = dict(given) if isinstance(given, Mapping) and given else {"name": given}
    name = settings.pop("name", None)
    if not isinstance(name, str) or name not in SCHEDULES:
        raise unknown_name("schedule", name, SCHEDULES)
    known = [each.name for each in fields(SCHEDULES[name])]
    for setting in settings:
        if setting not in known:
            raise unknown_name(f"setting of schedule {name!r}:", setting, known or {"(it takes none)"})
    return SCHEDULES[name](**settings)
