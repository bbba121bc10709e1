"""Charts of a results file as inline SVG: fonts stay text, colours are the page's CSS variables, output is repeatable.

A chart is 346 units wide, about the width of a phone, so that its text is readable there and it may grow on a desktop.
Methods are told apart by their names, written into the chart, never by colour alone.
"""

import re
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO
from itertools import zip_longest
from typing import Any
from xml.etree import ElementTree

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from .config import PLAIN

FEW_JUDGED = 20  # an acceptance rate from fewer judged tokens is drawn hollow

_WIDTH = 4.8  # inches, of 72 units
_PITCH = 0.44  # inches from one named line to the next
_LABEL_LENGTH = 30  # characters beside a number
_SVG = "http://www.w3.org/2000/svg"
_XLINK = "http://www.w3.org/1999/xlink"
_ROLES = ("ink", "muted", "grid", "card", "ours", "stock", "prefill", "verify", "draft", "overhead", "undivided")
_KIND_ROLES = {"ours": "ours", "stock": "stock", "plain": "stock"}
_TIME_ROLES = {
    "prefill": "prefill",
    "verify": "target's forward passes (verify)",
    "draft": "draft model",
    "overhead": "other work in rounds",
    "undivided": "decoding, not divided",
}
_SERIES = ("ours", "draft", "prefill", "overhead", "stock")
_COLOURS = {role: f"#01{number:02x}01" for number, role in enumerate(_ROLES)}
"""Placeholders that matplotlib draws with; each becomes the CSS variable of its role."""

_STYLE: dict[str, Any] = {
    "axes.edgecolor": _COLOURS["grid"],
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.labelcolor": _COLOURS["muted"],
    "axes.labelsize": 10,
    **dict.fromkeys(("axes.spines.left", "axes.spines.right", "axes.spines.top"), False),
    "axes.titlecolor": _COLOURS["ink"],
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "font.family": "DejaVu Sans",
    "font.size": 11,
    "grid.color": _COLOURS["grid"],
    "grid.linewidth": 0.8,
    "svg.fonttype": "none",
    "svg.hashsalt": "hf_specdec",
    "text.color": _COLOURS["ink"],
    "text.parse_math": False,
    **dict.fromkeys(("xtick.color", "ytick.color"), _COLOURS["muted"]),
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize"), 9.5),
    **dict.fromkeys(("xtick.major.size", "ytick.major.size"), 0),
}


@dataclass(frozen=True)
class Chart:
    """A chart of the page.

    Args:
        name: its id on the page.
        legend: pairs of a colour's role and what it stands for.
        svg: the inline `<svg>` element.
    """

    name: str
    title: str
    caption: str
    svg: str
    legend: tuple[tuple[str, str], ...] = ()


def charts(results: dict[str, Any], rows: list[dict[str, Any]]) -> list[Chart]:
    """All charts that the results have data for, in reading order."""
    methods, tables = results["methods"], results["tables"]
    ours = [method["label"] for method in methods if method["kind"] == "ours"]
    with _style():
        found = [
            *_speedup_charts(tables, methods, results["confidence"]),
            _time_chart(tables, methods),
            _depth_chart(ours, rows),
            _length_chart(ours, rows),
            _sweep_chart(tables, methods),
        ]
    return [chart for chart in found if chart is not None]


def sweeps(methods: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Groups of two or more of our methods that differ in `max_draft_tokens` alone, by their common name."""
    groups: dict[tuple[str, Any, Any], list[dict[str, Any]]] = {}
    for method in methods:
        if method["kind"] == "ours" and method["max_draft_tokens"] is not None:
            name = re.sub(rf"\({method['max_draft_tokens']}\)$", "", method["label"])
            name = re.sub(r"[,:(]?\s*max_draft_tokens=\d+\)?", "", name)
            groups.setdefault((name, method["strategy"], method["verifier"]), []).append(method)
    ordered = {key[0]: sorted(group, key=lambda method: method["max_draft_tokens"]) for key, group in groups.items()}
    return {name: group for name, group in ordered.items() if len({m["max_draft_tokens"] for m in group}) > 1}


def _speedup_charts(tables: list[dict[str, Any]], methods: list[dict[str, Any]], confidence: float) -> Iterator[Chart]:
    """One chart of all tasks, and one of its parts for each task that has several."""
    legend = (("ours", "this package"), ("stock", "transformers"))
    overall = {table["task"]: table["cells"] for table in tables if table["part"] == "all"}
    if svg := _forest(overall, methods):
        caption = (
            f"Tokens per second over those of plain generate, with {confidence:.0%} intervals over prompts. A hollow "
            "mark is within noise: its interval contains 1."
        )
        yield Chart("speedup", "Speed-up by task", caption, svg, legend)
    for number, task in enumerate(overall):
        parts = {t["part"]: t["cells"] for t in tables if t["task"] == task and t["part"] != "all"}
        if svg := _parts_forest(f"speedup-parts-{number}", parts, methods):
            caption = "The same for each part by itself: fewer prompts, so wider intervals."
            yield Chart(f"speedup-parts-{number}", f"Speed-up within {task}", caption, svg, legend)


def _compared(cells: dict[str, dict[str, Any]], methods: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The methods that `cells` compare with plain."""
    return [m for m in methods if m["label"] != PLAIN and (cells.get(m["label"]) or {}).get("speedup") is not None]


def _forest(groups: dict[str, dict[str, dict[str, Any]]], methods: list[dict[str, Any]]) -> str | None:
    """Speed-ups with intervals, a line each under its method's name; tasks under their headings."""
    lines: list[tuple[str, dict[str, Any], str]] = []
    for heading, cells in groups.items():
        shown = _compared(cells, methods)
        lines += [(heading, {}, "ink")] if shown else []
        lines += [(method["label"], cells[method["label"]], _KIND_ROLES[method["kind"]]) for method in shown]
    if not lines:
        return None
    figure = Figure(figsize=(_WIDTH, _PITCH * len(lines) + 0.5))
    axes = figure.add_subplot()
    for height, (label, cell, role) in enumerate(lines):
        if not cell:
            _write(axes, height, label, "", weight="bold", size=12, lower=0.18)
            continue
        interval = cell["speedup_interval"]
        _write(
            axes, height, label, f"{cell['speedup']:.2f}x" + (" ({:.2f}–{:.2f})".format(*interval) if interval else "")
        )
        _mark(axes, height, cell, role, 6.5)
    axes.axvline(1, color=_COLOURS["muted"], linewidth=1.2)
    axes.margins(x=0.06)
    axes.set(xlabel="times plain generate", ylim=(len(lines) - 0.5, -0.65), yticks=[])
    _fill(figure, axes)
    return _svg(figure, "speedup")


def _parts_forest(name: str, parts: dict[str, dict[str, Any]], methods: list[dict[str, Any]]) -> str | None:
    """Speed-ups of the parts of one task, a panel a method."""
    shown = {m["label"]: m for m in methods if any(m in _compared(cells, methods) for cells in parts.values())}
    heights = {part: height for height, part in enumerate(parts)}

    def draw(axes: Axes, label: str) -> None:
        for part, cells in parts.items():
            if shown[label] in _compared(cells, methods):
                _mark(axes, heights[part], cells[label], _KIND_ROLES[shown[label]["kind"]], 4.5)
        axes.axvline(1, color=_COLOURS["muted"], linewidth=1.2)
        axes.set_yticks(range(len(parts)), [_printable(part) for part in parts])
        axes.set_ylim(len(parts) - 0.4, -0.6)

    return _panels(name, list(shown), draw, "times plain generate", height=0.2 * len(parts) + 0.35)


def _mark(axes: Axes, height: float, cell: dict[str, Any], role: str, size: float) -> None:
    """A speed-up and its interval on one line."""
    interval = cell["speedup_interval"] or [cell["speedup"]] * 2
    axes.plot(interval, [height, height], color=_COLOURS[role], linewidth=size / 3, solid_capstyle="round", zorder=4)
    face = _COLOURS["card" if cell["within_noise"] else role]
    axes.plot(cell["speedup"], height, "o", markersize=size, color=_COLOURS[role], markerfacecolor=face, zorder=5)


def _time_chart(tables: list[dict[str, Any]], methods: list[dict[str, Any]]) -> Chart | None:
    """Milliseconds per new token of each method, stacked, over all tasks."""
    bars = [(m["label"], parts) for m in methods if (parts := _time_per_token(tables, m["label"]))]
    if not bars:
        return None
    figure = Figure(figsize=(_WIDTH, _PITCH * len(bars) + 0.5))
    axes = figure.add_subplot()
    for height, (label, parts) in enumerate(bars):
        left = 0.0
        for role, milliseconds in parts.items():
            axes.barh(height, milliseconds, 0.32, left, color=_COLOURS[role], edgecolor=_COLOURS["card"], zorder=4)
            left += milliseconds
        share = f", {parts['overhead'] / left:.0%} other" if "overhead" in parts else ""
        _write(axes, height, label, f"{left:.1f} ms{share}")
    axes.set(xlabel="milliseconds per new token", ylim=(len(bars) - 0.6, -0.7), yticks=[])
    _fill(figure, axes)
    used = {role for _, parts in bars for role in parts}
    legend = tuple((role, text) for role, text in _TIME_ROLES.items() if role in used)
    caption = "Wall clock of generate per new token, all tasks together. Shorter is faster."
    return Chart("time", "Where the time goes", caption, _svg(figure, "time"), legend)


def _time_per_token(tables: list[dict[str, Any]], label: str) -> dict[str, float]:
    """Milliseconds per token by role. Of a method without shares only prefill and the rest are known."""
    tokens = 0
    seconds: dict[str, float] = {}
    for table in tables:
        cell = table["cells"].get(label)
        if table["part"] != "all" or not cell or not cell["tokens"]:
            continue
        tokens += cell["tokens"]
        if shares := cell["time_share"]:
            times = {role: share * cell["seconds"] for role, share in shares.items()}
        else:
            times = {"prefill": cell["prefill_seconds"], "undivided": cell["decode_seconds"]}
        for role, time in times.items():
            seconds[role] = seconds.get(role, 0.0) + time
    return {role: 1000 * seconds[role] / tokens for role in _TIME_ROLES if role in seconds}


def pooled(rows: list[dict[str, Any]], label: str, name: str) -> list[int]:
    """A list of counts in a method's speculation statistics, added up over all its calls."""
    calls = [turn["speculation"] for row in rows for turn in row["methods"].get(label, {}).get("turns", [])]
    return [sum(counts) for counts in zip_longest(*(call[name] for call in calls if call), fillvalue=0)]


def _depth_chart(ours: list[str], rows: list[dict[str, Any]]) -> Chart | None:
    """Acceptance rate by position in the draft, a panel a method."""
    judged = {label: pooled(rows, label, "drafted_at_depth") for label in ours}
    accepted = {label: pooled(rows, label, "accepted_at_depth") for label in ours}

    def draw(axes: Axes, label: str) -> None:
        tried = [(depth, count) for depth, count in enumerate(judged[label]) if count]
        rates = [accepted[label][depth] / count for depth, count in tried]
        axes.plot([depth + 1 for depth, _ in tried], rates, color=_COLOURS["ours"], linewidth=1.8)
        for (depth, count), rate in zip(tried, rates):
            face = _COLOURS["card" if count < FEW_JUDGED else "ours"]
            axes.plot(depth + 1, rate, "o", markersize=4.5, color=_COLOURS["ours"], markerfacecolor=face)
        axes.set_ylim(-0.04, 1.04)
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.set_yticks([0, 0.5, 1])
        _whole_numbers(axes)

    svg = _panels("depth", [label for label in ours if any(judged[label])], draw, "position in the draft")
    caption = (
        "Of the draft tokens judged at a position, the share accepted, all tasks together. Hollow: fewer than "
        f"{FEW_JUDGED} judged. A token is judged only when all before it were accepted."
    )
    return Chart("depth", "Acceptance by position", caption, svg) if svg else None


def _length_chart(ours: list[str], rows: list[dict[str, Any]]) -> Chart | None:
    """Share of rounds by number of accepted tokens, a panel a method."""
    histograms = {label: pooled(rows, label, "acceptance_histogram") for label in ours}

    def draw(axes: Axes, label: str) -> None:
        rounds = sum(histograms[label])
        shares = [count / rounds for count in histograms[label]]
        axes.bar(range(len(shares)), shares, width=0.82, color=_COLOURS["ours"])
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.yaxis.set_major_locator(MaxNLocator(4))
        _whole_numbers(axes)

    svg = _panels("lengths", [label for label in ours if any(histograms[label])], draw, "accepted tokens in a round")
    caption = (
        "Rounds by the number of draft tokens accepted, all tasks together. A round adds one token of the target."
    )
    return Chart("lengths", "Accepted lengths", caption, svg) if svg else None


def _sweep_chart(tables: list[dict[str, Any]], methods: list[dict[str, Any]]) -> Chart | None:
    """Speed-up against `max_draft_tokens`, a panel a task."""
    groups = sweeps(methods)
    lengths = sorted({method["max_draft_tokens"] for group in groups.values() for method in group})
    cells = {table["task"]: table["cells"] for table in tables if table["part"] == "all"}
    roles = {name: _SERIES[number % len(_SERIES)] for number, name in enumerate(groups)}

    def draw(axes: Axes, task: str) -> None:
        for number, (name, group) in enumerate(groups.items()):
            shift = 0.12 * (number - (len(groups) - 1) / 2)
            known = [m for m in group if (cells[task].get(m["label"]) or {}).get("speedup") is not None]
            places = [lengths.index(method["max_draft_tokens"]) + shift for method in known]
            found = [cells[task][method["label"]] for method in known]
            line: dict[str, Any] = {
                "color": _COLOURS[roles[name]],
                "linewidth": 1.8,
                "marker": "os^Dv<"[number % 6],
                "markersize": 5,
            }
            axes.plot(places, [cell["speedup"] for cell in found], **line)
            for place, cell in zip(places, found):
                if cell["speedup_interval"]:
                    axes.plot([place, place], cell["speedup_interval"], color=_COLOURS[roles[name]], linewidth=1)
        axes.axhline(1, color=_COLOURS["muted"], linewidth=1.2)
        axes.set_xticks(range(len(lengths)), [str(length) for length in lengths])
        axes.grid(visible=False, axis="x")
        axes.yaxis.set_major_locator(MaxNLocator(5))

    swept = [task for task in cells if any(m["label"] in cells[task] for group in groups.values() for m in group)]
    svg = _panels("sweep", swept, draw, "max_draft_tokens")
    caption = (
        "Speed-up over plain generate by the longest draft allowed. Lengths are spaced evenly; bars are intervals."
    )
    legend = tuple((role, name) for name, role in roles.items())
    return Chart("sweep", "Speed against draft length", caption, svg, legend) if svg else None


def _panels(
    name: str, labels: Sequence[str], draw: Callable[[Axes, str], None], xlabel: str, height: float = 1.25
) -> str | None:
    """A panel for each label, two in a line, on shared axes. `height` is a panel's, in inches."""
    if not labels:
        return None
    columns = min(2, len(labels))
    lines = -(-len(labels) // columns)
    titles = ["\n".join(textwrap.wrap(_printable(label), 26 if columns == 2 else 60)) for label in labels]
    figure = Figure(figsize=(_WIDTH, (height + 0.25) * lines + 0.4), layout="constrained")
    grid = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    for axes, label, title in zip(grid.flat, labels, titles):
        draw(axes, label)
        axes.set_title(title)
    for axes in list(grid.flat)[len(labels) :]:
        axes.set_axis_off()
    figure.supxlabel(xlabel, fontsize=10, color=_COLOURS["muted"])
    return _svg(figure, name)


def _whole_numbers(axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.grid(visible=False, axis="x")


def _write(axes: Axes, height: float, left: str, right: str, lower: float = 0, **font: Any) -> None:
    """Text over the line at `height`, at both ends of the chart."""
    behind = {"facecolor": _COLOURS["card"], "edgecolor": "none", "pad": 0.6}
    place = {"transform": axes.get_yaxis_transform(), "va": "baseline", "bbox": behind, **font}
    axes.text(0, height - 0.28 + lower, _shortened(left), ha="left", **place)
    axes.text(1, height - 0.28 + lower, right, ha="right", **place)


def _fill(figure: Figure, axes: Axes) -> None:
    """Let the axes fill the figure, but for the room of the labels below."""
    inches = figure.get_figheight()
    axes.set_position((0.02, 0.46 / inches, 0.96, 1 - 0.48 / inches))
    axes.grid(visible=False, axis="y")
    axes.xaxis.set_major_locator(MaxNLocator(6))


def _shortened(label: str) -> str:
    """A label that leaves room for a number on its line; its end, which often tells it apart, is kept."""
    text = _printable(label)
    return text if len(text) <= _LABEL_LENGTH else f"{text[: _LABEL_LENGTH // 2]}…{text[1 - _LABEL_LENGTH // 2 :]}"


def _printable(text: str) -> str:
    """`text` without the control characters that XML cannot hold."""
    return "".join(character if character.isprintable() else " " for character in text)


@contextmanager
def _style() -> Iterator[None]:
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        # The browser's fonts draw the text; that matplotlib's lacks a glyph only makes its width an estimate.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def _svg(figure: Figure, name: str) -> str:
    """The figure as an inline element: ids of its own, colours as CSS variables, size left to the page."""
    buffer = StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    root = ElementTree.fromstring(buffer.getvalue())
    for element in list(root):
        if element.tag.endswith("metadata") or element.find(f"{{{_SVG}}}style") is not None:
            root.remove(element)
    for element in root.iter():
        for key, value in element.attrib.items():
            element.set(key, _attribute(key, value, name))
    for size in ("width", "height", "version"):
        del root.attrib[size]
    root.set("role", "img")
    root.set("aria-labelledby", f"{name}-title")
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _XLINK)
    return ElementTree.tostring(root, encoding="unicode")


def _attribute(key: str, value: str, name: str) -> str:
    if key == "id":
        return f"{name}-{value}"
    if key.endswith("href"):
        return value.replace("#", f"#{name}-", 1)
    for role, colour in _COLOURS.items():
        value = value.replace(colour, f"var(--{role})")
    return value.replace("url(#", f"url(#{name}-")
