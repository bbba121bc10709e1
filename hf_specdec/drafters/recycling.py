"""Token recycling: what the target found likely after a token is what it may choose after that token again.

Luo et al. 2024, arXiv:2408.08696. Deviations: the table is keyed on the last two tokens, with the last one to fall
back on, and where that is new the known token with the most similar embedding; it holds the target's probabilities,
so that the tree is grown best first instead of from a template.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.nn.functional import normalize

from ..state import DecodeView, Plan
from ..tree import DraftTree, RowTree, grow_best_first
from .base import Drafter, DraftStrategy, check_count, register_strategy
from .memory import Memory, as_memory, is_token, memory_setting

DEFAULT_TOP_TOKENS = 8
TRUST = (0.25, 0.6, 0.9)
"""Probability that the target chooses among the tokens remembered of a similar last token, the last, the last two."""
USUAL_GAIN = 0.27
"""Tokens per doubling of a tree's nodes, on average over texts: 0.43 of 3 nodes, 0.63 of 5, 0.80 of 9, 1.05 of 16."""
MOST_COMPARED = 2048
"""Known tokens that a new one is compared with, the first ones of the call."""

Followers = Sequence[tuple[int, float]]
"""Tokens and their probabilities, best first."""


class RecyclingMemory(Memory):
    """The target's likeliest next tokens after one and after two tokens. Safe to share between threads; bounded.

    Beyond `max_entries` the entries that were written longest ago leave. Token ids mean something only under one
    tokenizer: keep one memory per tokenizer.

    Args:
        max_entries: contexts that are remembered, at about 0.5 kB each.
    """

    kind = "recycling"

    def __init__(self, max_entries: int = 200_000):
        check_count("RecyclingMemory", "max_entries", max_entries)
        super().__init__()
        self.max_entries = max_entries
        self._followers: OrderedDict[tuple[int, ...], Followers] = OrderedDict()

    def __len__(self) -> int:
        """Contexts remembered."""
        return len(self._followers)

    def __repr__(self) -> str:
        return f"RecyclingMemory({len(self)} of {self.max_entries} contexts)"

    def learn(self, context: tuple[int, ...], followers: Followers) -> None:
        """Remember what the target expects after the last one or two tokens of a text."""
        with self._lock:
            for key in {context, context[-1:]}:
                self._followers.pop(key, None)
                self._followers[key] = followers
            while len(self._followers) > self.max_entries:
                self._followers.popitem(last=False)

    def recall(self, context: tuple[int, ...]) -> tuple[int, Followers]:
        """Of how many of these one or two tokens, the last ones, something is remembered, and what; 0 and nothing."""
        with self._lock:
            for size in range(len(context), 0, -1):
                if found := self._followers.get(context[-size:]):
                    return size, found
        return 0, ()

    @classmethod
    def _restored(cls, content: Mapping[str, Any]) -> "RecyclingMemory":
        memory = cls(content["max_entries"])
        for context, followers in content["table"]:
            if not (1 <= len(context) <= 2 and all(type(each) is int for each in context)):
                raise ValueError("it holds something that is no context of one or two tokens")
            known = tuple((token, float(prob)) for token, prob in followers)
            if not all(is_token(token) and 0 <= prob <= 1 for token, prob in known):
                raise ValueError("it holds something that is no token id, or no probability")
            if len(dict(known)) < len(known):
                raise ValueError(f"it holds a token twice after {context}")
            memory.learn(tuple(context), known)
        return memory

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            return {"max_entries": self.max_entries, "path": self.path, "table": list(self._followers.items())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        RecyclingMemory.__init__(self, state["max_entries"])
        self._followers.update(state["table"])
        self.path = state["path"]


@register_strategy("recycling")
@dataclass(frozen=True)
class Recycling(DraftStrategy):
    """Proposes what the target found likely after the same tokens before (token recycling, arXiv:2408.08696).

    Args:
        top_tokens: next tokens that are remembered per context.
        memory: a table that outlives the call, the path of a saved `RecyclingMemory`, or "new" for a table that all
            calls with this object share; None forgets after each call.
    """

    default_draft_tokens: ClassVar[int] = 15
    default_width: ClassVar[int] = DEFAULT_TOP_TOKENS
    trees: ClassVar[bool] = True
    needs: ClassVar[str] = "nothing; learns from the target's own scores as it decodes"

    top_tokens: int = DEFAULT_TOP_TOKENS
    memory: RecyclingMemory | str | None = None

    def __post_init__(self) -> None:
        check_count("recycling", "top_tokens", self.top_tokens)
        object.__setattr__(self, "memory", as_memory("recycling", self.memory, RecyclingMemory, RecyclingMemory))

    def build(self, target: Any, request: Any) -> "RecyclingDrafter":
        """The drafter of one call; it fits every target."""
        return RecyclingDrafter(self, embeddings_of(target))

    def to_dict(self) -> dict[str, Any]:
        """The settings by field name; a memory by its path, or "new" if it was never saved."""
        return {"top_tokens": self.top_tokens, "memory": memory_setting(self.memory)}


def embeddings_of(target: Any) -> torch.Tensor | None:
    """A target's input embeddings, shape `(V, F)`; None where they cannot be read, as those of a sharded model."""
    weight = getattr(target.model.get_input_embeddings(), "weight", None)
    if not isinstance(weight, torch.Tensor) or type(weight.data) is not torch.Tensor or weight.device.type == "meta":
        return None
    return weight.data if weight.dim() == 2 and len(weight) and weight.is_floating_point() else None


class Likeness:
    """Which of the tokens that were added is most like another one: that of the smallest angle between embeddings.

    Args:
        embeddings: shape `(V, F)`.
    """

    def __init__(self, embeddings: torch.Tensor):
        self._embeddings = embeddings
        self._tokens: dict[int, None] = {}
        shape = MOST_COMPARED, embeddings.shape[1]
        self._directions = torch.empty(shape, dtype=torch.float32, device=embeddings.device)
        self._ready = 0

    def add(self, token: int) -> None:
        """One more token, up to `MOST_COMPARED`."""
        if len(self._tokens) < MOST_COMPARED and token < len(self._embeddings):
            self._tokens[token] = None

    def nearest(self, token: int) -> int | None:
        """The most similar token; None where none was added. Reads the device."""
        if not self._tokens or token >= len(self._embeddings):
            return None
        tokens = list(self._tokens)
        if added := tokens[self._ready :]:
            self._directions[self._ready : len(tokens)] = normalize(self._embeddings[added].float())
            self._ready = len(tokens)
        return tokens[int((self._directions[: len(tokens)] @ self._embeddings[token].float()).argmax())]


class RecyclingDrafter(Drafter):
    """One table for all rows of the call, or the strategy's memory."""

    stock_draft_tokens = Recycling.default_draft_tokens
    usual_gain = USUAL_GAIN

    def __init__(self, strategy: Recycling, embeddings: torch.Tensor | None):
        self.top_tokens = strategy.top_tokens
        self._likeness = None if embeddings is None else Likeness(embeddings)
        self._table = strategy.memory if isinstance(strategy.memory, RecyclingMemory) else RecyclingMemory()

    def learn(self, view: DecodeView, tree: DraftTree, tokens: torch.Tensor, probs: torch.Tensor) -> None:
        """Write what the target expects after each node, rejected ones included; of equals the last one stays."""
        told = zip(tree.tokens.tolist(), tree.parents.tolist(), tokens.tolist(), probs.tolist(), strict=True)
        for row, (nodes, parents, ids, chances) in enumerate(told):
            for node, (token, parent) in enumerate(zip(nodes, parents)):
                if node and parent < 0:
                    continue
                before = tuple(view.tokens(row)[-2:-1]) if not node else (nodes[parent],)
                self._table.learn((*before, token), tuple(zip(ids[node], chances[node])))
                if self._likeness is not None:
                    self._likeness.add(token)

    def propose(self, view: DecodeView, plan: Plan) -> DraftTree:
        """The likeliest paths through the table."""
        return DraftTree.from_rows([self._grow(view.tokens(row)[-2:], plan) for row in range(view.rows)], view.device)

    def _grow(self, end: Sequence[int], plan: Plan) -> RowTree:
        start = tuple(end)

        def expand(context: tuple[int, ...]) -> Iterator[tuple[int, float, tuple[int, ...]]]:
            size, known = self._table.recall(context)
            if not size and context is start:
                known = self._of_similar(start[-1])
            for token, prob in known:
                yield token, TRUST[size] * prob, (context[-1], token)

        return grow_best_first(end[-1], start, expand, plan.depth, plan.width, plan.nodes)

    def _of_similar(self, token: int) -> Followers:
        similar = None if self._likeness is None else self._likeness.nearest(token)
        return () if similar is None else self._table.recall((similar,))[1]
