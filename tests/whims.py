"""Schedules without a clock that choose what no sensible one would: anything at all, or never to draft."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from hf_specdec import DraftTree
from hf_specdec.control import Controller, Schedule, Scope
from hf_specdec.state import DecodeView, Plan
from hf_specdec.tree import select_nodes


class Capricious(Controller):
    """Any plan, and any part of a tree."""

    def __init__(self, scope: Scope, seed: int):
        self._largest = scope.largest
        self._rng = random.Random(seed)

    def plan(self, view: DecodeView, rooms: Sequence[int]) -> Plan:
        plan = self._largest(view.rows).within(self._rng.choice([0, 1, 3, 50]))
        wanted = self._rng.choice([None, 0, 2])
        return Plan(plan.depth, plan.width, plan.nodes, wanted, self._rng.choice([None, 1.0, 9.0]))

    def prune(self, view: DecodeView, tree: DraftTree) -> DraftTree:
        kept = []
        for row in tree.parents.tolist():
            own = [0]
            for node, parent in enumerate(row):
                if parent in own and self._rng.random() < 0.7:
                    own.append(node)
            kept.append(own)
        return select_nodes(tree, kept)


@dataclass(frozen=True)
class Whims(Schedule):
    """A `Capricious` controller per call."""

    name: ClassVar[str] = "whims"
    seed: int = 0

    def build(self, scope: Scope) -> Capricious:
        return Capricious(scope, self.seed)


class Idle(Controller):
    """Never drafts."""

    def __init__(self, scope: Scope):
        self._largest = scope.largest

    def plan(self, view: DecodeView, rooms: Sequence[int]) -> Plan:
        return self._largest(view.rows).within(0)


@dataclass(frozen=True)
class Never(Schedule):
    """An `Idle` controller per call."""

    name: ClassVar[str] = "never"

    def build(self, scope: Scope) -> Idle:
        return Idle(scope)
