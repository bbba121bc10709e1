"""Suffix decoding: the draft is what followed the same context before, in this text or in answers of earlier calls.

SuffixDecoding, Oliaro et al. 2024, arXiv:2411.04975. Deviations: in a tree, the probability of a token is blended over
all matched contexts instead of taken from one; in a chain, the current occurrence counts as one that was followed by
something else in both sources, so that their scores compare.
"""

import operator
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar

from ..errors import SpecDecError
from ..state import DecodeView, Plan
from ..tree import DraftTree, RowTree, union
from .base import Drafter, DraftStrategy, check_count, register_strategy
from .memory import Memory, as_memory, is_token, memory_setting
from .suffix_index import DEFAULT_MAX_CONTEXT, PathRule, ScoredDraft, SuffixIndex


class SuffixMemory(Memory):
    """Answers of earlier calls, for `Suffix(memory=...)`. Safe to share between threads; bounded in size.

    An answer, without its prompt, enters when its row ends. Beyond `max_tokens` the oldest answers leave. Token ids
    mean something only under one tokenizer: keep one memory per tokenizer.

    Args:
        max_tokens: at most so many tokens are remembered, at about 0.5 kB each.
        max_context: the longest match, in tokens.
    """

    kind = "suffix"

    def __init__(self, max_tokens: int = 100_000, max_context: int = DEFAULT_MAX_CONTEXT):
        check_count("SuffixMemory", "max_tokens", max_tokens)
        check_count("SuffixMemory", "max_context", max_context)
        super().__init__()
        self.max_tokens = max_tokens
        self.max_context = max_context
        self._texts: deque[list[int]] = deque()
        self._size = 0
        self._index = SuffixIndex(max_context)
        self._index_is_whole = True

    def __len__(self) -> int:
        """Tokens remembered."""
        return self._size

    def __repr__(self) -> str:
        return f"SuffixMemory({self._size} of {self.max_tokens} tokens, {len(self._texts)} answers)"

    def add(self, tokens: Sequence[int]) -> None:
        """Remember a text (a sequence or a tensor of token ids); of one longer than `max_tokens`, its end."""
        added = _token_ids(tokens)[-self.max_tokens :]
        if not added:
            return
        with self._lock:
            index = self._whole_index()
            self._index_is_whole = False  # until the last line: an interrupt in between costs a rebuild, no damage
            self._texts.append(added)
            self._size += len(added)
            while self._size > self.max_tokens:
                self._size -= len(self._texts.popleft())
                index.forget_first_text()
            index.extend(added)
            index.end_text()
            self._index_is_whole = True

    def draft(self, tokens: Sequence[int], limit: int, rule: PathRule) -> ScoredDraft:
        """At most `limit` tokens that followed the end of `tokens` in the texts remembered."""
        with self._lock:
            index = self._whole_index()
            return index.draft(index.match(tokens), limit, rule, unseen=1)

    def tree(self, tokens: Sequence[int], plan: Plan) -> RowTree:
        """What followed the end of `tokens` in the texts remembered, as a tree below the last of them."""
        with self._lock:
            index = self._whole_index()
            return index.tree(index.match(tokens), tokens[-1], plan.depth, plan.width, plan.nodes)

    def _whole_index(self) -> SuffixIndex:
        if not self._index_is_whole:
            self._index = SuffixIndex(self.max_context)
            self._size = sum(map(len, self._texts))
            for text in self._texts:
                self._index.extend(text)
                self._index.end_text()
            self._index_is_whole = True
        return self._index

    @classmethod
    def _restored(cls, content: Mapping[str, Any]) -> "SuffixMemory":
        memory = cls(content["max_tokens"], content["max_context"])
        for text in content["texts"]:
            if not all(map(is_token, text)):
                raise ValueError("it holds something that is not a token id")
            memory.add(text)
        return memory

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            texts = [list(text) for text in self._texts]
        return {"max_tokens": self.max_tokens, "max_context": self.max_context, "path": self.path, "texts": texts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        SuffixMemory.__init__(self, state["max_tokens"], state["max_context"])
        for text in state["texts"]:
            self.add(text)
        self.path = state["path"]


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _token_ids(tokens: Any) -> list[int]:
    """Plain ints of a sequence, an array or a tensor. Raises `SpecDecError` for what is no text."""
    values = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    try:
        if not isinstance(values, Sequence) or any(isinstance(value, bool) for value in values):
            raise TypeError
        ids = [operator.index(value) for value in values]
        if min(ids, default=0) < 0:
            raise TypeError
    except TypeError:
        raise SpecDecError(
            f"SuffixMemory.add({type(tokens).__name__}): it is no sequence of token ids; "
            "pass those of one text, a list or a tensor of one dimension with whole numbers of at least 0."
        ) from None
    return ids


@register_strategy("suffix")
@dataclass(frozen=True)
class Suffix(DraftStrategy):
    """Copies what most often followed the same context (SuffixDecoding, arXiv:2411.04975). No model, no training.

    Args:
        max_context: longest match, in tokens, in the text of this call; a memory has its own.
        min_probability: a chain ends before the token that takes its estimated probability below this.
        max_tokens_factor: in a chain, a match of m tokens is followed for at most `max_tokens_factor * m` tokens.
        memory: answers of earlier calls: a `SuffixMemory`, the path of a saved one, or "new" for an empty one that all
            calls with this object share and add to; None forgets after each call.
    """

    default_draft_tokens: ClassVar[int] = 15
    default_width: ClassVar[int] = 4
    trees: ClassVar[bool] = True
    needs: ClassVar[str] = "nothing; best where the answer repeats itself, the prompt or earlier answers"

    max_context: int = DEFAULT_MAX_CONTEXT
    min_probability: float = 0.1
    max_tokens_factor: float = 4.0
    memory: SuffixMemory | str | None = None

    def __post_init__(self) -> None:
        check_count("suffix", "max_context", self.max_context)
        if not _is_number(self.min_probability) or not 0 <= self.min_probability <= 1:
            raise SpecDecError(f"suffix: min_probability={self.min_probability!r} is no probability; use 0 to 1.")
        if not _is_number(self.max_tokens_factor) or not self.max_tokens_factor > 0:
            raise SpecDecError(
                f"suffix: max_tokens_factor={self.max_tokens_factor!r} would never draft; use a number above 0."
            )
        object.__setattr__(self, "memory", as_memory("suffix", self.memory, SuffixMemory, SuffixMemory))

    def build(self, target: Any, request: Any) -> "SuffixDrafter":
        """The drafter of one call; it fits every target."""
        return SuffixDrafter(self)

    def to_dict(self) -> dict[str, Any]:
        """The settings by field name; a memory by its path, or "new" if it was never saved."""
        return {
            "max_context": self.max_context,
            "min_probability": self.min_probability,
            "max_tokens_factor": self.max_tokens_factor,
            "memory": memory_setting(self.memory),
        }


@dataclass
class _Row:
    """One row: its index, and the view's own list of its tokens, which grows in place."""

    index: SuffixIndex
    tokens: Sequence[int]
    prompt_length: int


class SuffixDrafter(Drafter):
    """One index per row, which grows as tokens arrive, beside the memory of the strategy."""

    stock_draft_tokens = Suffix.default_draft_tokens

    def __init__(self, strategy: Suffix):
        self._max_context = strategy.max_context
        self._rule = PathRule(strategy.min_probability, strategy.max_tokens_factor)
        self._memory = strategy.memory if isinstance(strategy.memory, SuffixMemory) else None
        self._rows: list[_Row] = []

    def start(self, view: DecodeView) -> None:
        """Index prompts and first tokens."""
        self._rows = [
            _Row(SuffixIndex(self._max_context), view.tokens(row), view.prompt_length(row)) for row in range(view.rows)
        ]
        self._absorb(view)

    def observe(self, view: DecodeView, emitted: Sequence[Sequence[int]]) -> None:
        """Index what was emitted."""
        self._absorb(view)

    def _absorb(self, view: DecodeView) -> None:
        for number, row in enumerate(self._rows):
            row.tokens = view.tokens(number)
            row.index.extend(row.tokens[len(row.index.text) :])

    def propose(self, view: DecodeView, plan: Plan) -> DraftTree:
        """The better chain of the two sources for each row, this text on ties; or a tree of both."""
        grow = self._tree if plan.width > 1 else self._chain
        return DraftTree.from_rows([grow(row, plan) for row in self._rows], view.device)

    def _chain(self, row: _Row, plan: Plan) -> RowTree:
        draft = self._draft(row.index, plan.depth)
        return RowTree.chain(row.tokens[-1], draft.tokens, draft.values)

    def _tree(self, row: _Row, plan: Plan) -> RowTree:
        index = row.index
        local = index.tree(index.matched, row.tokens[-1], plan.depth, plan.width, plan.nodes)
        if self._memory is None:
            return local
        return union([local, self._memory.tree(row.tokens, plan)], plan.width, plan.nodes)

    def _draft(self, index: SuffixIndex, limit: int) -> ScoredDraft:
        local = index.draft(index.matched, limit, self._rule)
        if self._memory is None:
            return local
        remembered = self._memory.draft(index.text, limit, self._rule)
        return remembered if remembered.score > local.score else local

    def keep(self, rows: Sequence[int]) -> None:
        """The answers of rows that leave enter the memory."""
        if self._rows:  # rows may leave before `start`
            self._remember(row for number, row in enumerate(self._rows) if number not in rows)
            self._rows = [self._rows[number] for number in rows]

    def finish(self) -> None:
        """The answers of the remaining rows enter the memory."""
        self._remember(self._rows)
        self._rows = []

    def _remember(self, rows: Iterable[_Row]) -> None:
        if self._memory is not None:
            for row in rows:
                self._memory.add(row.tokens[row.prompt_length :])
