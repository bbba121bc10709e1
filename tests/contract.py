"""What the contract suite needs to know of a strategy, and what it watches.

A registered strategy is in the suite by its name alone. One that cannot be made without settings gets them from
`SETTINGS`, the only place to add a row.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from cases import PHRASE, draft_model
from transformers import PreTrainedModel

from hf_specdec.control.base import Controller, Schedule, Scope
from hf_specdec.drafters import base
from hf_specdec.drafters.base import Drafter, DraftStrategy, build_strategy, known_strategies
from hf_specdec.state import DecodeView, Plan
from hf_specdec.tree import DraftTree

SETTINGS: dict[str, Callable[[PreTrainedModel], dict[str, Any]]] = {
    "draft_model": lambda draft: {"model": draft},
    "merge": lambda draft: {"strategies": ["suffix", "prompt_lookup", draft]},
    "cascade": lambda draft: {"strategies": ["prompt_lookup", draft]},
    "layer_skip": lambda draft: {"exit_layer": 1},
    "phrase_book": lambda draft: {"phrases": [PHRASE, (16, 10), (1, 2, 3), (3, 0, 2, 1)]},
}
"""Settings of the strategies that need some, given a draft model with the target's vocabulary."""

with pytest.MonkeyPatch.context() as _patch:  # the phrase book is a strategy of this suite alone
    _patch.setattr(base, "STRATEGIES", dict(base.STRATEGIES))
    from phrase_book import PhraseBook

    STRATEGIES = known_strategies()
    assert STRATEGIES["phrase_book"] is PhraseBook

NAMES = tuple(STRATEGIES)


def make(name: str, draft: PreTrainedModel | None = None) -> DraftStrategy:
    """The strategy of this name, with a draft model where it needs one."""
    settings = SETTINGS.get(name, lambda draft: {})
    return build_strategy(name, settings(draft_model() if draft is None else draft))


@dataclass
class Watch:
    """What happened to the drafters of a strategy: names of the calls in order, and each plan with its answer."""

    calls: list[str] = field(default_factory=list)
    rounds: list[tuple[int, Plan, DraftTree]] = field(default_factory=list)


@contextmanager
def watched(strategy: DraftStrategy) -> Iterator[Watch]:
    """Watch every drafter that this class of strategy builds while the block runs."""
    watch = Watch()
    build = type(strategy).build

    def building(self: DraftStrategy, target: Any, request: Any) -> Drafter:
        drafter = build(self, target, request)
        for name in ("start", "propose", "observe", "keep", "finish"):
            setattr(drafter, name, watching(name, getattr(drafter, name)))
        return drafter

    def watching(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            watch.calls.append(name)
            answer = method(*arguments)
            if name == "propose":
                watch.rounds.append((arguments[0].rows, arguments[1], answer))
            return answer

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(strategy), "build", building)
        yield watch


PLANS = (
    Plan.chain(5),
    Plan(4, 2, 9, least=0.01),
    Plan(0, 1, 1),
    Plan(3, 3, 10),
    Plan.chain(1),
    Plan(3, 2, 4),
    Plan(1, 4, 5),
    Plan(6, 2, 12),
    Plan(5, 1, 6, least=0.5),
)
"""Chains and trees, wide and deep, and one round without a draft. No plan is deeper than it has nodes."""


class Varied(Controller):
    """Grants `PLANS` in turn."""

    def __init__(self) -> None:
        self._plans = itertools.cycle(PLANS)

    def plan(self, view: DecodeView, rooms: Sequence[int]) -> Plan:
        """The next one."""
        return next(self._plans)


@dataclass(frozen=True)
class Various(Schedule):
    """The schedule of `Varied`."""

    def build(self, scope: Scope) -> Varied:
        """The controller of one call."""
        return Varied()


def children(parents: Sequence[int], node: int) -> list[int]:
    """Nodes right below a node."""
    return [other for other, parent in enumerate(parents) if parent == node]


def assert_within(plan: Plan, rows: int, tree: DraftTree) -> None:
    """The tree is well-formed, has these rows, and is not deeper, wider or larger than the plan grants."""
    assert tree.tokens.shape[0] == rows
    assert tree.size <= plan.nodes
    assert int(tree.depths.max()) <= plan.depth
    for parents, tokens, drawn in zip(tree.parents.tolist(), tree.tokens.tolist(), tree.sampled.tolist()):
        assert parents[0] == -1 and not drawn[0]
        real = [node for node, parent in enumerate(parents) if node == 0 or parent >= 0]
        assert all(parents[node] < node and parents[node] in real for node in real[1:])
        assert not any(drawn[node] for node in range(tree.size) if node not in real)
        for node in real:
            below = [tokens[child] for child in children(parents, node)]
            assert len(below) <= plan.width
            assert len(set(below)) == len(below), "siblings hold different tokens"
        if plan.width == 1:
            assert all(parents[node] == node - 1 for node in real), "a chain, node after node"


def assert_drawn_from_its_law(tree: DraftTree) -> None:
    """Where a node was drawn, `probs` at its parent is a law that can say its token."""
    if not tree.sampled.any():
        return
    assert tree.probs is not None
    for row, node in tree.sampled.nonzero().tolist():
        law = tree.probs[row, tree.parents[row, node]]
        assert law[tree.tokens[row, node]] > 0
        assert (law >= 0).all()
        torch.testing.assert_close(law.sum(), torch.ones(()), atol=1e-4, rtol=0)
