"""The report of a synthetic run: what it says, that nothing in it is read as markup, and how a browser renders it."""

import copy
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from markdown_it import MarkdownIt

from hf_specdec import SpecDecError
from hf_specdec_eval.charts import charts, pooled, sweeps
from hf_specdec_eval.headline import legend, tables
from hf_specdec_eval.page import token_texts
from hf_specdec_eval.provenance import provenance
from hf_specdec_eval.report import fastest, headline, write_report

EVIL = '<script>alert("x")</script>|`_*$m$&amp;'
PARTS = {"builtin": ["chat", "rewriting", "maths"], "gsm8k": ["gsm8k"]}
PIECES = ["The", " quick", " brown", " fox", ".", "\n", " over", " <b>", " the", " lazy", " dog", " déjà", "  "]
SKILL = {"suffix": 0.6, "prompt_lookup(1)": 0.55, "prompt_lookup(4)": 0.5, "prompt_lookup(8)": 0.45, EVIL: 0.05}
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def decode(ids: list[int]) -> list[str]:
    return [PIECES[token % len(PIECES)] for token in ids]


def method(label: str) -> dict[str, Any]:
    length = re.search(r"\((\d)\)", label)
    kind = "plain" if label == "plain" else "ours" if label in SKILL else "stock"
    return {
        "label": label,
        "kind": kind,
        "lossless": label != EVIL,
        "verifier": "exact" if kind == "ours" else None,
        "strategy": label.split("(")[0] if kind == "ours" else None,
        "max_draft_tokens": int(length[1]) if length else None,
    }


def turn(label: str, tokens: int, random: Random) -> dict[str, Any]:
    """An answer whose rounds accept a geometric number of up to 8 drafts."""
    ids = [random.randrange(len(PIECES)) for _ in range(tokens)]
    found: dict[str, Any] = {"token_ids": [ids], "text": ["".join(decode(ids))], "speculation": None}
    found |= {"prompt_tokens": [50], "prefill_seconds": 0.2, "target_forwards": tokens, "token_sources": None}
    if label not in SKILL:
        return found | {"seconds": 0.2 + 0.04 * tokens / (1.4 if label != "plain" else 1)}
    limit = method(label)["max_draft_tokens"] or 8
    sources, histogram, judged, accepted = [0], [0] * (limit + 1), [0] * limit, [0] * limit
    while len(sources) < tokens:
        hits = next((depth for depth in range(limit) if random.random() > SKILL[label]), limit)
        histogram[hits] += 1
        for depth in range(limit):
            judged[depth] += depth <= hits
            accepted[depth] += depth < hits
        sources += [1] * hits + [0]
    spec = {"acceptance_histogram": histogram, "drafted_at_depth": judged, "accepted_at_depth": accepted}
    forwards = sum(histogram) + 1
    seconds = 0.2 + 0.045 * forwards * random.uniform(0.9, 1.1)
    return found | {
        "seconds": seconds,
        "target_forwards": forwards,
        "speculation": spec,
        "token_sources": [sources[:tokens]],
    }


def make_rows(labels: list[str], units: int = 8) -> list[dict[str, Any]]:
    rows = []
    numbers = [(task, PARTS[task][i % len(PARTS[task])], i) for task in PARTS for i in range(units)]
    for unit, (task, part, number) in enumerate(numbers):
        for repeat in range(2):
            entries = {}
            for label in labels:
                random = Random(f"{unit}")  # one text for all methods
                turns = [turn(label, 60 + 5 * number, random)]
                failed = label == "prompt_lookup(8)" and unit == 2
                error = f"RuntimeError: {EVIL}\nsecond line" if failed else None
                entries[label] = {"error": error, "turns": [] if failed else turns, "peak_memory_bytes": 400 << 20}
            name = f"{task}/{number}" + (EVIL if unit == 0 else "")
            row = {"unit": unit, "repeat": repeat, "task": task, "samples": [{"id": name, "part": part}]}
            rows.append(row | {"order": labels, "process": 0, "methods": entries})
    suffix = rows[0]["methods"]["suffix"]["turns"][0]["token_ids"][0]
    suffix[5] += 1
    return rows


def cell(rows: list[dict[str, Any]], label: str) -> dict[str, Any]:
    both = [row for row in rows if row["methods"][label]["turns"] and row["methods"]["plain"]["turns"]]
    turns = [row["methods"][label]["turns"][0] for row in both]
    plain = [row["methods"]["plain"]["turns"][0] for row in both]
    seconds, prefill = sum(t["seconds"] for t in turns), sum(t["prefill_seconds"] for t in turns)
    tokens = sum(len(t["token_ids"][0]) for t in turns)
    speedup = sum(t["seconds"] for t in plain) / seconds
    histograms = [t["speculation"]["acceptance_histogram"] for t in turns if t["speculation"]]
    counts = [sum(column) for column in zip(*histograms)]
    ours, steps, hits = label in SKILL, sum(counts), sum(i * count for i, count in enumerate(counts))
    return {
        "prompts": len({row["unit"] for row in both}),
        "tokens": tokens,
        "seconds": seconds,
        "prefill_seconds": prefill,
        "decode_seconds": seconds - prefill,
        "tokens_per_second": tokens / seconds,
        "tokens_per_second_by_repeat": [tokens / seconds * 0.98, tokens / seconds * 1.02],
        "speedup": speedup,
        "speedup_interval": [speedup * 0.85, speedup * 1.2],
        "within_noise": speedup * 0.85 <= 1 <= speedup * 1.2,
        "decode_speedup": speedup * 1.05,
        "decode_speedup_interval": [speedup * 0.9, speedup * 1.3],
        "peak_memory_bytes": 3 << 29,
        "tokens_per_forward": tokens / sum(t["target_forwards"] for t in turns),
        "acceptance": {
            "mean_acceptance_length": 1 + hits / steps,
            "draft_acceptance_rate": 0.4321,
            "acceptance_histogram": counts,
            "acceptance_by_depth": [0.5, 0.25],
            "num_spec_steps": steps,
            "num_draft_tokens": 8 * steps,
            "num_accepted_draft_tokens": hits,
        }
        if ours
        else None,
        "time_share": {"prefill": 0.1, "draft": 0.02, "verify": 0.82, "overhead": 0.06} if ours else None,
    }


def make_results(rows: list[dict[str, Any]]) -> dict[str, Any]:
    labels = list(rows[0]["methods"])
    tables = []
    for task, parts in PARTS.items():
        own = [row for row in rows if row["task"] == task]
        for part in ["all", *(parts if len(parts) > 1 else [])]:
            chosen = [row for row in own if part in ("all", row["samples"][0]["part"])]
            tables.append({"task": task, "part": part, "cells": {label: cell(chosen, label) for label in labels}})
    failed = [(row, label) for row in rows for label in labels if row["methods"][label]["error"]]
    parted = {"sample": rows[0]["samples"][0]["id"], "turn": 0, "position": 5, "gap": 0.1234}
    by_task = {task: {"identical": 8, "compared": 8} for task in PARTS}
    whole = {"identical": 16, "compared": 16, "by_task": by_task, "divergences": []}
    same = {label: whole for label in labels if label != "plain"}
    by_task = by_task | {"builtin": {"identical": 7, "compared": 8}}
    accuracy = {label: 0.25 if label == EVIL else 0.5 for label in labels}
    none = {"task": "builtin", "part": "all", "metric": "pass_at_1", "values": None, "note": "code was not run"}
    return {
        "schema_version": 1,
        "provenance": {
            "date": "2030-01-02T03:04:05",
            "versions": {"torch": "9.8", "transformers": "7.6"},
            "commit": "abc1234",
            "machine": {"cpu": "Some CPU", "threads": 2, "device": "cpu"},
            "model": "some/model",
            "dtype": "bfloat16",
            "seed": 17,
            "processes": 1,
        },
        "config": {"model": "some/model", "note": EVIL},
        "confidence": 0.99,
        "methods": [method(label) for label in labels],
        "notes": ["A note of the run."],
        "tables": tables,
        "failures": [
            {"unit": row["unit"], "task": row["task"], "samples": [s["id"] for s in row["samples"]], "method": label}
            | {"error": row["methods"][label]["error"]}
            for row, label in failed
        ],
        "quality": [{"task": "gsm8k", "part": "all", "metric": "gsm8k_accuracy", "values": accuracy}, none],
        "identity": same | {"suffix": whole | {"identical": 15, "by_task": by_task, "divergences": [parted]}},
        "time": {
            "wall_seconds": 1234.0,
            "measured_seconds": 1200.0,
            "warm_up_seconds": 12.0,
            "own_seconds": 5.0,
            "own_share": 0.004,
        },
    }


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return make_rows(["plain", "stock_prompt_lookup", *SKILL])


@pytest.fixture(scope="module")
def results(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return make_results(rows)


@pytest.fixture(scope="module")
def directory(results: dict[str, Any], rows: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "new"
    before = copy.deepcopy((results, rows))
    write_report(results, rows, path, texts=4, decode=decode)
    assert (results, rows) == before
    return path


@pytest.fixture(scope="module")
def page(directory: Path) -> str:
    return (directory / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def text(directory: Path) -> str:
    return (directory / "report.md").read_text(encoding="utf-8")


class Reader(HTMLParser):
    """Tags with their attributes, the text of the page, and its tables."""

    def __init__(self, page: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.lines: list[list[str]] = []
        self._in_cell = False
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag == "tr":
            self.lines.append([])
        if tag in ("th", "td"):
            self.lines[-1].append("")
        self._in_cell = tag in ("th", "td") or (self._in_cell and tag not in ("tr", "table"))

    def handle_endtag(self, tag: str) -> None:
        self._in_cell = self._in_cell and tag not in ("th", "td")

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._in_cell:
            self.lines[-1][-1] += data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def rendered(text: str) -> Reader:
    return Reader(MarkdownIt("commonmark", {"html": True}).enable("table").render(text))


CHARTS = ["speedup", "speedup-parts-0", "time", "depth", "lengths", "sweep"]


def test_every_chart_is_on_the_page_once(page: str) -> None:
    reader = Reader(page)
    ids = [attributes["id"] for _, attributes in reader.tags if "id" in attributes]
    assert [name for name in ids if name in CHARTS] == CHARTS
    assert len(ids) == len(set(ids))
    assert reader.count("svg") == len(CHARTS)


def test_references_within_a_chart_lead_somewhere(page: str) -> None:
    ids = {attributes.get("id") for _, attributes in Reader(page).tags}
    used = set(re.findall(r'(?:href="|url\()#([^")]+)', page))
    assert used
    assert used <= ids


def test_page_needs_nothing_from_outside(page: str) -> None:
    reader = Reader(page)
    assert not reader.count("script")
    sources = [value for _, tag in reader.tags for name, value in tag.items() if name.endswith(("src", "href"))]
    assert all(value and value.startswith(("#", "data:")) for value in sources)
    assert not re.search(r"url\((?!#)|@import", page)


@pytest.mark.parametrize("kind", ["page", "text"])
def test_no_text_of_a_run_becomes_markup(kind: str, request: pytest.FixtureRequest) -> None:
    document = request.getfixturevalue(kind)
    reader = Reader(document) if kind == "page" else rendered(document)
    assert reader.count("script") == 0
    assert reader.count("b") == 0
    for cells in (EVIL, f"{EVIL} (lossy)", f"builtin/0{EVIL}"):
        assert any(cells in line for line in reader.lines), cells
    assert any(f"RuntimeError: {EVIL}" in " ".join(line) for line in reader.lines)


def test_chart_shows_a_label_as_it_is(page: str) -> None:
    labels = re.findall(r"<text[^>]*>([^<]*)</text>", page)
    start = "&lt;script&gt;alert("
    assert sum(label.startswith(start) for label in labels) >= 2
    assert any(label.startswith(start) and label.endswith("…t&gt;|`_*$m$&amp;amp;") for label in labels)


def test_markdown_and_page_have_the_same_tables(page: str, text: str) -> None:
    def said(lines: list[list[str]]) -> list[list[str]]:
        return sorted([" ".join(cell.split()) for cell in line] for line in lines)

    assert said(Reader(page).lines) == said(rendered(text).lines)


def test_says_what_was_run(text: str) -> None:
    machine = "Some CPU, threads 2"
    for fact in ("some/model", "bfloat16", machine, "2030-01-02", "abc1234", "torch 9.8", "| 17, 1 |", "0.4%"):
        assert fact in text


def test_the_threads_of_a_machine_are_not_called_its_cores() -> None:
    model: Any = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32)
    machine = provenance("some/model", model, 1)["machine"]
    assert machine["threads"] == torch.get_num_threads() and "cores" not in machine


def test_task_table(results: dict[str, Any], text: str) -> None:
    lines = rendered(text).lines
    task = next(table["cells"] for table in results["tables"] if table["task"] == "gsm8k")
    line = next(line for line in lines if line[0] == "suffix" and len(line) == 11)
    found = task["suffix"]
    low, high = found["speedup_interval"]
    assert f"{found['speedup']:.2f}x ({low:.2f}–{high:.2f})" in line
    assert {"43.2%", "8 of 8", "0.500", "1.50 GiB", "8", f"{found['tokens_per_forward']:.2f}"} <= set(line)
    assert any("7 of 8" in line for line in lines), "a table of one task counts another's texts"
    assert any(line[-1] == "15 of 16" for line in lines)
    slow = [line for line in lines if line[0] == f"{EVIL} (lossy)"]
    assert any("within noise" in cell for line in slow for cell in line)
    assert any("0.250 (-0.250)" in line for line in slow)
    assert any(line[0] == "rewriting" for line in lines)
    assert "code was not run" in text


def test_small_parts_are_in_the_report_and_not_on_screen(rows: list[dict[str, Any]], text: str) -> None:
    """Of eight prompts in three parts no part has four; of twelve each has."""
    small, large = (tables(make_results(each)) for each in (rows, make_rows(list(rows[0]["methods"]), units=12)))
    assert [each.title for each in small if not isinstance(each, str)] == ["builtin, all", "gsm8k, all"]
    assert "fewer than 4 prompts each: builtin, chat; builtin, rewriting; builtin, maths." in str(small[2])
    titles = ["builtin, all", "builtin, chat", "builtin, rewriting", "builtin, maths", "gsm8k, all"]
    assert [each.title for each in large if not isinstance(each, str)] == titles
    assert [str(each) for each in large[len(titles) :]] == legend(make_results(rows))
    assert {"chat", "rewriting", "maths"} <= {line[0] for line in rendered(text).lines}


def test_baselines_are_explained_where_they_are(results: dict[str, Any], text: str) -> None:
    (line,) = legend(results)
    assert line.startswith("stock_prompt_lookup: transformers' prompt lookup, ")
    assert line in rendered(text).text
    assert legend(one_method(results, "suffix")) == []
    several = {"methods": [method("stock_assistant_1"), method("stock_assistant_2")]}
    assert len(legend(several)) == 1


def test_failures_are_named_and_counted(text: str) -> None:
    lines = rendered(text).lines
    assert ["prompt_lookup(8)", "builtin", "builtin/2"] in [line[:3] for line in lines]
    assert "(number of prompts): prompt_lookup(8) (1)." in text
    assert "A note of the run." in text


def test_headline_of_a_clear_winner(results: dict[str, Any]) -> None:
    title, sentences = headline(results)
    said = " ".join(sentences)
    speeds = [t["cells"]["suffix"]["speedup"] for t in results["tables"] if t["part"] == "all"]
    assert fastest(results) == "suffix"
    assert (
        title == f"suffix is fastest: {min(speeds):.2f}x to {max(speeds):.2f}x the speed of plain generate on 2 tasks"
    )
    assert "99% confidence" in said
    assert "Same text as plain generate in 15 of 16 answers" in said
    assert "0.12 apart" in said
    assert "Not settled: the intervals of prompt_lookup(4), prompt_lookup(8) overlap" in said


def one_method(results: dict[str, Any], label: str, **changes: Any) -> dict[str, Any]:
    """The results of plain and one method on one task."""
    found = copy.deepcopy(results)
    found["methods"] = [method("plain"), method(label)]
    found["tables"] = [table for table in found["tables"] if table["task"] == "gsm8k"]
    found["tables"][0]["cells"] = {name: found["tables"][0]["cells"][name] for name in ("plain", label)}
    found["tables"][0]["cells"][label].update(changes)
    return found


def test_headline_where_nothing_is_faster(results: dict[str, Any]) -> None:
    noise = one_method(results, "suffix", speedup=1.02, speedup_interval=[0.95, 1.1], within_noise=True)
    assert headline(noise)[0] == (
        "No method is faster than plain generate beyond noise; suffix comes first with 1.02x on gsm8k"
    )
    slow = one_method(results, "suffix", speedup=0.8, speedup_interval=[0.7, 0.9], within_noise=False)
    assert headline(slow)[0].startswith("No method is faster than plain generate")
    single = one_method(results, "suffix", speedup=1.5, speedup_interval=None, within_noise=True)
    assert headline(single)[0] == "Too few prompts to tell what is noise; suffix comes first with 1.50x on gsm8k"
    assert "needs 4 prompts" in headline(single)[1][0]
    assert not any("Not settled" in sentence for sentence in headline(single)[1])


def test_headline_names_a_lossy_winner_and_a_stock_one(results: dict[str, Any]) -> None:
    assert any("lossy" in sentence for sentence in headline(one_method(results, EVIL))[1])
    stock = copy.deepcopy(results)
    for table in stock["tables"]:
        table["cells"]["stock_prompt_lookup"]["speedup"] = 99.0
    assert any("fastest of this package is suffix" in sentence for sentence in headline(stock)[1])


def test_rejection_is_said_to_keep_the_law(results: dict[str, Any]) -> None:
    found = one_method(results, "suffix")
    found["methods"][1]["verifier"] = "rejection"
    assert any("keeps the law of the text" in sentence for sentence in headline(found)[1])


def test_token_texts_show_rounds_and_sources(rows: list[dict[str, Any]]) -> None:
    texts = token_texts(rows, "suffix", 4, decode)
    assert [text.part for text in texts] == ["chat", "rewriting", "maths", "gsm8k"]
    for text, row in zip(texts, (rows[0], rows[2], rows[4], rows[16])):
        answer, turn = text.answers[0], row["methods"]["suffix"]["turns"][0]
        tokens = [token for each in answer.rounds for token in each]
        assert [token.accepted for token in tokens] == [bool(source) for source in turn["token_sources"][0]]
        assert [token.text.replace("↵", "") for token in tokens] == decode(turn["token_ids"][0])
        for each in answer.rounds[:-1]:
            assert [token.accepted for token in each] == [True] * (len(each) - 1) + [False]
    parted = [at for at, token in enumerate(t for r in texts[0].answers[0].rounds for t in r) if token.parted]
    assert parted == [5]
    assert "token 6" in texts[0].answers[0].note
    assert "same text" in texts[1].answers[0].note
    assert len(token_texts(rows, "suffix", 99, decode)) == 16


def test_token_texts_skip_failures_and_take_all_of_a_batch() -> None:
    def entry(ids: list[list[int]]) -> dict[str, Any]:
        return {"error": None, "turns": [{"token_ids": ids, "token_sources": [[0] * len(row) for row in ids]}]}

    failed = {"error": "RuntimeError: x", "turns": []}
    samples = [{"id": "a", "part": "t"}, {"id": "b", "part": "t"}]
    first = {"unit": 0, "repeat": 0, "task": "t", "samples": samples, "methods": {"suffix": failed}}
    again = {**first, "repeat": 1, "methods": {"suffix": entry([[1, 2], [3]]), "plain": failed}}
    texts = token_texts([again, first], "suffix", 5, decode)
    assert [(text.sample, len(text.answers[0].rounds)) for text in texts] == [("a", 2), ("b", 1)]
    assert "plain has no text" in texts[0].answers[0].note


def test_page_marks_tokens_and_asks_for_a_decoder(
    page: str, results: dict[str, Any], rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    assert page.count('<article class="text">') == 4
    assert '<span class="accepted">' in page
    assert page.count(" parted") >= 1
    assert "&lt;b&gt;" in page
    write_report(results, rows, tmp_path)
    bare = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<article" not in bare
    assert "without the tokenizer" in bare


def test_pooled_counts_have_unequal_lengths() -> None:
    def row(*counts: int) -> dict[str, Any]:
        return {"methods": {"suffix": {"turns": [{"speculation": {"acceptance_histogram": list(counts)}}]}}}

    empty = {"methods": {"suffix": {"turns": []}, "plain": {"turns": [{"speculation": None}]}}}
    rows = [row(1, 2), row(3), row(0, 0, 5), empty, {"methods": {}}]
    assert pooled(rows, "suffix", "acceptance_histogram") == [4, 2, 5]
    assert pooled([empty], "plain", "acceptance_histogram") == []


def test_sweeps_are_methods_that_differ_in_length_alone() -> None:
    labels = ["suffix(8)", "suffix(2)", "suffix", "a:max_draft_tokens=1", "a:max_draft_tokens=2,x=1", "b(3)"]
    lengths = [8, 2, None, 1, 2, 3]
    base = {"kind": "ours", "strategy": "s", "verifier": "exact"}
    methods = [{**base, "label": label, "max_draft_tokens": length} for label, length in zip(labels, lengths)]
    found = {name: [m["max_draft_tokens"] for m in group] for name, group in sweeps(methods).items()}
    assert found == {"suffix": [2, 8]}
    methods[0]["verifier"] = "rejection"
    assert sweeps(methods) == {}


def test_charts_only_of_what_there_is(results: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    alone = one_method(results, "stock_prompt_lookup")
    assert [chart.name for chart in charts(alone, rows)] == ["speedup", "time"]
    single = one_method(results, "suffix", speedup_interval=None)
    assert [chart.name for chart in charts(single, rows)] == ["speedup", "time", "depth", "lengths"]
    assert charts(single, rows) == charts(single, rows)


@pytest.mark.parametrize("kept", [["plain"], []])
def test_report_of_a_run_with_nothing_to_compare(results: dict[str, Any], tmp_path: Path, kept: list[str]) -> None:
    found = {**results, "tables": [], "methods": [method(label) for label in kept], "quality": [], "identity": {}}
    write_report(found, [], tmp_path, decode=decode)
    assert "No method could be compared" in (tmp_path / "report.md").read_text(encoding="utf-8")


def test_report_where_a_method_failed_everywhere(
    results: dict[str, Any], rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    nothing = dict.fromkeys(results["tables"][0]["cells"]["suffix"])
    found = copy.deepcopy(results)
    for table in found["tables"]:
        table["cells"]["suffix"] = {**nothing, "prompts": 0, "tokens": 0, "tokens_per_second_by_repeat": [None, None]}
        del table["cells"]["prompt_lookup(1)"]
    write_report(found, rows, tmp_path, decode=decode)
    assert fastest(found) == "prompt_lookup(4)"


def test_another_schema_version_is_refused(results: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(SpecDecError, match=r"schema version 2.*run the benchmark again"):
        write_report({**results, "schema_version": 2}, [], tmp_path)


@pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium to render with")
def test_browser_renders_every_chart_without_complaint(directory: Path, tmp_path: Path) -> None:
    # A hostile run: were anything of it executed, the page's title would change.
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    command += [f"--user-data-dir={tmp_path}", (directory / "report.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    reader = Reader(done.stdout)
    drawn = {attributes.get("aria-labelledby") for tag, attributes in reader.tags if tag == "svg"}
    assert drawn == {f"{name}-title" for name in CHARTS}
    assert not [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert reader.count("script") == 0
