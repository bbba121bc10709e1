"""How a chain of draft tokens is drawn from a draft's scores, one token per row at a time.

Greedy: the argmax. Sampled, under a verifier with the target's noise: `argmax(q / e)` with that noise, which lifts
acceptance. Sampled, under a verifier that reads draft probabilities: an independent draw, whose law goes along.
"""

from typing import Any

import torch

from ..state import DecodeView, Plan
from ..tree import DraftTree
from ..verify import likeliest, sample_with


class ChainDraw:
    """The tokens drawn in one round.

    Args:
        request: the call.
        view: the rows.
        plan: `plan.depth` tokens will be drawn at most.
    """

    def __init__(self, request: Any, view: DecodeView, plan: Plan):
        self._request = request
        self._view = view
        self._depth = plan.depth
        self._noise: torch.Tensor | None = None
        self._chosen: list[torch.Tensor] = []
        self._laws: list[torch.Tensor] = []

    def draw(self, logits: torch.Tensor) -> torch.Tensor:
        """The next token of each row, shape `(B,)`.

        Args:
            logits: the draft's after the tokens drawn so far, shape `(B, V)` with the target's V.
        """
        request = self._request
        scores = self._processed(logits.to(self._view.device))
        if not request.sampling:
            token = likeliest(scores)
        elif request.verifier.uses_noise:
            if self._noise is None:
                self._noise = request.noise_at(self._depth, scores)
            token = sample_with(scores, self._noise[:, len(self._chosen)]).clamp(min=0)
        else:
            law = torch.softmax(scores.float(), -1)
            self._laws.append(torch.where(law.isnan(), 1 / law.shape[1], law))
            token = torch.multinomial(self._laws[-1], 1).squeeze(1)
        self._chosen.append(token)
        return token

    def _processed(self, logits: torch.Tensor) -> torch.Tensor:
        """Scores after the call's processors, without tokens that the target cannot read."""
        processors, unreadable = self._request.processors, self._request.unreadable
        scores = logits[:, : self._request.vocab_size]
        if self._request.sampling or len(processors):
            paths: list[list[int]] = [[]] * self._view.rows
            if self._chosen and processors.reads_prefix:
                paths = torch.stack(self._chosen, 1).tolist()
            scores = processors.process_paths(scores, paths, self._request.state)
        if unreadable:
            scores = scores.index_fill(1, torch.tensor(unreadable, device=scores.device), float("-inf"))
        return scores

    def tree(self) -> DraftTree:
        """The chain of each row."""
        device = self._view.device
        roots = torch.tensor(self._view.roots(), device=device)
        tokens = torch.stack([roots, *self._chosen], 1)
        parents = torch.arange(-1, len(self._chosen), device=device).repeat(self._view.rows, 1)
        laws = self._laws
        probs = torch.stack([*laws, torch.zeros_like(laws[0])], 1) if laws else None
        return DraftTree(tokens, parents, (parents >= 0) & bool(laws), probs)
