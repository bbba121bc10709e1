"""How many tokens to draft: costs of this machine, acceptance of a measured run, and the table that follows."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from hf_specdec import CostModel, SpecDecConfig, SpecDecError, machine_key, save_costs, unknown_name

from .cost import PLAIN_STEPS, WIDTHS, measure_costs
from .planning import (
    Forecast,
    MeasuredCall,
    StepCosts,
    check_length,
    compute_speedup,
    expected_tokens,
    forecast,
    measured_calls,
)
from .rows import RESULTS_FILE, read_rows

APART = 128
"""Least distance of the contexts at which costs are measured."""


@dataclass(frozen=True)
class MeasuredRun:
    """A method of a finished run of the harness.

    Args:
        label: the method's.
        longest: its draft length.
        calls: what it did.
        batch_size, temperature: of the run.
    """

    label: str
    longest: int
    calls: tuple[MeasuredCall, ...]
    batch_size: int
    temperature: float


def load_run(path: str | Path, strategy: Any, label: str | None = None) -> MeasuredRun:
    """The method of a run that tells most about a strategy: the one with the longest drafts.

    Args:
        path: a `results.json` with its `rows.jsonl` beside it, or their directory.
        strategy: what `assistant_strategy` takes.
        label: another method than that one.

    Raises:
        SpecDecError: the files cannot be read, or no method of the constant schedule, or more than one, fits.
    """
    config = SpecDecConfig.of(strategy)
    file = Path(path) / RESULTS_FILE if Path(path).is_dir() else Path(path)
    try:
        results = json.loads(file.read_text(encoding="utf-8"))
        ours = [each for each in results["methods"] if each["kind"] == "ours"]
        run = results["config"]
        settings = {each["label"]: each.get("strategy_options") for each in run["strategies"]}
        adaptive = {each["label"] for each in run["strategies"] if not is_constant(each)}
        batch_size, temperature = run["batch_size"], run["temperature"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SpecDecError(f"{file} is no results file of hf-specdec bench: {type(error).__name__} {error}.") from None
    asked = config.to_dict()["strategy_options"] if isinstance(config.strategy, str) else None
    named = f"{config.resolved.name!r}" + (f" with {asked}" if asked else "")
    default = replace(config, max_draft_tokens=None).draft_tokens(batch_size)
    lengths = {
        each["label"]: default if each["max_draft_tokens"] is None else each["max_draft_tokens"]
        for each in ours
        if each["strategy"] == config.resolved.name and each["label"] not in adaptive
        if asked is None or settings.get(each["label"]) in (None, asked)
    }
    if label is not None and label not in lengths:
        raise unknown_name(f"method with strategy {named} and one draft length:", label, lengths)
    longest = max(lengths.values(), default=0)
    fitting = [each for each, own in lengths.items() if own == longest] if label is None else [label]
    if len(fitting) != 1 or not lengths[fitting[0]]:
        found = f"fits {', '.join(map(repr, fitting))}" if longest else "was not drafted with at one length"
        raise SpecDecError(
            f"Strategy {named} {found} in {file}; one method with schedule=constant is needed, name it."
        )
    rows = read_rows(file.parent, lambda message: None)
    calls = tuple(measured_calls(rows, fitting[0], lengths[fitting[0]]))
    return MeasuredRun(fitting[0], lengths[fitting[0]], calls, batch_size, temperature)


def is_constant(config: Mapping[str, Any]) -> bool:
    """A strategy of a run had the same draft length in every round."""
    schedule = config.get("schedule", "constant")
    if schedule is None:
        return SpecDecConfig(verifier=config.get("verifier", "exact")).text_depends_on_drafts
    return bool(schedule == "constant")


@dataclass(frozen=True)
class LengthPlan:
    """Forecasts of all lengths from 0 on; those beyond `measured` tokens go on as the run went where it ended."""

    forecasts: tuple[Forecast, ...]
    measured: int | None = None

    @property
    def best(self) -> Forecast:
        """The fastest; the shortest of equals."""
        return max(self.forecasts, key=lambda each: each.decode_speedup if each.speedup is None else each.speedup)

    def table(self) -> Table:
        """A row per length; the best is bold."""
        table = Table(title="Expected against plain generate", caption=self._caption())
        for name in ("draft length", "tokens per round", "decoding", "whole call"):
            table.add_column(name, justify="right")
        for each in self.forecasts:
            beyond = self.measured is not None and each.length > self.measured
            table.add_row(
                f"{each.length}{' *' if beyond else ''}",
                f"{each.tokens_per_round:.2f}",
                f"{each.decode_speedup:.2f}x",
                "" if each.speedup is None else f"{each.speedup:.2f}x",
                style="bold" if each is self.best else None,
            )
        return table

    def _caption(self) -> str:
        best = self.best.length
        advice = f"Best: max_draft_tokens={best}." if best else "Best: plain generate, no drafts."
        if self.measured is not None and self.forecasts[-1].length > self.measured:
            advice += f" *: longer than the run's {self.measured}, extrapolated."
        return advice


def plan(
    model: PreTrainedModel,
    strategy: Any,
    acceptance: float | Sequence[float] | MeasuredRun,
    max_length: int = 16,
    context: int | None = None,
    console: Console | None = None,
    save_costs_to: str | None = None,
) -> LengthPlan:
    """Measure costs, forecast the speed-up of every draft length up to `max_length`, and print a table.

    Args:
        model: the target, enabled.
        strategy: what `assistant_strategy` takes.
        acceptance: a run, whose calls are replayed (`forecast`), or numbers for the closed form (`compute_speedup`),
            which knows greedy decoding of one text, and no prompts.
        max_length: the longest draft; no longer than `acceptance` where it is a list.
        context: tokens at which costs count, 512 by default. A run brings its own.
        console: where the table goes; standard output by default.
        save_costs_to: a JSON file to add the costs to, for `Adaptive(profile=...)`.
    """
    if context is not None and context < 1:
        raise SpecDecError(f"context={context} is no number of tokens; give at least 1.")
    if isinstance(acceptance, MeasuredRun):
        if context is not None:
            raise SpecDecError(f"context={context} was given, and the run brings the contexts of its calls; drop it.")
        planned, own = forecast_lengths(model, strategy, acceptance, max_length)
    else:
        expected_tokens(acceptance, max_length)  # refuses what is no probability before anything is timed
        middle = 512 if context is None else context
        contexts = spread_contexts(middle, middle)
        own = measure_costs(model, strategy, widths_up_to(max_length), contexts=contexts).at(1, middle)
        step = (own.draft_seconds, own.verify_seconds, own.plain_seconds, own.overhead_seconds)
        planned = LengthPlan(
            tuple(
                Forecast(each, expected_tokens(acceptance, each), compute_speedup(acceptance, each, *step))
                for each in range(max_length + 1)
            )
        )
    if save_costs_to is not None:
        write_costs(save_costs_to, model, own)
    (console or Console(highlight=False)).print(planned.table())
    return planned


def forecast_lengths(
    model: PreTrainedModel, strategy: Any, run: MeasuredRun, max_length: int
) -> tuple[LengthPlan, StepCosts]:
    """Measure costs at the contexts and batch sizes of a run and replay its calls under every draft length.

    Returns:
        the forecasts, and the costs of one row in the middle of the contexts.
    """
    low, high = np.quantile([each.context for each in run.calls], (0.05, 0.95))
    sizes = sorted({len(each.agreed) for each in run.calls} | {1})
    widths, contexts = widths_up_to(max_length), spread_contexts(low, high)
    costs = measure_costs(model, strategy, widths, sizes, contexts, temperature=run.temperature)
    forecasts = tuple(forecast(run.calls, each, costs.at) for each in range(max_length + 1))
    return LengthPlan(forecasts, run.longest), costs.at(1, float((low + high) / 2))


def widths_up_to(max_length: int) -> list[int]:
    """Widths of blocks to time for drafts of up to so many tokens."""
    check_length(max_length)
    return sorted({each for each in WIDTHS if each <= max_length} | {max_length + 1})


def write_costs(path: str, model: PreTrainedModel, costs: StepCosts) -> None:
    """Add costs to a JSON file, for `Adaptive(profile=...)`."""
    profile = CostModel.measured(costs.verify_seconds, costs.draft_seconds, costs.overhead_seconds)
    save_costs(path, machine_key(model), profile)


def spread_contexts(low: float, high: float) -> list[int]:
    """Two contexts to measure at, `APART` or more apart, around the same middle where there is room below."""
    if high - low < APART:
        low = max((low + high - APART) / 2, PLAIN_STEPS)
        high = max(high, low + APART)
    return [round(low), round(high)]
