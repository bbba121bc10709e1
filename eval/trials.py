"""Strategies beside plain `generate` on the same prompts, for a choice among them: what is fast, and why.

Measuring is that of `hf-specdec bench`: methods take turns on each prompt in random order, with the same inputs, seed,
token count and clock. Only what finished every prompt that plain `generate` finished is a candidate.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from hf_specdec import SpecDecConfig, SpecDecError

from .bench import Unit, measured, progress
from .config import PLAIN, RunConfig
from .measure import Meter
from .methods import Method
from .quality import identity
from .rows import Row
from .summary import compare

CONFIDENCE = 0.95
"""Of the intervals."""


@dataclass(frozen=True)
class Candidate:
    """What a strategy did on some prompts.

    Args:
        method: how it was called.
        speedup: of whole calls over plain `generate` on the same prompts, both sides in tokens per second.
        interval: of the speed-up; None where prompts are too few.
        tokens_per_round: per row, the target's own token included.
        round_seconds: per round, all rows together.
        accepted: share of the draft tokens.
        identical, compared: texts that are plain `generate`'s, of how many.
    """

    method: Method
    speedup: float
    interval: tuple[float, float] | None
    tokens_per_round: float
    round_seconds: float
    accepted: float
    identical: int
    compared: int


@dataclass(frozen=True)
class Comparison:
    """Candidates that finished all prompts which plain `generate` finished, and what the others stumbled over.

    Args:
        candidates: in the order given.
        errors: what they did, by label; also of plain `generate`.
        step_seconds: of plain decoding.
        rows: what was measured, without the prompts that plain `generate` failed on.
    """

    candidates: tuple[Candidate, ...]
    errors: Mapping[str, str]
    step_seconds: float
    rows: tuple[Row, ...]

    @property
    def notes(self) -> list[str]:
        """A sentence about each error."""
        left = {PLAIN: "they are"}
        return [f"{label} {error}, so {left.get(label, 'it is')} left out." for label, error in self.errors.items()]


@dataclass(frozen=True)
class Trials:
    """Measures as `hf-specdec bench` does: methods take turns on each prompt, after an uncounted call of each.

    Args:
        meter: calls the model.
        config: repeats, lengths and seed.
        console: where progress goes.
    """

    meter: Meter
    config: RunConfig
    console: Console

    def compare(self, plain: Method, methods: Sequence[Method], units: Sequence[Unit]) -> Comparison:
        """Measure some methods beside plain `generate`. Raises `SpecDecError` where that cannot run at all."""
        todo = [(repeat, unit) for repeat in range(self.config.repeats) for unit in units]
        first = self._warmed_up(plain, units)
        able: list[Method] = []
        errors: dict[str, str] = {}
        for method in methods:
            error = self.meter.run(method, first.samples, self.config.warm_up_tokens)["error"]
            if error is None:
                able.append(method)
            else:
                errors[method.label] = f"cannot run here ({' '.join(error.split())})"
        rows: list[Row] = []
        if able:
            named = ", ".join(each.label for each in able)
            prompts = sum(len(each.samples) for each in units)
            self.console.print(f"On {prompts} prompts, beside plain generate: {named}", soft_wrap=True)
            with progress(self.console, len(todo), True) as advance:
                for row in measured(self.meter, [plain, *able], todo, self.config, 0):
                    rows.append(row)
                    advance()
        return judge(rows, plain, able, errors)

    def _warmed_up(self, plain: Method, units: Sequence[Unit]) -> Unit:
        """The first unit that plain `generate` can do, after a short call: others may be too long for the model."""
        failures: list[str] = []
        for unit in units:
            error = self.meter.run(plain, unit.samples, self.config.warm_up_tokens)["error"]
            if error is None:
                return unit
            failures.append(error)
        raise SpecDecError(f"{plain.label} cannot run here, nothing was measured. {failures[0]}")


def judge(rows: Sequence[Row], plain: Method, methods: Sequence[Method], errors: Mapping[str, str]) -> Comparison:
    """What rows say about methods. One that failed where plain `generate` did not is an error and no candidate.

    Args:
        rows: with all these methods.
        errors: what is known already of others, by label.
    """
    errors, whole = dict(errors), list(rows)
    rows = [row for row in rows if row["methods"][PLAIN]["error"] is None]
    for method, own in ((plain, whole), *((each, rows) for each in methods)):
        failed = [error for row in own if (error := row["methods"][method.label]["error"]) is not None]
        if failed:
            told = " ".join(failed[0].split())
            errors[method.label] = f"failed on {len(failed)} of {len(own)} calls ({told})"
    if not rows:
        return Comparison((), errors, 0.0, ())
    able = [each for each in methods if each.label not in errors]
    cells = compare(rows, [each.to_dict() for each in (plain, *able)], CONFIDENCE)
    same = identity(rows, PLAIN)
    candidates = [_candidate(each, cells[each.label], same[each.label], rows) for each in able]
    return Comparison(tuple(candidates), errors, _step_seconds(rows, PLAIN, cells[PLAIN]), tuple(rows))


def _candidate(method: Method, cell: Mapping[str, Any], same: Mapping[str, Any], rows: Sequence[Row]) -> Candidate:
    interval = cell["speedup_interval"]
    return Candidate(
        method=method,
        speedup=cell["speedup"],
        interval=None if interval is None else (interval[0], interval[1]),
        tokens_per_round=cell["acceptance"]["mean_acceptance_length"],
        round_seconds=_step_seconds(rows, method.label, cell),
        accepted=cell["acceptance"]["draft_acceptance_rate"],
        identical=same["identical"],
        compared=same["compared"],
    )


def _step_seconds(rows: Sequence[Row], label: str, cell: Mapping[str, Any]) -> float:
    """Seconds per forward pass of the target after the prompt's, with all that a round does beside it."""
    steps = sum(turn["target_forwards"] - 1 for row in rows for turn in row["methods"][label]["turns"])
    return float(cell["decode_seconds"] / steps) if steps else 0.0


def config_of(method: Method) -> SpecDecConfig:
    """What a method gives as `assistant_strategy`."""
    config: SpecDecConfig = method.arguments["assistant_strategy"]
    return config
