"""What a run ends with on the terminal: a table for the eye, one line for a script."""

from typing import Any

from rich.table import Table

from .methods import STOCK_LOOKUP_TOKENS
from .summary import FEWEST_UNITS

STOCK = {
    "stock_prompt_lookup": f"transformers' prompt lookup, generate(prompt_lookup_num_tokens={STOCK_LOOKUP_TOKENS})",
    "stock_assistant": "transformers' assisted generation with the same draft model, generate(assistant_model=...)",
    "plain_compiled": "plain generate with a static cache, compiled",
}
"""What the labels of baselines stand for; one of several draft models has its number behind."""


def headline(results: dict[str, Any], output: str) -> dict[str, Any]:
    """Per task the fastest of our strategies and what it gains.

    Args:
        results: the content of `results.json`.
        output: the directory that holds it.
    """
    ours = [each["label"] for each in results["methods"] if each["kind"] == "ours"]
    tasks = {}
    for table in results["tables"]:
        cells = {label: table["cells"][label] for label in ours if table["cells"].get(label, {}).get("tokens")}
        if table["part"] != "all" or not cells:
            continue
        best = max(cells, key=lambda label: cells[label]["speedup"] or 0.0)
        same = _same(results, best, table["task"])
        tasks[table["task"]] = {
            "fastest": best,
            **{
                name: cells[best][name]
                for name in ("tokens_per_second", "speedup", "speedup_interval", "within_noise")
            },
            "identical": same and same["identical"],
            "compared": same and same["compared"],
        }
    return {"output": output, "tasks": tasks, "failures": len(results["failures"])}


def legend(results: dict[str, Any]) -> list[str]:
    """A sentence for each kind of baseline in the tables."""
    labels = [method["label"] for method in results["methods"] if method["kind"] != "ours"]
    return [f"{name}: {what}." for name, what in STOCK.items() if any(label.startswith(name) for label in labels)]


def tables(results: dict[str, Any]) -> list[Table | str]:
    """One table per task and large enough part, a row per method; under them what the reader must know."""
    made: list[Table | str] = []
    sure, small = f"{results['confidence']:.0%} interval", []
    for each in results["tables"]:
        if each["part"] != "all" and max(cell["prompts"] for cell in each["cells"].values()) < FEWEST_UNITS:
            small.append(f"{each['task']}, {each['part']}")
            continue
        table = Table(title=f"{each['task']}, {each['part']}")
        table.add_column("method", no_wrap=True)
        for name in ("tokens/s", "speed-up", sure, "tokens per forward", "identical"):
            table.add_column(name, justify="right")
        for label, cell in each["cells"].items():
            interval, same = cell["speedup_interval"], _same(results, label, each["task"])
            table.add_row(
                label,
                _number(cell["tokens_per_second"], ".1f"),
                _number(cell["speedup"], ".2f", "x"),
                "" if interval is None else f"{interval[0]:.2f} - {interval[1]:.2f}",
                _number(cell["tokens_per_forward"], ".2f"),
                f"{same['identical']} of {same['compared']}" if same and each["part"] == "all" else "",
            )
        made.append(table)
    if small:
        made.append(f"In the reports only, with fewer than {FEWEST_UNITS} prompts each: {'; '.join(small)}.")
    return [*made, *legend(results)]


def _same(results: dict[str, Any], label: str, task: str) -> dict[str, int] | None:
    """How many texts of a task are plain's, of those compared."""
    found = results["identity"].get(label)
    return found["by_task"].get(task) if found else None


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else format(value, form) + unit
