"""Tasks: the schema of task files, local data, samples, and the tasks that come with the package."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml

from hf_specdec import SpecDecError
from hf_specdec.demo_prompts import PROMPTS
from hf_specdec_eval import task as task_module
from hf_specdec_eval.quality import METRICS
from hf_specdec_eval.task import load_samples, load_task, task_names

ROWS = [{"question": f"What is {n} + {n}?", "level": ["easy", "hard"][n % 3 > 0], "sum": str(2 * n)} for n in range(9)]
PLAIN: dict[str, Any] = {
    "version": 1,
    "name": "sums",
    "description": "Sums.",
    "dataset": {"path": "json", "data_files": "sums.jsonl"},
    "prompt": "question",
    "max_new_tokens": 8,
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def make(tmp_path: Path):
    """Writes a task file with these keys instead of `PLAIN`'s, and its rows; gives the file's path."""

    def write(rows: list[dict[str, Any]] | None = None, without: tuple[str, ...] = (), **keys: Any) -> Path:
        write_rows(tmp_path / "sums.jsonl", ROWS if rows is None else rows)
        values = {key: value for key, value in {**PLAIN, **keys}.items() if key not in without}
        path = tmp_path / "sums.yaml"
        path.write_text(yaml.safe_dump(values))
        return path

    return write


def one(path: Path | str, **options: Any) -> Any:
    return load_samples(load_task(path), limit=1, **options)[0]


# The tasks that come with the package


def test_every_task_of_the_package_keeps_its_file_name_and_what_its_metrics_want() -> None:
    named = "alpaca builtin cnn_dailymail gsm8k humaneval mbpp mt_bench spec_bench".split()
    assert set(named) <= set(task_names())
    for name in task_names():
        task = load_task(name)
        assert task.name == name
        for metric in task.metrics:
            allowed = {*METRICS[metric].required, *METRICS[metric].optional}
            assert set(METRICS[metric].required) <= set(task.reference) <= allowed


def test_builtin_is_a_fair_mixture_from_the_start() -> None:
    samples = load_samples(load_task("builtin"))
    assert Counter(each.part for each in samples) == dict.fromkeys(
        ["chat", "rewriting", "summarising", "code_edit", "extraction", "maths"], 8
    )
    assert len({each.part for each in samples[:6]}) == 6
    assert len({each.id for each in samples}) == len({each.turns for each in samples}) == 48
    assert load_samples(load_task("builtin"), limit=13) == samples[:13]
    assert sum(len(each.turns[0].split()) > 150 for each in samples) >= 8
    assert not {each.turns[0] for each in samples} & {each.text for each in PROMPTS}


def test_spec_bench_has_six_parts_and_asks_the_first_turn(tmp_path: Path) -> None:
    categories = "writing roleplay reasoning math coding extraction stem humanities".split()
    categories += "translation summarization qa math_reasoning rag".split() * 3
    rows = [
        {"question_id": number, "category": category, "turns": [f"ask {number}", "and then?"]}
        for number, category in enumerate(categories)
    ]
    write_rows(tmp_path / "data" / "spec_bench_some.jsonl", rows)
    samples = load_samples(load_task("spec_bench"), limit=12, data_dir=tmp_path / "data")
    parts = "multi_turn translation summarisation question_answering maths retrieval".split()
    assert [each.part for each in samples] == parts * 2
    assert [each.turns for each in samples[:2]] == [("ask 0",), ("ask 8",)]
    assert samples[1].id == "spec_bench/8"


@pytest.mark.parametrize(
    ("name", "row", "turns", "reference"),
    [
        (
            "mt_bench",
            {"prompt": ["First?", "Second?"], "prompt_id": 1, "category": "stem", "reference": []},
            ("First?", "Second?"),
            {},
        ),
        (
            "humaneval",
            {
                "task_id": "HumanEval/0",
                "prompt": "def f():\n",
                "canonical_solution": "",
                "test": "def check(f): ...",
                "entry_point": "f",
            },
            ("def f():\n",),
            {"prompt": "def f():\n", "test": "def check(f): ...", "entry_point": "f"},
        ),
        (
            "mbpp",
            {
                "source_file": "x",
                "task_id": 2,
                "prompt": "Write f.",
                "code": "",
                "test_imports": [],
                "test_list": ["assert f(1)", "assert f({2})"],
            },
            (
                "Write f. Your code should pass these tests:\n\n```python\nassert f(1)\nassert f({2})\n```\n\n"
                "Answer with one Python code block.",
            ),
            {"setup": [], "test": ["assert f(1)", "assert f({2})"]},
        ),
        (
            "gsm8k",
            {"question": "1 + {1}?", "answer": "#### 2"},
            ("1 + {1}?\n\nSolve this step by step, and give the answer as a number on the last line.",),
            {"answer": "#### 2"},
        ),
        (
            "cnn_dailymail",
            {"article": "It rained.", "highlights": "Rain.", "id": "a"},
            ("Summarise this news article in three or four sentences.\n\nIt rained.",),
            {"summary": "Rain."},
        ),
        ("alpaca", {"instruction": "Greet.", "input": "", "output": "Hi", "text": ""}, ("Greet.",), {}),
    ],
)
def test_tasks_read_the_columns_of_their_data_sets(
    tmp_path: Path, name: str, row: dict[str, Any], turns: tuple[str, ...], reference: dict[str, Any]
) -> None:
    path = write_rows(tmp_path / "any.jsonl", [row])
    sample = one(name, data_dir={name: path})
    assert sample.turns == turns and sample.reference == reference


def test_a_hub_data_set_is_loaded_by_its_id(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(*positional: Any, **named: Any) -> datasets.Dataset:
        asked.append((positional, named))
        return datasets.Dataset.from_list([{"question": "How many?", "answer": "#### 2"}])

    monkeypatch.setattr(task_module, "load_dataset", load)
    assert one("gsm8k").id == "gsm8k/0"
    assert asked == [(("openai/gsm8k", "main"), {"split": "test", "revision": None, "data_files": None})]


# Task files


def test_a_task_file_becomes_samples(make) -> None:
    path = make(
        prompt="{question} ({level})",
        part="level",
        parts={"easy": "warm_up", "hard": "main"},
        reference={"answer": "sum"},
        chat=False,
        system="Be brief.",
        stop="\n",
        metrics=["exact_match"],
    )
    samples = load_samples(load_task(path))
    assert [each.id for each in samples] == [f"sums/{n}" for n in (0, 1, 3, 2, 6, 4, 5, 7, 8)]
    assert [each.part for each in samples] == ["warm_up", "main"] * 3 + ["main"] * 3
    first = samples[0]
    assert first.turns == ("What is 0 + 0? (easy)",) and first.reference == {"answer": "0"}
    assert (first.chat, first.system, first.stop, first.max_new_tokens) == (False, "Be brief.", ("\n",), 8)


def test_without_parts_the_part_is_the_task_and_rows_keep_their_order(make) -> None:
    samples = load_samples(load_task(make()), limit=4)
    assert [(each.part, each.id) for each in samples] == [("sums", f"sums/{n}") for n in range(4)]


@pytest.mark.parametrize("suffix", ["csv", "parquet", "json"])
def test_other_formats_and_several_files(make, tmp_path: Path, suffix: str) -> None:
    whole = datasets.Dataset.from_list(ROWS)
    for number, piece in enumerate((whole.select(range(4)), whole.select(range(4, 9)))):
        getattr(piece, f"to_{suffix}")(tmp_path / f"piece{number}.{suffix}")
    path = make(dataset={"path": suffix, "split": "test[:7]", "data_files": [f"piece0.{suffix}", f"piece1.{suffix}"]})
    assert [each.turns[0] for each in load_samples(load_task(path))] == [row["question"] for row in ROWS[:7]]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"promt": "question"}, "'promt'. Did you mean 'prompt'"),
        ({"dataset": {"path": "json", "data_file": "x"}}, "'data_file'. Did you mean 'data_files'"),
        ({"without": ("version",)}, "has no `version`"),
        ({"version": 2}, "has version 2"),
        ({"without": ("description",)}, "has no `description`"),
        ({"dataset": {"data_files": "sums.jsonl"}}, "has no `path`"),
        ({"dataset": {"path": "json"}}, "no `data_files`"),
        ({"dataset": "gsm8k"}, "a mapping with `path`"),
        ({"turns": "question"}, "one of `prompt` and `turns`"),
        ({"prompt": None}, "one of `prompt` and `turns`"),
        ({"parts": {"easy": "a"}}, "`parts` of"),
        ({"max_turns": 1}, "`max_turns` of"),
        ({"max_new_tokens": 0}, "a whole number above 0"),
        ({"max_new_tokens": True}, "a whole number above 0"),
        ({"chat": "yes"}, "true or false"),
        ({"stop": [1]}, "a list of texts"),
        ({"reference": {"answer": 1}}, "a mapping of texts"),
        ({"name": "a/b"}, "letters, digits"),
        ({"prompt": "Sum {question"}, "is no template"),
        ({"prompt": "Sum {{}}"}, "no column in it"),
        ({"prompt": "{question.x}"}, "no column; write"),
        ({"prompt": "{}"}, "no column; write"),
    ],
)
def test_a_task_file_that_breaks_the_schema_is_refused(make, keys: dict[str, Any], said: str) -> None:
    path = make(**keys)
    with pytest.raises(SpecDecError) as error:
        load_task(path)
    assert said in str(error.value) and str(path) in str(error.value)


@pytest.mark.parametrize("content", ["- a\n- b\n", "", "name: [a\n"])
def test_a_file_that_holds_no_mapping_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "odd.yaml"
    path.write_text(content)
    with pytest.raises(SpecDecError, match=r"odd\.yaml"):
        load_task(path)


def test_unknown_tasks_and_absent_files_are_named() -> None:
    with pytest.raises(SpecDecError, match="Did you mean 'gsm8k'"):
        load_task("gsm9k")
    with pytest.raises(SpecDecError, match=r"nowhere\.yaml"):
        load_task("nowhere.yaml")


# Data that do not fit


@pytest.mark.parametrize(
    "keys",
    [{"prompt": "questoin"}, {"prompt": "{questoin}?"}, {"reference": {"answer": "questoin"}}, {"part": "questoin"}],
)
def test_a_missing_column_is_named_with_the_columns_seen(make, tmp_path: Path, keys: dict[str, Any]) -> None:
    with pytest.raises(SpecDecError) as error:
        one(make(**keys))
    for said in (
        "'questoin'",
        "Did you mean 'question'",
        "level, question, sum",
        "'sums'",
        str(tmp_path / "sums.jsonl"),
    ):
        assert said in str(error.value)


@pytest.mark.parametrize(
    ("rows", "keys", "said"),
    [
        ([{"question": "a"}, {"question": " "}], {}, "Row 1 of"),
        ([{"question": "a"}, {"question": None}], {}, "Row 1 of"),
        ([{"question": 1}], {}, "Row 0 of"),
        ([{"question": ["a"]}, {"question": []}], {"turns": "question", "prompt": None}, "Row 1 of"),
        ([{"question": "a"}], {"turns": "question", "prompt": None}, "no list of texts"),
        ([{"question": "a", "level": "x"}, {"question": "b", "level": None}], {"part": "level"}, "Row 1 of"),
        ([{"question": "a", "level": "hrd"}], {"part": "level", "parts": {"hard": "main"}}, "Did you mean 'hard'"),
        ([], {}, "The task 'sums' has no rows"),
    ],
)
def test_a_row_that_does_not_fit_is_named(make, rows: list[dict[str, Any]], keys: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecDecError) as error:
        load_samples(load_task(make(rows, **keys)))
    assert said in str(error.value) and "sums.jsonl" in str(error.value)


@pytest.mark.parametrize("content", ['{"question": "a"}\n{"question": "b', "<html>not found</html>", "\x00\x01"])
def test_a_broken_file_is_named(make, tmp_path: Path, content: str) -> None:
    path = make()
    (tmp_path / "sums.jsonl").write_text(content)
    with pytest.raises(SpecDecError, match=r"'sums' cannot load .*sums\.jsonl.*Check that the files"):
        one(path)


def test_an_absent_file_is_named(make, tmp_path: Path) -> None:
    path = make()
    (tmp_path / "sums.jsonl").unlink()
    with pytest.raises(SpecDecError, match=r"sums\.jsonl"):
        one(path)


@pytest.mark.parametrize(
    "failure",
    [ConnectionError("Couldn't reach the hub"), datasets.exceptions.DatasetNotFoundError("no such data set")],
)
def test_a_failed_download_says_what_to_do(monkeypatch: pytest.MonkeyPatch, failure: Exception) -> None:
    def load(*positional: Any, **named: Any) -> None:
        raise failure from OSError("connection reset by peer")

    monkeypatch.setattr(task_module, "load_dataset", load)
    with pytest.raises(SpecDecError) as error:
        one("gsm8k")
    for said in ("'gsm8k'", "openai/gsm8k (main)", str(failure), "connection reset by peer", "--data-dir"):
        assert said in str(error.value)


def test_no_samples_cannot_be_asked_for(make) -> None:
    with pytest.raises(SpecDecError, match="limit=0"):
        load_samples(load_task(make()), limit=0)


# Local copies


def test_the_file_of_a_directory_is_the_tasks_own_before_one_that_starts_like_it(tmp_path: Path) -> None:
    write_rows(tmp_path / "data" / "gsm8k_train.jsonl", [{"question": "from train", "answer": ""}])
    assert "from train" in one("gsm8k", data_dir=tmp_path / "data").turns[0]
    write_rows(tmp_path / "data" / "gsm8k.jsonl", [{"question": "from gsm8k", "answer": ""}])
    assert "from gsm8k" in one("gsm8k", data_dir=str(tmp_path / "data")).turns[0]


def test_two_files_or_none_are_an_error_that_lists_them(tmp_path: Path) -> None:
    data = tmp_path / "data"
    for name in ("gsm8k_dev.jsonl", "gsm8k_train.jsonl"):
        write_rows(data / name, [{"question": name, "answer": ""}])
    with pytest.raises(SpecDecError, match=r"more than one file.*gsm8k_dev\.jsonl, gsm8k_train\.jsonl.*gsm8k=FILE"):
        one("gsm8k", data_dir=data)
    assert "gsm8k_dev" in one("gsm8k", data_dir={"gsm8k": data / "gsm8k_dev.jsonl"}).turns[0]
    with pytest.raises(SpecDecError, match=r"no file for the task 'mbpp'.*gsm8k_dev\.jsonl"):
        one("mbpp", data_dir=data)
    with pytest.raises(SpecDecError, match="no file for the task 'builtin'"):
        one("builtin", data_dir={"builtin": data})


@pytest.mark.parametrize("place", ["nowhere", "readme.txt"])
def test_a_place_without_data_is_an_error(tmp_path: Path, place: str) -> None:
    (tmp_path / "readme.txt").write_text("no data")
    for given in (tmp_path / place, {"gsm8k": tmp_path / place}):
        with pytest.raises(SpecDecError, match=f"{place}, which is no directory"):
            one("gsm8k", data_dir=given)


def test_a_task_with_local_data_needs_no_copy(make, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert one("builtin", data_dir=tmp_path / "empty").id == "builtin/0"
    assert one(make(), data_dir=tmp_path / "empty").id == "sums/0"
    assert one("builtin", data_dir={"gsm8k": tmp_path / "empty"}).id == "builtin/0"
    write_rows(tmp_path / "empty" / "builtin.jsonl", [{"prompt": "mine", "part": "chat"}])
    assert one("builtin", data_dir=tmp_path / "empty").turns == ("mine",)
