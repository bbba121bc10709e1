"""A draft model with another tokenizer than the target's.

The draft model reads the row's text in its own ids and keeps its own slot cache. Greedy, it writes on in its own ids,
and what it wrote is encoded in the target's. Sampled, it draws among the tokens whose string both vocabularies have,
from a law over the target's ids. Where the grown text has the ids that are in the cache, they stay; the rest is run.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from ..errors import SpecDecError
from ..state import DecodeView, Plan
from ..tree import DraftTree, keep_nodes
from ..verify import likeliest
from .bridge import RowText, bridge_between, common_prefix, lexicon
from .draft_model import DraftModel, ModelDrafter
from .drawing import ChainDraw

MOST_STEPS = 4
"""Draft tokens per token of the plan, at most, where the draft's tokens are shorter."""


class BridgedDrafter(ModelDrafter):
    """The draft model's state in one call, with the row's text in its own ids.

    Timor et al., "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous
    Vocabularies" (arXiv:2502.05202): token-level intersection when sampling, string matching when greedy.

    Args:
        model: the draft model.
        strategy: its settings.
        target: the target.
        request: the call.
        tokenizers: the target's and the draft model's.
    """

    def __init__(
        self, model: PreTrainedModel, strategy: DraftModel, target: Any, request: Any, tokenizers: tuple[Any, Any]
    ):
        if strategy.vocabulary is not None:
            raise SpecDecError(
                "DraftModel(vocabulary=...) lists ids that target and draft model share, and this draft model has "
                "another tokenizer. Leave `vocabulary` out."
            )
        super().__init__(model, strategy, target, request)
        size = min(self._readable, int(self._slots.config.vocab_size))
        self._bridge = bridge_between(lexicon(tokenizers[0]), lexicon(tokenizers[1]), request.vocab_size, size)
        if not self._bridge.words:
            raise SpecDecError(
                "The tokenizers of the draft model and of the target have no text token in common, so that no draft "
                "could be said in the target's ids. Use a draft model for the same kind of text, or "
                'assistant_strategy="suffix".'
            )
        request.stats.note(
            f"the draft model has another tokenizer; {self._bridge.words} of its {len(self._bridge.draft.pieces)} "
            "text tokens are the target's too"
        )
        pairs = sorted(self._bridge.to_target.items())
        self._drafts, self._targets = torch.tensor(pairs, device=self._device).unbind(1)
        self._to_draft = torch.zeros(request.vocab_size, dtype=torch.long, device=self._device)
        self._to_draft[self._targets] = self._drafts
        self._sayable = torch.tensor(self._bridge.sayable, device=self._device)
        self._texts: list[RowText] = []
        self._held: list[list[int]] = []
        self._settled: list[int] = []

    def start(self, view: DecodeView) -> None:
        """Run all but the last id of each row's text through the draft model."""
        self._texts = [RowText(self._bridge) for _ in range(view.rows)]
        texts = [text.read(view.tokens(row)) for row, text in enumerate(self._texts)]
        texts = [ids if len(ids) > 1 else ids * 2 for ids in texts]  # a prefill has at least one column
        super().start(DecodeView.of_sequences(texts, view.device))
        self._held = [ids[:-1] for ids in texts]
        self._settled = [0] * view.rows

    def propose(self, view: DecodeView, plan: Plan) -> DraftTree:
        """A chain of at most `plan.depth` tokens for each row within the draft model's window.

        Greedy, the draft model writes as many tokens as the text so far has per token of the target's, and one more,
        so that the plan's last token is a whole one.
        """
        texts = [text.read(view.tokens(row)) for row, text in enumerate(self._texts)]
        steps = plan.depth
        if not self._request.sampling:
            longest = max(len(ids) / len(view.tokens(row)) for row, ids in enumerate(texts))
            steps = math.ceil(plan.depth * min(longest, MOST_STEPS)) + 1
        own = DecodeView.of_sequences(texts, view.device)
        within = [self._slots.cache is not None and self._fits(own, row, steps) for row in range(view.rows)]
        if not all(within):
            self._request.stats.note(
                f"drafting stopped where a row passed the draft model's window of {self._window} tokens"
            )
        if not any(within):
            return DraftTree.from_chains(view.roots(), [[]] * view.rows, view.device)
        kept = [common_prefix(*each) for each in zip(self._held, texts, self._settled)]
        self._cached = [min(count, len(ids) - 1) for count, ids in zip(kept, texts)]
        scores = self._catch_up(own)[:, 0]
        if self._request.sampling:
            chosen, tree = self._drawn(view, own, scores, steps, within)
        else:
            chosen, tree = self._written(view, own, scores, steps, plan.depth, within)
        self._held = [[*ids, *more[:-1]] for ids, more in zip(texts, chosen)]
        self._settled = [text.settled for text in self._texts]
        return tree

    def _written(
        self,
        view: DecodeView,
        own: DecodeView,
        scores: torch.Tensor,
        steps: int,
        depth: int,
        within: Sequence[bool],
    ) -> tuple[list[list[int]], DraftTree]:
        """The likeliest ids one after the other, and their text in the target's ids."""
        chosen: list[torch.Tensor] = []
        for step in range(steps):
            if step:
                scores = self._step(chosen[-1], own, step)
            chosen.append(self._sayable[likeliest(scores[:, self._sayable])])
        written = torch.stack(chosen, 1).tolist()
        chains = [
            self._bridge.target_ids(view.tokens(row), written[row])[:depth] if inside else []
            for row, inside in enumerate(within)
        ]
        return written, DraftTree.from_chains(view.roots(), chains, view.device)

    def _drawn(
        self, view: DecodeView, own: DecodeView, scores: torch.Tensor, depth: int, within: Sequence[bool]
    ) -> tuple[list[list[int]], DraftTree]:
        """Tokens drawn among those that both vocabularies have, with the target's noise where the verifier has it."""
        draw = ChainDraw(self._request, view, Plan.chain(depth))
        chosen: list[torch.Tensor] = []
        for step in range(depth):
            if step:
                scores = self._step(chosen[-1], own, step)
            mapped = scores.new_full((view.rows, self._request.vocab_size), float("-inf"))
            token = draw.draw(mapped.index_copy_(1, self._targets, scores[:, self._drafts]))
            chosen.append(self._to_draft[token.to(self._device)])
        tree = draw.tree()
        inside = torch.tensor(within, device=view.device).unsqueeze(1)
        return torch.stack(chosen, 1).tolist(), keep_nodes(tree, inside.expand(-1, tree.size))

    def _step(self, token: torch.Tensor, own: DecodeView, depth: int) -> torch.Tensor:
        """Run the id at `depth` of each row's chain; the scores after it, shape `(B, V)`."""
        seen = torch.ones(own.rows, 1, 1, dtype=torch.bool, device=self._device)
        return self._forward(token.unsqueeze(1), seen, [length + depth for length in own.lengths()])[:, 0]

    def observe(self, view: DecodeView, emitted: Sequence[Sequence[int]]) -> None:
        """Nothing: `propose` compares the grown text with what is in the cache."""

    def keep(self, rows: Sequence[int]) -> None:
        """Only these rows stay."""
        super().keep(rows)
        self._texts = [self._texts[row] for row in rows]
        self._held = [self._held[row] for row in rows]
        self._settled = [self._settled[row] for row in rows]
