"""Where each row ends, as in plain `generate`.

With an end-of-text id, a finished row leaves and is padded. Without one, plain `generate` lets finished rows go on until
the last row is done, so here they go on too, and the batch is cut where plain `generate` would have ended.
"""

from collections.abc import Sequence

from .state import DecodeState

UNBOUNDED = 2**31


class RowEnds:
    """Ends per row of the caller's batch.

    Args:
        rows: rows of the caller's batch.
        input_length: columns of the prompt.
        max_length: columns after which every row ends, or None.
        pads_finished_rows: finished rows leave and are padded.
    """

    def __init__(self, rows: int, input_length: int, max_length: int | None, pads_finished_rows: bool):
        self._ends: list[int | None] = [None] * rows
        self._most = UNBOUNDED if max_length is None else max(1, max_length - input_length)
        self._leave_at_once = pads_finished_rows or rows == 1

    @property
    def steps(self) -> int:
        """Output steps of the batch, once every row has ended."""
        return max(end for end in self._ends if end is not None)

    def _limit(self) -> int:
        ended = [end for end in self._ends if end is not None]
        everyone = len(ended) == len(self._ends)
        return max(ended) if everyone and not self._leave_at_once else self._most

    def rooms(self, state: DecodeState) -> list[int]:
        """Tokens that each row may still emit."""
        limit = self._limit()
        return [limit - state.emitted_count(row) for row in range(state.rows)]

    def most_room(self, state: DecodeState) -> int:
        """Tokens that some row may still emit."""
        return max(self.rooms(state))

    def settle(
        self, state: DecodeState, proposed: Sequence[list[int]], stops: Sequence[int | None]
    ) -> tuple[list[list[int]], set[int]]:
        """Cut what each row emits at its end. Returns the tokens per row and the rows that leave.

        Args:
            proposed: tokens of this round per row, not yet committed.
            stops: tokens up to and including the first stop of the round, per row.
        """
        totals = [state.emitted_count(row) for row in range(state.rows)]
        for row, stop in enumerate(stops):
            row_id = state.row_ids[row]
            if stop is not None and self._ends[row_id] is None:
                self._ends[row_id] = totals[row] + stop
        limit = self._limit()
        emitted, leaving = [], set()
        for row, tokens in enumerate(proposed):
            end = self._ends[state.row_ids[row]] if self._leave_at_once else None
            cut = (limit if end is None else end) - totals[row]
            emitted.append(tokens[: max(cut, 0)])
            if len(tokens) >= cut:
                leaving.add(row)
        return emitted, leaving
