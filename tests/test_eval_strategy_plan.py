"""`hf-specdec plan`: which prompts choose, what is compared, the verdict, and the file that it leaves.

Real calls of tiny models, whose seconds are replaced by given ones where something depends on them.
"""

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
import test_eval_bench as bench_tests
import torch
import yaml
from rich.console import Console
from text_models import make_tokenizer
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import hf_specdec
from hf_specdec import CostModel, SpecDecConfig, SpecDecError, save_costs
from hf_specdec.cli import app
from hf_specdec_eval import commands, strategy_plan, trials
from hf_specdec_eval.bench import Unit
from hf_specdec_eval.config import RunConfig
from hf_specdec_eval.length_plan import LengthPlan
from hf_specdec_eval.measure import Meter
from hf_specdec_eval.planning import Forecast, StepCosts
from hf_specdec_eval.strategy_plan import default_candidates, load_units, plan_strategy, split
from hf_specdec_eval.task import Sample

folder = bench_tests.folder  # the fixture
STEP = 0.1
"""Seconds of plain decoding per token, and of every prompt."""


@pytest.fixture
def no_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs are not measured."""

    def refuse(*arguments: Any) -> Any:
        raise SpecDecError("No costs here.")

    monkeypatch.setattr(strategy_plan, "forecast_lengths", refuse)


def configuration(folder: Path, *strategies: str, **changes: Any) -> RunConfig:
    values: dict[str, Any] = {
        "model": str(folder / "target"),
        "strategies": list(strategies),
        "tasks": [],
        "task_files": [str(folder / "task.yaml")],
        "dtype": "float32",
        "repeats": 1,
        "warm_up_tokens": 2,
    }
    return RunConfig.from_dict({**values, **changes})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """A function that sets decoding speeds over plain, by label and unit, and gives the rows that are measured."""

    def start(speed: Callable[[str, int], float]) -> list[dict[str, Any]]:
        real, rows = trials.measured, []

        def measured(*arguments: Any) -> Any:
            for row in real(*arguments):
                for label, entry in row["methods"].items():
                    for turn in entry["turns"]:
                        decoding = STEP * (max(map(len, turn["token_ids"])) - 1)
                        factor = 1.0 if label == "plain" else speed(label, row["unit"]) * (1 + row["unit"] / 50)
                        turn["prefill_seconds"] = STEP
                        turn["seconds"] = STEP + decoding / factor
                rows.append(row)
                yield row

        monkeypatch.setattr(trials, "measured", measured)
        return rows

    return start


def quiet() -> Console:
    return Console(record=True, width=160, stderr=True, markup=False)


# ------------------------------------------------------------------------------------------------ which prompts


def units(*tasks: tuple[str, int]) -> list[Unit]:
    made: list[Unit] = []
    for name, count in tasks:
        for number in range(count):
            sample = Sample(f"{name}/{number}", name, name, ("hi",), {}, 4, (), None, None)
            made.append(Unit(len(made), name, (sample,)))
    return made


def test_the_first_third_of_each_task_chooses_and_the_others_are_held_out() -> None:
    everything = units(("a", 9), ("b", 4))
    choosing, held_out = split(everything)
    assert [each.number for each in choosing] == [0, 1, 2, 9, 10]
    assert sorted(each.number for each in choosing + held_out) == list(range(13))


@pytest.mark.parametrize("tasks", [(("a", 5),), (("a", 3), ("b", 2)), (("a", 1),)])
def test_too_few_prompts_are_refused_with_what_to_do(tasks: tuple[tuple[str, int], ...]) -> None:
    with pytest.raises(SpecDecError, match=r"too few.*at least 6.*--limit"):
        split(units(*tasks))
    split(units(("a", 6)))


def test_too_few_prompts_are_refused_before_the_model_is_loaded() -> None:
    done = CliRunner().invoke(app, ["plan", "--model", "absent", "--limit", "3"])
    assert done.exit_code == 2 and "3 prompts" in done.stderr and "too few" in done.stderr


# -------------------------------------------------------------------------------------------------- the verdict


def test_the_fastest_on_the_first_prompts_is_measured_on_the_others(folder, clock, no_forecast) -> None:
    """`suffix` is lucky on the prompts that choose; its figures are those of the others."""
    rows = clock(lambda label, unit: 1.2 if label != "suffix" else 3.0 if unit < 2 else 1.5)
    console = quiet()
    planned = plan_strategy(configuration(folder, "prompt_lookup", "suffix"), console)
    assert [each["unit"] for each in rows] == [0, 1, 2, 3, 4, 5]
    everyone = {"plain", "prompt_lookup", "prompt_lookup(10)", "suffix", "suffix(15)"}
    assert [set(each["methods"]) for each in rows] == [everyone] * 2 + [{"plain", "suffix"}] * 4
    assert (planned.chosen.method.label, planned.choosing, planned.held_out) == ("suffix", 2, 4)
    plain, own = (
        sum(turn["seconds"] for row in rows[2:] for turn in row["methods"][label]["turns"])
        for label in ("plain", "suffix")
    )
    assert planned.chosen.speedup == pytest.approx(plain / own) and planned.chosen.speedup < 1.7
    low, high = planned.interval
    assert 1 < low < planned.chosen.speedup < high and planned.pays
    for tokens, told in ((1.5, False), (1.01, True)):
        other = replace(planned, chosen=replace(planned.chosen, tokens_per_round=tokens))
        assert ("Hardly a draft was accepted" in other.basis) is told
    text = console.export_text()
    shape = "up to 15 draft tokens in a tree, 4 wide and 15 deep at most, as many as pay in each round"
    assert f"Use suffix ({shape}): {planned.chosen.speedup:.2f}x" in text
    assert f"x plain generate ({low:.2f} to {high:.2f}) on prompts like these." in text
    assert "4 of 4 texts are plain generate's" in text
    assert "No other length of prompt_lookup was tried. No costs here." in text


@pytest.mark.parametrize("speed", [0.6, 0.94])
def test_where_nothing_is_surely_faster_the_verdict_is_not_to_speculate(folder, clock, no_forecast, speed) -> None:
    clock(lambda label, unit: speed if label == "suffix" else 0.5)
    console = quiet()
    planned = plan_strategy(configuration(folder, "suffix", "prompt_lookup"), console)
    assert not planned.pays and planned.interval[0] < 1
    low, high = planned.interval
    told = f"the best, suffix, is {planned.chosen.speedup:.2f}x plain generate ({low:.2f} to {high:.2f})."
    assert planned.sentence == f"Do not use speculation here: {told}"
    text = console.export_text()
    assert "Use " not in text and ("not shown to be slow" in text) is (planned.interval[1] > 1)


@pytest.mark.parametrize("speed", [0.5, 2.0])
def test_answers_of_one_token_leave_nothing_to_speculate_on(folder, clock, monkeypatch, speed: float) -> None:
    clock(lambda label, unit: 1.0)
    timed = trials.measured

    def measured(*arguments: Any) -> Any:
        for row in timed(*arguments):
            for label, entry in row["methods"].items():
                if label != "plain":
                    entry["turns"][0]["seconds"] /= speed
            yield row

    monkeypatch.setattr(trials, "measured", measured)
    console = quiet()
    planned = plan_strategy(configuration(folder, "suffix", "prompt_lookup", max_new_tokens=1), console)
    assert not planned.pays
    assert planned.sentence.startswith("Do not use speculation here: answers have one token")
    assert " ".join(console.export_text().split()) == planned.sentence


def test_figures_explain_the_speed(folder, clock, no_forecast) -> None:
    """Decoding gains tokens per round times seconds of a plain step over those of a round."""
    clock(lambda label, unit: 1.5)
    planned = plan_strategy(configuration(folder, "suffix:schedule=constant,max_draft_tokens=4"), quiet())
    assert [each.method.label for each in planned.candidates] == ["suffix:schedule=constant,max_draft_tokens=4"]
    (each,) = planned.candidates
    assert planned.step_seconds == pytest.approx(STEP)
    assert 1 <= each.tokens_per_round and each.identical == each.compared == 2 and 0 <= each.accepted <= 1
    assert each.tokens_per_round * planned.step_seconds / each.round_seconds == pytest.approx(1.5, rel=0.1)
    assert each.interval is None, "two prompts have no interval"


def test_batches_and_repeats(folder, clock, no_forecast) -> None:
    rows = clock(lambda label, unit: 1.5)
    prompts: dict[str, Any] = {"tasks": ["builtin"], "task_files": [], "limit": 18}
    config = configuration(folder, "suffix", **prompts, batch_size=3, repeats=2, max_new_tokens=4)
    planned = plan_strategy(config, quiet())
    assert (planned.choosing, planned.held_out) == (6, 12) and len(rows) == 2 * 6
    assert planned.interval[0] > 1


# ---------------------------------------------------------------------------------------------------- candidates


def test_a_length_that_a_forecast_prefers_is_measured_as_well(folder, clock, monkeypatch) -> None:
    clock(lambda label, unit: 2.0 if label == "prompt_lookup(3)" else 1.1)
    asked: list[Any] = []

    def forecast(model: Any, strategy: Any, run: Any, longest: int) -> Any:
        asked.append((strategy, run, longest))
        speedups = {3: 1.8, 10: 1.2}
        forecasts = tuple(Forecast(each, 1.0, 1.0, speedups.get(each, 1.0)) for each in range(longest + 1))
        return LengthPlan(forecasts, run.longest), StepCosts(1.0, {1: 1.0})

    monkeypatch.setattr(strategy_plan, "forecast_lengths", forecast)
    console = quiet()
    planned = plan_strategy(configuration(folder, "prompt_lookup", "suffix"), console)
    ((strategy, run, longest),) = asked
    assert (strategy.max_draft_tokens, run.longest, longest, len(run.calls)) == (10, 10, 16, 2)
    assert planned.chosen.method.label == "prompt_lookup(3)"
    assert (planned.config["max_draft_tokens"], planned.config["schedule"]) == (3, "constant")
    assert "3 draft tokens in every round promised" in console.export_text()
    assert "(up to 3 draft tokens in a chain, in every round)" in planned.sentence
    assert planned.call == (
        "assistant_strategy=SpecDecConfig(strategy='prompt_lookup', max_draft_tokens=3, schedule='constant')"
    )


def test_a_generated_label_is_none_that_a_user_gave(folder, clock, monkeypatch) -> None:
    clock(lambda label, unit: 2.0 if label == "prompt_lookup(3)#2" else 1.1)
    forecasts = tuple(Forecast(each, 1.0, 1.0, 1.8 if each == 3 else 1.2) for each in range(17))
    planned = LengthPlan(forecasts, 10), StepCosts(1.0, {1: 1.0})
    monkeypatch.setattr(strategy_plan, "forecast_lengths", lambda *arguments: planned)
    theirs = ("prompt_lookup(10)@suffix:max_draft_tokens=1", "prompt_lookup(3)@suffix:max_draft_tokens=2")
    found = plan_strategy(configuration(folder, "prompt_lookup", *theirs), quiet())
    lengths = {each.method.label: each.method.spec.config["max_draft_tokens"] for each in found.candidates}
    assert lengths == {
        "prompt_lookup": None, "prompt_lookup(10)#2": 10, "prompt_lookup(10)": 1, "prompt_lookup(3)": 2,
        "prompt_lookup(3)#2": 3,
    }  # fmt: skip
    assert len(found.candidates) == 5
    assert (found.chosen.method.label, found.config["max_draft_tokens"]) == ("prompt_lookup(3)#2", 3)


def test_a_length_that_promises_no_more_is_not_measured(folder, clock, monkeypatch) -> None:
    clock(lambda label, unit: 2.0 if label == "suffix" else 1.1)
    forecasts = tuple(Forecast(each, 1.0, 1.0, 1.2 if each == 3 else 1.1) for each in range(17))
    planned = LengthPlan(forecasts, 10), StepCosts(1.0, {1: 1.0})
    monkeypatch.setattr(strategy_plan, "forecast_lengths", lambda *arguments: planned)
    found = plan_strategy(configuration(folder, "prompt_lookup", "suffix"), quiet())
    assert {each.method.label for each in found.candidates} == {
        "prompt_lookup", "prompt_lookup(10)", "suffix", "suffix(15)",
    }  # fmt: skip
    assert any("no other draft length" in each for each in found.notes)


def test_sizes_that_are_given_are_left_alone_and_a_constant_schedule_is_not_measured_twice(folder, clock) -> None:
    rows = clock(lambda label, unit: 1.5)
    plan_strategy(configuration(folder, "prompt_lookup:max_draft_tokens=2", "lookahead"), quiet())
    assert set(rows[0]["methods"]) == {"plain", "prompt_lookup:max_draft_tokens=2", "lookahead"}


def test_the_default_candidates() -> None:
    assert [each.label for each in default_candidates()] == ["auto", "suffix", "prompt_lookup"]
    with_model = default_candidates("some/draft")
    assert [each.label for each in with_model] == ["auto", "free", "suffix", "prompt_lookup", "draft_model"]
    assert with_model[0].draft_model == with_model[-1].draft_model == "some/draft"


def test_a_draft_model_joins_the_default_candidates_and_is_one_object(folder, clock, no_forecast, monkeypatch) -> None:
    clock(lambda label, unit: 1.5)
    loaded: list[str] = []
    real = AutoModelForCausalLM.from_pretrained

    def load(name: str, **options: Any) -> Any:
        loaded.append(Path(name).name)
        return real(name, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load)
    config = configuration(folder, max_new_tokens=6, strategies=default_candidates(str(folder / "draft")))
    found = plan_strategy(config, quiet())
    assert loaded == ["target", "draft"]
    labels = {each.method.label for each in found.candidates}
    assert {"auto", "auto(15)", "free", "draft_model", "draft_model(4)"} <= labels
    assert [each.split(" was ")[0] for each in found.notes] == [
        f"No other length of {name}" for name in ("prompt_lookup", "draft_model")
    ]
    yaml.safe_dump([each.method.spec.config for each in found.candidates])  # names, not models


def test_what_cannot_run_or_fails_is_named_and_left_out(folder, clock, no_forecast, monkeypatch) -> None:
    clock(lambda label, unit: 1.5 if label.startswith("suffix") else 5.0)
    tokenizer = make_tokenizer()
    for question, told in ((bench_tests.QUESTIONS[0], "cannot run here"), ("rewrite", "failed on 1 of 2 calls")):
        monkeypatch.setattr(bench_tests.FailsOnDogs, "token", tokenizer(question)["input_ids"][0])
        console = quiet()
        planned = plan_strategy(
            configuration(folder, "suffix:max_draft_tokens=3", "fails_on_dogs:schedule=constant"), console
        )
        assert planned.chosen.method.label == "suffix:max_draft_tokens=3"
        (note,) = [each for each in planned.notes if "fails_on_dogs" in each]
        assert told in note and "no dogs please), so it is left out." in note and note in console.export_text()


def test_nothing_is_recommended_that_fails_on_a_prompt_held_out(folder, clock, monkeypatch) -> None:
    clock(lambda label, unit: 5.0)
    monkeypatch.setattr(bench_tests.FailsOnDogs, "token", make_tokenizer()(bench_tests.QUESTIONS[3])["input_ids"][0])
    with pytest.raises(SpecDecError, match=r"was the fastest.*failed on 1 of 4.*no dogs.*--strategy"):
        plan_strategy(configuration(folder, "fails_on_dogs:schedule=constant"), quiet())


def test_prompts_that_plain_generate_fails_on_are_named_and_do_not_count(folder, clock, monkeypatch) -> None:
    clock(lambda label, unit: 1.5)
    timed = trials.measured

    def measured(*arguments: Any) -> Any:
        for row in timed(*arguments):
            if row["unit"] in (0, failing):
                row["methods"]["plain"] = {"error": "RuntimeError: too long", "turns": [], "peak_memory_bytes": None}
            yield row

    monkeypatch.setattr(trials, "measured", measured)
    failing = 0
    planned = plan_strategy(configuration(folder, "suffix:max_draft_tokens=3"), quiet())
    assert planned.candidates[0].compared == 1 and planned.chosen.compared == 4
    assert planned.notes == ("plain failed on 1 of 2 calls (RuntimeError: too long), so they are left out.",)
    failing = 5
    with pytest.raises(SpecDecError, match=r"Too few prompts were finished.*too long.*more prompts"):
        plan_strategy(configuration(folder, "suffix:max_draft_tokens=3"), quiet())


@pytest.mark.parametrize("part", [0, 1], ids=["chooses", "held out"])
def test_a_first_prompt_that_is_too_long_is_left_out_as_any_other(folder, clock, monkeypatch, part: int) -> None:
    clock(lambda label, unit: 1.5)
    prompts: dict[str, Any] = {"tasks": ["builtin"], "task_files": [], "limit": 9, "max_new_tokens": 4}
    config = configuration(folder, "suffix:max_draft_tokens=3", **prompts)
    parts = split(load_units(config))
    real, too_long = Meter.run, {parts[part][0].samples[0].turns[0]}

    def run(self: Meter, method: Any, samples: Any, limit: Any) -> dict[str, Any]:
        if samples[0].turns[0] in too_long:
            return {"error": "IndexError: too long", "turns": [], "peak_memory_bytes": None}
        return real(self, method, samples, limit)

    monkeypatch.setattr(Meter, "run", run)
    planned = plan_strategy(config, quiet())
    left_out = f"plain failed on 1 of {len(parts[part])} calls (IndexError: too long), so they are left out."
    assert planned.notes == (left_out,) and planned.pays
    assert [planned.candidates[0].compared, planned.chosen.compared] == [3 - (part == 0), 6 - (part == 1)]
    too_long.update(each.samples[0].turns[0] for own in parts for each in own)
    with pytest.raises(SpecDecError, match=r"^plain cannot run here, nothing was measured\. IndexError: too long$"):
        plan_strategy(config, quiet())


def test_no_candidate_at_all_is_an_error_that_names_each(folder, monkeypatch) -> None:
    monkeypatch.setattr(bench_tests.FailsOnDogs, "token", make_tokenizer()(bench_tests.QUESTIONS[0])["input_ids"][0])
    with pytest.raises(SpecDecError, match=r"Nothing could be compared.*fails_on_dogs.*no dogs"):
        plan_strategy(configuration(folder, "fails_on_dogs:schedule=constant"), quiet())


# ------------------------------------------------------------------------------------------------ on the command line


def command(folder: Path, *arguments: str) -> Any:
    base = ["plan", "--model", str(folder / "target"), "--task-file", str(folder / "task.yaml"), "--dtype", "float32"]
    return CliRunner().invoke(app, [*base, *arguments], env={"COLUMNS": "300"})


def test_what_is_saved_is_loaded_and_generates_the_same_text(folder, tmp_path, clock, no_forecast) -> None:
    clock(lambda label, unit: 3.0 if label.endswith("(15)") else 1.1)
    file = tmp_path / "mine.yaml"
    spec = "mine@suffix:max_context=8"
    done = command(folder, "--strategy", spec, "--strategy", "prompt_lookup", "--save", str(file))
    assert done.exit_code == 0, done.output
    assert "Use mine(15) (up to 15 draft tokens" in done.stdout and f'assistant_strategy="{file}"' in done.stdout
    expected = SpecDecConfig("suffix", {"max_context": 8}, max_draft_tokens=15, schedule="constant")
    assert SpecDecConfig.from_file(file) == expected
    model = hf_specdec.enable(AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32))
    inputs = make_tokenizer()(bench_tests.QUESTIONS[0], return_tensors="pt")
    call = {**inputs, "max_new_tokens": 20, "do_sample": False}
    assert torch.equal(model.generate(**call), model.generate(**call, assistant_strategy=str(file)))
    again = ["generate", "--model", str(folder / "target"), "--strategy", str(file), "--prompt", "the cat"]
    assert CliRunner().invoke(app, [*again, "--max-new-tokens", "4"]).exit_code == 0


def test_what_is_saved_has_no_defaults_and_says_what_it_was_measured_on(folder, tmp_path, clock, no_forecast) -> None:
    clock(lambda label, unit: 1.5 if label == "auto" else 1.1)
    file = tmp_path / "mine.yaml"
    done = command(folder, "--strategy", "auto", "--save", str(file))
    assert done.exit_code == 0, done.output
    *comments, content = file.read_text().splitlines()
    assert content == "strategy: auto"
    facts = dict(each.removeprefix("# ").split(": ", 1) for each in comments)
    assert datetime.fromisoformat(facts["Chosen by hf-specdec plan"]) <= datetime.now(timezone.utc)
    assert facts["model"] == f"{folder / 'target'}, float32"
    assert f"threads {torch.get_num_threads()}, device " in facts["machine"]
    assert facts["prompts"] == "4 of questions, beside 2 that chose; 1 per call, at temperature 0"
    assert "Use auto (" in done.stdout and f"{facts['figures']} on prompts like these." in done.stdout


def test_nothing_is_saved_where_nothing_pays(folder, tmp_path, clock, no_forecast) -> None:
    clock(lambda label, unit: 0.8)
    file = tmp_path / "mine.yaml"
    done = command(folder, "--strategy", "suffix", "--save", str(file))
    assert done.exit_code == 0, done.output
    assert "Do not use speculation here: the best, suffix" in done.stdout and f"{file} was not written." in done.stdout
    assert not file.exists() and "In Python" not in done.stdout


def test_costs_that_cannot_be_measured_do_not_take_the_verdict_with_them(
    folder, tmp_path, clock, no_forecast, monkeypatch
) -> None:
    clock(lambda label, unit: 2.0)

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise SpecDecError("No room.")

    monkeypatch.setattr(strategy_plan, "measure_costs", refuse)
    file, costs = tmp_path / "mine.yaml", tmp_path / "costs.json"
    done = command(folder, "--strategy", "suffix", "--save", str(file), "--save-costs", str(costs))
    assert done.exit_code == 0 and f"Costs were not saved to {costs}. No room." in done.stdout
    assert file.exists() and not costs.exists()


@pytest.mark.slow
def test_a_whole_plan_with_its_costs(folder, tmp_path) -> None:
    """Everything is measured, costs included; the profile is one that the adaptive schedule loads."""
    file = tmp_path / "costs.json"
    done = command(folder, "--max-new-tokens", "6", "--save-costs", str(file))
    assert done.exit_code == 0, done.output
    assert "auto" in done.stdout and "prompt_lookup(10)" in done.stdout and "x plain generate (" in done.stdout
    model = hf_specdec.enable(AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32))
    inputs = make_tokenizer()(bench_tests.QUESTIONS[0], return_tensors="pt")
    profiled = SpecDecConfig("suffix", schedule={"name": "adaptive", "profile": str(file)})
    call = {**inputs, "max_new_tokens": 20, "do_sample": False}
    assert torch.equal(model.generate(**call), model.generate(**call, assistant_strategy=profiled))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--draft-model", "x", "--strategy", "suffix"], "--strategy draft_model:model=NAME"),
        (["--save", "nowhere/at/all.yaml"], "there is no directory"),
        (["--save", "all.json"], "end in .yaml"),
        (["--save-costs", "nowhere/at/all.json"], "there is no directory"),
        (["--nodes", "4"], "--nodes goes with --tree"),
        (["--label", "x"], "--label goes with --results"),
        (["--prompt", "x"], "--prompt goes with --layers"),
        (["--context", "9"], "--context goes with --tree or --results or --acceptance"),
        (["--tree", "--limit", "0"], "--limit does not go with --tree"),
        (["--layers", "--tree"], "--tree does not go with --layers"),
        (["--results", "x", "--acceptance", "0.5"], "--acceptance does not go with --results"),
        (["--acceptance", "0.5"], "Give --strategy once"),
        (["--acceptance", "0.5", "--strategy", "suffix", "--strategy", "free"], "Give --strategy once"),
        (["--strategy", "sufix"], "suffix"),
        (["--limit", "0"], "limit=0"),
        (["--repeats", "0"], "repeats=0"),
    ],
    ids=str,
)
def test_options_that_make_no_plan_are_refused(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(commands.plan_app, ["--model", "absent", *arguments], env={"COLUMNS": "300"})
    assert done.exit_code == 2 and message in done.output


@pytest.mark.parametrize("mode", [[], ["--acceptance", "0.5"]], ids=["the whole answer", "a length table"])
def test_files_that_cannot_be_written_or_added_to_are_refused_before_the_model_is_loaded(mode, tmp_path) -> None:
    (tmp_path / "folder.yaml").mkdir()
    for name, content in (("list.json", "[]"), ("text.json", "no costs"), ("other.json", '{"format": "other"}')):
        (tmp_path / name).write_text(content)
    cases = [("--save-costs", "folder.yaml", "is a directory")]
    cases += [("--save-costs", f"{name}.json", "file of costs") for name in ("list", "text", "other")]
    for option, name, told in cases + ([] if mode else [("--save", "folder.yaml", "is a directory")]):
        arguments = ["--model", "absent", "--strategy", "suffix", *mode, option, str(tmp_path / name)]
        done = CliRunner().invoke(commands.plan_app, arguments, env={"COLUMNS": "300"})
        assert done.exit_code == 2 and option in done.output and told in done.output, (name, done.output)


def test_a_file_of_costs_is_taken(tmp_path) -> None:
    save_costs(tmp_path / "costs.json", "elsewhere", CostModel.measured({1: 1.0}))
    commands.check_places(None, str(tmp_path / "costs.json"))
    commands.check_places(str(tmp_path / "new.yaml"), str(tmp_path / "new.json"))
