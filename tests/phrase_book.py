"""A strategy as a user would write one: this module, and the line that registers it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from hf_specdec import DecodeView, Drafter, DraftStrategy, DraftTree, Plan, register_strategy


@register_strategy("phrase_book")
@dataclass(frozen=True)
class PhraseBook(DraftStrategy):
    """Completes phrases of a fixed list.

    Args:
        phrases: token ids of each phrase.
    """

    default_draft_tokens: ClassVar[int] = 8
    needs: ClassVar[str] = "phrases, as lists of token ids"

    phrases: Sequence[Sequence[int]] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "phrases", tuple(map(tuple, self.phrases)))

    def build(self, target: Any, request: Any) -> "PhraseDrafter":
        """The drafter of one call; it fits every target."""
        return PhraseDrafter(self.phrases)


class PhraseDrafter(Drafter):
    """Proposes the rest of the phrase of which the end of a row's text holds most; of the first one on ties."""

    def __init__(self, phrases: Sequence[Sequence[int]]):
        self._phrases = phrases

    def propose(self, view: DecodeView, plan: Plan) -> DraftTree:
        """A chain of at most `plan.depth` tokens per row; none where no phrase has begun."""
        chains = [self._rest(view.tokens(row))[: plan.depth] for row in range(view.rows)]
        return DraftTree.from_chains(view.roots(), chains, view.device)

    def _rest(self, text: Sequence[int]) -> Sequence[int]:
        begun = [
            (count, phrase)
            for phrase in self._phrases
            for count in range(1, min(len(phrase), len(text) + 1))
            if tuple(text[-count:]) == phrase[:count]
        ]
        count, phrase = max(begun, key=lambda each: each[0], default=(0, ()))
        return phrase[count:]
