"""The noise of sampling, drawn exactly as plain `generate` draws it.

`torch.multinomial(probs, 1)` is `argmax(probs / e)` with `e ~ Exp(1)` of the shape of `probs`, drawn from the same
generator. So the token that plain `generate` would sample at an output step is a function of that step's law and of
one `(rows, V)` draw over the caller's whole batch. Invariant: draw t here is the draw that plain `generate` makes at
output step t, and `finish` leaves the generator where plain `generate` would leave it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

KEPT_BYTES = 64 * 2**20
"""Draws of rows that lag behind are kept up to this size."""


@contextmanager
def generator_kept(device: torch.device) -> Iterator[None]:
    """What draws inside leaves the framework's generators as they were."""
    if device.type == "cuda":
        with torch.random.fork_rng(devices=[device]):
            yield
        return
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)


class SharedNoise:
    """Draws per output step, kept until every row is past them.

    Args:
        rows: rows of the caller's batch, finished ones included.
        vocab_size: V, the width of the target's scores.
        device: where the scores are, hence which generator is used.
    """

    def __init__(self, rows: int, vocab_size: int, device: torch.device):
        self._shape = (rows, vocab_size)
        self._device = device
        self._generator_module = torch if device.type == "cpu" else torch.get_device_module(device)
        self._draws: dict[int, torch.Tensor] = {}
        self._states: list[torch.Tensor] = []
        self._first = 0
        self._most_kept = max(KEPT_BYTES // (4 * rows * vocab_size), 32)

    def _state(self) -> torch.Tensor:
        if self._device.type == "cpu":
            return torch.get_rng_state()
        return self._generator_module.get_rng_state(self._device)

    def _set_state(self, state: torch.Tensor) -> None:
        if self._device.type == "cpu":
            torch.set_rng_state(state)
        else:
            self._generator_module.set_rng_state(state, self._device)

    def _exponential(self) -> torch.Tensor:
        return torch.empty(self._shape, dtype=torch.float32, device=self._device).exponential_()

    def _draw(self, step: int) -> torch.Tensor:
        """The draw of a step; drawn once, and drawn again from the saved state where it was not worth its memory."""
        while (new := self._first + len(self._states)) <= step:
            self._states.append(self._state())
            draw = self._exponential()
            if len(self._draws) < self._most_kept:
                self._draws[new] = draw
        if step in self._draws:
            return self._draws[step]
        now = self._state()
        self._set_state(self._states[step - self._first])
        draw = self._exponential()
        self._set_state(now)
        return draw

    def reach(self, step: int) -> None:
        """Draw up to this step now, from the generator as it stands."""
        self._draw(step)

    def at(self, steps: Sequence[Sequence[int]], row_ids: Sequence[int]) -> torch.Tensor:
        """Noise of row `row_ids[b]` at output steps `steps[b]`: shape `(B, D, V)`."""
        needed: dict[int, list[tuple[int, int]]] = {}
        for place, own in enumerate(steps):
            for depth, step in enumerate(own):
                needed.setdefault(step, []).append((place, depth))
        shape = len(steps), max(map(len, steps)), self._shape[1]
        noise = torch.empty(shape, dtype=torch.float32, device=self._device)
        for step in sorted(needed):
            draw = self._draw(step)
            for place, depth in needed[step]:
                noise[place, depth] = draw[row_ids[place]]
        return noise

    def forget_before(self, step: int) -> None:
        """Steps before this one are behind every row."""
        while self._first < step and self._states:
            self._draws.pop(self._first, None)
            self._states.pop(0)
            self._first += 1

    def finish(self, steps: int) -> None:
        """Leave the generator in the state after `steps` draws."""
        if steps > self._first + len(self._states):
            self._draw(steps - 1)
        elif steps < self._first + len(self._states):
            self._set_state(self._states[steps - self._first])
