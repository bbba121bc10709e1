"""What a run makes of odd settings, odd names, odd files and texts that end in odd ways."""

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import test_eval_bench as bench_tests
import yaml
from test_eval_bench import configuration, rows_of
from text_models import make_model, make_tokenizer
from typer.testing import CliRunner

import hf_specdec
from hf_specdec import SpecDecError
from hf_specdec.cli import app
from hf_specdec_eval import commands, methods
from hf_specdec_eval import rows as row_files
from hf_specdec_eval.bench import check_names, run_bench
from hf_specdec_eval.config import RunConfig, parse_strategy
from hf_specdec_eval.lossless import Finding, Verdict
from hf_specdec_eval.measure import Meter
from hf_specdec_eval.results import pieces
from hf_specdec_eval.task import Sample, load_task

folder = bench_tests.folder  # the fixture


# ------------------------------------------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tasks", [1]),
        ("tasks", [None]),
        ("task_files", [""]),
        ("data_dir", [3]),
        ("output", 3),
        ("output", ""),
        ("revision", 3),
        ("attention", 3),
        ("device_map", 3),
        ("model", 3),
        ("allow_code_execution", "no"),
        ("allow_code_execution", 1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("seed", 2**64),
        ("strategies", {"suffix": None}),
        ("strategies", [None]),
    ],
)
def test_values_of_a_wrong_type_are_refused_by_name(name, value):
    with pytest.raises(SpecDecError, match="strategy" if value == [None] and name == "strategies" else name):
        RunConfig.from_dict({"model": "m", name: value})


def test_null_is_the_same_as_absent(tmp_path):
    nothing = dict.fromkeys(("tasks", "strategies", "output", "limit", "seed", "dtype", "data_dir"))
    assert RunConfig.from_dict({"model": "m", **nothing}) == RunConfig("m")
    with pytest.raises(SpecDecError, match="needs a model"):
        RunConfig.from_dict({"model": None})


@pytest.mark.parametrize("label", ["plain", "plain_compiled", "stock_prompt_lookup", "stock_assistant"])
def test_a_strategy_cannot_take_the_label_of_a_baseline(label):
    with pytest.raises(SpecDecError, match="label of a baseline"):
        RunConfig.from_dict({"model": "m", "strategies": [f"{label}@suffix"]})


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("suffix:max_context=3,max_context=4", "given twice"),
        ("suffix:verifier=exact,verifier=rejection", "given twice"),
        ("suffix:strategy=prompt_lookup", "'strategy'"),
        ("x@", "label without a strategy"),
        ("@", "label without a strategy"),
        ({"strategy": "draft_model", "strategy_options": {"model": "m", "vocabulary": {1, 2}}}, "no file can hold"),
    ],
)
def test_strategies_that_contradict_themselves_are_refused(given, told):
    with pytest.raises(SpecDecError, match=told):
        parse_strategy(given)


def test_a_path_may_hold_the_sign_that_ends_a_label(tmp_path):
    path = tmp_path / "model@home"
    path.mkdir()
    assert parse_strategy(str(path)).draft_model == str(path)


def test_draft_lengths_without_a_strategy_are_refused():
    with pytest.raises(SpecDecError, match="--strategy"):
        RunConfig("m").with_lengths([1, 2])


# --------------------------------------------------------------------------------------------------------- names


def test_tasks_and_parts_that_tables_cannot_tell_apart_are_refused(folder, tmp_path):
    file = str(folder / "task.yaml")
    with pytest.raises(SpecDecError, match="'questions' is given 2 times"):
        run_bench(configuration(folder, tmp_path / "out", task_files=[file, file]))
    samples = [Sample(f"builtin/{part}", "builtin", part, ("?",), {}, 4, (), None, None) for part in ("all", "b")]
    with pytest.raises(SpecDecError, match="part 'all'"):
        check_names([load_task("builtin")], [samples])
    check_names([load_task("builtin")], [samples[:1]])


def test_a_local_data_set_is_given_once_per_task(folder, tmp_path):
    places = [f"questions={folder / 'questions.jsonl'}", f"questions={tmp_path}"]
    with pytest.raises(SpecDecError, match="given twice"):
        run_bench(configuration(folder, tmp_path / "out", data_dir=places))


def test_labels_and_paths_with_markup_are_shown_as_they_are(folder, tmp_path):
    output = tmp_path / "[bold]out[/x]"
    base = ["bench", "--model", str(folder / "target"), "--task-file", str(folder / "task.yaml"), "--repeats", "1"]
    result = CliRunner().invoke(
        app, [*base, "--limit", "2", "--strategy", "a[/b] :bug:@suffix", "--output", str(output)]
    )
    assert result.exit_code == 0, result.stderr
    assert "a[/b] :bug:" in result.stderr and "[bold]out[/x]" in result.stderr.replace("\n", "")


def test_tokens_with_markup_are_shown_as_they_are(folder, monkeypatch):
    finding = Finding("suffix", "greedy text", False, "furthest apart: '[/INST]' for '[b]'")
    monkeypatch.setattr(commands, "verify", lambda *arguments: Verdict((finding,)))
    result = CliRunner().invoke(app, ["verify", "--model", str(folder / "target"), "--strategy", "suffix"])
    assert result.exit_code == 1, result.exception
    assert result.stdout.count("[/INST]") == 2 and result.stdout.count("[b]") == 2


# ------------------------------------------------------------------------------------------------ files and resume


@pytest.mark.parametrize("broken", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_download_that_was_cut_short_is_one_error(folder, tmp_path, broken):
    shutil.copytree(folder / "target", tmp_path / "cut")
    content = (tmp_path / "cut" / broken).read_bytes()
    (tmp_path / "cut" / broken).write_bytes(content[: len(content) // 2])
    with pytest.raises(SpecDecError, match=r"cut cannot be loaded"):
        run_bench(configuration(folder, tmp_path / "out", model=str(tmp_path / "cut")))
    if broken != "tokenizer.json":
        with pytest.raises(SpecDecError, match=r"cut' cannot be loaded"):
            run_bench(configuration(folder, tmp_path / "out", strategies=[str(tmp_path / "cut")]))


def test_a_draft_model_without_a_name_is_one_error(folder, tmp_path):
    with pytest.raises(SpecDecError, match="cannot be loaded"):
        run_bench(configuration(folder, tmp_path / "out", strategies=["draft_model:model="]))


def test_a_start_that_measured_nothing_does_not_hold_its_output(folder, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(SpecDecError, match="cannot be loaded"):
        run_bench(configuration(folder, out, model=str(tmp_path / "typo")))
    (out / "rows.jsonl").touch()
    run_bench(configuration(folder, out, repeats=1, limit=1))
    assert json.loads((out / "run.json").read_text())["model"] == str(folder / "target")


@pytest.mark.parametrize("content", [b"[]", b"3", b"{", b"\xff\xfe", None])
def test_a_run_whose_settings_are_lost_is_left_alone(folder, tmp_path, content):
    out = tmp_path / "out"
    out.mkdir()
    (out / "results.json").write_text("{}")
    if content is not None:
        (out / "run.json").write_bytes(content)
    for resume in (False, True):
        with pytest.raises(SpecDecError, match=r"run\.json is missing or broken"):
            row_files.prepare_directory(configuration(folder, out), resume)
    assert (out / "results.json").read_text() == "{}"


def test_a_resumed_run_refuses_rows_of_other_prompts(folder, tmp_path):
    for name in ("task.yaml", "questions.jsonl"):
        shutil.copy(folder / name, tmp_path / name)
    options = {"task_files": [str(tmp_path / "task.yaml")], "repeats": 1}
    run_bench(configuration(folder, tmp_path / "out", **options))
    kept = (tmp_path / "out" / "rows.jsonl").read_bytes()
    task = yaml.safe_load((tmp_path / "task.yaml").read_text())
    (tmp_path / "task.yaml").write_text(yaml.safe_dump({**task, "prompt": "Please: {question}"}))
    with pytest.raises(SpecDecError, match="other prompts"):
        run_bench(configuration(folder, tmp_path / "out", **options), resume=True)
    lines = (tmp_path / "questions.jsonl").read_text().splitlines()
    (tmp_path / "task.yaml").write_text(yaml.safe_dump(task))
    (tmp_path / "questions.jsonl").write_text("\n".join(lines[:3]))
    with pytest.raises(SpecDecError, match="other prompts"):
        run_bench(configuration(folder, tmp_path / "out", **options), resume=True)
    assert (tmp_path / "out" / "rows.jsonl").read_bytes() == kept


def test_a_resumed_run_refuses_rows_of_other_methods_before_it_measures(folder, tmp_path):
    out = tmp_path / "out"
    run_bench(configuration(folder, out, repeats=1))
    rows = rows_of(out)
    for row in rows:
        row["methods"]["plain_compiled"] = row["methods"]["plain"]
    (out / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:3]))
    with pytest.raises(SpecDecError, match="plain_compiled"):
        run_bench(configuration(folder, out, repeats=1), resume=True)
    assert len(rows_of(out)) == 3


def test_a_copy_of_the_rows_is_neither_read_nor_removed(folder, tmp_path):
    out = tmp_path / "out"
    run_bench(configuration(folder, out, repeats=1, limit=1))
    for name in ("rows-backup.jsonl", "rows_old.jsonl"):
        (out / name).write_text("not a row\n" * 2)
    run_bench(configuration(folder, out, repeats=1, limit=1), resume=True)
    assert (out / "rows-backup.jsonl").exists() and (out / "rows_old.jsonl").exists()


@pytest.mark.parametrize(
    "line", ["[]", "{}", '{"unit": "x", "repeat": 0, "methods": {}}', '{"unit": 0, "repeat": 0, "methods": []}']
)
def test_a_line_that_is_no_row_is_named(tmp_path, line):
    row = json.dumps({"unit": 0, "repeat": 0, "methods": {}})
    (tmp_path / "rows.jsonl").write_text(f"{line}\n{row}\n")
    with pytest.raises(SpecDecError, match="line 1"):
        row_files.read_rows(tmp_path, print)


def test_a_full_disk_leaves_no_half_report(folder, tmp_path, monkeypatch):
    out = tmp_path / "out"
    real = os.fsync

    def full(descriptor: int) -> None:
        if "report" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(row_files.os, "fsync", full)
    with pytest.raises(SpecDecError, match=r"report\.html cannot be written: .*No space left"):
        run_bench(configuration(folder, out, repeats=1, limit=1))
    assert {each.name for each in out.iterdir()} == {"run.json", "rows.jsonl", "results.json"}


# ------------------------------------------------------------------------------------------------------- methods


def test_a_baseline_that_cannot_run_does_not_stop_the_run(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(methods, "STOCK_LOOKUP_TOKENS", "many")
    results = run_bench(configuration(folder, tmp_path / "out", repeats=1, limit=2))
    assert results is not None
    assert [(each["unit"], each["method"]) for each in results["failures"]] == [
        (0, "stock_prompt_lookup"),
        (1, "stock_prompt_lookup"),
    ]
    cells = results["tables"][0]["cells"]
    assert (cells["stock_prompt_lookup"]["prompts"], cells["suffix"]["prompts"]) == (0, 2)


# --------------------------------------------------------------------------------------------------- ends of texts


@pytest.fixture
def meter() -> Meter:
    """Of a model without an end-of-sequence token and a tokenizer without padding."""
    tokenizer = make_tokenizer()
    tokenizer.pad_token = None
    model = hf_specdec.enable(make_model(len(tokenizer), seed=1).eval())
    model.generation_config.pad_token_id = None
    return Meter(model, tokenizer, 0.0, 0)


def test_without_an_end_of_sequence_every_token_is_text(meter):
    assert meter.pad == 0
    assert meter._cut([5, 0, 7, 0, 0], ()) == [5, 0, 7, 0, 0]


def test_what_comes_after_a_stop_text_is_not_counted(meter):
    cat, dog, mat = (meter.tokenizer(each)["input_ids"][0] for each in ("cat", "dog", "mat"))
    stop = meter.tokenizer.decode([dog])
    assert meter._cut([cat, dog, mat, cat], (stop,)) == [cat, dog], "the row went on while others decoded"
    assert meter._cut([cat, mat, cat], (stop,)) == [cat, mat, cat]
    across = meter.tokenizer.decode([cat, dog])
    assert meter._cut([dog, mat], (across,), [mat, cat]) == [dog], "the stop text begins in the prompt"
    assert meter._cut([mat, mat], (across,), [cat, dog]) == [mat, mat], "the stop text is in the prompt alone"


def test_stock_and_batches_are_cut_where_plain_is(folder, tmp_path):
    """transformers' lookup runs over a stop text, its assistant fails there, and rows without an end token go on."""
    run_bench(configuration(folder, tmp_path / "free", repeats=1))
    texts = [row["methods"]["plain"]["turns"][0]["text"][0] for row in rows_of(tmp_path / "free")]
    task = yaml.safe_load((folder / "task.yaml").read_text())
    task["stop"] = sorted({each for text in texts for each in text[5:] if each.isascii() and each.isalpha()})[:4]
    task["dataset"]["data_files"] = str(folder / "questions.jsonl")
    (tmp_path / "task.yaml").write_text(yaml.safe_dump(task))
    seen = set()
    for size in (1, 3):
        out = tmp_path / f"batch{size}"
        run_bench(configuration(folder, out, repeats=1, batch_size=size, task_files=[str(tmp_path / "task.yaml")]))
        for row in rows_of(out):
            entries = {label: entry for label, entry in row["methods"].items() if label != "stock_assistant"}
            texts = [entry["turns"][0]["token_ids"] for entry in entries.values()]
            assert all(each == texts[0] for each in texts)
            assert size > 1 or "stop strings" in row["methods"]["stock_assistant"]["error"]
            seen |= {len(ids) for ids in texts[0]}
    assert len(seen) > 1 and min(seen) < 12


def test_characters_of_several_tokens_are_shown_whole():
    tokenizer = make_tokenizer()
    text = "the cat 🎉 naïve ☃"
    ids = tokenizer(text)["input_ids"]
    found = pieces(tokenizer, ids)
    assert len(found) == len(ids) > len(text.split()) and "".join(found) == text
    assert not any("\ufffd" in each for each in found)
    broken = ids[: next(at for at, piece in enumerate(found) if "🎉" in piece)]
    assert "".join(pieces(tokenizer, broken)) == tokenizer.decode(broken)


def test_a_yaml_run_with_null_tasks_measures_its_file_only(folder, tmp_path):
    values: dict[str, Any] = configuration(folder, tmp_path / "out", repeats=1, limit=1).to_dict()
    path = Path(tmp_path / "run.yaml")
    path.write_text(yaml.safe_dump({**values, "tasks": None}))
    result = CliRunner().invoke(app, ["bench", "--config", str(path)])
    assert result.exit_code == 0, result.stderr
    assert {row["task"] for row in rows_of(tmp_path / "out")} == {"questions"}


def test_an_error_says_that_a_text_outgrew_the_model(folder):
    class Broken:
        chat_template = None

        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [1] * len(text)}

    model = hf_specdec.enable(make_model(8, seed=1).eval())
    sample = Sample("t/0", "t", "t", ("x" * 2040,), {}, 4, (), None, None)
    broken = methods.Method("plain", "plain", {"no_such_option": 1})
    meter = Meter(model, Broken(), 0.0, 0)  # type: ignore[arg-type]
    entry = meter.run(broken, [sample], 20)
    assert "take up to 2060 tokens, and the model has 2048 positions" in entry["error"]
    assert "positions" not in meter.run(broken, [sample], 4)["error"]
