"""Which draft length pays: closed forms, and forecasts from a measured run. Pure: no model and no clock.

A round that drafts k tokens takes `k * t_draft + t_verify(k + 1) + t_overhead` and brings `E(k)` tokens, against
`t_plain` for one token of plain decoding. Length 0 is plain decoding itself.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np
from scipy.optimize import brentq

from hf_specdec import SpecDecError

from .config import PLAIN

Seconds = Callable[[float], float] | Mapping[int, float]


def expected_tokens(acceptance: float | Sequence[float], length: int) -> float:
    """Tokens that a round brings: `E(k) = (1 - a**(k + 1)) / (1 - a)`, the target's own token included.

    Leviathan et al. 2023 (arXiv:2211.17192), equation 1. It assumes that each drafted token is accepted with the same
    probability a, whatever its position and whatever was accepted before it, and that every round drafts k tokens.

    Per position, with `c_i` the probability that token i is accepted given that those before it were:
    `E(k) = 1 + c_1 + c_1 c_2 + ... + c_1 ... c_k`. That holds for runs of draft length k alone: where acceptance comes
    in stretches, as when text is copied, a shorter length meets each stretch in more rounds (see `replay`).

    Args:
        acceptance: a, or the list of `c_i`, first position first.
        length: k.

    Raises:
        SpecDecError: for a value outside [0, 1], or fewer positions than k.
    """
    check_length(length)
    if not isinstance(acceptance, Sequence):
        check_probability(acceptance)
        return length + 1.0 if acceptance == 1 else (1 - acceptance ** (length + 1)) / (1 - acceptance)
    for each in acceptance:
        check_probability(each)
    if length > len(acceptance):
        raise SpecDecError(
            f"Draft length {length} was asked for and acceptance is known for {len(acceptance)} positions; ask for a "
            "shorter length, or give one number for all positions."
        )
    return 1.0 + sum(accumulate(acceptance[:length], mul))


def compute_speedup(
    acceptance: float | Sequence[float],
    length: int,
    draft_seconds: float,
    verify_seconds: Seconds,
    plain_seconds: float,
    overhead_seconds: float = 0.0,
) -> float:
    """Decoding speed over that of plain decoding: `E(k) * t_plain / (k * t_draft + t_verify(k + 1) + t_overhead)`.

    With `t_verify = t_plain`, no overhead and `c = t_draft / t_plain` it is Theorem 3.8 of Leviathan et al. 2023,
    `(1 - a**(k + 1)) / ((1 - a) (k c + 1))`. Beside what `expected_tokens` assumes, costs must not depend on the
    context: give those of the contexts that matter. The prompt's own forward is left out.

    Args:
        acceptance: as in `expected_tokens`.
        length: k; 0 is plain decoding, whose speed-up is 1.
        draft_seconds: per drafted token.
        verify_seconds: of a target forward, by its width in tokens; a mapping is interpolated between its widths.
        plain_seconds: per token of plain decoding.
        overhead_seconds: per round, beside drafting and verifying.
    """
    tokens = expected_tokens(acceptance, length)
    if length == 0:
        return 1.0
    seconds = length * draft_seconds + seconds_at(verify_seconds, length + 1) + overhead_seconds
    return tokens * plain_seconds / seconds


def find_optimal_length(
    acceptance: float | Sequence[float],
    max_length: int,
    draft_seconds: float,
    verify_seconds: Seconds,
    plain_seconds: float,
    overhead_seconds: float = 0.0,
) -> tuple[int, float]:
    """The fastest length in 0 ... `max_length` and its speed-up; the shortest of equals.

    All lengths are tried: verify time has steps, so the speed-up may have several maxima.

    Args:
        acceptance, draft_seconds, verify_seconds, plain_seconds, overhead_seconds: as in `compute_speedup`.
    """
    check_length(max_length)
    costs = (draft_seconds, verify_seconds, plain_seconds, overhead_seconds)
    speedups = [compute_speedup(acceptance, length, *costs) for length in range(max_length + 1)]
    best = max(range(max_length + 1), key=lambda length: speedups[length])
    return best, speedups[best]


def seconds_at(seconds: Seconds, width: float) -> float:
    """The time of a block of this width, interpolated linearly where `seconds` is a mapping."""
    if callable(seconds):
        return seconds(width)
    widths = sorted(seconds)
    if not widths or not widths[0] <= width <= widths[-1]:
        raise SpecDecError(f"Width {width:g} was asked for, and times are known for {widths}; measure it as well.")
    return float(np.interp(width, widths, [seconds[each] for each in widths]))


def check_length(length: int) -> None:
    """Raise `SpecDecError` unless it is a draft length."""
    if isinstance(length, bool) or not isinstance(length, int) or length < 0:
        raise SpecDecError(f"Draft length {length!r} is no number of tokens; give a whole number of at least 0.")


def check_probability(value: float) -> None:
    """Raise `SpecDecError` unless it is a probability."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise SpecDecError(f"Acceptance {value!r} is no probability; give a number from 0 to 1.")


@dataclass(frozen=True)
class StepCosts:
    """Seconds of what a call consists of, at one batch size and one context.

    Args:
        plain_seconds: one step of plain decoding.
        verify_seconds: a round without its drafting, by the width of its block.
        draft_seconds: per drafted token.
        overhead_seconds: asking the drafter, however much it proposes.
        start_seconds: between the prompt's forward and the first round.
    """

    plain_seconds: float
    verify_seconds: Mapping[int, float]
    draft_seconds: float = 0.0
    overhead_seconds: float = 0.0
    start_seconds: float = 0.0

    def towards(self, other: "StepCosts", share: float) -> "StepCosts":
        """On the line from these costs (`share` 0) to the other ones (1)."""
        widths = self.verify_seconds.keys() & other.verify_seconds.keys()
        mixed = {
            field.name: (1 - share) * getattr(self, field.name) + share * getattr(other, field.name)
            for field in fields(self)
            if field.name != "verify_seconds"
        }
        verify = {
            each: (1 - share) * self.verify_seconds[each] + share * other.verify_seconds[each] for each in widths
        }
        return StepCosts(verify_seconds=verify, **mixed)


@dataclass(frozen=True)
class MeasuredCall:
    """What one measured call of `generate` tells about the same call under another draft length.

    Args:
        prompt_tokens: of its longest row.
        agreed: per row, per token after the first: was it what the drafter proposed, or would have?
        undrafted_rounds: rounds in which nothing was proposed, summed over rows.
        mean_draft: proposed tokens per round that proposed any.
        longest: the draft length of the run.
        plain_prefill_seconds: of plain decoding, from the call to the end of the first forward.
        plain_step_seconds: of plain decoding, per step after that.
        prefill_seconds: as `plain_prefill_seconds`, under the strategy.
    """

    prompt_tokens: int
    agreed: tuple[tuple[bool, ...], ...]
    undrafted_rounds: int
    mean_draft: float
    longest: int
    plain_prefill_seconds: float
    plain_step_seconds: float
    prefill_seconds: float

    @property
    def steps(self) -> int:
        """Steps of plain decoding after the prompt's own."""
        return max(map(len, self.agreed), default=0)

    @property
    def context(self) -> float:
        """Tokens in the middle of the call."""
        return self.prompt_tokens + self.steps / 2


def accepted_in_rounds(token_sources: Iterable[int]) -> list[int]:
    """Accepted draft tokens per round: a round is a run of accepted tokens closed by one of the target's own.

    Args:
        token_sources: 1 for an accepted draft token, 0 for the target's own; the prompt's forward is left out.
    """
    rounds, accepted, opened = [], 0, False
    for accepted_draft in token_sources:
        accepted, opened = accepted + accepted_draft, True
        if not accepted_draft:
            rounds.append(accepted)
            accepted, opened = 0, False
    return rounds + [accepted] if opened else rounds


def agreement(accepted: Sequence[int], longest: int, tokens: int) -> tuple[bool, ...]:
    """Per token, whether the drafter had it right, from the rounds of a run.

    The token that closes a round is where the drafter was wrong or silent, except after a fully accepted draft of
    `longest` tokens, where it was not asked: there it counts as right if the next round's first draft was accepted.

    Args:
        accepted: accepted tokens per round.
        longest: the draft length of the run.
        tokens: how many tokens the rounds emitted; the last round may lack its closing one.
    """
    agreed: list[bool] = []
    for count, following in zip(accepted, [*accepted[1:], 0]):
        agreed += [True] * count + [count == longest and following > 0]
    return tuple(agreed[:tokens])


def replay(agreed: Sequence[bool], length: int) -> list[int]:
    """Accepted tokens per round of the same text under another draft length.

    It assumes that a drafter proposes the same continuation wherever within an accepted stretch it is asked, and fewer
    tokens of it under a smaller limit: so it is for draft models, and nearly so for lookups.
    """
    rounds, position = [], 0
    while position < len(agreed):
        room = min(length, len(agreed) - position - 1)
        accepted = next((depth for depth in range(room) if not agreed[position + depth]), room)
        rounds.append(accepted)
        position += accepted + 1
    return rounds


def mean_draft(measured: float, longest: int, length: int) -> float:
    """Mean draft under the limit `length`, where under the limit `longest` it was `measured`.

    Drafts are taken to end after each token with one probability h, so that under a limit k their mean is
    `1 + (1 - h) + ... + (1 - h)**(k - 1)`.
    """
    if measured >= longest:
        return float(length)

    def mean(stay: float, limit: int) -> float:
        return sum(stay**depth for depth in range(limit))

    stay = brentq(lambda each: mean(each, longest) - measured, 0.0, 1.0) if measured > 1 else 0.0
    return mean(stay, length)


def measured_calls(rows: Iterable[Mapping[str, Any]], label: str, longest: int) -> list[MeasuredCall]:
    """The calls of one method in the rows of a run; those where it or plain `generate` failed are left out.

    Args:
        rows: lines of `rows.jsonl`.
        label: the method.
        longest: its draft length.

    Raises:
        SpecDecError: where no row has both methods, or the method does not speculate.
    """
    calls = []
    for row in rows:
        own, plain = row["methods"].get(label), row["methods"].get(PLAIN)
        if own is None or plain is None or own["error"] or plain["error"]:
            continue
        for turn, plain_turn in zip(own["turns"], plain["turns"]):
            if turn["speculation"] is None:
                raise SpecDecError(f"Method {label!r} does not speculate here; name one of hf_specdec's own.")
            calls.append(_measured_call(turn, plain_turn, longest))
    if not any(call.steps for call in calls):
        raise SpecDecError(f"No row holds a finished call of more than one token of both {label!r} and {PLAIN!r}.")
    return calls


def _measured_call(turn: Mapping[str, Any], plain: Mapping[str, Any], longest: int) -> MeasuredCall:
    speculation = turn["speculation"]
    drafted_rounds = next(iter(speculation["drafted_at_depth"]), 0)
    plain_steps = max(map(len, plain["token_ids"])) - 1
    decoded = [sources[1:] for sources in turn["token_sources"]]
    return MeasuredCall(
        prompt_tokens=max(turn["prompt_tokens"]),
        agreed=tuple(agreement(accepted_in_rounds(each), longest, len(each)) for each in decoded),
        undrafted_rounds=speculation["num_spec_steps"] - drafted_rounds,
        mean_draft=speculation["num_draft_tokens"] / drafted_rounds if drafted_rounds else float(longest),
        longest=longest,
        plain_prefill_seconds=plain["prefill_seconds"],
        plain_step_seconds=(plain["seconds"] - plain["prefill_seconds"]) / max(plain_steps, 1),
        prefill_seconds=turn["prefill_seconds"],
    )


@dataclass(frozen=True)
class Forecast:
    """What a draft length is expected to bring.

    Args:
        length: tokens drafted per round at most; 0 is plain decoding.
        tokens_per_round: per row, the target's own token included.
        decode_speedup: over plain decoding, prompts left out.
        speedup: of whole calls, prompts included; None where only an acceptance rate is known.
    """

    length: int
    tokens_per_round: float
    decode_speedup: float
    speedup: float | None = None


def forecast(calls: Sequence[MeasuredCall], length: int, costs: Callable[[int, float], StepCosts]) -> Forecast:
    """What `length` would have brought in these calls, which are replayed round by round.

    Each call is priced at its own context. A round in which nothing was proposed costs a block of one token; a batch
    takes as many rounds as its slowest row, and a round's block is as wide as its longest draft. Prompts keep the time
    that they took in the run, in units of its plain steps, so that a machine that has become faster or slower since
    does not matter.

    Args:
        calls: of a run with one draft length.
        length: the draft length asked about.
        costs: by batch size and context.
    """
    check_length(length)
    if length == 0:
        return Forecast(0, 1.0, 1.0, 1.0)
    plain_decode = own_decode = plain_prompt = own_prompt = 0.0
    tokens = rounds = 0
    for call in calls:
        whole = costs(len(call.agreed), call.context)
        scale = whole.plain_seconds / call.plain_step_seconds if call.plain_step_seconds > 0 else 1.0
        plain_decode += call.steps * whole.plain_seconds
        plain_prompt += scale * call.plain_prefill_seconds
        own_prompt += scale * call.prefill_seconds
        replayed = [replay(row, length) for row in call.agreed]
        tokens += sum(map(len, call.agreed))
        rounds += sum(map(len, replayed))
        own_decode += whole.start_seconds + _rounds_seconds(call, length, replayed, costs)
    speedup = (plain_prompt + plain_decode) / (own_prompt + own_decode)
    return Forecast(length, tokens / rounds, plain_decode / own_decode, speedup)


def _rounds_seconds(
    call: MeasuredCall, length: int, replayed: list[list[int]], costs: Callable[[int, float], StepCosts]
) -> float:
    """Time of the rounds of a call, row by row in `replayed`."""
    missed = sum(row.count(0) for row in replayed)
    silent = min(1.0, call.undrafted_rounds / missed) if missed else 0.0
    drafted = mean_draft(call.mean_draft, call.longest, length)
    by_rows = {rows: costs(rows, call.context) for rows in range(1, len(replayed) + 1)}
    seconds = 0.0
    for step in range(max(map(len, replayed), default=0)):
        accepted = [row[step] for row in replayed if step < len(row)]
        own = by_rows[len(accepted)]
        narrow = 0.0 if any(accepted) else silent ** len(accepted)
        wide = drafted * own.draft_seconds + seconds_at(own.verify_seconds, 1 + drafted)
        seconds += own.overhead_seconds + narrow * seconds_at(own.verify_seconds, 1) + (1 - narrow) * wide
    return seconds
