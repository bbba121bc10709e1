"""Logits processors per tree node, and stopping criteria per ragged row.

Processors and criteria were written for a rectangular batch that grows by one column. They get exactly that: the whole
batch of the caller, left padding included, cut at the length that is being judged; only the rows whose node or token
is judged there take the answer.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers.generation import logits_process as stock
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from .errors import UnsupportedOptionError
from .fingerprint import changes_when_called
from .state import DecodeState

IGNORES_PREFIX = (
    "TemperatureLogitsWarper TopPLogitsWarper TopKLogitsWarper TopHLogitsWarper MinPLogitsWarper TypicalLogitsWarper "
    "EpsilonLogitsWarper EtaLogitsWarper SuppressTokensLogitsProcessor InfNanRemoveLogitsProcessor LogitNormalization"
).split()
READS_PREFIX = (
    "MinLengthLogitsProcessor MinNewTokensLengthLogitsProcessor RepetitionPenaltyLogitsProcessor "
    "EncoderRepetitionPenaltyLogitsProcessor NoRepeatNGramLogitsProcessor EncoderNoRepeatNGramLogitsProcessor "
    "SequenceBiasLogitsProcessor NoBadWordsLogitsProcessor PrefixConstrainedLogitsProcessor "
    "ForcedBOSTokenLogitsProcessor ForcedEOSTokenLogitsProcessor ExponentialDecayLengthPenalty "
    "SuppressTokensAtBeginLogitsProcessor WatermarkLogitsProcessor"
).split()


def _classes(names: Sequence[str]) -> set[type]:
    return {getattr(stock, name) for name in names if hasattr(stock, name)}


class NodeProcessors:
    """The logits processors of a call, applied node by node, each node by its own path.

    Raises `UnsupportedOptionError` at construction for a processor that keeps state between calls.
    """

    def __init__(self, processors: LogitsProcessorList, input_ids: torch.Tensor, vocab_size: int):
        self._processors = list(processors)
        self._ignores_prefix = _classes(IGNORES_PREFIX)
        known = self._ignores_prefix | _classes(READS_PREFIX)
        for processor in self._processors:
            if type(processor) in known:
                continue
            name = type(processor).__name__
            if type(processor).__module__ == stock.__name__:
                raise UnsupportedOptionError(
                    f"The logits processor {name} keeps state between calls, so it cannot judge several draft tokens "
                    "at once. Call `generate` without `assistant_strategy`, or without the option that adds it."
                )
            if reason := changes_when_called(processor, input_ids, vocab_size):
                raise UnsupportedOptionError(
                    f"The logits processor {name} {reason}, so it cannot judge several draft tokens at once. Make it "
                    "a function of `input_ids` and `scores` alone, or call `generate` without `assistant_strategy`."
                )

    def __len__(self) -> int:
        return len(self._processors)

    @property
    def stock(self) -> LogitsProcessorList:
        """The processors as transformers takes them."""
        return LogitsProcessorList(self._processors)

    @property
    def reads_prefix(self) -> bool:
        """Some processor depends on the tokens before."""
        return any(type(each) not in self._ignores_prefix for each in self._processors)

    def process(
        self,
        logits: torch.Tensor,
        tokens: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]],
        state: DecodeState,
    ) -> torch.Tensor:
        """Scores of every node: `FloatTensor` of shape `(B, N, V)`, float32.

        Args:
            logits: shape `(B, N, V)`; left as they are.
            tokens: tokens of the nodes, per row.
            parents: parents of the nodes, per row.
            state: where node 0 is the last committed token of each row.
        """
        paths = [_node_paths(*own) for own in zip(tokens, parents, strict=True)]
        return self.process_nodes(logits, paths, state)

    def process_paths(self, logits: torch.Tensor, paths: Sequence[list[int]], state: DecodeState) -> torch.Tensor:
        """Scores after one path per row: `FloatTensor` of shape `(B, V)`, float32.

        Args:
            logits: shape `(B, V)`; left as they are.
            paths: tokens after the last committed one, per row.
        """
        return self.process_nodes(logits.unsqueeze(1), [[path] for path in paths], state).squeeze(1)

    def process_nodes(
        self, logits: torch.Tensor, paths: Sequence[Sequence[list[int] | None]], state: DecodeState
    ) -> torch.Tensor:
        """Scores of nodes that are given by their paths: `FloatTensor` of shape `(B, N, V)`, float32.

        Args:
            logits: shape `(B, N, V)`; left as they are.
            paths: tokens after the last committed one down to each node, per row; None for a node that does not count.
        """
        scores = logits.to(torch.float32, copy=True)
        passes = None
        for processor in self._processors:
            if type(processor) in self._ignores_prefix:
                flat = scores.view(-1, scores.shape[-1])
                scores = processor(flat.new_zeros((flat.shape[0], 1), dtype=torch.long), flat).view_as(scores)
                continue
            if passes is None:
                passes = _passes(paths, state, scores.device)
            for prefix, rows, nodes, ids in passes:
                own = scores[rows, nodes]
                if len(ids) == len(prefix):  # ids ascend: every row of the caller's batch is there
                    scores[rows, nodes] = processor(prefix, own).to(scores.dtype)
                    continue
                batch = own[:1].repeat(len(prefix), 1)
                batch[ids] = own
                scores[rows, nodes] = processor(prefix, batch)[ids].to(scores.dtype)
        return scores


def _node_paths(tokens: Sequence[int], parents: Sequence[int]) -> list[list[int] | None]:
    """Tokens below the root down to each node; None for padding."""
    paths: list[list[int] | None] = [[]]
    for token, parent in zip(tokens[1:], parents[1:]):
        above = paths[parent] if parent >= 0 else None
        paths.append(None if above is None else [*above, token])
    return paths


def _passes(
    paths: Sequence[Sequence[list[int] | None]], state: DecodeState, device: torch.device
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Groups of nodes with prefixes of one length, at most one node per row: `(prefixes, rows, nodes, row ids)`."""
    groups: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for row, own in enumerate(paths):
        ranks: dict[int, int] = {}
        for node, path in enumerate(own):
            if path is not None:
                rank = ranks[len(path)] = ranks.get(len(path), -1) + 1
                groups.setdefault((state.padded_length(row) + len(path), rank), []).append((row, node))
    result = []
    for (length, _), members in sorted(groups.items()):
        ids = [state.row_ids[row] for row, _ in members]
        added = {row_id: paths[row][node] or [] for row_id, (row, node) in zip(ids, members)}
        prefix = state.padded(length, added, device)
        rows, nodes = zip(*members)
        index = [torch.tensor(each, device=device) for each in (rows, nodes, ids)]
        result.append((prefix, index[0], index[1], index[2]))
    return result


class RowStopping:
    """The stopping criteria of a call.

    Criteria whose answer for a row depends on that row alone are asked as a round is settled. In a batch, all others
    are asked by column, see `RowEnds`.
    """

    def __init__(self, criteria: StoppingCriteriaList, rows: int, input_length: int):
        self._eos: set[int] = set()
        self._by_prefix: list[Any] = []
        self._by_column: list[Any] = []
        self.max_length: int | None = None
        self.pads_finished_rows = any(hasattr(each, "eos_token_id") for each in criteria)
        for each in criteria:
            if type(each) is EosTokenCriteria:
                self._eos |= set(each.eos_token_id.tolist())
            elif type(each) is MaxLengthCriteria:
                self.max_length = each.max_length if self.max_length is None else min(self.max_length, each.max_length)
            elif rows == 1 or type(each) in (StopStringCriteria, MaxTimeCriteria):
                self._by_prefix.append(each)
            else:
                self._by_column.append(each)
        self._input_length = input_length

    @property
    def asks_by_column(self) -> bool:
        """Some criterion is asked by column."""
        return bool(self._by_column)

    def ask(self, columns: torch.Tensor, scores: Callable[[int], Any]) -> list[bool]:
        """What the criteria that are asked by column say of each row.

        Args:
            columns: the caller's whole batch, `LongTensor` of shape `(rows, L)`.
            scores: gives the scores of the first n output steps.
        """
        return self._verdicts(self._by_column, columns, scores)

    def _verdicts(self, criteria: Sequence[Any], columns: torch.Tensor, scores: Callable[[int], Any]) -> list[bool]:
        verdicts = torch.zeros(columns.shape[0], dtype=torch.bool, device=columns.device)
        for each in criteria:
            verdicts = verdicts | each(columns, scores(columns.shape[1] - self._input_length))
        return verdicts.tolist()

    def first_stops(
        self, emitted: Sequence[Sequence[int]], state: DecodeState, scores: Callable[[int], Any]
    ) -> list[int | None]:
        """Per row, how many of the emitted tokens come up to and including the first stop; None for no stop.

        Args:
            emitted: tokens of this round per row, not yet committed.
            state: the state before them.
            scores: gives the scores of the first n output steps.
        """
        stops: list[int | None] = []
        for row, tokens in enumerate(emitted):
            stop = next((i + 1 for i, token in enumerate(tokens) if token in self._eos), None)
            if self.max_length is not None:
                room = max(1, self.max_length - state.padded_length(row))
                if room <= len(tokens):
                    stop = room if stop is None else min(stop, room)
            stops.append(stop)
        if self._by_prefix:
            self._ask_prefixes(emitted, state, stops, scores)
        return stops

    def _ask_prefixes(
        self,
        emitted: Sequence[Sequence[int]],
        state: DecodeState,
        stops: list[int | None],
        scores: Callable[[int], Any],
    ) -> None:
        lengths = {state.padded_length(row) + i + 1 for row, tokens in enumerate(emitted) for i in range(len(tokens))}
        done: set[int] = set()
        for length in sorted(lengths):
            counts = [length - state.padded_length(row) for row in range(state.rows)]
            judged = [
                row
                for row, count in enumerate(counts)
                if row not in done and 0 < count <= (len(emitted[row]) if (stop := stops[row]) is None else stop)
            ]
            if not judged:
                continue
            added = {row_id: emitted[row] for row, row_id in enumerate(state.row_ids)}
            verdicts = self._verdicts(self._by_prefix, state.padded(length, added, state.device), scores)
            for row in judged:
                if verdicts[state.row_ids[row]]:
                    stops[row] = counts[row]
                    done.add(row)
