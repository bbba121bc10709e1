"""A run's results and rows as `report.md` and `report.html`: both say the same, the page also draws it.

The report only arranges and words what `results.json` holds. One thing it computes itself: acceptance over all tasks,
from the counts in the rows.
"""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from hf_specdec import SpecDecError

from .charts import charts
from .config import PLAIN
from .headline import legend
from .page import Grid, render_page, token_texts
from .rows import write_atomically
from .summary import FEWEST_UNITS

SCHEMA_VERSION = 1


def write_report(
    results: dict[str, Any],
    rows: list[dict[str, Any]],
    directory: Path,
    texts: int = 6,
    decode: Callable[[list[int]], list[str]] | None = None,
) -> None:
    """Write `report.md` and `report.html`.

    Args:
        results: what `results.json` holds.
        rows: the lines of `rows.jsonl`.
        texts: prompts whose tokens the page shows by where they came from.
        decode: the text piece of each token id; without it the page shows no token texts and says so.

    Raises:
        SpecDecError: the results have another schema version.
    """
    if results.get("schema_version") != SCHEMA_VERSION:
        raise SpecDecError(
            f"These results have schema version {results.get('schema_version')!r} and a report is made of version "
            f"{SCHEMA_VERSION}; run the benchmark again, or make the report with the release that measured."
        )
    title, sentences = headline(results)
    facts, grids = _facts(results), _grids(results)
    shown = _shown_method(results, rows)
    token_text = token_texts(rows, shown, texts, decode) if decode and shown else []
    if shown and texts and decode is None:
        sentences = [*sentences, "No texts are shown: the report was made without the tokenizer."]
    config = json.dumps(results["config"], indent=2, ensure_ascii=False)
    page = render_page(
        title=title,
        sentences=sentences,
        subtitle=" · ".join(value for _, value in facts.rows[:4]),
        charts=charts(results, rows),
        grids=[facts, *grids],
        texts=token_text,
        config=config,
    )
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(directory / "report.html", page)
    write_atomically(directory / "report.md", markdown(title, sentences, [facts, *grids], config))


def headline(results: dict[str, Any]) -> tuple[str, list[str]]:
    """The fastest method, by how much, how sure that is, and whether its text is plain's: a title and sentences."""
    label = fastest(results)
    if label is None:
        return "No method could be compared with plain generate", _reservations(results)
    cells = _cells(results, label)
    low, high = min(cell["speedup"] for cell in cells.values()), max(cell["speedup"] for cell in cells.values())
    factor = f"{low:.2f}x" if len(cells) == 1 else f"{low:.2f}x to {high:.2f}x"
    over = next(iter(cells)) if len(cells) == 1 else f"{len(cells)} tasks"
    faster = [task for task, cell in cells.items() if not cell["within_noise"] and cell["speedup"] > 1]
    if faster:
        title = f"{label} is fastest: {factor} the speed of plain generate on {over}"
    elif all(cell["speedup_interval"] is None for cell in cells.values()):
        title = f"Too few prompts to tell what is noise; {label} comes first with {factor} on {over}"
    else:
        title = f"No method is faster than plain generate beyond noise; {label} comes first with {factor} on {over}"
    sentences = [_certainty(cells, results["confidence"]), _same_text(results, label)]
    sentences += [*_rivals(results, label), *_reservations(results)]
    return title, [sentence for sentence in sentences if sentence]


def fastest(results: dict[str, Any], kind: str | None = None) -> str | None:
    """The method with the largest geometric mean of speed-ups, of those compared on most tasks; None without one."""
    labels = [m["label"] for m in results["methods"] if m["label"] != PLAIN and kind in (None, m["kind"])]
    scores = {}
    for label in labels:
        if cells := _cells(results, label):
            scores[label] = (len(cells), geometric_mean(cell["speedup"] for cell in cells.values()))
    return max(scores, key=lambda label: scores[label]) if scores else None


def _cells(results: dict[str, Any], label: str) -> dict[str, dict[str, Any]]:
    """A method's cells by task, parts left out, where it could be compared."""
    found = {table["task"]: table["cells"].get(label) for table in results["tables"] if table["part"] == "all"}
    return {task: cell for task, cell in found.items() if cell and cell["speedup"]}


def _certainty(cells: dict[str, dict[str, Any]], confidence: float) -> str:
    parts = []
    for task, cell in cells.items():
        said = f"{task} {cell['speedup']:.2f}x (no interval: it needs {FEWEST_UNITS} prompts)"
        if cell["speedup_interval"]:
            low, high = cell["speedup_interval"]
            noise = ", within noise" if cell["within_noise"] else ""
            said = f"{task} {cell['speedup']:.2f}x ({low:.2f} to {high:.2f}, {cell['prompts']} prompts{noise})"
        parts.append(said)
    return f"How sure, at {confidence:.0%} confidence: {'; '.join(parts)}."


def _same_text(results: dict[str, Any], label: str) -> str:
    method = next(method for method in results["methods"] if method["label"] == label)
    found = results["identity"].get(label)
    parts = [f"{label} is lossy: its text may be another than the target's"] if not method["lossless"] else []
    if method["lossless"] and method["verifier"] not in (None, "exact"):
        parts.append(f"Verifier {method['verifier']} keeps the law of the text, not the text itself")
    if found and found["compared"]:
        same, compared = found["identical"], found["compared"]
        gaps = [each["gap"] for each in found["divergences"] if each.get("gap") is not None]
        near = f"; where they part, the target's own logits are at most {max(gaps):.2g} apart" if gaps else ""
        parts.append(f"Same text as plain generate in {same} of {compared} answers{near}")
    return ". ".join(parts) + "." if parts else ""


def _rivals(results: dict[str, Any], label: str) -> list[str]:
    """Methods that may be as fast, and the package's best where the winner is not its own."""
    sentences = []
    mine = _cells(results, label)
    close = []
    for method in results["methods"]:
        other = _cells(results, method["label"])
        pairs = [(mine[task]["speedup_interval"], other[task]["speedup_interval"]) for task in mine if task in other]
        if method["label"] not in (PLAIN, label) and pairs and all(_overlap(*pair) for pair in pairs):
            close.append(method["label"])
    if close:
        sentences.append(f"Not settled: the intervals of {', '.join(close)} overlap with those of {label}.")
    own = fastest(results, kind="ours")
    if own and not any(m["label"] == label and m["kind"] == "ours" for m in results["methods"]):
        factors = ", ".join(f"{cell['speedup']:.2f}x on {task}" for task, cell in _cells(results, own).items())
        sentences.append(f"The fastest of this package is {own}: {factors}.")
    return sentences


def _overlap(one: list[float] | None, other: list[float] | None) -> bool:
    return one is not None and other is not None and one[0] <= other[1] and other[0] <= one[1]


def _reservations(results: dict[str, Any]) -> list[str]:
    """What failed, and what the run has to say about itself."""
    failed: dict[str, set[str]] = {}
    for failure in results["failures"]:
        failed.setdefault(failure["method"], set()).update(failure["samples"])
    named = ", ".join(f"{label} ({len(prompts)})" for label, prompts in failed.items())
    first = [f"Failed, and left out on both sides of the comparison (number of prompts): {named}."] if failed else []
    return [*first, *results.get("notes", [])]


def _shown_method(results: dict[str, Any], rows: list[dict[str, Any]]) -> str | None:
    """Whose texts are shown: the fastest of ours, else one that answered at all."""
    labels = [fastest(results, kind="ours"), *(m["label"] for m in results["methods"] if m["kind"] == "ours")]
    answered = {label for row in rows for label, found in row["methods"].items() if found["turns"]}
    return next((label for label in labels if label in answered), None)


def _facts(results: dict[str, Any]) -> Grid:
    source, time = results["provenance"], results["time"]
    machine = source["machine"]
    where = ", ".join(f"{name} {machine[name]}" for name in machine if name != "device")
    rows = [
        ("model", str(source["model"])),
        ("weights", str(source["dtype"])),
        ("device", str(machine["device"])),
        ("date", str(source["date"])),
        ("machine", where),
        ("commit", str(source["commit"] or "not known")),
        ("seed, processes", f"{source['seed']}, {source['processes']}"),
        ("versions", ", ".join(f"{name} {version}" for name, version in source["versions"].items())),
        (
            "time",
            f"{_duration(time['wall_seconds'])}, of which {_duration(time['measured_seconds'])} measured, "
            f"{_duration(time['warm_up_seconds'])} warm-up, {time['own_share']:.1%} the harness's own work",
        ),
    ]
    return Grid("What was run", ("", ""), rows)


def _grids(results: dict[str, Any]) -> list[Grid]:
    tasks = list(dict.fromkeys(table["task"] for table in results["tables"]))
    grids = [_task_grid(results, task) for task in tasks]
    grids += [grid for task in tasks for grid in _part_grids(results, task)]
    grids += [_trade_grid(results, tasks), _failure_grid(results), _rounds_grid(results), _divergence_grid(results)]
    return [grid for grid in grids if grid.rows]


def _task_grid(results: dict[str, Any], task: str) -> Grid:
    """The table of one task, all its parts together."""
    cells = next(t["cells"] for t in results["tables"] if t["task"] == task and t["part"] == "all")
    quality = [entry for entry in results["quality"] if entry["task"] == task and entry["part"] == "all"]
    metrics = [entry for entry in quality if entry["values"] is not None]
    columns = ["method", "tokens/s", "speed-up", "decoding alone", "tokens per forward", "mean acceptance length"]
    columns += ["acceptance rate", "same text", *(entry["metric"] for entry in metrics), "peak memory", "prompts"]
    rows, speeds = [], []
    for method in results["methods"]:
        label, cell = method["label"], cells.get(method["label"])
        if not cell:
            continue
        speeds.append(cell["speedup"] or 0.0)
        accepted = cell["acceptance"] or {"mean_acceptance_length": None, "draft_acceptance_rate": None}
        rows.append(
            [
                _name(method),
                _spread(cell),
                _speedup(cell, label),
                _speedup(cell, label, "decode_"),
                _number(cell["tokens_per_forward"]),
                _number(accepted["mean_acceptance_length"]),
                _number(accepted["draft_acceptance_rate"], "{:.1%}"),
                _identical(results, label, task),
                *(_number(entry["values"].get(label), "{:.3f}") for entry in metrics),
                _memory(cell["peak_memory_bytes"]),
                str(cell["prompts"]),
            ]
        )
    best = speeds.index(max(speeds)) if any(speeds) else None
    notes = [
        f"Speed-up: total tokens over total seconds, method over plain, on the units both finished, with the "
        f"{results['confidence']:.0%} interval over prompts. tokens/s: in brackets the spread over repeats.",
        *legend(results),
        *(f"{entry['metric']}: {entry['note']}" for entry in quality if entry.get("note")),
    ]
    return Grid(task, columns, rows, notes, best)


def _part_grids(results: dict[str, Any], task: str) -> list[Grid]:
    """Speed-ups, and each metric, by part of a task that has several."""
    labels = [method["label"] for method in results["methods"]]
    parts = {t["part"]: t["cells"] for t in results["tables"] if t["task"] == task and t["part"] != "all"}
    others = [label for label in labels if label != PLAIN and any(label in cells for cells in parts.values())]
    speeds = [[part, *(_speedup(cells.get(label), label) for label in others)] for part, cells in parts.items()]
    grids = [Grid(f"{task}: speed-up by part", ("part", *others), speeds)]
    found = [e for e in results["quality"] if e["task"] == task and e["part"] != "all" and e["values"] is not None]
    for metric in dict.fromkeys(entry["metric"] for entry in found):
        rows = [
            [entry["part"], *(_number(entry["values"].get(label), "{:.3f}") for label in labels)]
            for entry in found
            if entry["metric"] == metric
        ]
        grids.append(Grid(f"{task}: {metric} by part", ("part", *labels), rows))
    return grids


def _trade_grid(results: dict[str, Any], tasks: list[str]) -> Grid:
    """Quality against speed, a line a method."""
    measured = [e for e in results["quality"] if e["part"] == "all" and e["values"] is not None]
    columns, rows = ["method"], [[_name(method)] for method in results["methods"]]
    cells = {table["task"]: table["cells"] for table in results["tables"] if table["part"] == "all"}
    for task in tasks:
        metrics = [entry for entry in measured if entry["task"] == task]
        columns += [f"{task}: speed-up", *(f"{task}: {entry['metric']}" for entry in metrics)]
        for row, method in zip(rows, results["methods"]):
            row.append(_speedup(cells[task].get(method["label"]), method["label"]))
            row += [_against(entry["values"], method["label"]) for entry in metrics]
    for row, method in zip(rows, results["methods"]):
        row.append(_identical(results, method["label"]))
    notes = ["Same text: answers identical to plain's, all tasks together. In brackets: the difference from plain."]
    return Grid("Quality against speed", [*columns, "same text"], rows, notes)


def _failure_grid(results: dict[str, Any]) -> Grid:
    rows = [[f["method"], f["task"], ", ".join(f["samples"]), f["error"]] for f in results["failures"]]
    return Grid("Failures", ("method", "task", "prompts", "error"), rows)


def _rounds_grid(results: dict[str, Any]) -> Grid:
    """The counts behind the acceptance figures, and the time shares, for each task."""
    columns = ["method", "task", "num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens"]
    columns += ["acceptance_histogram", "acceptance_by_depth", "prefill", "draft", "verify", "overhead"]
    rows = []
    for method in results["methods"]:
        for task, cell in _cells(results, method["label"]).items():
            if counts := cell["acceptance"]:
                totals = [str(counts[name]) for name in columns[2:5]]
                histogram = " ".join(str(count) for count in counts["acceptance_histogram"])
                rates = " ".join(f"{rate:.2f}" for rate in counts["acceptance_by_depth"])
                shares = [_number((cell["time_share"] or {}).get(name), "{:.1%}") for name in columns[-4:]]
                rows.append([method["label"], task, *totals, histogram, rates, *shares])
    return Grid("Rounds and their time", columns, rows, folded=True)


def _divergence_grid(results: dict[str, Any]) -> Grid:
    rows = [
        [label, each["sample"], str(each["turn"] + 1), str(each["position"] + 1), _number(each.get("gap"), "{:.3g}")]
        for label, found in results["identity"].items()
        for each in found["divergences"]
    ]
    notes = ["Gap: between the logits that the target itself gives plain's token and the other one. Near 0: a tie."]
    columns = ("method", "prompt", "turn", "token", "gap")
    return Grid("Where texts part from plain's", columns, rows, notes, folded=True)


def _name(method: dict[str, Any]) -> str:
    return method["label"] if method["lossless"] else f"{method['label']} (lossy)"


def _speedup(cell: dict[str, Any] | None, label: str, prefix: str = "") -> str:
    if not cell or cell[f"{prefix}speedup"] is None:
        return "–"
    text, interval = f"{cell[f'{prefix}speedup']:.2f}x", cell[f"{prefix}speedup_interval"]
    if label == PLAIN:
        return text
    if interval is None:
        return f"{text}, no interval"
    noise = ", within noise" if interval[0] <= 1 <= interval[1] else ""
    return f"{text} ({interval[0]:.2f}–{interval[1]:.2f}){noise}"


def _spread(cell: dict[str, Any]) -> str:
    speeds = [speed for speed in cell["tokens_per_second_by_repeat"] if speed is not None]
    spread = f" ({min(speeds):.1f}–{max(speeds):.1f})" if len(speeds) > 1 else ""
    return _number(cell["tokens_per_second"], "{:.1f}") + spread


def _identical(results: dict[str, Any], label: str, task: str | None = None) -> str:
    """How many of a method's texts are plain's, in all or in one task."""
    found = results["identity"].get(label)
    if found and task is not None:
        found = found["by_task"].get(task)
    return f"{found['identical']} of {found['compared']}" if found else "–"


def _against(values: dict[str, float], label: str) -> str:
    value, plain = values.get(label), values.get(PLAIN)
    if value is None or plain is None or label == PLAIN:
        return _number(value, "{:.3f}")
    return f"{value:.3f} ({value - plain:+.3f})"


def _number(value: float | None, form: str = "{:.2f}") -> str:
    return "–" if value is None else form.format(value)


def _memory(size: int | None) -> str:
    return "–" if size is None else f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def markdown(title: str, sentences: Sequence[str], grids: Sequence[Grid], config: str) -> str:
    """The report as GitHub-flavoured Markdown; all text is escaped, so none of it is read as markup."""
    lines = [f"# {_escape(title)}", ""]
    for sentence in sentences:
        lines += [_escape(sentence), ""]
    for grid in grids:
        lines += [f"## {_escape(grid.title)}", "", _line(grid.columns), _line(["---"] * len(grid.columns), plain=True)]
        lines += [*(_line(row) for row in grid.rows), ""]
        for note in grid.notes:
            lines += [_escape(note), ""]
    return "\n".join([*lines, "## Settings of the run", "", "```json", config, "```", ""])


def _line(cells: Sequence[str], plain: bool = False) -> str:
    return "| " + " | ".join(cell if plain else _escape(cell) for cell in cells) + " |"


def _escape(text: str) -> str:
    """`text` on one line, without meaning in Markdown or HTML."""
    return re.sub(r"[\\`*\[\]<>|~#$&]|\b_|_\b", r"\\\g<0>", " ".join(text.split()))
