"""What steps cost on this machine, from calls of `generate` alone.

Plain steps are the gaps between the tokens that a streamer gets. For the rest, a strategy that proposes random tokens
in scheduled numbers reads the clock around every round, while the real drafter, if there is one, drafts beside it.
"""

import copy
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from scipy.optimize import nnls
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from hf_specdec import (
    DecodeView,
    Drafter,
    DraftStrategy,
    DraftTree,
    Plan,
    SpecDecConfig,
    SpecDecError,
    SpeculativeGenerationMixin,
)

from .measure import ForwardClock, sampling_options, synchronise
from .planning import StepCosts

WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 17, 21, 25, 33, 49, 65)
PLAIN_STEPS = 24
UNCOUNTED = 2
"""Steps after a prompt that are not counted: they set up caches."""


@dataclass(frozen=True)
class CostCurve:
    """Costs at some batch sizes and contexts, linear between them; beyond the contexts those of the nearest one, since
    a line through two noisy points soon falls below 0 there.

    Args:
        points: by `(batch size, context)`.
    """

    points: Mapping[tuple[int, float], StepCosts]

    def at(self, batch_size: int, context: float) -> StepCosts:
        """Costs of a batch of this size with this many tokens per row."""
        sizes = sorted({size for size, _ in self.points})
        if not sizes[0] <= batch_size <= sizes[-1]:
            raise SpecDecError(
                f"Costs were measured for batches of {sizes}, not for {batch_size}; measure it as well."
            )
        low, high, share = bracket(sizes, batch_size)
        return self._at_context(low, context).towards(self._at_context(high, context), share)

    def _at_context(self, size: float, context: float) -> StepCosts:
        own = {length: costs for (rows, length), costs in self.points.items() if rows == size}
        low, high, share = bracket(sorted(own), min(max(context, min(own)), max(own)))
        return own[low].towards(own[high], share)


def bracket(values: Sequence[float], value: float) -> tuple[float, float, float]:
    """The two neighbours of a value within ascending ones, and its share between them."""
    if len(values) == 1:
        return values[0], values[0], 0.0
    index = max(int(np.searchsorted(values, value)), 1)
    low, high = values[index - 1], values[index]
    return low, high, (value - low) / (high - low)


class ScheduleEnded(Exception):
    """All scheduled rounds have been timed."""


@dataclass
class RoundLog:
    """Times of calls in seconds."""

    first_round_at: float | None = None
    """When the first round of the latest call began."""
    start_seconds: list[float] = field(default_factory=list)
    """Per call: between the prompt's forward and the first round."""
    verify_seconds: dict[int, list[float]] = field(default_factory=dict)
    """By width: the round without its drafting."""
    draft_seconds: dict[int, list[float]] = field(default_factory=dict)
    """By tokens asked for: the drafter's `propose`, `learn` and `observe`."""


@dataclass(frozen=True, eq=False)
class ScheduledDrafts(DraftStrategy):
    """Random tokens in scheduled numbers, timed.

    Args:
        schedule: drafted tokens, round by round.
        timed: the strategy whose drafting is timed; its drafts are dropped.
        log: where times go.
    """

    schedule: tuple[int, ...]
    timed: DraftStrategy | None
    log: RoundLog

    name: ClassVar[str] = "scheduled_drafts"

    def build(self, target: Any, request: Any) -> "ScheduledDrafter":
        """The drafter of one call."""
        return ScheduledDrafter(self, None if self.timed is None else self.timed.build(target, request))


class ScheduledDrafter(Drafter):
    """Ends the call with `ScheduleEnded` when all its rounds are timed."""

    def __init__(self, strategy: ScheduledDrafts, timed: Drafter | None):
        self._schedule = list(strategy.schedule)
        self._log = strategy.log
        self._timed = timed
        self.top_tokens = 0 if timed is None else timed.top_tokens
        self._passed = 0
        self._length = 0
        self._began = self._drafting = 0.0

    @contextmanager
    def _drafts(self, device: torch.device) -> Iterator[None]:
        """Add what runs inside to the round's drafting time."""
        started = time.perf_counter()
        yield
        synchronise(device)
        self._drafting += time.perf_counter() - started

    def start(self, view: DecodeView) -> None:
        """Let the drafter see the prompt."""
        if self._timed is not None:
            self._timed.start(view)
            synchronise(view.device)

    def propose(self, view: DecodeView, plan: Plan) -> DraftTree:
        """The next scheduled number of random tokens per row."""
        now = time.perf_counter()
        if not self._passed:
            self._log.first_round_at = now
        if self._passed > UNCOUNTED:
            self._log.verify_seconds.setdefault(self._length + 1, []).append(now - self._began - self._drafting)
            if self._length:
                self._log.draft_seconds.setdefault(self._length, []).append(self._drafting)
        if self._passed == len(self._schedule) or plan.depth < self._schedule[self._passed]:
            raise ScheduleEnded
        self._length = self._schedule[self._passed]
        self._passed += 1
        self._began, self._drafting = now, 0.0
        if self._timed is not None and self._length:
            with self._drafts(view.device):
                self._timed.propose(view, Plan.chain(self._length))
        noise = random.Random(self._passed)
        chains = [noise.choices(view.tokens(row), k=self._length) for row in range(view.rows)]
        return DraftTree.from_chains(view.roots(), chains, view.device)

    def learn(self, view: DecodeView, tree: DraftTree, tokens: torch.Tensor, probs: torch.Tensor) -> None:
        """Time what the drafter makes of the target's likeliest tokens."""
        if self._timed is not None:
            with self._drafts(view.device):
                self._timed.learn(view, tree, tokens, probs)

    def observe(self, view: DecodeView, emitted: Sequence[Sequence[int]]) -> None:
        """Time what the drafter does with new tokens."""
        if self._timed is not None:
            with self._drafts(view.device):
                self._timed.observe(view, emitted)

    def keep(self, rows: Sequence[int]) -> None:
        """Only these rows stay."""
        if self._timed is not None:
            self._timed.keep(rows)

    def finish(self) -> None:
        """The call has ended."""
        if self._timed is not None:
            self._timed.finish()


class TokenClock(BaseStreamer):
    """When each token of a call came, the prompt first."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """Note the time."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is held back."""

    def step_seconds(self) -> list[float]:
        """Per token after the prompt's own."""
        return [after - before for before, after in zip(self.times[1:], self.times[2:])][UNCOUNTED:]


@contextmanager
def endless(model: PreTrainedModel) -> Iterator[None]:
    """Texts of this model do not end by themselves inside."""
    kept = model.generation_config
    model.generation_config = copy.deepcopy(kept)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = kept.pad_token_id or 0
    try:
        yield
    finally:
        model.generation_config = kept


@dataclass(frozen=True)
class Calibration:
    """How costs are measured, at every batch size and context.

    Args:
        model: the target, enabled.
        config: the strategy whose drafting is timed, and the verifier; None times verification alone.
        widths: of target forwards, in tokens.
        repeats: calls of each kind, which take turns.
        rounds: per width and call.
        temperature: 0 decodes greedily.
    """

    model: PreTrainedModel
    config: SpecDecConfig | None
    widths: tuple[int, ...]
    repeats: int
    rounds: int
    temperature: float

    def point(self, batch_size: int, context: int) -> StepCosts:
        """Medians at one batch size, around one context. The first call of each kind is not counted."""
        plain: list[float] = []
        log = RoundLog()
        self._plain(batch_size, context)
        self._scheduled(batch_size, context, -1, RoundLog())
        for repeat in range(self.repeats):
            plain += self._plain(batch_size, context)
            self._scheduled(batch_size, context, repeat, log)
        missing = sorted(set(self.widths) - log.verify_seconds.keys())
        if missing or not plain:
            raise SpecDecError(
                f"The model's texts ended before width {missing[0] if missing else 1} was timed at context {context}; "
                "its stopping criteria end them, so its costs cannot be measured with random prompts."
            )
        draft_seconds, overhead_seconds = line({each: _median(own) for each, own in log.draft_seconds.items()})
        return StepCosts(
            plain_seconds=_median(plain),
            verify_seconds={width: _median(own) for width, own in sorted(log.verify_seconds.items())},
            draft_seconds=draft_seconds,
            overhead_seconds=overhead_seconds,
            start_seconds=_median(log.start_seconds),
        )

    def _plain(self, batch_size: int, context: int) -> list[float]:
        clock = TokenClock()
        self._generate(batch_size, context, PLAIN_STEPS, PLAIN_STEPS + 1, streamer=clock)
        return clock.step_seconds()

    def _scheduled(self, batch_size: int, context: int, repeat: int, log: RoundLog) -> None:
        """One call whose rounds go through all widths, in an order of its own; it ends after its last round."""
        lengths = [width - 1 for width in self.widths]
        order = random.Random(repeat)
        schedule = [max(lengths)] * UNCOUNTED
        for _ in range(self.rounds):
            schedule += order.sample(lengths, len(lengths))
        strategy = ScheduledDrafts(tuple(schedule), None if self.config is None else self.config.resolved, log)
        request = SpecDecConfig(
            strategy=strategy,
            verifier="exact" if self.config is None else self.config.verifier,
            verifier_options={} if self.config is None else self.config.verifier_options,
            max_draft_tokens=max(1, *lengths),
            schedule="constant",
        )
        limit = 2 * (len(schedule) + max(lengths)) + 2  # a random token may happen to be right
        with ForwardClock(self.model, counting=False) as clock, suppress(ScheduleEnded):
            self._generate(batch_size, context, len(schedule), limit, assistant_strategy=request)
        if log.first_round_at is not None and clock.ended:
            log.start_seconds.append(log.first_round_at - clock.ended[0])

    def _generate(self, batch_size: int, context: int, steps: int, limit: int, **arguments: Any) -> None:
        """A call with random prompts, of at most `limit` new tokens; the first `steps` lie around the context."""
        config = self.model.config.get_text_config(decoder=True)
        length = max(context - steps // 2, 1)
        longest = getattr(config, "max_position_embeddings", None)
        if longest is not None and length + limit > longest:
            raise SpecDecError(
                f"Costs at context {context} take texts of {length + limit} tokens, and the model has positions for "
                f"{longest}; give a smaller context, or fewer widths."
            )
        generator = torch.Generator().manual_seed(context)
        ids = torch.randint(config.vocab_size, (batch_size, length), generator=generator).to(self.model.device)
        sampling = sampling_options(self.temperature)
        with endless(self.model):
            self.model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, **sampling, **arguments
            )


def measure_costs(
    model: PreTrainedModel,
    strategy: Any = None,
    widths: Sequence[int] = WIDTHS[:12],
    batch_sizes: Sequence[int] = (1,),
    contexts: Sequence[int] = (128, 512),
    repeats: int = 5,
    rounds: int = 3,
    temperature: float = 0.0,
) -> CostCurve:
    """Time plain steps, and rounds by the width of their block, with what drafting adds; all in seconds.

    Every time is a median of `repeats * rounds` or more, over calls that take turns, after calls that are not counted.
    A call's steps lie around their context. Drafting is fitted as `overhead + k * draft` over the lengths k.

    Args:
        model: the target, enabled.
        strategy: what `assistant_strategy` takes; None leaves drafting out.
        widths: of target forwards in tokens, the root included; 1 is always timed.
        batch_sizes: rows per call.
        contexts: tokens per row.
        repeats: calls of each kind, at each batch size and context.
        rounds: per width and call.
        temperature: 0 decodes greedily.

    Raises:
        SpecDecError: the model is not enabled, a number is not positive, or a context is too long for the model.
    """
    if not isinstance(model, SpeculativeGenerationMixin):
        raise SpecDecError(f"{type(model).__name__} is not enabled; call hf_specdec.enable(model) first.")
    for name, values in {
        "widths": widths, "batch_sizes": batch_sizes, "contexts": contexts, "repeats": [repeats], "rounds": [rounds],
    }.items():  # fmt: skip
        if not values or any(isinstance(each, bool) or not isinstance(each, int) or each < 1 for each in values):
            raise SpecDecError(f"{name}={values!r} must hold whole numbers of at least 1.")
    config = None if strategy is None else SpecDecConfig.of(strategy)
    calibration = Calibration(model, config, tuple(sorted({1, *widths})), repeats, rounds, temperature)
    return CostCurve({(rows, length): calibration.point(rows, length) for rows in batch_sizes for length in contexts})


def line(seconds: Mapping[int, float]) -> tuple[float, float]:
    """Seconds per token and seconds beside them, neither negative, from times by number of tokens: least squares."""
    if not seconds:
        return 0.0, 0.0
    (slope, start), _ = nnls(np.array([[length, 1.0] for length in seconds]), np.array(list(seconds.values())))
    return float(slope), float(start)


def _median(values: Sequence[float]) -> float:
    return float(np.median(values))
