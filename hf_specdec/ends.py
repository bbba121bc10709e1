"""Where each row ends, as in plain `generate`.

With an end-of-text id, a finished row leaves and is padded. Without one, plain `generate` lets finished rows go on
until the last row is done, so here they go on too, and the batch is cut where plain `generate` would have ended.

Criteria of the user's may look at the whole batch or keep state. In a batch they are asked column by column, in order,
once all rows have come that far; a row that ran ahead of its end is cut back.
"""

from collections.abc import Callable, Sequence

import torch

from .processing import RowStopping
from .state import DecodeState

UNBOUNDED = 2**31
Scores = Callable[[int], tuple[torch.Tensor, ...] | None]


class RowEnds:
    """Ends per row of the caller's batch, in emitted tokens.

    Args:
        stopping: the criteria.
        rows: rows of the caller's batch.
        input_length: columns of the prompt.
    """

    def __init__(self, stopping: RowStopping, rows: int, input_length: int):
        self._stopping = stopping
        self._ends: list[int | None] = [None] * rows
        self._most = UNBOUNDED if stopping.max_length is None else max(1, stopping.max_length - input_length)
        self._leave_at_once = stopping.pads_finished_rows or rows == 1
        self._judged = 0
        self._waiting: set[int] = set()

    @property
    def steps(self) -> int:
        """Output steps of the batch, once every row has ended."""
        return max(end for end in self._ends if end is not None)

    def end(self, row_id: int) -> int:
        """Tokens of a row in the result: all steps where finished rows go on, else up to its own end."""
        own = self._ends[row_id]
        return own if own is not None and self._leave_at_once else self.steps

    def judged_steps(self, state: DecodeState) -> int:
        """Output steps that every row has passed and that no criterion can take back."""
        passed = min(state.emitted_count(row) for row in range(state.rows)) if state.rows else self.steps
        return min(passed, self._judged) if self._stopping.asks_by_column else passed

    def _limit(self) -> int:
        everyone = all(end is not None for end in self._ends)
        return self.steps if everyone and not self._leave_at_once else self._most

    def rooms(self, state: DecodeState) -> list[int]:
        """Tokens that each row may still emit."""
        return [self._room(state, row) for row in range(state.rows)]

    def _room(self, state: DecodeState, row: int) -> int:
        end = self._ends[state.row_ids[row]] if self._leave_at_once else None
        return (self._limit() if end is None else end) - state.emitted_count(row)

    def most_room(self, state: DecodeState) -> int:
        """Tokens that some row may still emit."""
        return max(self.rooms(state))

    def cut(self, state: DecodeState, proposed: Sequence[list[int]], stops: Sequence[int | None]) -> list[list[int]]:
        """What each row emits.

        Args:
            proposed: tokens of this round per row, not yet committed.
            stops: tokens up to and including the first stop of the round, per row.
        """
        for row, stop in enumerate(stops):
            row_id = state.row_ids[row]
            if stop is not None and self._ends[row_id] is None:
                self._ends[row_id] = state.emitted_count(row) + stop
        return [tokens[: max(self._room(state, row), 0)] for row, tokens in enumerate(proposed)]

    def settle(self, state: DecodeState, scores: Scores, caches_roots: bool) -> set[int]:
        """After the commit: ask the criteria that are asked by column, and say which rows leave.

        Args:
            caches_roots: a row that ends before the batch stays for one more forward, which puts its last token into
                the cache, as plain `generate` does.
        """
        if self._stopping.asks_by_column:
            self._ask_columns(state, scores)
        leaving = set()
        for row, row_id in enumerate(state.row_ids):
            end = self._ends[row_id] if self._leave_at_once else self._limit()
            if end is not None and state.emitted_count(row) >= end:
                leaving.add(row)
        if not caches_roots:
            return leaving
        last = self.steps if len(leaving) == state.rows else UNBOUNDED
        early = {row for row in leaving if state.emitted_count(row) < last}
        waited = {row for row in early if state.row_ids[row] in self._waiting}
        self._waiting |= {state.row_ids[row] for row in early}
        return leaving - early | waited

    def _ask_columns(self, state: DecodeState, scores: Scores) -> None:
        going_on = [each for each in state.row_ids if not self._leave_at_once or self._ends[each] is None]
        passed = min(len(state.emitted(row_id)) for row_id in going_on) if going_on else self.steps
        while self._judged < passed and not self._over(self._judged):
            self._judged += 1
            verdicts = self._stopping.ask(state.padded(state.input_length + self._judged, {}, state.device), scores)
            for row_id, stop in enumerate(verdicts):
                end = self._ends[row_id]
                if stop and (end is None or end > self._judged):
                    self._ends[row_id] = self._judged
                    if self._leave_at_once and state.truncate(row_id, self._judged):
                        self._waiting.add(row_id)  # its last token is in the cache: it ran ahead

    def _over(self, steps: int) -> bool:
        return all(end is not None and end <= steps for end in self._ends)
