"""What has been decoded so far. One writer, `loop.py`; drafters and controllers get the read-only `DecodeView`.

Tokens of a row count from column 0, left padding stripped. Invariant: slot i of row b of the target's cache holds the
K/V of token i of that row, for `i < length(b) - 1`; the last committed token, the root, is not in the cache yet.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

Chances = Callable[[Sequence[int], Sequence[float] | None], list[float]]
"""From parents of a row's nodes, and its drafter's estimates if there are any, to the chance that each is accepted."""


@dataclass(frozen=True)
class Plan:
    """What the controller grants for one round: tokens below the root, children per node, nodes with the root.

    A tree stays within all three. `width == 1` grants chains. Strategies that run a model or combine others read more:

    Args:
        model_depth: longest path of a member that runs a model; None for `depth`, 0 leaves it out.
        enough: where members are asked in turn, tokens per row that the earlier ones must promise for a member that
            runs a model to be left out; None leaves it to the strategy.
        least: chance that the best path of a row must have, on average over rows, to be worth another forward of a
            model. Nodes that are drawn for a verifier that reads draft probabilities disregard it.
        lookup_chances, model_chances: what `enough` and `least` are compared with; None takes the drafter's word.
        own_widths: each member of several keeps to the default width of its own.
        taught: what the target found likely is told after this round; False leaves members out that draft from it.
    """

    depth: int
    width: int
    nodes: int
    model_depth: int | None = None
    enough: float | None = None
    least: float = 0.0
    lookup_chances: Chances | None = None
    model_chances: Chances | None = None
    own_widths: bool = False
    taught: bool = True

    @classmethod
    def chain(cls, depth: int) -> "Plan":
        """A chain of `depth` tokens."""
        return cls(depth, 1, depth + 1)

    def within(self, depth: int) -> "Plan":
        """The plan with at most `depth` tokens below the root."""
        depth = max(min(depth, self.depth), 0)
        nodes = min(self.nodes, 1 + depth) if self.width == 1 or not depth else self.nodes
        return replace(self, depth=depth, nodes=nodes)

    def for_model(self) -> "Plan":
        """The plan of a member that runs a model."""
        return self if self.model_depth is None else replace(self.within(self.model_depth), model_depth=None)


class RowTokens(Sequence[int]):
    """Token ids of a row that can be read and not written; a slice is a list of its own. They grow with the row."""

    __slots__ = ("_ids",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, ids: list[int]):
        self._ids = ids

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, place: Any) -> Any:
        return self._ids[place]

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids)

    def __contains__(self, token: object) -> bool:
        return token in self._ids

    def __reversed__(self) -> Iterator[int]:
        return reversed(self._ids)

    def __eq__(self, other: object) -> bool:
        return self._ids == list(other) if isinstance(other, Sequence) else NotImplemented

    def __add__(self, other: Iterable[int]) -> list[int]:
        return [*self._ids, *other]

    def __radd__(self, other: Iterable[int]) -> list[int]:
        return [*other, *self._ids]

    def index(self, token: int, *limits: int) -> int:
        """Its first place, as in a list."""
        return self._ids.index(token, *limits)

    def count(self, token: int) -> int:
        """How often it is there, as in a list."""
        return self._ids.count(token)

    def __repr__(self) -> str:
        return repr(self._ids)


class DecodeView:
    """Read-only view of the rows that are still decoding.

    `unseen[b]` counts prompt positions of row b without token ids (an `inputs_embeds` prompt); they come first, and
    `length(b)` includes them.
    """

    def __init__(
        self,
        sequences: list[list[int]],
        prompt_lengths: list[int],
        unseen: list[int],
        row_ids: list[int],
        device: torch.device,
    ):
        self._sequences = sequences
        self._prompt_lengths = prompt_lengths
        self._unseen = unseen
        self._row_ids = row_ids
        self.device = device

    @classmethod
    def of_sequences(
        cls, sequences: list[list[int]], device: torch.device | str = "cpu", prompt_lengths: list[int] | None = None
    ) -> "DecodeView":
        """A view over plain lists of token ids, for tests and for stock assisted decoding."""
        lengths = list(map(len, sequences)) if prompt_lengths is None else prompt_lengths
        rows = len(sequences)
        return cls(sequences, lengths, [0] * rows, list(range(rows)), torch.device(device))

    @property
    def rows(self) -> int:
        """B, the number of rows still decoding."""
        return len(self._sequences)

    @property
    def row_ids(self) -> Sequence[int]:
        """Position of each row in the caller's batch."""
        return tuple(self._row_ids)

    def tokens(self, row: int) -> Sequence[int]:
        """Committed token ids of a row, prompt first, root last; `list` of them is a copy to write to."""
        return RowTokens(self._sequences[row])

    def root(self, row: int) -> int:
        """The last committed token of a row."""
        return self._sequences[row][-1]

    def roots(self) -> list[int]:
        """The last committed token of each row."""
        return [sequence[-1] for sequence in self._sequences]

    def length(self, row: int) -> int:
        """Committed tokens of a row, root included."""
        return len(self._sequences[row]) + self._unseen[row]

    def lengths(self) -> list[int]:
        """`length` of each row."""
        return [self.length(row) for row in range(self.rows)]

    def prompt_length(self, row: int) -> int:
        """How many of `tokens(row)` came from the prompt."""
        return self._prompt_lengths[row]


class DecodeState(DecodeView):
    """The writable state, with the caller's whole batch in the columns of plain `generate`.

    Attributes:
        view: what strategies and controllers see of it.

    Args:
        input_ids: the prompt, `LongTensor` of shape `(rows, L)`, padding included.
        attention_mask: shape `(rows, L)`, or None for all ones.
        cached: prompt tokens in the cache per row.
        pad_token_id: what stands after the end of a finished row.
    """

    def __init__(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, cached: Sequence[int], pad_token_id: int
    ):
        rows, self.input_length = input_ids.shape
        if attention_mask is None:
            self.prompt_columns = max(self.input_length, *cached)
            self._real_columns = [list(range(count)) for count in cached]
        else:
            self.prompt_columns = attention_mask.shape[1]
            self._real_columns = [row.nonzero().squeeze(1).tolist() for row in attention_mask]
        prompts = input_ids.tolist()
        if attention_mask is not None and attention_mask.shape == input_ids.shape:
            prompts = [[ids[column] for column in real] for ids, real in zip(prompts, self._real_columns)]
        unseen = [count - len(prompt) for count, prompt in zip(cached, prompts, strict=True)]
        parts = prompts, list(map(len, prompts)), unseen, list(range(rows))
        super().__init__(*parts, input_ids.device)
        self.view = DecodeView(*parts, input_ids.device)  # the same lists
        self._emitted: list[list[int]] = [[] for _ in range(rows)]
        self._pad_token_id = pad_token_id
        self._grid = input_ids.long()
        self._written = [0] * rows  # emitted tokens that are in the grid: it is looked at by few calls

    def columns(self, row_id: int, count: int) -> list[int]:
        """Columns of the first `count` tokens of a row of the caller's batch in plain `generate`'s cache."""
        real = self._real_columns[row_id]
        return real[:count] + list(range(self.prompt_columns, self.prompt_columns + count - len(real)))

    def emitted(self, row_id: int) -> list[int]:
        """Tokens that a row of the caller's batch has emitted."""
        return self._emitted[row_id]

    def emitted_count(self, row: int) -> int:
        """Tokens that a row still decoding has emitted; its next output step."""
        return len(self._emitted[self._row_ids[row]])

    def padded_length(self, row: int) -> int:
        """Columns of a row in plain `generate`'s batch."""
        return self.input_length + self.emitted_count(row)

    def padded(self, length: int, added: Mapping[int, Sequence[int]], device: torch.device) -> torch.Tensor:
        """The caller's whole batch as plain `generate` would have it at `length` columns: shape `(rows, length)`.

        Args:
            added: tokens not yet committed, by row id; they follow the row's committed ones.
        """
        missing = max(length, self.input_length + max(map(len, self._emitted))) - self._grid.shape[1]
        if missing > 0:
            fill = self._grid.new_full((self._grid.shape[0], max(missing, self._grid.shape[1])), self._pad_token_id)
            self._grid = torch.cat([self._grid, fill], dim=1)
        for row_id, own in enumerate(self._emitted):
            if unwritten := own[self._written[row_id] :]:
                end = self.input_length + len(own)
                self._grid[row_id, end - len(unwritten) : end] = torch.tensor(unwritten, device=self._grid.device)
                self._written[row_id] = len(own)
        batch = self._grid[:, :length].clone()
        for row_id, tokens in added.items():
            start = self.input_length + len(self._emitted[row_id])
            tokens = tokens[: max(length - start, 0)]
            if tokens:
                batch[row_id, start : start + len(tokens)] = torch.tensor(tokens, device=batch.device)
        return batch.to(device)

    def commit(self, emitted: Sequence[Sequence[int]]) -> None:
        """Append what each row still decoding emitted."""
        for row, tokens in enumerate(emitted):
            self._sequences[row].extend(tokens)
            self._emitted[self._row_ids[row]].extend(tokens)

    def truncate(self, row_id: int, steps: int) -> bool:
        """Cut a row of the caller's batch back to its first `steps` emitted tokens and pad it. Was there more?"""
        surplus = len(self._emitted[row_id]) - steps
        if surplus > 0:
            del self._emitted[row_id][steps:]
            self._grid[row_id, self.input_length + steps :] = self._pad_token_id
            self._written[row_id] = min(self._written[row_id], steps)
            if row_id in self._row_ids:
                del self._sequences[self._row_ids.index(row_id)][-surplus:]
        return surplus > 0

    def keep(self, rows: Sequence[int]) -> None:
        """Only these rows stay."""
        for name in ("_sequences", "_prompt_lengths", "_unseen", "_row_ids"):
            values = getattr(self, name)
            values[:] = [values[row] for row in rows]

    def sequences(self, steps: int) -> torch.Tensor:
        """Prompt and the first `steps` emitted tokens of every row, padded: shape `(rows, L + steps)`."""
        batch = self.padded(self.input_length + steps, {}, self.device)
        for row_id, tokens in enumerate(self._emitted):
            batch[row_id, self.input_length + len(tokens) :] = self._pad_token_id
        return batch
