"""The run of the harness on a tiny model: rows, resume, processes, failures, what it counts."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate import PartialState
from text_models import make_model, make_tokenizer, save_models
from typer.testing import CliRunner

import hf_specdec
from hf_specdec import DraftStrategy, SpecDecError, register_strategy
from hf_specdec.cli import app
from hf_specdec_eval import rows as row_files
from hf_specdec_eval.bench import make_units, run_bench
from hf_specdec_eval.config import RunConfig
from hf_specdec_eval.measure import Meter
from hf_specdec_eval.methods import Method
from hf_specdec_eval.task import Sample, load_samples, load_task

QUESTIONS = [
    "the cat sat on the mat and the cat sat on the",
    "rewrite: the dog sat on the cat",
    "the mat and the mat and the mat",
    "a cat and a dog and a cat",
    "sat on the mat and sat on the",
    "the dog and the cat and the dog",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models `target`, `chat` and `draft`, and a task file `task.yaml` of six questions."""
    folder = tmp_path_factory.mktemp("bench")
    save_models(make_tokenizer(), folder, ("target", "draft", "chat"))
    (folder / "questions.jsonl").write_text("".join(json.dumps({"question": each}) + "\n" for each in QUESTIONS))
    task = {
        "version": 1,
        "name": "questions",
        "description": "six questions",
        "dataset": {"path": "json", "data_files": "questions.jsonl", "split": "train"},
        "prompt": "question",
        "max_new_tokens": 12,
    }
    (folder / "task.yaml").write_text(yaml.safe_dump(task))
    return folder


def configuration(folder: Path, output: Path, **changes: Any) -> RunConfig:
    values: dict[str, Any] = {
        "model": str(folder / "target"),
        "strategies": ["suffix", f"small@draft_model:model={folder / 'draft'},max_draft_tokens=3"],
        "tasks": [],
        "task_files": [str(folder / "task.yaml")],
        "dtype": "float32",
        "repeats": 2,
        "output": str(output),
        "warm_up_tokens": 2,
    }
    return RunConfig.from_dict({**values, **changes})


def rows_of(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "rows.jsonl").read_text().splitlines()]


def texts_of(directory: Path) -> dict[Any, Any]:
    """What each method wrote, without the times."""
    return {
        (row["repeat"], row["unit"], label): [turn["token_ids"] for turn in entry["turns"]]
        for row in rows_of(directory)
        for label, entry in row["methods"].items()
    }


def test_a_run_leaves_four_files_and_says_what_was_measured(folder, tmp_path):
    results = run_bench(configuration(folder, tmp_path / "out"))
    assert results is not None
    directory = tmp_path / "out"
    names = {each.name for each in directory.iterdir()}
    assert names == {"run.json", "rows.jsonl", "results.json", "report.md", "report.html"}
    assert json.loads((directory / "results.json").read_text()) == json.loads(json.dumps(results))
    rows = rows_of(directory)
    assert [(row["repeat"], row["unit"]) for row in rows] == [(repeat, unit) for repeat in (0, 1) for unit in range(6)]
    labels = ["plain", "stock_prompt_lookup", "stock_assistant", "suffix", "small"]
    assert [each["label"] for each in results["methods"]] == labels
    assert len({tuple(row["order"]) for row in rows}) > 1, "methods run in one fixed order"
    for row in rows:
        assert sorted(row["order"]) == sorted(labels) == sorted(row["methods"])
        plain = row["methods"]["plain"]["turns"][0]
        for label in labels:
            turn = row["methods"][label]["turns"][0]
            assert row["methods"][label]["error"] is None
            assert turn["token_ids"] == plain["token_ids"]
            assert 0 < turn["prefill_seconds"] < turn["seconds"]
            assert (turn["speculation"] is None) == (label not in ("suffix", "small"))
        assert plain["target_forwards"] == len(plain["token_ids"][0]) == 12
        sources = row["methods"]["small"]["turns"][0]["token_sources"]
        assert len(sources[0]) == 12 and set(sources[0]) <= {0, 1}
    assert results["identity"]["suffix"]["identical"] == results["identity"]["suffix"]["compared"] > 0
    assert results["failures"] == []
    assert 0 < results["time"]["own_share"]


def test_sampled_texts_agree_with_plain_under_the_same_seed(folder, tmp_path):
    results = run_bench(configuration(folder, tmp_path / "out", temperature=1.5, repeats=1, limit=3))
    assert results is not None
    for label in ("suffix", "small"):
        assert results["identity"][label]["identical"] == results["identity"][label]["compared"] == 3
    texts = texts_of(tmp_path / "out")
    assert len({json.dumps(text) for (_, _, label), text in texts.items() if label == "plain"}) == 3


def test_batches_leave_out_what_takes_one_prompt_at_a_time(folder, tmp_path):
    results = run_bench(configuration(folder, tmp_path / "out", batch_size=4, repeats=1))
    assert results is not None
    assert [each["label"] for each in results["methods"]] == ["plain", "suffix", "small"]
    assert any("one prompt at a time" in each for each in results["notes"])
    assert [len(row["samples"]) for row in rows_of(tmp_path / "out")] == [4, 2]
    assert results["identity"]["suffix"]["compared"] == 6


def test_units_hold_samples_of_one_task_with_equal_turns():
    def sample(number: int, turns: int) -> Sample:
        return Sample(f"t/{number}", "t", "t", ("hi",) * turns, {}, 4, (), None, None)

    task = load_task("builtin")
    units = make_units([task], [[sample(0, 1), sample(1, 1), sample(2, 2), sample(3, 2), sample(4, 2)]], 2)
    assert [[each.id for each in unit.samples] for unit in units] == [["t/0", "t/1"], ["t/2", "t/3"], ["t/4"]]
    assert [unit.number for unit in units] == [0, 1, 2]


def test_tokens_are_counted_alike_whether_a_row_ends_by_itself_by_a_stop_or_not():
    tokenizer = make_tokenizer()
    model = hf_specdec.enable(make_model(len(tokenizer), seed=1).eval())
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    meter = Meter(model, tokenizer, 0.0, 0)
    end, cat, dog = tokenizer.eos_token_id, *(tokenizer(each)["input_ids"][0] for each in ("cat", "dog"))
    assert meter._cut([cat, dog, end, end, end], ()) == [cat, dog, end]
    assert meter._cut([cat, dog, cat], ()) == [cat, dog, cat]
    stop = tokenizer.decode([dog])
    assert meter._cut([cat, dog, end, end], (stop,)) == [cat, dog]
    assert meter._cut([cat, cat, end, end], (stop,)) == [cat, cat, end]


def test_turns_go_on_with_the_answers_before(folder):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    model = hf_specdec.enable(make_model(len(tokenizer), seed=1).eval())
    meter = Meter(model, tokenizer, 0.0, 0)
    sample = Sample("t/0", "t", "t", ("the cat", "the dog"), {}, 5, (), None, "be brief")
    entry = meter.run(Method("plain", "plain"), [sample], None)
    assert entry["error"] is None and len(entry["turns"]) == 2
    said = tokenizer(f"system: be brief\nuser: the cat\nassistant: {entry['turns'][0]['text'][0]}\nuser: the dog\n")
    assert entry["turns"][1]["prompt_tokens"] == [len(said["input_ids"])]


@register_strategy("fails_on_dogs")
class FailsOnDogs(DraftStrategy):
    """Raises where the prompt has the token of its class attribute."""

    token = -1
    default_draft_tokens = 4
    needs = "nothing"

    def build(self, target: Any, request: Any) -> Any:
        if self.token in request.input_ids.flatten().tolist():
            raise RuntimeError("no dogs\n please")
        return hf_specdec.Suffix().build(target, request)

    def to_dict(self) -> dict[str, Any]:
        return {}


def test_a_strategy_that_raises_on_one_prompt_is_named_and_the_rest_is_measured(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(FailsOnDogs, "token", make_tokenizer()("rewrite")["input_ids"][0])
    results = run_bench(configuration(folder, tmp_path / "out", strategies=["fails_on_dogs", "suffix"], repeats=1))
    assert results is not None
    assert [(each["unit"], each["method"], each["samples"]) for each in results["failures"]] == [
        (1, "fails_on_dogs", [rows_of(tmp_path / "out")[1]["samples"][0]["id"]])
    ]
    assert "no dogs" in results["failures"][0]["error"]
    cells = results["tables"][0]["cells"]
    assert (cells["fails_on_dogs"]["prompts"], cells["suffix"]["prompts"]) == (5, 6)


def test_a_method_that_cannot_run_at_all_stops_the_run_before_anything_is_measured(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(FailsOnDogs, "token", make_tokenizer()(QUESTIONS[0])["input_ids"][0])
    with pytest.raises(SpecDecError, match="fails_on_dogs cannot run here, nothing was measured"):
        run_bench(configuration(folder, tmp_path / "out", strategies=["fails_on_dogs"]))


# ----------------------------------------------------------------------------------------------- nothing is lost


def test_resume_measures_what_is_missing_and_nothing_twice(folder, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run_bench(configuration(folder, whole))
    run_bench(configuration(folder, cut))
    lines = (cut / "rows.jsonl").read_bytes().splitlines(keepends=True)
    (cut / "rows.jsonl").write_bytes(b"".join(lines[:5]) + lines[5][:40])
    for name in ("results.json", "report.md", "report.html"):
        (cut / name).unlink()
    run_bench(configuration(folder, cut), resume=True)
    assert (cut / "rows.jsonl").read_bytes().splitlines(keepends=True)[:5] == lines[:5]
    assert texts_of(cut) == texts_of(whole)
    assert (cut / "report.html").exists()
    run_bench(configuration(folder, cut), resume=True)
    assert texts_of(cut) == texts_of(whole)


def test_a_torn_last_line_is_told_and_a_broken_one_before_it_is_refused(tmp_path):
    row = {"unit": 0, "repeat": 0, "methods": {}}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n" + '{"unit": 1, "rep')
    told: list[str] = []
    assert row_files.read_rows(tmp_path, told.append) == [row]
    assert len(told) == 1 and "last line" in told[0]
    with row_files.RowFile(path) as file:
        file.write({**row, "unit": 1})
    assert [each["unit"] for each in row_files.read_rows(tmp_path, told.append)] == [0, 1]
    path.write_text("nonsense\n" + json.dumps(row) + "\n")
    with pytest.raises(SpecDecError, match="line 1"):
        row_files.read_rows(tmp_path, told.append)


def test_another_configuration_and_rows_without_resume_are_refused(folder, tmp_path):
    out = tmp_path / "out"
    run_bench(configuration(folder, out, limit=1, repeats=1))
    kept = (out / "rows.jsonl").read_bytes()
    with pytest.raises(SpecDecError, match="--resume"):
        run_bench(configuration(folder, out, limit=1, repeats=1))
    for resume in (False, True):
        with pytest.raises(SpecDecError, match=r"another configuration .seed was 0 there and is 1 now"):
            run_bench(configuration(folder, out, limit=1, repeats=1, seed=1), resume=resume)
    assert (out / "rows.jsonl").read_bytes() == kept


def test_a_full_disk_keeps_the_rows_before(folder, tmp_path, monkeypatch):
    real, calls = os.fsync, []

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 4:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(row_files.os, "fsync", full)
    with pytest.raises(SpecDecError, match=r"No space left.*--resume"):
        run_bench(configuration(folder, tmp_path / "out"))
    monkeypatch.undo()
    assert 2 <= len(rows_of(tmp_path / "out")) <= 4
    run_bench(configuration(folder, tmp_path / "out"), resume=True)
    assert len(rows_of(tmp_path / "out")) == 12


def launch(folder: Path, output: Path, *more: str, processes: int = 0) -> list[str]:
    """The command line of a run of its own."""
    start = [sys.executable, str(Path(__file__).parent.parent / "eval" / "run.py")]
    if processes:
        start = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", str(processes)]
        start += ["--main_process_port", "0", "-m", "hf_specdec_eval.run"]
    options = ["--model", str(folder / "target"), "--task-file", str(folder / "task.yaml"), "--dtype", "float32"]
    options += ["--strategy", "suffix", "--repeats", "2", "--output", str(output)]
    return [*start, *options, *more]


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


@pytest.mark.slow
def test_two_processes_give_the_rows_and_texts_of_one(folder, tmp_path):
    subprocess.run(launch(folder, tmp_path / "one"), check=True, env=ENVIRONMENT, capture_output=True)
    command = launch(folder, tmp_path / "two", processes=2)
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert texts_of(tmp_path / "one") == texts_of(tmp_path / "two")
    assert {row["process"] for row in rows_of(tmp_path / "two")} == {0, 1}
    assert not list((tmp_path / "two").glob("rows-*"))
    assert json.loads(done.stdout.strip().splitlines()[-1])["tasks"]["questions"]["fastest"] == "suffix"


def test_a_launcher_that_starts_one_process_in_place_of_two_is_not_believed(folder, tmp_path, monkeypatch):
    for name, value in {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SpecDecError, match="--multi_gpu"):
        run_bench(configuration(folder, tmp_path / "out"))


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_rows_of_an_undisturbed_one(folder, tmp_path):
    subprocess.run(launch(folder, tmp_path / "one"), check=True, env=ENVIRONMENT, capture_output=True)
    process = subprocess.Popen(
        launch(folder, tmp_path / "killed"), env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    path = tmp_path / "killed" / "rows.jsonl"
    until = time.monotonic() + 120
    while time.monotonic() < until and (not path.exists() or path.read_bytes().count(b"\n") < 3):
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "the run was over before it was killed"
    before = path.read_bytes().splitlines(keepends=True)
    assert 3 <= len(before) < 12
    subprocess.run(launch(folder, tmp_path / "killed", "--resume"), check=True, env=ENVIRONMENT, capture_output=True)
    assert texts_of(tmp_path / "killed") == texts_of(tmp_path / "one")
    whole = [line for line in before if line.endswith(b"\n")]
    assert path.read_bytes().splitlines(keepends=True)[: len(whole)] == whole


# ---------------------------------------------------------------------------------------------- command line


def test_the_last_line_on_standard_output_is_one_json_object(folder, tmp_path):
    command = launch(folder, tmp_path / "out", "--limit", "2")[2:]
    result = CliRunner().invoke(app, ["bench", *command])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout.strip().splitlines()[-1])
    assert told["output"] == str(tmp_path / "out")
    assert told["tasks"]["questions"]["identical"] == told["tasks"]["questions"]["compared"] == 2


def test_a_command_leaves_its_process_group_before_it_ends(folder, tmp_path, monkeypatch):
    """Else torch's threads may abort the interpreter as it ends, and a run that is done counts as failed."""
    left = []
    monkeypatch.setattr(PartialState, "destroy_process_group", lambda self: left.append(self.num_processes))
    command = launch(folder, tmp_path / "out", "--limit", "2")[2:]
    assert CliRunner().invoke(app, ["bench", *command]).exit_code == 0
    assert left == [1]


def test_a_yaml_file_holds_a_whole_run_and_options_go_before_it(folder, tmp_path):
    values = configuration(folder, tmp_path / "out").to_dict()
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    result = CliRunner().invoke(app, ["bench", "--config", str(tmp_path / "run.yaml"), "--repeats", "1"])
    assert result.exit_code == 0, result.output
    assert len(rows_of(tmp_path / "out")) == 6
    assert RunConfig.from_dict(json.loads((tmp_path / "out" / "run.json").read_text())).repeats == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--strategy", "sufix"], "'suffix'"),
        (["--strategy", "suffix:max_contxt=3"], "'max_context'"),
        (["--strategy", "suffix", "--strategy", "suffix"], "given twice"),
        (["--task", "gsm8"], "'gsm8k'"),
        (["--dtype", "bfloat61"], "'bfloat16'"),
        (["--repeats", "0"], "at least 1"),
        (["--temperature", "-1"], "at least 0"),
        (["--draft-lengths", "1,x"], "1,2,4,8"),
        (["--data-dir", "a", "--data-dir", "b"], "--data-dir"),
        (["--data-dir", "builtn=a"], "'builtin'"),
        (["--config", "missing.yaml"], "missing.yaml"),
    ],
)
def test_bad_options_are_one_line_and_status_2(folder, tmp_path, arguments, told):
    base = ["bench", "--output", str(tmp_path / "out"), "--model", str(folder / "target")]
    base += ["--strategy", "prompt_lookup"]
    result = CliRunner().invoke(app, [*base, *arguments])
    assert result.exit_code == 2
    assert told in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr


def test_a_run_without_a_strategy_is_refused(folder, tmp_path):
    with pytest.raises(SpecDecError, match="--strategy suffix"):
        run_bench(configuration(folder, tmp_path / "out", strategies=[]))


def test_a_missing_model_is_one_line(folder, tmp_path):
    command = ["bench", "--model", str(tmp_path / "nothing"), "--task-file", str(folder / "task.yaml")]
    command += ["--strategy", "suffix"]
    result = CliRunner().invoke(app, [*command, "--output", str(tmp_path / "out")])
    assert result.exit_code == 2 and "cannot be loaded" in " ".join(result.stderr.split())


def test_strategies_are_read_from_texts_files_and_mappings(folder, tmp_path):
    (tmp_path / "mine.yaml").write_text("strategy: suffix\nstrategy_options: {max_context: 8}\nmax_draft_tokens: 5\n")
    given = ["suffix:max_context=8,max_draft_tokens=5", str(tmp_path / "mine.yaml"), str(folder / "draft")]
    given.append({"label": "named", "strategy": "prompt_lookup", "verifier": "rejection"})
    first, second, third, fourth = RunConfig.from_dict({"model": "m", "strategies": given}).strategies
    assert first.config == second.config
    assert (first.label, second.label) == (given[0], "mine")
    assert third.draft_model == str(folder / "draft") and third.config["strategy"] == "draft_model"
    assert (fourth.label, fourth.config["verifier"]) == ("named", "rejection")


def test_a_sweep_runs_each_strategy_once_per_length():
    config = RunConfig.from_dict({"model": "m", "strategies": ["suffix", "prompt_lookup"]}).with_lengths([1, 4])
    assert [each.label for each in config.strategies] == [
        "suffix(1)",
        "suffix(4)",
        "prompt_lookup(1)",
        "prompt_lookup(4)",
    ]
    assert [each.config["max_draft_tokens"] for each in config.strategies] == [1, 4, 1, 4]


def test_the_builtin_task_needs_no_network(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    samples = load_samples(load_task("builtin"), None, None)
    assert len(samples) == 48 and len({each.part for each in samples}) == 6
    assert torch.tensor([len(each.turns) for each in samples]).eq(1).all()
