"""Calls of `generate` that watch what parts of a target draft and how long it takes.

`probe_parts` asks every part for one token in each round of a plain greedy call, `round_seconds` times real rounds and
plain steps, `decode_seconds` times whole texts. All in seconds, batch size 1.
"""

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from hf_specdec import (
    DecodeView,
    Drafter,
    DraftStrategy,
    DraftTree,
    LayerSkip,
    Plan,
    SpecDecConfig,
    SpecDecError,
    SpeculativeGenerationMixin,
)

from .cost import PLAIN_STEPS, UNCOUNTED, ScheduleEnded, TokenClock, endless
from .measure import sampling_options

ASKED = Plan.chain(1)


@dataclass(frozen=True)
class Probe:
    """What a part did along some texts.

    Args:
        agreed: per text, per token after the first: was it the part's argmax?
        step_seconds: median of a draft step.
    """

    agreed: tuple[tuple[bool, ...], ...]
    step_seconds: float


@dataclass
class PartLog:
    """What a part did in one call."""

    agreed: list[bool] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Watched(DraftStrategy):
    """Asks parts for the next token, and proposes nothing.

    Args:
        parts: who is asked.
        logs: one per part.
    """

    parts: tuple[LayerSkip, ...]
    logs: tuple[PartLog, ...]

    name: ClassVar[str] = "watched_parts"

    def build(self, target: Any, request: Any) -> "WatchedDrafter":
        """The drafter of one call."""
        return WatchedDrafter([part.build(target, request) for part in self.parts], self.logs)


class WatchedDrafter(Drafter):
    """Compares what the parts say with what the target says."""

    def __init__(self, drafters: Sequence[Drafter], logs: Sequence[PartLog]):
        self._drafters = drafters
        self._logs = logs
        self._said: list[int] = []

    def propose(self, view: DecodeView, plan: Plan) -> DraftTree:
        """A bare root."""
        self._said = []
        for drafter, log in zip(self._drafters, self._logs):
            started = time.perf_counter()
            self._said.append(int(drafter.propose(view, ASKED).tokens[0, 1]))
            log.seconds.append(time.perf_counter() - started)
        return DraftTree.from_chains(view.roots(), [[]] * view.rows, view.device)

    def observe(self, view: DecodeView, emitted: Sequence[Sequence[int]]) -> None:
        """The target's token is known."""
        for log, said in zip(self._logs, self._said):
            log.agreed.append(said == emitted[0][0])


def probe_parts(
    model: SpeculativeGenerationMixin, prompts: Sequence[Sequence[int]], parts: Sequence[LayerSkip], new_tokens: int
) -> list[Probe]:
    """What each part would have drafted along the target's greedy texts.

    Args:
        model: the target, enabled.
        prompts: token ids.
        parts: whom to ask.
        new_tokens: longest text.
    """
    texts: list[list[tuple[bool, ...]]] = [[] for _ in parts]
    seconds: list[list[float]] = [[] for _ in parts]
    for prompt in prompts:
        logs = tuple(PartLog() for _ in parts)
        config = SpecDecConfig(Watched(tuple(parts), logs), max_draft_tokens=1, schedule="constant")
        _generate(model, prompt, new_tokens, assistant_strategy=config)
        for own, log in enumerate(logs):
            texts[own].append(tuple(log.agreed))
            seconds[own] += log.seconds[UNCOUNTED:] or log.seconds
    if new_tokens > 1 and not any(texts[0]):
        raise SpecDecError("The model ends its texts after a token or two on these prompts; give others.")
    return [Probe(tuple(own), statistics.median(times or [0.0])) for own, times in zip(texts, seconds)]


@dataclass(frozen=True, eq=False)
class ScheduledRounds(DraftStrategy):
    """Real drafts of parts in scheduled numbers, timed.

    Args:
        parts: whose drafts.
        schedule: a part and a number of tokens, round by round.
        drafts: seconds of drafting by part and number of tokens.
        verifies: seconds of the rest of the rounds.
    """

    parts: tuple[LayerSkip, ...]
    schedule: tuple[tuple[int, int], ...]
    drafts: dict[tuple[int, int], list[float]]
    verifies: dict[tuple[int, int], list[float]]

    name: ClassVar[str] = "scheduled_rounds"

    def build(self, target: Any, request: Any) -> "ScheduledRoundsDrafter":
        """The drafter of one call."""
        return ScheduledRoundsDrafter(self, [part.build(target, request) for part in self.parts])


class ScheduledRoundsDrafter(Drafter):
    """Ends the call with `ScheduleEnded` when all its rounds are timed."""

    def __init__(self, strategy: ScheduledRounds, drafters: Sequence[Drafter]):
        self._strategy = strategy
        self._drafters = drafters
        self._passed = 0
        self._drafted_at = 0.0

    def propose(self, view: DecodeView, plan: Plan) -> DraftTree:
        """The next scheduled draft."""
        now = time.perf_counter()
        schedule = self._strategy.schedule
        if self._passed > UNCOUNTED:
            self._strategy.verifies.setdefault(schedule[self._passed - 1], []).append(now - self._drafted_at)
        if self._passed == len(schedule) or plan.depth < schedule[self._passed][1]:
            raise ScheduleEnded
        part, length = schedule[self._passed]
        self._passed += 1
        if not length:
            self._drafted_at = now
            return DraftTree.from_chains(view.roots(), [[]] * view.rows, view.device)
        tree = self._drafters[part].propose(view, Plan.chain(length))
        tree.tokens.tolist()  # what was asked of the device is done
        self._drafted_at = time.perf_counter()
        if self._passed > UNCOUNTED:
            self._strategy.drafts.setdefault(schedule[self._passed - 1], []).append(self._drafted_at - now)
        return tree


@dataclass(frozen=True)
class RoundSeconds:
    """Medians of what took turns.

    Args:
        plain: a step of plain decoding.
        undrafted: a round without drafts.
        draft: the drafting of a round, by part and drafted tokens.
        verify: the rest of it, likewise.
    """

    plain: float
    undrafted: float
    draft: Mapping[tuple[LayerSkip, int], float]
    verify: Mapping[tuple[LayerSkip, int], float]


def round_seconds(
    model: SpeculativeGenerationMixin,
    prompt: Sequence[int],
    parts: Sequence[LayerSkip],
    lengths: Sequence[int],
    repeats: int,
) -> RoundSeconds:
    """Time rounds of every part and draft length in some calls, and plain steps in calls between them."""
    pairs = [(0, 0), *((part, length) for part in range(len(parts)) for length in lengths)]
    drafts: dict[tuple[int, int], list[float]] = {}
    verifies: dict[tuple[int, int], list[float]] = {}
    plain: list[float] = []
    for repeat in range(repeats):
        order = random.Random(repeat).sample(pairs, len(pairs))
        schedule = (*[pairs[-1]] * UNCOUNTED, *order)
        rounds = ScheduledRounds(tuple(parts), schedule, drafts, verifies)
        config = SpecDecConfig(rounds, max_draft_tokens=max(lengths), schedule="constant")
        limit = sum(length + 1 for _, length in schedule) + max(lengths) + 2
        clock = TokenClock()
        with endless(model):
            with suppress(ScheduleEnded):
                _generate(model, prompt, limit, assistant_strategy=config)
            _generate(model, prompt, PLAIN_STEPS, streamer=clock)
        plain += clock.step_seconds()
    if missing := [pair for pair in pairs if pair not in verifies]:
        raise SpecDecError(
            f"The model's texts ended before a round of {missing[0][1]} drafts was timed; its stopping criteria end "
            "them."
        )

    def medians(log: Mapping[tuple[int, int], list[float]]) -> dict[tuple[LayerSkip, int], float]:
        return {(parts[part], length): statistics.median(own) for (part, length), own in log.items() if length}

    undrafted = statistics.median(verifies[0, 0])
    return RoundSeconds(statistics.median(plain), undrafted, medians(drafts), medians(verifies))


def decode_seconds(
    model: SpeculativeGenerationMixin, prompts: Sequence[Sequence[int]], config: SpecDecConfig, new_tokens: int
) -> tuple[float, float]:
    """Seconds per token after the first, of plain decoding and under a config, over calls that take turns."""
    totals = {plain: [0.0, 0] for plain in (True, False)}
    for counted, prompt in enumerate([prompts[0], *prompts]):
        for plain in (True, False):
            clock = TokenClock()
            _generate(model, prompt, new_tokens, streamer=clock, **({} if plain else {"assistant_strategy": config}))
            if counted:
                totals[plain][0] += clock.times[-1] - clock.times[1]
                totals[plain][1] += len(clock.times) - 2
    return totals[True][0] / max(totals[True][1], 1), totals[False][0] / max(totals[False][1], 1)


def _generate(model: SpeculativeGenerationMixin, prompt: Sequence[int], new_tokens: int, **arguments: Any) -> None:
    """A greedy call of one prompt."""
    ids = torch.tensor([list(prompt)], device=model.device)
    model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        **sampling_options(0.0),
        **arguments,
    )
