"""Closed forms, replayed runs, and costs measured through `generate`. Nothing here asserts how long anything takes."""

import dataclasses
import io
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import prompt, tiny
from rich.console import Console

import hf_specdec
from hf_specdec import (
    DecodeView,
    DraftModel,
    DraftStrategy,
    DraftTree,
    Plan,
    PromptLookup,
    SpecDecConfig,
    SpecDecError,
)
from hf_specdec_eval import cost, length_plan
from hf_specdec_eval.cost import CostCurve, bracket, line, measure_costs
from hf_specdec_eval.length_plan import LengthPlan, load_run, plan
from hf_specdec_eval.planning import (
    Forecast,
    MeasuredCall,
    StepCosts,
    accepted_in_rounds,
    agreement,
    compute_speedup,
    expected_tokens,
    find_optimal_length,
    forecast,
    mean_draft,
    measured_calls,
    replay,
    seconds_at,
)

FLAT = StepCosts(plain_seconds=1.0, verify_seconds={1: 1.0, 64: 1.0})


# Closed forms


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("length", [0, 1, 4, 9])
def test_expected_tokens_is_the_mean_of_simulated_rounds(acceptance: float, length: int) -> None:
    draw = random.Random(1)
    total = 0
    for _ in range(4000):
        accepted = 0
        while accepted < length and draw.random() < acceptance:
            accepted += 1
        total += accepted + 1
    assert expected_tokens(acceptance, length) == pytest.approx(total / 4000, rel=0.05)
    assert expected_tokens([acceptance] * length, length) == pytest.approx(expected_tokens(acceptance, length))


def test_expected_tokens_per_position() -> None:
    assert expected_tokens([0.5, 0.4, 0.0], 3) == pytest.approx(1 + 0.5 + 0.2)
    assert expected_tokens([0.5, 0.4], 1) == 1.5
    with pytest.raises(SpecDecError, match="2 positions"):
        expected_tokens([0.5, 0.4], 3)


@pytest.mark.parametrize(
    ("acceptance", "length"), [(1.2, 2), (-0.1, 2), (True, 2), ("x", 2), ([0.5, 2], 2), (0.5, -1)]
)
def test_what_is_no_probability_or_length_is_refused(acceptance: Any, length: int) -> None:
    with pytest.raises(SpecDecError):
        expected_tokens(acceptance, length)


@pytest.mark.parametrize("length", [1, 3, 7])
def test_speedup_is_theorem_3_8_when_a_block_costs_as_much_as_a_token(length: int) -> None:
    a, c = 0.7, 0.1
    theorem = (1 - a ** (length + 1)) / ((1 - a) * (length * c + 1))
    assert compute_speedup(a, length, c, lambda width: 1.0, 1.0) == pytest.approx(theorem)
    assert compute_speedup(a, length, c, lambda width: 1.0, 1.0, overhead_seconds=0.5) < theorem


def test_length_zero_is_plain_decoding() -> None:
    assert compute_speedup(0.9, 0, 0.1, {1: 5.0}, 1.0, 3.0) == 1.0
    assert find_optimal_length(0.0, 8, 0.1, lambda width: 1.0, 1.0) == (0, 1.0)


def test_the_optimum_is_the_best_of_all_lengths_also_behind_a_step() -> None:
    def stepped(width: float) -> float:
        return 1.0 if width <= 2 else 1.9  # length 2 costs as much as length 15

    costs = (0.0, stepped, 1.0, 0.0)
    best, speedup = find_optimal_length(0.95, 15, *costs)
    each = [compute_speedup(0.95, length, *costs) for length in range(16)]
    assert best == 15 and speedup == max(each) and each[2] < each[1] < each[15]


def test_mappings_are_interpolated_and_never_left() -> None:
    assert seconds_at({1: 1.0, 3: 2.0}, 2) == 1.5
    with pytest.raises(SpecDecError, match="Width 4"):
        seconds_at({1: 1.0, 3: 2.0}, 4)
    with pytest.raises(SpecDecError, match="Width 1"):
        seconds_at({}, 1)


# Replay


def test_rounds_are_read_from_token_sources() -> None:
    assert accepted_in_rounds([1, 1, 0, 0, 1, 0]) == [2, 0, 1]
    assert accepted_in_rounds([0, 1, 1]) == [0, 2]
    assert accepted_in_rounds([]) == []


def test_agreement_goes_on_over_a_full_draft_only_when_the_next_one_is_accepted() -> None:
    assert agreement([2, 1, 0], 2, 6) == (True, True, True, True, False, False)
    assert agreement([2, 0], 2, 4) == (True, True, False, False)
    assert agreement([1, 1], 2, 3) == (True, False, True)  # a stop cut the closing token


def test_a_replay_at_the_length_of_the_run_is_the_run() -> None:
    draw = random.Random(3)
    for longest in (1, 3, 8):
        accepted = [draw.choice([0, 0, 1, longest // 2, longest, longest]) for _ in range(40)]
        tokens = sum(accepted) + len(accepted)
        agreed = agreement(accepted, longest, tokens)
        assert replay(agreed, longest) == accepted
        assert sum(replay(agreed, 1)) + len(replay(agreed, 1)) == tokens


def test_replay_tells_what_shorter_runs_do_where_survival_does_not() -> None:
    """A text that copies itself in stretches: real runs at each length, against predictions from the longest."""
    text = _stretches()
    run = _lookup_rounds(text, 16)
    agreed = agreement(run, 16, len(text) - _PROMPT)
    off = []
    for length in (1, 2, 4, 8):
        real = len(_lookup_rounds(text, length))
        assert len(replay(agreed, length)) == pytest.approx(real, rel=0.03)
        survival = 1 + sum(sum(each >= depth for each in run) for depth in range(1, length + 1)) / len(run)
        off.append(abs((len(text) - _PROMPT) / survival / real - 1))
    assert max(off) > 0.1  # the control: the per-round survival of the long run misses


_PROMPT = 120


def _stretches() -> list[int]:
    draw = random.Random(5)
    text = [draw.randrange(10_000) for _ in range(_PROMPT)]
    while len(text) < 1500:
        start = draw.randrange(len(text) - 30)
        text += text[start : start + draw.randrange(3, 30)] + [draw.randrange(10_000) for _ in range(6)]
    return text


def _lookup_rounds(text: list[int], length: int) -> list[int]:
    drafter = PromptLookup().build(None, None)
    position, rounds = _PROMPT, []
    drafter.start(DecodeView.of_sequences([text[:position]]))
    while position < len(text):
        view = DecodeView.of_sequences([text[:position]])
        drafter.observe(view, [[]])
        room = min(length, len(text) - position - 1)
        draft = drafter.propose(view, Plan.chain(room)).tokens[0, 1:].tolist() if room else []
        right = (index for index, token in enumerate(draft) if token != text[position + index])
        rounds.append(next(right, len(draft)))
        position += rounds[-1] + 1
    return rounds


def test_the_mean_draft_under_a_smaller_limit() -> None:
    assert mean_draft(8.0, 8, 3) == 3
    assert mean_draft(1.0, 8, 4) == 1
    assert mean_draft(2.5, 8, 8) == pytest.approx(2.5)
    assert 1 < mean_draft(2.5, 8, 2) < 2 < mean_draft(2.5, 8, 4) < 2.5


# Forecasts


def _call(accepted: list[int], longest: int, undrafted: int = 0, rows: int = 1, **more: Any) -> MeasuredCall:
    tokens = sum(accepted) + len(accepted)
    values = {
        "prompt_tokens": 100,
        "agreed": (agreement(accepted, longest, tokens),) * rows,
        "undrafted_rounds": undrafted * rows,
        "mean_draft": float(longest),
        "longest": longest,
        "plain_prefill_seconds": 0.0,
        "plain_step_seconds": 1.0,
        "prefill_seconds": 0.0,
    }
    return MeasuredCall(**{**values, **more})


def test_a_forecast_by_hand() -> None:
    costs = StepCosts(2.0, {1: 2.0, 5: 4.0}, draft_seconds=0.5, overhead_seconds=0.25, start_seconds=1.0)
    call = _call([4, 0, 0, 1], 4, undrafted=1)
    seen = forecast([call], 4, lambda rows, context: costs)
    own = 1.0 + 4 * 0.25 + 3 * (4 * 0.5 + 4.0) + 1 * 2.0
    assert seen.decode_speedup == pytest.approx(9 * 2.0 / own) and seen.speedup == pytest.approx(9 * 2.0 / own)
    assert seen.tokens_per_round == 9 / 4
    # at length 1 the four accepted tokens take two rounds and the closing token none of its own
    shorter = forecast([call], 1, lambda rows, context: costs)
    assert shorter.tokens_per_round == 9 / len(replay(call.agreed[0], 1))


def test_prompts_are_scaled_by_the_plain_step_and_dilute_the_speedup() -> None:
    call = _call([4] * 20, 4, plain_prefill_seconds=50.0, plain_step_seconds=0.5, prefill_seconds=60.0)
    seen = forecast([call], 4, lambda rows, context: FLAT)
    assert seen.decode_speedup == pytest.approx(5.0)
    assert seen.speedup == pytest.approx((100 + 100) / (120 + 20))  # steps take twice as long now, so prompts do
    twice = forecast([call, call], 4, lambda rows, context: FLAT)
    assert (twice.speedup, twice.decode_speedup) == (seen.speedup, seen.decode_speedup)


def test_costs_are_taken_at_the_contexts_of_the_calls() -> None:
    asked: list[tuple[int, float]] = []

    def costs(rows: int, context: float) -> StepCosts:
        asked.append((rows, context))
        return FLAT

    forecast([_call([1, 1], 1, prompt_tokens=100), _call([1, 1], 1, prompt_tokens=900)], 1, costs)
    assert {context for _, context in asked} == {102.0, 902.0}


def test_a_batch_waits_for_its_slowest_row() -> None:
    fast, slow = _call([3, 3], 3), _call([0] * 8, 3)
    both = _call([3, 3], 3, agreed=fast.agreed + slow.agreed)
    seen = forecast([both], 3, lambda rows, context: FLAT)
    assert seen.decode_speedup == 1.0 and seen.tokens_per_round == 16 / 10
    costs = StepCosts(1.0, {1: 1.0, 4: 2.0})
    lonely = forecast([_call([0] * 8, 3, undrafted=8)], 3, lambda rows, context: costs)
    assert lonely.decode_speedup == 1.0  # blocks without a draft are one token wide
    mixed = _call([], 3, agreed=fast.agreed + slow.agreed, undrafted_rounds=8)
    assert forecast([mixed], 3, lambda rows, context: costs).decode_speedup == pytest.approx(8 / (2 * 2.0 + 6))


def test_length_zero_is_forecast_as_plain() -> None:
    assert forecast([_call([1], 1)], 0, lambda rows, context: FLAT) == Forecast(0, 1.0, 1.0, 1.0)


# From rows and results


def _measured_row(model: Any, strategy: SpecDecConfig, label: str, unit: int) -> dict[str, Any]:
    inputs, strategy = prompt(seed=unit), dataclasses.replace(strategy, schedule="constant")
    base = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    output = model.generate(
        **inputs, max_new_tokens=24, do_sample=False, assistant_strategy=strategy, return_dict_in_generate=True
    )
    stats, length = output.speculation, inputs["input_ids"].shape[1]
    turn = {"prompt_tokens": [length], "seconds": 1.0, "prefill_seconds": 0.1}
    depths = {"drafted_at_depth": stats.drafted_at_depth, "accepted_at_depth": stats.accepted_at_depth}
    plain = {**turn, "token_ids": base[:, length:].tolist(), "speculation": None, "token_sources": None}
    own = {
        **turn,
        "token_ids": output.sequences[:, length:].tolist(),
        "speculation": {**stats.to_dict(), **depths},
        "token_sources": [list(map(int, row.token_sources)) for row in stats.rows],
    }
    entries = {"plain": {"error": None, "turns": [plain]}, label: {"error": None, "turns": [own]}}
    return {"unit": unit, "repeat": 0, "methods": entries}


def test_rows_of_real_runs_forecast_the_rounds_of_shorter_drafts() -> None:
    model = hf_specdec.enable(tiny())
    noisy = tiny()
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        for weight in noisy.parameters():
            weight += 0.1 * weight.std(correction=0) * torch.randn(weight.shape, generator=generator)
    for strategy in (DraftModel(noisy), PromptLookup()):
        rows = {
            length: [_measured_row(model, SpecDecConfig(strategy, max_draft_tokens=length), "x", unit)
                     for unit in range(4)]
            for length in (1, 2, 4, 8)
        }  # fmt: skip
        calls = measured_calls(rows[8], "x", 8)
        assert [call.steps for call in calls] == [23] * 4
        for length, own in rows.items():
            real = sum(row["methods"]["x"]["turns"][0]["speculation"]["num_spec_steps"] for row in own)
            assert sum(len(replay(call.agreed[0], length)) for call in calls) == pytest.approx(real, rel=0.05)


def _write_run(directory: Path, rows: list[dict[str, Any]], methods: list[dict[str, Any]], **config: Any) -> Path:
    strategies = [{"label": each["label"], "schedule": "constant"} for each in methods]
    results = {
        "methods": [{"label": "plain", "kind": "plain", "strategy": None, "max_draft_tokens": None}, *methods],
        "config": {"batch_size": 1, "temperature": 0.0, "strategies": strategies, **config},
    }
    (directory / "results.json").write_text(json.dumps(results))
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory / "results.json"


def _method(label: str, length: int | None, strategy: str = "prompt_lookup") -> dict[str, Any]:
    return {"label": label, "kind": "ours", "strategy": strategy, "max_draft_tokens": length}


def test_a_plan_from_a_run(tmp_path: Path) -> None:
    model = hf_specdec.enable(tiny())
    rows = [_measured_row(model, SpecDecConfig("prompt_lookup", max_draft_tokens=4), "long", each) for each in (0, 1)]
    path = _write_run(tmp_path, rows, [_method("short", 1), _method("long", 4), _method("other", None, "suffix")])
    run = load_run(path, "prompt_lookup")
    assert (run.label, run.longest, len(run.calls), run.batch_size) == ("long", 4, 2, 1)
    assert load_run(tmp_path, "prompt_lookup") == run
    console = Console(record=True, width=100)
    planned = plan(model, "prompt_lookup", run, max_length=6, console=console)
    assert [each.length for each in planned.forecasts] == list(range(7)) and planned.measured == 4
    assert all(each.speedup is not None and each.speedup > 0 for each in planned.forecasts)
    assert planned.best.speedup == max(each.speedup for each in planned.forecasts if each.speedup is not None)
    text = console.export_text()
    assert "5 *" in text and "4 *" not in text and "extrapolated" in text
    with pytest.raises(SpecDecError, match="the run brings"):
        plan(model, "prompt_lookup", run, context=64)


def test_a_plan_forecasts_all_calls_at_their_contexts_and_batch_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def costs(model: Any, strategy: Any, widths: Any, sizes: Any, contexts: Any, temperature: float) -> CostCurve:
        asked.update(widths=widths, sizes=sizes, contexts=contexts, temperature=temperature)
        prices = StepCosts(1.0, {each: 1 + each / 10 for each in widths})
        return CostCurve({(rows, length): prices for rows in sizes for length in contexts})

    monkeypatch.setattr(length_plan, "measure_costs", costs)
    calls = (_call([4, 0], 4, prompt_tokens=50), _call([0] * 6, 4, rows=3, prompt_tokens=800))
    run = length_plan.MeasuredRun("x", 4, calls, batch_size=3, temperature=0.7)
    planned = plan(tiny(), "prompt_lookup", run, max_length=4, console=Console(record=True, file=io.StringIO()))
    prices = StepCosts(1.0, {each: 1 + each / 10 for each in asked["widths"]})
    for each in planned.forecasts:
        expected = forecast(calls, each.length, lambda rows, context: prices)
        assert (each.speedup, each.tokens_per_round) == pytest.approx((expected.speedup, expected.tokens_per_round))
    assert asked["sizes"] == [1, 3] and asked["temperature"] == 0.7 and {1, 5} <= set(asked["widths"])
    assert 50 < asked["contexts"][0] < asked["contexts"][1] < 810


def test_a_run_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    path = _write_run(tmp_path, [], [_method("one", 4), _method("two", 4), _method("zero", 0, "suffix")])
    with pytest.raises(SpecDecError, match="'one', 'two'"):
        load_run(path, "prompt_lookup")
    with pytest.raises(SpecDecError, match="Did you mean 'two'"):
        load_run(path, "prompt_lookup", label="twoo")
    with pytest.raises(SpecDecError, match="not drafted"):
        load_run(path, "suffix")
    with pytest.raises(SpecDecError, match="No row"):
        load_run(path, "prompt_lookup", label="one")
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(SpecDecError, match="no results file"):
        load_run(path, "prompt_lookup")
    with pytest.raises(SpecDecError, match="no results file"):
        load_run(tmp_path / "nowhere.json", "prompt_lookup")


def test_a_run_with_other_settings_of_the_strategy_is_refused(tmp_path: Path) -> None:
    """Acceptance of one draft model says nothing about another."""
    runs = [{"label": "one", "schedule": "constant", "strategy_options": {"max_ngram": 3}}]
    path = _write_run(tmp_path, [], [_method("one", 4)], strategies=runs)
    with pytest.raises(SpecDecError, match="not drafted"):
        load_run(path, "prompt_lookup")
    with pytest.raises(SpecDecError, match="Unknown method"):
        load_run(path, {"strategy": "prompt_lookup", "strategy_options": {"max_ngram": 4}}, label="one")
    with pytest.raises(SpecDecError, match="No row"):
        load_run(path, {"strategy": "prompt_lookup", "strategy_options": {"max_ngram": 3}})


def test_results_without_a_batch_size_are_no_results(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(json.dumps({"methods": [], "config": {"strategies": []}}))
    with pytest.raises(SpecDecError, match="no results file"):
        load_run(tmp_path, "prompt_lookup")


def test_a_context_that_is_no_length_is_refused() -> None:
    with pytest.raises(SpecDecError, match="context=-5"):
        plan(tiny(), "suffix", 0.5, max_length=1, context=-5)


def test_runs_whose_length_adapts_are_no_measure_of_one_length(tmp_path: Path) -> None:
    adaptive = [{"label": "one", "schedule": "adaptive"}]
    path = _write_run(tmp_path, [], [_method("one", 4)], strategies=adaptive)
    with pytest.raises(SpecDecError, match="not drafted"):
        load_run(path, "prompt_lookup")


def test_failed_and_foreign_methods_are_not_replayed() -> None:
    model = hf_specdec.enable(tiny())
    row = _measured_row(model, SpecDecConfig("prompt_lookup", max_draft_tokens=4), "x", 0)
    failed = {**row, "methods": {**row["methods"], "x": {"error": "RuntimeError: no", "turns": []}}}
    assert len(measured_calls([row, failed], "x", 4)) == 1
    with pytest.raises(SpecDecError, match="No row"):
        measured_calls([failed], "x", 4)
    with pytest.raises(SpecDecError, match="does not speculate"):
        measured_calls([row], "plain", 4)


# Costs


class Counting(DraftStrategy):
    """Copies its last token, and counts how often it is asked for how much."""

    name = "counting"

    def __init__(self) -> None:
        object.__setattr__(self, "asked", [])
        object.__setattr__(self, "finished", [])

    def build(self, target: Any, request: Any) -> Any:
        strategy = self

        class Own(hf_specdec.Drafter):
            def propose(self, view: DecodeView, plan: Plan) -> DraftTree:
                strategy.asked.append(plan.depth)
                return DraftTree.from_chains(view.roots(), [[root] * plan.depth for root in view.roots()])

            def finish(self) -> None:
                strategy.finished.append(True)

        return Own()


def test_rounds_are_split_into_drafting_and_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that only parts of a round move: 10 per drafted token, 4 to learn, 3 to observe, 100 for the rest."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(cost, "time", SimpleNamespace(perf_counter=lambda: clock.now))

    class Slow(hf_specdec.Drafter):
        def start(self, view: DecodeView) -> None:
            clock.now += 7

        def propose(self, view: DecodeView, plan: Plan) -> DraftTree:
            clock.now += 10 * plan.depth
            return DraftTree.from_chains(view.roots(), [[]])

        def learn(self, view: DecodeView, tree: DraftTree, tokens: torch.Tensor, probs: torch.Tensor) -> None:
            clock.now += 4

        def observe(self, view: DecodeView, emitted: Any) -> None:
            clock.now += 3

    log = cost.RoundLog()
    drafter = cost.ScheduledDrafter(cost.ScheduledDrafts((2, 2, 1, 2, 0), None, log), Slow())
    view = DecodeView.of_sequences([[5, 6, 7]])
    drafter.start(view)
    for size in (3, 3, 2, 3, 1):
        tree = drafter.propose(view, Plan.chain(9))
        assert tree.size == size
        clock.now += 100
        drafter.learn(view, tree, tree.tokens.unsqueeze(2), torch.ones(1, size, 1))
        drafter.observe(view, [[1]])
    with pytest.raises(cost.ScheduleEnded):
        drafter.propose(view, Plan.chain(9))
    assert log.first_round_at == 7
    assert log.verify_seconds == {2: [100], 3: [100], 1: [100]}
    assert log.draft_seconds == {1: [17], 2: [27]}


def test_plain_steps_are_counted_from_the_second_token_on(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 50.0, 59.0, 67.0, 68.0, 70.0])
    monkeypatch.setattr(cost, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    clock = cost.TokenClock()
    for _ in range(6):
        clock.put(torch.zeros(1))
    assert clock.step_seconds() == [1.0, 2.0]  # 50 is the prompt's; 9 and 8 set up caches


@pytest.mark.parametrize("batch_sizes", [(1,), (1, 3)])
def test_costs_have_every_width_context_and_batch_size(batch_sizes: tuple[int, ...]) -> None:
    model = hf_specdec.enable(tiny())
    curve = measure_costs(model, None, (2, 5), batch_sizes, (40, 90), repeats=1, rounds=1)
    assert set(curve.points) == {(rows, length) for rows in batch_sizes for length in (40, 90)}
    for costs in curve.points.values():
        assert list(costs.verify_seconds) == [1, 2, 5] and min(costs.verify_seconds.values()) > 0
        assert (
            costs.plain_seconds > 0 and costs.start_seconds > 0 and costs.draft_seconds == costs.overhead_seconds == 0
        )
    with pytest.raises(SpecDecError, match="not for 9"):
        curve.at(9, 50)


def test_the_strategy_is_asked_for_every_length_as_often_and_let_go() -> None:
    model = hf_specdec.enable(tiny())
    strategy = Counting()
    costs = measure_costs(model, strategy, (1, 2, 4), contexts=(40,), repeats=2, rounds=3).at(1, 40)
    calls = 3  # one of them is not counted
    assert [strategy.asked.count(each) for each in (0, 1, 3)] == [0, calls * 3, calls * (3 + 2)]
    assert len(strategy.finished) == calls
    assert (
        costs.draft_seconds >= 0 and costs.overhead_seconds >= 0 and costs.draft_seconds + costs.overhead_seconds > 0
    )


@pytest.mark.parametrize("name", ["recycling", "lookahead", "suffix"])
def test_a_drafter_that_learns_from_every_forward_does_so_while_it_is_timed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = hf_specdec.enable(tiny())
    strategy = SpecDecConfig(name).resolved
    kind = type(strategy.build(SimpleNamespace(model=model), None))
    heard: list[int] = []

    def learn(self: Any, view: DecodeView, tree: DraftTree, tokens: torch.Tensor, probs: torch.Tensor) -> None:
        heard.append(tree.size)

    monkeypatch.setattr(kind, "learn", learn)
    measure_costs(model, strategy, (2, 4), contexts=(40,), repeats=1, rounds=1)
    if name == "suffix":
        assert not heard
    else:
        assert len(heard) > 2 * (1 + 3), "two calls, each with a prompt and at least a round per width"
        assert {1, 2, 4} <= set(heard)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("verifier", ["exact", "rejection"])
def test_costs_of_a_draft_model(temperature: float, verifier: str) -> None:
    model = hf_specdec.enable(tiny())
    config = SpecDecConfig(DraftModel(tiny(seed=1)), verifier=verifier)
    costs = measure_costs(model, config, (2, 4), (2,), (40,), repeats=1, rounds=2, temperature=temperature).at(2, 40)
    assert costs.start_seconds > 0 and costs.draft_seconds + costs.overhead_seconds > 0


def test_the_model_is_left_as_it_was_also_when_it_fails() -> None:
    model = hf_specdec.enable(tiny())
    model.generation_config.eos_token_id = list(range(96))  # every token ends a text
    kept, before = model.generation_config, model.generation_config.to_dict()
    attention = model.config._attn_implementation
    measure_costs(model, "suffix", (2,), contexts=(40,), repeats=1, rounds=1)
    with pytest.raises(SpecDecError, match="positions"):
        measure_costs(model, "suffix", (2,), contexts=(510,), repeats=1, rounds=1)
    assert model.generation_config is kept and kept.to_dict() == before
    assert model.config._attn_implementation == attention


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(SpecDecError, match="enable"):
        measure_costs(tiny())
    model = hf_specdec.enable(tiny())
    for wrong in ({"widths": (0,)}, {"contexts": ()}, {"repeats": 0}, {"batch_sizes": (1.5,)}):
        with pytest.raises(SpecDecError, match=next(iter(wrong))):
            measure_costs(model, **wrong)  # type: ignore[arg-type]


def test_costs_between_points_lie_on_lines() -> None:
    points = {
        (rows, context): StepCosts(rows + context / 100, {1: float(rows), 3: context / 10})
        for rows in (1, 5)
        for context in (100, 300)
    }
    costs = CostCurve(points).at(2, 150)
    assert costs.plain_seconds == pytest.approx(2 + 1.5)
    assert costs.verify_seconds == pytest.approx({1: 2.0, 3: 15.0})
    assert bracket([1, 4, 8], 6) == (4, 8, 0.5) and bracket([3], 3) == (3, 3, 0.0)


@pytest.mark.parametrize(("context", "nearest"), [(17.5, 24), (500, 152)])
def test_costs_beyond_the_measured_contexts_are_those_of_the_nearest_and_can_be_saved(
    context: float, nearest: int, tmp_path: Path
) -> None:
    """On a line through these points drafting would take less than no time at the shorter context."""
    points = {
        (1, length): StepCosts(1.0, {1: 1.0, 2: 1.2}, 0.1, overhead_seconds=overhead)
        for length, overhead in ((24, 0.0), (152, 0.05))
    }
    costs = CostCurve(points).at(1, context)
    assert costs == points[1, nearest]
    length_plan.write_costs(str(tmp_path / "costs.json"), tiny(), costs)


def test_drafting_is_a_line_that_never_falls_below_zero() -> None:
    assert line({1: 3.0, 4: 9.0}) == pytest.approx((2.0, 1.0))
    assert line({1: 2.0, 4: 1.0}) == pytest.approx((0.0, 1.5))
    assert line({1: 1.0, 4: 10.0})[1] == 0.0
    assert line({}) == (0.0, 0.0)


def test_a_plan_from_a_number() -> None:
    model = hf_specdec.enable(tiny())
    console = Console(record=True, width=100)
    planned = plan(model, "suffix", 0.5, max_length=3, context=48, console=console)
    assert [each.tokens_per_round for each in planned.forecasts] == [expected_tokens(0.5, each) for each in range(4)]
    assert all(each.speedup is None for each in planned.forecasts)
    assert "Best" in console.export_text()
    with pytest.raises(SpecDecError, match="probability"):
        plan(model, "suffix", 1.5)


def test_the_best_of_equals_is_the_shortest() -> None:
    assert LengthPlan((Forecast(0, 1, 1.0), Forecast(1, 2, 1.2), Forecast(2, 3, 1.2))).best.length == 1
    assert "plain" in str(LengthPlan((Forecast(0, 1, 1.0), Forecast(1, 2, 0.9))).table().caption)
