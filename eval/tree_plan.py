"""Which draft tree pays: acceptance by sibling rank, given or measured, costs of this machine, and Sequoia's optimum.

The optimum is a fixed shape under one acceptance per rank, the same at every node (arXiv:2402.12374). A strategy that
chooses its nodes by what it knows of the text does better with as many; drafts that come in stretches, as copies do,
are accepted deeper than the product of ranks says.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from rich.console import Console
from rich.tree import Tree
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec import (
    DecodeView,
    Drafter,
    DraftStrategy,
    DraftTree,
    Plan,
    SpecDecConfig,
    SpecDecError,
    TreeTemplate,
    fastest_template,
    optimal_template,
)

from .cost import WIDTHS, measure_costs
from .length_plan import spread_contexts
from .measure import pad_left, prompt_ids, sampling_options
from .planning import StepCosts, seconds_at
from .task import load_samples, load_task

PROMPTS = 6
NEW_TOKENS = 128
DEFAULT_NODES = 32
DEFAULT_DEPTH = 16


@dataclass
class RankCounts:
    """Judged nodes that had children, and how often the child of each rank was the accepted one."""

    nodes: int = 0
    accepted: Counter[int] = field(default_factory=Counter)

    def count(self, tree: DraftTree, row: int, emitted: Sequence[int]) -> None:
        """Follow what a row emitted down the tree that was proposed for it."""
        children: dict[int, list[int]] = {}
        tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
        for child, parent in enumerate(parents):
            if parent >= 0:
                children.setdefault(parent, []).append(child)
        node: int | None = 0
        for token in emitted:
            if node is None or node not in children:
                return
            self.nodes += 1
            own = children[node]
            rank = next((rank for rank, child in enumerate(own) if tokens[child] == token), None)
            node = None if rank is None else own[rank]
            if rank is not None:
                self.accepted[rank] += 1

    def acceptance_by_rank(self) -> list[float]:
        """Share of the nodes in which the child of each rank was accepted. Raises `SpecDecError` where no node was."""
        if not self.accepted:
            raise SpecDecError(
                "The strategy had no draft accepted on these prompts, so no tree of its drafts can pay; measure it on "
                "your own with `hf-specdec bench`, or give --acceptance."
            )
        return [self.accepted[rank] / self.nodes for rank in range(max(self.accepted) + 1)]


@dataclass(frozen=True, eq=False)
class Recorded(DraftStrategy):
    """Another strategy, whose accepted drafts are counted by sibling rank.

    Args:
        inner: the strategy.
        counts: where counts go.
    """

    inner: DraftStrategy
    counts: RankCounts

    name: ClassVar[str] = "recorded"

    def __post_init__(self) -> None:
        facts = ("default_draft_tokens", "default_depth", "default_width", "needs", "sampled", "knows_law", "trees")
        for fact in facts:
            object.__setattr__(self, fact, getattr(self.inner, fact))

    def build(self, target: Any, request: Any) -> "RecordingDrafter":
        """The drafter of one call."""
        return RecordingDrafter(self.inner.build(target, request), self.counts)


class RecordingDrafter(Drafter):
    """Hands everything on. A round is counted when the next one begins or the call ends."""

    def __init__(self, inner: Drafter, counts: RankCounts):
        self.top_tokens = inner.top_tokens
        self._inner = inner
        self._counts = counts
        self._tree: DraftTree | None = None
        self._texts: list[tuple[Sequence[int], int]] = []
        """Tokens of each row, the view's own list, which grows in place, and how many they were."""

    def start(self, view: DecodeView) -> None:
        """Start the drafter."""
        self._inner.start(view)

    def propose(self, view: DecodeView, plan: Plan) -> DraftTree:
        """Its tree."""
        self._count()
        self._texts = [(view.tokens(row), len(view.tokens(row))) for row in range(view.rows)]
        self._tree = self._inner.propose(view, plan)
        return self._tree

    def _count(self) -> None:
        if self._tree is not None:
            for row, (tokens, length) in enumerate(self._texts):
                self._counts.count(self._tree, row, tokens[length:])
        self._tree = None

    def learn(self, view: DecodeView, tree: DraftTree, tokens: torch.Tensor, probs: torch.Tensor) -> None:
        """Let it learn."""
        self._inner.learn(view, tree, tokens, probs)

    def observe(self, view: DecodeView, emitted: Sequence[Sequence[int]]) -> None:
        """Let it see what was emitted."""
        self._inner.observe(view, emitted)

    def keep(self, rows: Sequence[int]) -> None:
        """Only these rows stay."""
        self._inner.keep(rows)

    def finish(self) -> None:
        """The call has ended."""
        self._count()
        self._inner.finish()


def measure_acceptance(
    model: PreTrainedModel,
    strategy: Any,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int = NEW_TOKENS,
) -> RankCounts:
    """Decode greedily, and count at which rank the drafts are accepted that the strategy proposes by itself.

    All that it proposes is verified, whatever the schedule. Where a node had fewer children than another, the missing
    ones count as not accepted: it is what the strategy brings, not what it would bring with more candidates.

    Args:
        model: the target, enabled.
        strategy: what `assistant_strategy` takes.
        prompts: token ids.
        max_new_tokens: longest answer.
    """
    counts = RankCounts()
    config = SpecDecConfig.of(strategy)
    recorded = replace(config, strategy=Recorded(config.resolved, counts), strategy_options={}, schedule="constant")
    for ids in prompts:
        model.generate(
            **pad_left([ids], 0, model.device),
            max_new_tokens=max_new_tokens,
            assistant_strategy=recorded,
            **sampling_options(0.0),
        )
    return counts


def builtin_prompts(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """The first `PROMPTS` prompts of the package, of different kinds."""
    return [prompt_ids(tokenizer, each, 0, []) for each in load_samples(load_task("builtin"), PROMPTS, None)]


@dataclass(frozen=True)
class TreePlan:
    """The tree that takes the least time per token.

    Args:
        template: its shape; the root alone where no draft pays.
        acceptance_by_rank: what it was made for.
        tokens_per_round: what it brings, the target's own token included.
        speedup: of decoding over plain `generate`, prompts left out.
        largest: the optimal tree of the most nodes, for comparison, and what it brings.
    """

    template: TreeTemplate
    acceptance_by_rank: tuple[float, ...]
    tokens_per_round: float
    speedup: float
    largest: tuple[int, float]

    def tree(self) -> Tree:
        """Each node with its rank among its siblings, first 1, and the probability that it is accepted."""
        branches = [Tree("last token")]
        values = self.template.values(self.acceptance_by_rank)
        for parent, rank, value in list(zip(self.template.parents, self.template.ranks, values))[1:]:
            branches.append(branches[parent].add(f"{rank + 1}: {value:.2f}"))
        return branches[0]

    @property
    def sentence(self) -> str:
        """What to expect and to set."""
        size, brings = self.largest
        compared = f"(With {size} nodes, {brings:.2f} tokens per round.)"
        shape = self.template
        if len(shape) == 1:
            return f"Best: plain generate, no drafts. {compared}"
        return (
            f"Best: {len(shape)} nodes with the last token, {self.tokens_per_round:.2f} tokens per round, "
            f"{self.speedup:.2f}x plain generate. "
            f"max_draft_tokens={len(shape) - 1}, max_depth={shape.depth}, max_width={shape.width}. {compared}"
        )


def choose_tree(acceptance_by_rank: Sequence[float], costs: StepCosts, nodes: int, depth: int) -> TreePlan:
    """The fastest tree at these costs, of which the drafting is per level; one node is a step of plain decoding."""

    def seconds(size: int) -> float:
        if size == 1:
            return costs.plain_seconds
        return seconds_at(costs.verify_seconds, size) + costs.overhead_seconds

    shape = fastest_template(acceptance_by_rank, costs.draft_seconds, seconds, nodes, depth)
    tokens = shape.expected_tokens(acceptance_by_rank)
    spent = shape.depth * costs.draft_seconds + seconds(len(shape))
    largest = optimal_template(acceptance_by_rank, nodes, depth)
    brings = largest.expected_tokens(acceptance_by_rank)
    return TreePlan(
        shape, tuple(acceptance_by_rank), tokens, tokens * costs.plain_seconds / spent, (len(largest), brings)
    )


def plan_tree(
    model: PreTrainedModel,
    strategy: Any,
    acceptance_by_rank: Sequence[float],
    nodes: int = DEFAULT_NODES,
    depth: int = DEFAULT_DEPTH,
    context: int | None = None,
    console: Console | None = None,
) -> TreePlan:
    """Measure costs, find the fastest tree for an acceptance by rank, and print it.

    Args:
        model: the target, enabled.
        strategy: what `assistant_strategy` takes; its drafting is timed in chains.
        acceptance_by_rank: probability that the child of each rank is the one that is accepted.
        nodes: most nodes, the root included.
        depth: longest path.
        context: tokens at which costs count, 512 by default.
        console: where the tree goes; standard output by default.
    """
    if context is not None and context < 1:
        raise SpecDecError(f"context={context} is no number of tokens; give at least 1.")
    optimal_template(acceptance_by_rank, nodes, depth)  # refuses what is none before anything is timed
    middle = 512 if context is None else context
    widths = sorted({each for each in WIDTHS if each <= nodes} | {nodes})
    costs = measure_costs(model, strategy, widths, contexts=spread_contexts(middle, middle)).at(1, middle)
    planned = choose_tree(acceptance_by_rank, costs, nodes, depth)
    console = console or Console(highlight=False)
    console.print(planned.tree())
    console.print(planned.sentence, soft_wrap=True)
    return planned
