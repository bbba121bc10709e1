"""Tables from rows: hand-made rows whose sums are done by hand, and the coverage of the intervals in a simulation."""

import json
import random
from typing import Any

import numpy as np
import pytest

pytest.importorskip("scipy")

from hf_specdec import SpecDecError
from hf_specdec_eval.summary import failures, speedup_interval, summarise

METHODS = [
    {"label": "plain", "kind": "plain"},
    {"label": "stock", "kind": "stock"},
    {"label": "suffix", "kind": "ours"},
]
SPECULATION = {
    "num_spec_steps": 2,
    "num_draft_tokens": 4,
    "num_accepted_draft_tokens": 2,
    "acceptance_histogram": [1, 0, 1],
    "drafted_at_depth": [2, 2],
    "accepted_at_depth": [1, 1],
    "draft_seconds": 0.25,
    "verify_seconds": 1.0,
}


def turn(tokens: int = 5, seconds: float = 4.0, prefill: float = 1.0, forwards: int = 5, **speculation: Any) -> dict:
    """One turn of one sample."""
    return {
        "prompt_tokens": [3],
        "token_ids": [list(range(tokens))],
        "text": ["x"],
        "seconds": seconds,
        "prefill_seconds": prefill,
        "target_forwards": forwards,
        "speculation": speculation or None,
        "token_sources": None,
    }


def done(*turns: dict, memory: int | None = None) -> dict:
    """A method that finished."""
    return {"error": None, "turns": list(turns or [turn()]), "peak_memory_bytes": memory}


def failed(error: str = "RuntimeError: out of memory") -> dict:
    """A method that raised."""
    return {"error": error, "turns": [], "peak_memory_bytes": None}


def row(unit: int = 0, repeat: int = 0, parts: tuple[str, ...] = ("t",), task: str = "t", **calls: dict) -> dict:
    """One line of `rows.jsonl`; methods that are not given run like `turn()`."""
    ours = done(turn(seconds=2.0, prefill=0.5, forwards=3, **SPECULATION))
    return {
        "unit": unit,
        "repeat": repeat,
        "task": task,
        "samples": [{"id": f"{task}/{unit}.{index}", "part": part} for index, part in enumerate(parts)],
        "order": ["plain"],
        "process": 0,
        "methods": {"plain": done(), "stock": done(), "suffix": ours, **calls},
    }


def cell(rows: list[dict], label: str = "suffix", table: int = 0) -> dict:
    return summarise(rows, METHODS)[table]["cells"][label]


def test_totals_and_speedup_by_hand() -> None:
    rows = [
        row(0, plain=done(turn(10, 5.0, 1.0, 10)), suffix=done(turn(10, 2.0, 0.5, 4, **SPECULATION), memory=7)),
        row(1, plain=done(turn(20, 10.0, 1.0, 20)), suffix=done(turn(30, 8.0, 0.5, 11, **SPECULATION), memory=5)),
    ]
    found = cell(rows)
    assert (found["prompts"], found["tokens"], found["seconds"]) == (2, 40, 10.0)
    assert (found["prefill_seconds"], found["decode_seconds"]) == (1.0, 9.0)
    assert found["tokens_per_second"] == 4.0 and found["tokens_per_second_by_repeat"] == [4.0]
    assert found["speedup"] == pytest.approx((40 / 10) / (30 / 15))
    assert found["decode_speedup"] == pytest.approx((38 / 9) / (28 / 13))
    assert found["tokens_per_forward"] == pytest.approx(40 / 15)
    assert found["peak_memory_bytes"] == 7
    assert found["speedup_interval"] is None, "two prompts say nothing of others"
    found = cell([{**each, "unit": each["unit"] + 2 * copy} for copy in range(3) for each in rows])
    low, high = found["speedup_interval"]
    assert low < found["speedup"] < high
    low, high = found["decode_speedup_interval"]
    assert low < found["decode_speedup"] < high


def test_plain_is_one_by_definition() -> None:
    found = cell([row(0), row(1)], "plain")
    assert (found["speedup"], found["decode_speedup"]) == (1.0, 1.0)
    assert found["speedup_interval"] is None and found["within_noise"]
    assert found["acceptance"] is None and found["time_share"] is None and found["peak_memory_bytes"] is None


def test_acceptance_adds_up_counts_of_different_depth() -> None:
    deeper = {
        **SPECULATION,
        "num_spec_steps": 1,
        "num_draft_tokens": 3,
        "num_accepted_draft_tokens": 3,
        "acceptance_histogram": [0, 0, 0, 1],
        "drafted_at_depth": [1, 1, 1],
        "accepted_at_depth": [1, 1, 1],
    }
    rows = [row(0), row(1, suffix=done(turn(seconds=2.0, **deeper)))]
    assert cell(rows)["acceptance"] == {
        "mean_acceptance_length": 1 + 5 / 3,
        "draft_acceptance_rate": 5 / 7,
        "acceptance_histogram": [1, 0, 1, 1],
        "acceptance_by_depth": [2 / 3, 2 / 3, 1.0],
        "num_spec_steps": 3,
        "num_draft_tokens": 7,
        "num_accepted_draft_tokens": 5,
    }
    assert cell(rows, "stock")["acceptance"] is None


def test_a_strategy_that_never_drafts_has_rates() -> None:
    silent = {
        **SPECULATION,
        "num_spec_steps": 0,
        "num_draft_tokens": 0,
        "num_accepted_draft_tokens": 0,
        "acceptance_histogram": [],
        "drafted_at_depth": [],
        "accepted_at_depth": [],
    }
    found = cell([row(0, suffix=done(turn(**silent)))])["acceptance"]
    assert (found["mean_acceptance_length"], found["draft_acceptance_rate"]) == (1.0, 0.0)
    assert found["acceptance_by_depth"] == []


def test_time_shares_add_up_to_one() -> None:
    shares = cell([row(0), row(1)])["time_share"]
    assert shares == pytest.approx({"prefill": 0.25, "draft": 0.125, "verify": 0.5, "overhead": 0.125})
    assert sum(shares.values()) == pytest.approx(1)
    assert cell([row(0)], "stock")["time_share"] is None


def test_turns_of_a_unit_are_added_up() -> None:
    rows = [row(0, suffix=done(turn(4, 1.0, 0.5, 2, **SPECULATION), turn(6, 4.0, 0.5, 3, **SPECULATION)))]
    found = cell(rows)
    assert (found["tokens"], found["seconds"], found["prefill_seconds"], found["prompts"]) == (10, 5.0, 1.0, 1)
    assert found["tokens_per_forward"] == 2.0
    assert found["acceptance"]["num_spec_steps"] == 4


def test_repeats_are_pooled_and_listed() -> None:
    slow = done(turn(5, 10.0, 1.0, 3, **SPECULATION))
    rows = [row(unit, repeat) for unit in range(2) for repeat in range(2)] + [
        row(unit, 2, suffix=slow) for unit in range(2)
    ]
    found = cell(rows)
    assert found["prompts"] == 2 and found["tokens"] == 30
    assert found["tokens_per_second_by_repeat"] == [2.5, 2.5, 0.5]
    assert found["speedup"] == pytest.approx((30 / 28) / (30 / 24))


def test_repeats_of_a_unit_are_drawn_together() -> None:
    """Two units are two draws, however often each is repeated."""
    rows = [row(0), row(1, suffix=done(turn(seconds=3.0, **SPECULATION)))]
    again = rows + [{**one, "repeat": 1} for one in rows]
    assert cell(again)["speedup_interval"] == pytest.approx(cell(rows)["speedup_interval"])


def test_one_unit_has_no_interval() -> None:
    found = cell([row(0, 0), row(0, 1)])
    assert found["speedup"] == 2.0
    assert found["speedup_interval"] is None and found["decode_speedup_interval"] is None and found["within_noise"]


def test_within_noise_is_said_of_an_interval_around_one() -> None:
    slower = [row(unit, suffix=done(turn(seconds=8.0, **SPECULATION))) for unit in range(4)]
    faster = [row(unit) for unit in range(4)]
    mixed = [row(unit, suffix=done(turn(seconds=2.0 + unit, **SPECULATION))) for unit in range(4)]
    assert [cell(rows)["within_noise"] for rows in (slower, faster, mixed)] == [False, False, True]
    assert cell(faster)["speedup_interval"] == pytest.approx([2.0, 2.0])


def test_each_part_has_its_table_after_all() -> None:
    rows = [row(0, parts=("maths",)), row(1, parts=("chat",)), row(2, parts=("maths",)), row(3, task="other")]
    tables = summarise(rows, METHODS)
    assert [(table["task"], table["part"]) for table in tables] == [
        ("t", "all"),
        ("t", "maths"),
        ("t", "chat"),
        ("other", "all"),
    ]
    assert [table["cells"]["suffix"]["prompts"] for table in tables] == [3, 2, 1, 1]


def test_a_batch_of_several_parts_counts_for_the_task_only() -> None:
    rows = [row(0, parts=("maths", "chat")), row(1, parts=("maths", "maths"))]
    tables = summarise(rows, METHODS)
    assert [(table["part"], table["cells"]["plain"]["prompts"]) for table in tables] == [("all", 4), ("maths", 2)]


def test_failed_units_leave_the_comparison_on_both_sides() -> None:
    rows = [row(0), row(1, suffix=failed()), row(2, plain=failed())]
    found = summarise(rows, METHODS)[0]["cells"]
    assert {label: found[label]["prompts"] for label in found} == {"plain": 2, "stock": 2, "suffix": 1}
    assert found["suffix"]["tokens"] == 5 and found["suffix"]["speedup"] == 2.0


def test_a_method_that_never_finished_has_an_empty_cell() -> None:
    found = cell([row(0, suffix=failed()), row(1, suffix=failed())])
    assert (found["prompts"], found["tokens"], found["seconds"]) == (0, 0, 0.0)
    assert found["tokens_per_second_by_repeat"] == [] and found["within_noise"]
    nulls = "tokens_per_second speedup speedup_interval decode_speedup tokens_per_forward acceptance time_share"
    assert all(found[name] is None for name in nulls.split())


def test_failures_are_named_once() -> None:
    rows = [row(4, 1, suffix=failed()), row(4, 0, suffix=failed()), row(2, stock=failed("ValueError: no"))]
    assert failures(rows) == [
        {"unit": 2, "task": "t", "samples": ["t/2.0"], "method": "stock", "error": "ValueError: no"},
        {
            "unit": 4,
            "task": "t",
            "samples": ["t/4.0"],
            "method": "suffix",
            "error": "RuntimeError: out of memory",
        },
    ]
    assert failures([row(0)]) == []


def test_no_rows_make_no_tables() -> None:
    assert summarise([], METHODS) == [] and failures([]) == []


def test_a_run_without_plain_has_speeds_but_no_speedup() -> None:
    rows = [row(0), row(1)]
    for one in rows:
        del one["methods"]["plain"]
    found = summarise(rows, METHODS[1:])[0]["cells"]["suffix"]
    assert found["tokens_per_second"] == 2.5
    assert found["speedup"] is None and found["speedup_interval"] is None and found["within_noise"]


def test_answers_of_one_token_have_no_decoding_speedup() -> None:
    rows = [row(unit, plain=done(turn(1)), suffix=done(turn(1, **SPECULATION))) for unit in range(3)]
    found = cell(rows)
    assert found["speedup"] == 1.0
    assert found["decode_speedup"] is None and found["decode_speedup_interval"] is None
    assert cell([*rows[:1], row(7)])["decode_speedup_interval"] is None  # half of the resamples of two decode nothing


def test_rows_of_other_methods_are_refused() -> None:
    with pytest.raises(SpecDecError, match=r"Unit 0.*plain, stock, suffix.*asked for plain, stock;"):
        summarise([row(0)], METHODS[:2])


@pytest.mark.parametrize("confidence", [0, 1, 99.0])
def test_a_confidence_that_is_no_probability_is_refused(confidence: float) -> None:
    with pytest.raises(SpecDecError, match="between 0 and 1"):
        summarise([row(0)], METHODS, confidence)


def noisy_rows(seed: int) -> list[dict]:
    """Twelve units of three parts and two tasks, two repeats, with timing noise and a few failures."""
    draw = random.Random(seed)
    rows = []
    for unit in range(12):
        for repeat in range(2):
            calls = {
                label: done(turn(draw.randint(1, 40), draw.uniform(2, 9), draw.uniform(0.1, 1), **SPECULATION))
                for label in ("plain", "stock", "suffix")
            }
            if draw.random() < 0.1:
                calls["suffix"] = failed()
            task = "first" if unit % 4 else "second"
            rows.append(row(unit, repeat, parts=("abc"[unit % 3],), task=task, **calls))
    return rows


def test_the_order_of_rows_changes_nothing_and_all_is_json() -> None:
    rows = noisy_rows(0)
    expected = json.dumps([summarise(rows, METHODS), failures(rows)], allow_nan=False)
    for seed in range(3):
        random.Random(seed).shuffle(rows)
        assert json.dumps([summarise(rows, METHODS), failures(rows)], allow_nan=False) == expected


def test_a_higher_confidence_gives_a_wider_interval() -> None:
    widths = []
    for confidence in (0.8, 0.95, 0.99):
        table = next(each for each in summarise(noisy_rows(1), METHODS, confidence) if each["task"] == "first")
        low, high = table["cells"]["suffix"]["speedup_interval"]
        widths.append(high - low)
    assert widths == sorted(widths) and len(set(widths)) == 3


def simulated(generator: np.random.Generator, units: int, speedup: float) -> tuple[np.ndarray, ...]:
    """Tokens and seconds of a method and of plain decoding over prompts of different length and speed.

    Noise on each time is multiplicative and heavy-tailed, with a pause now and then, and the machine drifts. A
    speed-up other than 1 varies with the prompt, with 1 / E[1 / speed-up] = `speedup`.
    """
    tokens = np.clip(np.exp(generator.normal(4, 0.8, units)), 4, 128).round()
    plain_seconds = tokens / np.exp(generator.normal(0, 0.15, units))
    spread = 0.2 if speedup != 1 else 0.0
    seconds = plain_seconds / speedup / np.exp(generator.normal(spread**2 / 2, spread, units))
    noise = np.exp(0.05 * np.clip(generator.standard_t(3, (2, units)), -15, 15))
    pause = np.where(generator.random((2, units)) < 0.03, np.minimum(1 + generator.pareto(1.5, (2, units)), 10), 1)
    drift = 1 + 0.2 * np.sin(np.linspace(0, 5, units) + generator.uniform(0, 6.3))
    return tokens, seconds * noise[0] * pause[0] * drift, tokens, plain_seconds * noise[1] * pause[1] * drift


@pytest.mark.parametrize("speedup", [1.0, 1.3])
@pytest.mark.parametrize("units", [6, 24])
def test_intervals_cover_the_true_speedup(speedup: float, units: int) -> None:
    """At 0.99, of 300 runs at least 97 % hold the truth; an interval of half the width does not."""
    generator = np.random.default_rng(units)
    intervals = [speedup_interval(*simulated(generator, units, speedup)) for _ in range(300)]
    low, high = np.log(np.array(intervals)).T
    centre, margin = (low + high) / 2, (high - low) / 2
    off = abs(np.log(speedup) - centre)
    assert (off <= margin).mean() >= 0.97
    assert (off <= margin / 2).mean() < 0.97
