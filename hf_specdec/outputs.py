"""Per-token outputs: one entry per emitted token, in the shapes of plain `generate`.

Entry t of scores, logits, hidden states and attentions belongs to the t-th emitted token of every row. A row that has
ended holds zeros there.
"""

from collections.abc import Sequence
from typing import Any

import torch

from .state import DecodeState

Nested = list[tuple[torch.Tensor, ...]]


class TokenOutputs:
    """Collects what the caller asked for.

    Args:
        generation_config: says what is wanted.
        rows: rows of the caller's batch.

    Attributes:
        windows: per layer, the columns that its attention shows, or None for all; known once the prompt has run.
    """

    def __init__(self, generation_config: Any, rows: int):
        wanted = bool(generation_config.return_dict_in_generate)
        self.scores: list[torch.Tensor] | None = [] if wanted and generation_config.output_scores else None
        self.logits: list[torch.Tensor] | None = [] if wanted and generation_config.output_logits else None
        self.hidden_states: Nested | None = [] if wanted and generation_config.output_hidden_states else None
        self.attentions: Nested | None = [] if wanted and generation_config.output_attentions else None
        self._rows = rows
        self.windows: Sequence[int | None] = ()

    def scores_until(self, steps: int) -> tuple[torch.Tensor, ...] | None:
        """Scores of the first `steps` output steps, as a stopping criterion gets them."""
        return None if self.scores is None else tuple(self.scores[:steps])

    def prefill(self, raw: Any) -> None:
        """The first entries of hidden states and attentions are the whole prompt's."""
        if self.hidden_states is not None:
            self.hidden_states.append(tuple(raw.hidden_states))
        if self.attentions is not None:
            self.attentions.append(tuple(raw.attentions))

    def add_scores(
        self, state: DecodeState, row: int, nodes: Sequence[int], scores: torch.Tensor, logits: Any
    ) -> None:
        """Scores and logits of the tokens that follow `nodes` of a row; called before the commit."""
        row_id, step = state.row_ids[row], state.emitted_count(row)
        for entries, values in ((self.scores, scores), (self.logits, logits)):
            if entries is None:
                continue
            for index, node in enumerate(nodes, start=step):
                if index == len(entries):
                    entries.append(
                        torch.zeros(self._rows, values.shape[-1], dtype=torch.float32, device=values.device)
                    )
                entries[index][row_id] = values[row, node]

    def add_states(self, state: DecodeState, row: int, nodes: Sequence[int], raw: Any) -> None:
        """Hidden states and attentions of the tokens that follow `nodes` of a row in a verify forward."""
        row_id, step = state.row_ids[row], state.emitted_count(row)
        for index, node in enumerate(nodes):
            if self.hidden_states is not None:
                parts = [layer[..., row, node : node + 1, :] for layer in raw.hidden_states]
                self._put(self.hidden_states, step + index, row_id, parts, 2)
            if self.attentions is not None:
                parts = self._attention(state, row, nodes[: index + 1], raw)
                self._put(self.attentions, step + index, row_id, parts, 3)

    def _attention(self, state: DecodeState, row: int, path: Sequence[int], raw: Any) -> list[torch.Tensor]:
        """Attention of the last node of `path` over the columns of plain `generate`."""
        base = state.length(row) - 1
        count = base + len(path)
        places = state.columns(state.row_ids[row], count)
        slots = list(range(base)) + [base + node for node in path]
        parts = []
        for layer, window in zip(raw.attentions, self.windows, strict=True):
            own = layer[row, :, path[-1], slots]
            full = own.new_zeros(own.shape[0], 1, places[-1] + 1)
            full[:, 0, places] = own
            parts.append(full if window is None else full[:, :, -window:])
        return parts

    def _put(self, entries: Nested, step: int, row_id: int, parts: Sequence[torch.Tensor], behind: int) -> None:
        """Write a row's parts, whose last `behind` axes come after that of the rows."""
        if step == len(entries):
            shapes = [(*part.shape[:-behind], self._rows, *part.shape[-behind:]) for part in parts]
            entries.append(tuple(part.new_zeros(shape) for part, shape in zip(parts, shapes)))
        for entry, part in zip(entries[step], parts, strict=True):
            entry.select(-behind - 1, row_id).copy_(part)

    def finish(self, steps: int) -> dict[str, Any]:
        """The collected outputs by field name, cut to `steps` entries."""
        fields = ("scores", "logits", "hidden_states", "attentions")
        found = {name: getattr(self, name) for name in fields}
        return {name: None if entries is None else tuple(entries[:steps]) for name, entries in found.items()}
