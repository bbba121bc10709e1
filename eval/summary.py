"""Rows of a run to its tables: throughput, speed-up over plain decoding with its interval, and what the drafts did.

Both sides of a speed-up come from the same rows, and sums run over rows sorted by unit and repeat, so that the order
of a rows file changes nothing. A unit (one `generate` call's samples) is what is drawn anew in the bootstrap.
"""

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from hf_specdec import SpecDecError

from .config import PLAIN

RESAMPLES = 2000
SEED = 0

Row = Mapping[str, Any]
Floats = NDArray[np.float64]

FEWEST_UNITS = 4
"""With fewer, Student's quantile is so large that an interval would say nothing (64 standard errors for two)."""


def summarise(
    rows: Sequence[Row], methods: Sequence[Mapping[str, Any]], confidence: float = 0.99
) -> list[dict[str, Any]]:
    """Make `results["tables"]`: for each task one table of all its units, and one for each part if it has several.

    Tasks and parts come in the order in which the run met them. A unit whose samples are of different parts has one
    time for all of them, so it counts in the task's table only.

    Args:
        rows: lines of `rows.jsonl`, in any order.
        methods: entries of `results["methods"]`.
        confidence: of the intervals, between 0 and 1.

    Raises:
        SpecDecError: a confidence that is no probability, or rows of other methods than `methods`.
    """
    if not 0 < confidence < 1:
        raise SpecDecError(f"confidence={confidence} is no probability; give one between 0 and 1, as in 0.99.")
    _check_methods(rows, [method["label"] for method in methods])
    rows = sorted(rows, key=_position)
    tables = []
    for task in dict.fromkeys(row["task"] for row in rows):
        of_task = [row for row in rows if row["task"] == task]
        parts = list(dict.fromkeys(sample["part"] for row in of_task for sample in row["samples"]))
        groups = {"all": of_task}
        if len(parts) > 1:
            groups |= {part: [row for row in of_task if _part(row) == part] for part in parts}
        tables += [
            {"task": task, "part": part, "cells": compare(group, methods, confidence)}
            for part, group in groups.items()
            if group
        ]
    return tables


def compare(
    rows: Sequence[Row], methods: Sequence[Mapping[str, Any]], confidence: float = 0.99
) -> dict[str, dict[str, Any]]:
    """Make the cells of one table: by label, what a method did in these rows, beside plain decoding.

    Args:
        rows, methods, confidence: as in `summarise`; the rows are taken together, whatever task they are of.
    """
    return {method["label"]: _cell(rows, method, confidence) for method in methods}


def failures(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Make `results["failures"]`, by unit; an error that comes back in each repeat of a unit is named once."""
    found = {}
    for row in sorted(rows, key=_position):
        for label, call in sorted(row["methods"].items()):
            if call["error"] is not None:
                found[row["task"], row["unit"], label, call["error"]] = {
                    "unit": row["unit"],
                    "task": row["task"],
                    "samples": [sample["id"] for sample in row["samples"]],
                    "method": label,
                    "error": call["error"],
                }
    return list(found.values())


def speedup_interval(
    tokens: Floats, seconds: Floats, plain_tokens: Floats, plain_seconds: Floats, confidence: float = 0.99
) -> tuple[float, float] | None:
    """Confidence interval of a speed-up S = (sum tokens / sum seconds) / (sum plain_tokens / sum plain_seconds).

    exp(log S -+ t se sqrt(n / (n - 1))), where se is the paired bootstrap's standard error of log S over the n units
    and t the quantile of Student's law with n - 1 degrees of freedom; with few units percentile and BCa intervals are
    too narrow (Hesterberg, "What Teachers Should Know About the Bootstrap", arXiv:1411.5279). Units count as
    independent draws of prompts: the interval is about other prompts of the same kind, not only about the clock.

    Args:
        tokens, seconds, plain_tokens, plain_seconds: of shape `(units,)`, all repeats of a unit added up.
        confidence: coverage that is asked for.

    Returns:
        Lower and upper end, or None for fewer than `FEWEST_UNITS`, or if some resample has no token or no time.
    """
    columns = (tokens, seconds, plain_tokens, plain_seconds)
    units = len(tokens)
    if units < FEWEST_UNITS or not all(column.sum() > 0 for column in columns):
        return None
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)  # of a resample without tokens: None is returned
        drawn = stats.bootstrap(
            columns,
            _log_speedup,
            paired=True,
            vectorized=True,
            n_resamples=RESAMPLES,
            batch=500,
            method="percentile",
            random_state=SEED,
        )
        quantile = stats.t.ppf((1 + confidence) / 2, units - 1)
        margin = quantile * drawn.standard_error * math.sqrt(units / (units - 1))
        low, high = np.exp(_log_speedup(*columns) + np.array([-margin, margin]))
    return (float(low), float(high)) if np.isfinite([low, high]).all() else None


def _log_speedup(tokens: Floats, seconds: Floats, plain_tokens: Floats, plain_seconds: Floats, axis: int = -1) -> Any:
    return (
        np.log(tokens.sum(axis))
        - np.log(seconds.sum(axis))
        - np.log(plain_tokens.sum(axis))
        + np.log(plain_seconds.sum(axis))
    )


@dataclass(frozen=True)
class _Calls:
    """Sums of one method over the turns of each row; all of shape `(rows,)`.

    `decoded` counts the tokens behind the first of each sequence, which is the prefill's.
    """

    tokens: Floats
    seconds: Floats
    decoded: Floats
    decode_seconds: Floats

    @classmethod
    def of(cls, rows: Sequence[Row], label: str) -> "_Calls":
        """Read what the method did from rows that it finished."""
        sums = []
        for row in rows:
            turns = row["methods"][label]["turns"]
            lengths = [len(ids) for turn in turns for ids in turn["token_ids"]]
            seconds = sum(turn["seconds"] for turn in turns)
            decode_seconds = sum(turn["seconds"] - turn["prefill_seconds"] for turn in turns)
            sums.append((sum(lengths), seconds, sum(length - 1 for length in lengths if length), decode_seconds))
        return cls(*np.array(sums, dtype=np.float64).reshape(len(rows), 4).T)

    def added_up(self, keys: Sequence[int]) -> "_Calls":
        """Add up the rows of equal key, in the order of the keys."""
        _, group = np.unique(np.array(keys, dtype=np.int64), return_inverse=True)
        columns = (self.tokens, self.seconds, self.decoded, self.decode_seconds)
        return _Calls(*(np.bincount(group, weights=column).astype(np.float64) for column in columns))


def _cell(rows: Sequence[Row], method: Mapping[str, Any], confidence: float) -> dict[str, Any]:
    """One method over the rows that it and plain decoding both finished; all its own in a run without plain."""
    label = method["label"]
    rows = [row for row in rows if _finished(row, label) and _finished(row, PLAIN)]
    turns = [turn for row in rows for turn in row["methods"][label]["turns"]]
    calls = _Calls.of(rows, label)
    by_repeat = calls.added_up([row["repeat"] for row in rows])
    tokens, seconds, decode_seconds = calls.tokens.sum(), calls.seconds.sum(), calls.decode_seconds.sum()
    memory = [row["methods"][label]["peak_memory_bytes"] for row in rows]
    ours = method["kind"] == "ours"
    return {
        "prompts": len({(row["unit"], sample["id"]) for row in rows for sample in row["samples"]}),
        "tokens": int(tokens),
        "seconds": float(seconds),
        "prefill_seconds": float(seconds - decode_seconds),
        "decode_seconds": float(decode_seconds),
        "tokens_per_second": _ratio(tokens, seconds),
        "tokens_per_second_by_repeat": [_ratio(*pair) for pair in zip(by_repeat.tokens, by_repeat.seconds)],
        **_compared(rows, label, calls, confidence),
        "peak_memory_bytes": max((size for size in memory if size is not None), default=None),
        "tokens_per_forward": _ratio(tokens, sum(turn["target_forwards"] for turn in turns)),
        "acceptance": _acceptance(turns) if ours and turns else None,
        "time_share": _time_share(turns, seconds, decode_seconds) if ours and seconds > 0 else None,
    }


def _compared(rows: Sequence[Row], label: str, calls: _Calls, confidence: float) -> dict[str, Any]:
    """What sets a method against plain decoding; plain itself is 1 by definition, without an interval."""
    speedup = decode_speedup = interval = decode_interval = None
    if rows and PLAIN in rows[0]["methods"]:
        plain = _Calls.of(rows, PLAIN)
        speedup = _speedup(calls.tokens, calls.seconds, plain.tokens, plain.seconds)
        decode_speedup = _speedup(calls.decoded, calls.decode_seconds, plain.decoded, plain.decode_seconds)
        if label != PLAIN:
            units = [row["unit"] for row in rows]
            ours, theirs = calls.added_up(units), plain.added_up(units)
            interval = speedup_interval(ours.tokens, ours.seconds, theirs.tokens, theirs.seconds, confidence)
            decode_interval = speedup_interval(
                ours.decoded, ours.decode_seconds, theirs.decoded, theirs.decode_seconds, confidence
            )
    return {
        "speedup": speedup,
        "speedup_interval": list(interval) if interval else None,
        "within_noise": interval is None or interval[0] <= 1 <= interval[1],
        "decode_speedup": decode_speedup,
        "decode_speedup_interval": list(decode_interval) if decode_interval else None,
    }


def _acceptance(turns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts added up over calls, and the rates of the sums; definitions as in `SpeculationStats`."""
    calls = [turn["speculation"] for turn in turns]
    steps, drafted, accepted = (
        sum(call[name] for call in calls)
        for name in ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
    )
    histogram, drafted_at, accepted_at = (
        [sum(counts) for counts in zip_longest(*(call[name] for call in calls), fillvalue=0)]
        for name in ("acceptance_histogram", "drafted_at_depth", "accepted_at_depth")
    )
    return {
        "mean_acceptance_length": 1 + (_ratio(accepted, steps) or 0.0),
        "draft_acceptance_rate": _ratio(accepted, drafted) or 0.0,
        "acceptance_histogram": histogram,
        "acceptance_by_depth": [_ratio(*pair) or 0.0 for pair in zip(accepted_at, drafted_at)],
        "num_spec_steps": steps,
        "num_draft_tokens": drafted,
        "num_accepted_draft_tokens": accepted,
    }


def _time_share(turns: Sequence[Mapping[str, Any]], seconds: float, decode_seconds: float) -> dict[str, float]:
    """Shares of the calls' wall clock that add up to 1; overhead is what the prefill and later forwards leave."""
    draft = sum(turn["speculation"]["draft_seconds"] for turn in turns)
    verify = sum(turn["speculation"]["verify_seconds"] for turn in turns)
    parts = {
        "prefill": seconds - decode_seconds,
        "draft": draft,
        "verify": verify,
        "overhead": decode_seconds - draft - verify,
    }
    return {name: float(part / seconds) for name, part in parts.items()}


def _speedup(tokens: Floats, seconds: Floats, plain_tokens: Floats, plain_seconds: Floats) -> float | None:
    return _ratio(tokens.sum() * plain_seconds.sum(), seconds.sum() * plain_tokens.sum())


def _ratio(numerator: float, denominator: float) -> float | None:
    return float(numerator / denominator) if denominator else None


def _finished(row: Row, label: str) -> bool:
    """Whether the method came to its end in this row; one that the run does not have stands in no other's way."""
    return label not in row["methods"] or row["methods"][label]["error"] is None


def _part(row: Row) -> str | None:
    """The part of a row's samples, or None if they differ."""
    parts = {sample["part"] for sample in row["samples"]}
    return parts.pop() if len(parts) == 1 else None


def _position(row: Row) -> tuple[int, str, int, int]:
    return row["unit"], row["task"], row["repeat"], row["process"]


def _check_methods(rows: Iterable[Row], labels: Sequence[str]) -> None:
    for row in rows:
        if set(row["methods"]) != set(labels):
            raise SpecDecError(
                f"Unit {row['unit']}, repeat {row['repeat']} has the methods {', '.join(sorted(row['methods']))}, but "
                f"the summary was asked for {', '.join(sorted(labels))}; give all methods of the run."
            )
