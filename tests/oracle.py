"""The oracle: a draft strategy that knows the answer, and spoils it at will.

It replays a text that plain `generate` wrote and corrupts each drafted token with a given probability, so that rounds
with none, some and all drafts accepted occur whatever the model. Its randomness is its own generator: the global one,
which decides the sampled text, is left alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from conftest import VOCABULARY

from hf_specdec.drafters.base import Drafter, DraftStrategy
from hf_specdec.state import DecodeView, Plan
from hf_specdec.tree import DraftTree


@dataclass(frozen=True)
class Oracle(DraftStrategy):
    """Replays `text`.

    Args:
        text: the tokens that each row of the caller's batch will emit.
        error_rate: probability of corrupting a drafted token.
        seed: of the corruption.
        vocabulary: ids below this are valid.
        siblings: wrong tokens beside each drafted one, in node order before it; 0 drafts chains.
    """

    text: tuple[tuple[int, ...], ...]
    error_rate: float = 0.0
    seed: int = 0
    vocabulary: int = VOCABULARY
    siblings: int = 0

    @property
    def default_width(self) -> int:
        """The right token and its siblings."""
        return 1 + self.siblings

    name: ClassVar[str] = "oracle"
    default_draft_tokens: ClassVar[int] = 5
    default_schedule: ClassVar[str | None] = "constant"  # it is there to have its drafts judged, whatever they cost
    trees: ClassVar[bool] = True

    @classmethod
    def of(cls, text: torch.Tensor | Sequence[Sequence[int]], error_rate: float = 0.0, **settings: Any) -> "Oracle":
        """The oracle for these rows of new tokens, given as a tensor or lists."""
        rows = text.tolist() if isinstance(text, torch.Tensor) else text
        return cls(tuple(map(tuple, rows)), error_rate, **settings)

    def build(self, target: Any, request: Any) -> "OracleDrafter":
        """A drafter for one call."""
        return OracleDrafter(self)


@dataclass(frozen=True)
class ChainOracle(Oracle):
    """The oracle that says it proposes chains alone."""

    trees: ClassVar[bool] = False


class OracleDrafter(Drafter):
    """Drafts what is left of each row's text, also checking that rows leave as announced."""

    def __init__(self, strategy: Oracle):
        self.strategy = strategy
        self.generator = torch.Generator().manual_seed(strategy.seed)
        self.rows = list(range(len(strategy.text)))
        self.finished = False

    def start(self, view: DecodeView) -> None:
        """Rows that ended with their first token have already left."""
        self.rows = list(view.row_ids)

    def keep(self, rows: Sequence[int]) -> None:
        """Only these rows stay."""
        assert list(rows) == sorted(set(rows)), "rows must ascend"
        self.rows = [self.rows[row] for row in rows]

    def finish(self) -> None:
        """The call has ended."""
        self.finished = True

    def propose(self, view: DecodeView, plan: Plan) -> DraftTree:
        """What each row will emit next, with errors."""
        assert self.rows == list(view.row_ids), "`keep` and the view disagree about who is still decoding"
        branch = 1 + self.strategy.siblings if plan.width > 1 else 1
        depth = min(plan.depth, (plan.nodes - 1) // branch)
        chains = []
        for row in range(view.rows):
            emitted = len(view.tokens(row)) - view.prompt_length(row)
            rest = self.strategy.text[self.rows[row]][emitted : emitted + depth]
            chains.append([self.spoil(token) for token in rest])
        if branch == 1:
            return DraftTree.from_chains(view.roots(), chains, view.device)
        return self.with_siblings(view, chains)

    def spoil(self, token: int) -> int:
        """The token, or with probability `error_rate` another one."""
        if torch.rand((), generator=self.generator).item() >= self.strategy.error_rate:
            return token
        return self.another(token)

    def another(self, token: int, distance: int | None = None) -> int:
        """A token that is not this one."""
        if distance is None:
            distance = int(torch.randint(1, self.strategy.vocabulary, (), generator=self.generator))
        return (token + distance) % self.strategy.vocabulary

    def with_siblings(self, view: DecodeView, chains: list[list[int]]) -> DraftTree:
        """Each chain with wrong siblings in front of every node, so that an accepted path is never in place."""
        branch = 1 + self.strategy.siblings
        size = 1 + branch * max(map(len, chains))
        tokens = torch.tensor([[root] * size for root in view.roots()])
        parents = torch.full((view.rows, size), -1)
        for row, chain in enumerate(chains):
            above = 0
            for depth, token in enumerate(chain):
                first = 1 + branch * depth
                for sibling in range(branch):
                    wrong = sibling < self.strategy.siblings
                    tokens[row, first + sibling] = self.another(token, sibling + 1) if wrong else token
                    parents[row, first + sibling] = above
                above = first + branch - 1
        tokens, parents = tokens.to(view.device), parents.to(view.device)
        return DraftTree(tokens, parents, torch.zeros_like(tokens, dtype=torch.bool))
