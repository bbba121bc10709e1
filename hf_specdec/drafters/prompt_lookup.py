"""Prompt lookup: the draft is what followed the latest earlier occurrence of the last few tokens.

Prompt Lookup Decoding, Saxena 2023. The index holds, for each n-gram, where it ended last with a token after it. It
grows as tokens arrive, so a draft costs at most `max_ngram` dictionary look-ups however long the text is.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

from ..errors import SpecDecError
from ..state import DecodeView, Plan
from ..tree import DraftTree, RowTree
from .base import Drafter, DraftStrategy, register_strategy
from .suffix_index import ESCAPE

MATCHED = 16
"""Tokens that are compared to tell how long a match is."""


@register_strategy("prompt_lookup")
@dataclass(frozen=True)
class PromptLookup(DraftStrategy):
    """Copies what followed the same n-gram earlier in the text (Prompt Lookup Decoding, Saxena 2023).

    The longest match wins, then the most recent.

    Args:
        max_ngram: longest match looked for, in tokens.
        min_ngram: shortest match accepted, in tokens.
    """

    default_draft_tokens: ClassVar[int] = 10
    needs: ClassVar[str] = "nothing; best where the answer repeats itself or the prompt"

    max_ngram: int = 5
    min_ngram: int = 1

    def __post_init__(self) -> None:
        for name, value in (("min_ngram", self.min_ngram), ("max_ngram", self.max_ngram)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise SpecDecError(
                    f"prompt_lookup: {name}={value!r}, but an n-gram has at least one token; "
                    "use a whole number of at least 1."
                )
        if self.min_ngram > self.max_ngram:
            raise SpecDecError(
                f"prompt_lookup: min_ngram={self.min_ngram} exceeds max_ngram={self.max_ngram}, so nothing could "
                "match; lower the one or raise the other."
            )

    def build(self, target: Any, request: Any) -> "PromptLookupDrafter":
        """The drafter of one call; it fits every target."""
        return PromptLookupDrafter(self)


class NgramIndex:
    """Where the continuation of each n-gram of one growing text starts, for its latest occurrence."""

    def __init__(self, min_ngram: int, max_ngram: int):
        self._starts: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in range(max_ngram, min_ngram - 1, -1)}
        self._next = 1  # position of the first token that the index has not seen follow anything

    def absorb(self, text: Sequence[int]) -> None:
        """Take in what `text` has gained since the last call."""
        for position in range(self._next, len(text)):
            for n, starts in self._starts.items():
                if n <= position:
                    starts[tuple(text[position - n : position])] = position
        self._next = max(self._next, len(text))

    def draft(self, text: Sequence[int], limit: int) -> tuple[list[int], int]:
        """At most `limit` tokens that followed the end of the absorbed `text` earlier, and how many tokens before them
        are the same in both places, up to `MATCHED`.

        A copy that reaches the end of the text goes on in the draft, so that a repetition goes on repeating.
        """
        for n, starts in self._starts.items():
            start = starts.get(tuple(text[-n:]))
            if start is not None:
                draft = list(text[start : start + limit])
                period = len(text) - start
                while len(draft) < limit:
                    draft.append(draft[len(draft) - period])
                matched = n
                while matched < min(MATCHED, start) and text[start - 1 - matched] == text[-1 - matched]:
                    matched += 1
                return draft, matched
        return [], 0


def _values(count: int, matched: int) -> list[float]:
    """Chances of the first `count` tokens of a copy, after so many tokens that matched: a copy that has been right for
    longer is right more often, as in `SuffixIndex.tree` for a context that occurred once before."""
    return list(accumulate((length / (length + ESCAPE) for length in range(matched, matched + count)), operator.mul))


class PromptLookupDrafter(Drafter):
    """One n-gram index per row, which grows as tokens arrive."""

    stock_draft_tokens = PromptLookup.default_draft_tokens

    def __init__(self, strategy: PromptLookup):
        self._strategy = strategy
        self._indices: list[NgramIndex] = []

    def start(self, view: DecodeView) -> None:
        """Index prompts and first tokens."""
        strategy = self._strategy
        self._indices = [NgramIndex(strategy.min_ngram, strategy.max_ngram) for _ in range(view.rows)]
        self._absorb(view)

    def observe(self, view: DecodeView, emitted: Sequence[Sequence[int]]) -> None:
        """Index what was emitted."""
        self._absorb(view)

    def _absorb(self, view: DecodeView) -> None:
        for row, index in enumerate(self._indices):
            index.absorb(view.tokens(row))

    def propose(self, view: DecodeView, plan: Plan) -> DraftTree:
        """A chain of at most `plan.depth` tokens per row; none where nothing matches."""
        drafts = [index.draft(view.tokens(row), plan.depth) for row, index in enumerate(self._indices)]
        chains = [
            RowTree.chain(root, tokens, _values(len(tokens), matched))
            for root, (tokens, matched) in zip(view.roots(), drafts)
        ]
        return DraftTree.from_rows(chains, view.device)

    def keep(self, rows: Sequence[int]) -> None:
        """Only these rows stay."""
        if self._indices:  # rows may leave before `start`
            self._indices = [self._indices[row] for row in rows]
