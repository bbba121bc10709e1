"""Several strategies together: all in one tree (`merge`), or the first that has something to say (`cascade`)."""

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from ..errors import SpecDecError
from ..proposal import fault_of
from ..state import Chances, DecodeView, Plan
from ..tree import UNKNOWN, DraftTree, RowTree, union
from .base import Drafter, DraftStrategy, build_strategy, known_strategies, register_strategy
from .draft_model import DraftModel
from .given import as_strategy
from .recycling import Recycling
from .suffix import Suffix


@dataclass(frozen=True)
class _Combined(DraftStrategy):
    """What `merge` and `cascade` share.

    Args:
        strategies: the members: each what `as_strategy` takes.
    """

    strategies: Any

    needs: ClassVar[str] = "what its members need"

    def __post_init__(self) -> None:
        given = self.strategies
        if isinstance(given, (str, Mapping)) or not isinstance(given, Sequence) or not given:
            raise SpecDecError(
                f"{self.name}: strategies={given!r} is no list of strategies; give one, as in ['suffix', 'recycling']."
            )
        object.__setattr__(self, "strategies", tuple(map(as_strategy, given)))

    @property
    def sampled(self) -> bool:  # type: ignore[override]
        """Some member draws."""
        return any(each.sampled for each in self.strategies)

    @property
    def trees(self) -> bool:  # type: ignore[override]
        """Some member proposes trees."""
        return any(each.trees for each in self.strategies)

    @property
    def default_draft_tokens(self) -> int:  # type: ignore[override]
        """The largest of the members'."""
        return max(each.default_draft_tokens for each in self.strategies)

    @property
    def default_width(self) -> int:  # type: ignore[override]
        """The largest of the members'."""
        return max(each.default_width for each in self.strategies)

    def to_dict(self) -> dict[str, Any]:
        """The members by name and settings."""
        return {
            "strategies": [{"strategy": each.name, "strategy_options": each.to_dict()} for each in self.strategies]
        }


@register_strategy("merge")
@dataclass(frozen=True)
class Merge(_Combined):
    """The proposals of all members in one tree without duplicates, cut to its most valuable nodes.

    The value of a node is its estimated acceptance; where several members propose it, that not all of them are wrong.
    Which nodes stay depends on the tokens drafted, so members that draw serve no verifier that reads draft
    probabilities.

    Args:
        strategies: the members: each what `as_strategy` takes.
    """

    @property
    def trees(self) -> bool:  # type: ignore[override]
        """Two chains may part."""
        return True

    @property
    def default_width(self) -> int:  # type: ignore[override]
        """Room for each member at each place."""
        return max(len(self.strategies), *(each.default_width for each in self.strategies))

    @property
    def knows_law(self) -> bool:  # type: ignore[override]
        """No member draws, and each knows its law."""
        return not self.sampled and all(each.knows_law for each in self.strategies)

    def build(self, target: Any, request: Any) -> "MergeDrafter":
        """The drafter. Raises what a member raises that does not fit the target or the request."""
        members = [each.build(target, request) for each in self.strategies]
        return MergeDrafter(members, self.strategies, request)


@register_strategy("free")
@dataclass(frozen=True)
class Free(Merge):
    """`suffix` and `recycling` in one tree: no model, no training.

    Args:
        suffix: settings of `Suffix`, as a dict, or the strategy itself.
        recycling: settings of `Recycling`, as a dict, or the strategy itself.
    """

    strategies: Any = field(init=False, repr=False, default=())
    suffix: Any = field(default_factory=dict)
    recycling: Any = field(default_factory=dict)

    needs: ClassVar[str] = "nothing; best where the answer repeats itself, the prompt or earlier answers"

    def __post_init__(self) -> None:
        members = []
        for name, kind in (("suffix", Suffix), ("recycling", Recycling)):
            given = getattr(self, name)
            if isinstance(given, Mapping):
                given = build_strategy(name, dict(given))
            if not isinstance(given, kind):
                raise SpecDecError(f"free: {name}={given!r} is neither a dict of settings nor a {kind.__name__}.")
            object.__setattr__(self, name, given)
            members.append(given)
        object.__setattr__(self, "strategies", tuple(members))

    def to_dict(self) -> dict[str, Any]:
        """The settings of both members."""
        return {"suffix": self.suffix.to_dict(), "recycling": self.recycling.to_dict()}


@register_strategy("cascade")
@dataclass(frozen=True)
class Cascade(_Combined):
    """Per row, the proposal of the first member that has one; later members are asked only for want of it.

    Args:
        strategies: the members: each what `as_strategy` takes.
    """

    @property
    def knows_law(self) -> bool:  # type: ignore[override]
        """Every member knows its law."""
        return all(each.knows_law for each in self.strategies)

    def build(self, target: Any, request: Any) -> "CascadeDrafter":
        """The drafter. Raises what a member raises that does not fit the target or the request."""
        members = [each.build(target, request) for each in self.strategies]
        return CascadeDrafter(members, self.strategies, request)


@register_strategy("auto")
@dataclass(frozen=True)
class Auto(Cascade):
    """What needs no thought: `free`, and with a draft model that model where it promises more than `free` does.

    Under the adaptive schedule, its default, each round drafts as much as pays on this machine, or nothing.

    Args:
        model: what else may draft: a draft model, its name or path, settings of `DraftModel` as a dict, or another
            strategy, such as `quantized_self`, by name, as an object or as a dict with `strategy` and
            `strategy_options`. None drafts without a model.
    """

    strategies: Any = field(init=False, repr=False, default=())
    model: Any = None

    needs: ClassVar[str] = "nothing; a draft model may be given"

    def __post_init__(self) -> None:
        if self.model is not None and not isinstance(self.model, DraftStrategy):
            named = isinstance(self.model, str) and self.model in known_strategies()
            if named or (isinstance(self.model, Mapping) and "strategy" in self.model):
                own = as_strategy(self.model)
            else:
                settings = dict(self.model) if isinstance(self.model, Mapping) else {"model": self.model}
                own = build_strategy(DraftModel.name, settings)
            object.__setattr__(self, "model", own)
        members = [Free()] if self.model is None else [Free(), self.model]
        object.__setattr__(self, "strategies", tuple(members))

    def to_dict(self) -> dict[str, Any]:
        """The settings of the draft model, or name and settings of what else drafts."""
        if self.model is None or isinstance(self.model, DraftModel):
            return {"model": None if self.model is None else self.model.to_dict()}
        return {"model": {"strategy": self.model.name, "strategy_options": self.model.to_dict()}}


class CombinedDrafter(Drafter):
    """Hands what happens on to all members.

    Args:
        members: their drafters.
        strategies: what built them.
        request: the call.
    """

    def __init__(self, members: Sequence[Drafter], strategies: Sequence[DraftStrategy], request: Any):
        self._members = members
        self._request = request
        self._strategies = {id(drafter): strategy for drafter, strategy in zip(members, strategies)}
        self.top_tokens = max(each.top_tokens for each in members)
        self.stock_draft_tokens = max(each.stock_draft_tokens for each in members)
        self.looks_up = any(each.looks_up for each in members)
        self.usual_gain = max((each.usual_gain for each in members if each.top_tokens), default=math.inf)
        self.drafts_untaught = self.usual_gain < math.inf and any(_drafts_untaught(each) for each in members)
        self.runs_model = any(each.runs_model for each in members)
        self.on_target = any(each.on_target for each in members)

    def ask(self, member: Drafter, view: DecodeView, plan: Plan) -> DraftTree:
        """A member's proposal, which is empty where the plan leaves members out that run a model."""
        strategy, own = self._strategies[id(member)], plan
        if member.runs_model and not member.looks_up:
            own = plan.for_model()
            if plan.model_depth is None and strategy.default_depth is not None:
                own = own.within(strategy.default_depth)
        if plan.own_widths:
            own = replace(own, width=min(strategy.default_width, own.width)).within(own.depth)
        if not plan.taught and member.top_tokens and not member.drafts_untaught:
            own = own.within(0)
        if not own.depth:
            return DraftTree.from_chains(view.roots(), [[]] * view.rows, view.device)
        tree = member.propose(view, own)
        if fault := fault_of(tree, view.rows, self._request.vocab_size):
            raise SpecDecError(
                f"{type(member).__name__} must answer with a DraftTree of {view.rows} rows, but {fault}."
            )
        return tree

    @property
    def forwards(self) -> int:  # type: ignore[override]
        """Forward passes of the members' models."""
        return sum(each.forwards for each in self._members)

    @property
    def forward_seconds(self) -> float:  # type: ignore[override]
        """Time spent in them."""
        return sum(each.forward_seconds for each in self._members)

    def start(self, view: DecodeView) -> None:
        """Start all members."""
        for each in self._members:
            each.start(view)

    def learn(self, view: DecodeView, tree: DraftTree, tokens: torch.Tensor, probs: torch.Tensor) -> None:
        """Each member gets as many tokens as it wants, and a lesson of its own, which it may write to."""
        learners = [each for each in self._members if each.top_tokens]
        for each in learners:
            lesson = tree, tokens[..., : each.top_tokens], probs[..., : each.top_tokens]
            if len(learners) > 1:
                lesson = tree.copy_to(tree.tokens.device), lesson[1].clone(), lesson[2].clone()
            each.learn(view, *lesson)

    def observe(self, view: DecodeView, emitted: Sequence[Sequence[int]]) -> None:
        """All members see what was emitted."""
        for each in self._members:
            each.observe(view, list(map(list, emitted)))

    def keep(self, rows: Sequence[int]) -> None:
        """Only these rows stay."""
        for each in self._members:
            each.keep(list(rows))

    def finish(self) -> None:
        """The call has ended for all members."""
        with ExitStack() as stack:  # for each, also where another raises
            for each in reversed(self._members):
                stack.callback(each.finish)


def _drafts_untaught(member: Drafter) -> bool:
    return member.drafts_untaught or (member.looks_up and not member.top_tokens)


class MergeDrafter(CombinedDrafter):
    """One tree of all proposals."""

    def propose(self, view: DecodeView, plan: Plan) -> DraftTree:
        """The most valuable nodes of all proposals; under a plan for chains, of the paths to them the best one."""
        asked = [self.ask(each, view, plan) for each in self._members]
        trees = [tree for tree in asked if tree.size > 1]
        if not trees or (len(trees) == 1 and trees[0].values is not None):
            return (trees or asked)[0]
        rows = [union([RowTree.of(tree, row) for tree in trees], plan.width, plan.nodes) for row in range(view.rows)]
        return DraftTree.from_rows(rows, view.device)


class CascadeDrafter(CombinedDrafter):
    """The first proposal of each row."""

    def propose(self, view: DecodeView, plan: Plan) -> DraftTree:
        """Ask one member after the other until every row has a proposal.

        Under a plan with `enough`, until one promises as many tokens; the last that was asked goes before the others.
        """
        chosen: DraftTree | None = None
        for each in self._members:
            tree = self.ask(each, view, plan)
            if chosen is None:
                chosen = tree
            else:
                chosen = fill_rows(chosen, tree) if plan.enough is None else fill_rows(tree, chosen)
            if each is self._members[-1]:
                break
            if has_drafts(chosen) if plan.enough is None else promised(chosen, plan.lookup_chances) >= plan.enough:
                break
        assert chosen is not None
        return chosen


def has_drafts(tree: DraftTree) -> bool:
    """Every row has a node below its root."""
    return bool((tree.parents[:, 1:] >= 0).any(1).all())


def promised(tree: DraftTree, chances: Chances | None) -> float:
    """Tokens per row that a round with this tree is expected to emit."""
    if chances is None:
        drafted = tree.parents >= 0
        return 1 + float((values_of(tree) * drafted).sum()) / len(drafted)
    rows = tree.on_host
    return sum(sum(chances(row.parents, row.values)) for row in rows) / len(rows)


def values_of(tree: DraftTree) -> torch.Tensor:
    """The drafter's estimates; where it gives none, half of the drafts are taken to be right at each depth."""
    return UNKNOWN ** tree.depths.float() if tree.values is None else tree.values


def fill_rows(tree: DraftTree, other: DraftTree) -> DraftTree:
    """The rows of a tree, and those of another where it has no node below the root."""
    if tree.values is None or other.values is None:
        tree, other = (replace(each, values=values_of(each)) for each in (tree, other))
    size = max(tree.size, other.size)
    empty = ~(tree.parents[:, 1:] >= 0).any(1)

    def choose(name: str, fill: float) -> torch.Tensor | None:
        parts = [getattr(each, name) for each in (tree, other)]
        known = next((each for each in parts if each is not None), None)
        if known is None:
            return None
        padded = []
        for part in parts:
            part = known.new_full((len(empty), 1, *known.shape[2:]), fill) if part is None else part.to(known.device)
            padding = part.new_full((len(part), size - part.shape[1], *part.shape[2:]), fill)
            padded.append(torch.cat([part, padding], 1))
        return torch.where(empty.view(-1, *[1] * (known.dim() - 1)), padded[1], padded[0])

    tokens, parents, sampled = choose("tokens", 0), choose("parents", -1), choose("sampled", 0)
    assert tokens is not None and parents is not None and sampled is not None
    return DraftTree(tokens, parents, sampled, choose("probs", 0.0), choose("values", 0.0))
