"""Which strategy to use, and what it gains: chosen on the first prompts, measured again on prompts that had no say.

The fastest of many owes some of its figure to luck. So a third of the prompts chooses, with all candidates taking
turns with plain `generate`, and the expected speed-up with its interval is that of the chosen one on the others.
"""

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from hf_specdec import Auto, Constant, DraftModel, SpecDecConfig, SpecDecError

from .bench import Unit, check_names, data_dirs, load_target, make_units, processes
from .config import PLAIN, RunConfig, StrategySpec, essential, parse_strategy
from .cost import WIDTHS, measure_costs
from .length_plan import MeasuredRun, forecast_lengths, spread_contexts, write_costs
from .measure import Meter
from .methods import Method, build_methods
from .planning import measured_calls
from .provenance import comment, provenance
from .rows import Row
from .summary import FEWEST_UNITS
from .task import load_samples, load_task
from .trials import Candidate, Comparison, Trials, config_of

DEFAULT_LIMIT = 24
"""Prompts per task."""
CHOOSING_SHARE = 3
"""One prompt of so many chooses."""
FEWEST_CHOOSING = 2
HARDLY_DRAFTED = 1.05
"""Tokens per round up to which a gain is not that of drafts."""
LONGEST = 16
"""Draft length up to which chains are forecast, or their default where that is longer."""


def default_candidates(draft_model: str | None = None) -> list[StrategySpec]:
    """What is worth comparing on any model; `free` alone only beside a draft model, without which `auto` is the same.

    Args:
        draft_model: name or path of a draft model, which `auto` then has, and which is compared by itself.
    """
    if draft_model is None:
        return [parse_strategy(each) for each in ("auto", "suffix", "prompt_lookup")]
    options = {"model": draft_model}
    auto = parse_strategy({"strategy": Auto.name, "strategy_options": options})
    own = parse_strategy({"strategy": DraftModel.name, "strategy_options": options})
    return [auto, *(parse_strategy(each) for each in ("free", "suffix", "prompt_lookup")), own]


def load_units(config: RunConfig) -> list[Unit]:
    """The prompts of a run, in batches."""
    tasks = [load_task(each) for each in (*config.tasks, *config.task_files)]
    places = data_dirs(config, tasks)
    samples = [load_samples(each, config.limit, places) for each in tasks]
    check_names(tasks, samples)
    return make_units(tasks, samples, config.batch_size)


def split(units: Sequence[Unit]) -> tuple[list[Unit], list[Unit]]:
    """The units that choose, the first third of each task, and those that are held out.

    Raises:
        SpecDecError: too few are left for an interval.
    """
    choosing: list[Unit] = []
    held_out: list[Unit] = []
    for task in dict.fromkeys(each.task for each in units):
        own = [each for each in units if each.task == task]
        count = -(-len(own) // CHOOSING_SHARE)
        choosing += own[:count]
        held_out += own[count:]
    if len(choosing) < FEWEST_CHOOSING or len(held_out) < FEWEST_UNITS:
        raise SpecDecError(
            f"{len(units)} prompts, counting each batch once, are too few: {FEWEST_CHOOSING} must choose, and "
            f"{FEWEST_UNITS} others show what the chosen strategy gains and how sure that is. Give at least "
            f"{FEWEST_CHOOSING + FEWEST_UNITS}: a higher --limit, another --task or --task-file, or a smaller "
            "--batch-size."
        )
    return choosing, held_out


def fixed(method: Method, length: int, taken: Collection[str]) -> Method:
    """The same strategy with so many draft tokens in every round, under a label that is not taken."""
    assert method.spec is not None
    size: dict[str, Any] = {"max_draft_tokens": length, "schedule": "constant"}
    label = f"{method.label}({length})"
    names = (f"{label}#{number}" if number > 1 else label for number in itertools.count(1))
    spec = StrategySpec(next(each for each in names if each not in taken), {**method.spec.config, **size})
    return Method(spec.label, method.kind, {"assistant_strategy": replace(config_of(method), **size)}, spec)


def leaves_size_open(config: SpecDecConfig) -> bool:
    """Its user does not say how much it drafts."""
    sizes = (config.schedule, config.max_draft_tokens, config.max_depth, config.max_width)
    return all(each is None for each in sizes)


def is_constant(config: SpecDecConfig) -> bool:
    """Every round drafts as much."""
    return bool(config.bound_schedule.name == Constant.name)


@dataclass(frozen=True)
class StrategyPlan:
    """What to use.

    Args:
        candidates: what was compared.
        notes: what could not be compared or was left out, and why.
        step_seconds: of plain decoding, where the candidates were compared.
        chosen: the fastest of them, as measured on the prompts that were held out.
        choosing, held_out: how many prompts.
        tasks: of the prompts.
        batch_size, temperature: of the calls.
        origin: what was measured, where and when (`provenance`).
    """

    candidates: tuple[Candidate, ...]
    notes: tuple[str, ...]
    step_seconds: float
    chosen: Candidate
    choosing: int
    held_out: int
    tasks: tuple[str, ...]
    batch_size: int
    temperature: float
    origin: Mapping[str, Any]

    @property
    def interval(self) -> tuple[float, float]:
        """Of the expected speed-up, at 95 %."""
        assert self.chosen.interval is not None
        return self.chosen.interval

    @property
    def has_rounds(self) -> bool:
        """Some answer went on after the token that the prompt's forward pass gives."""
        return self.chosen.round_seconds > 0

    @property
    def pays(self) -> bool:
        """The chosen one is faster than plain `generate`, as surely as the interval says, to the digits shown."""
        return self.has_rounds and round(self.interval[0], 2) > 1

    @property
    def config(self) -> dict[str, Any]:
        """The fields of the chosen `SpecDecConfig`, which YAML can hold."""
        assert self.chosen.method.spec is not None
        return self.chosen.method.spec.config

    @property
    def figures(self) -> str:
        """The expected speed-up and its interval."""
        low, high = self.interval
        return f"{self.chosen.speedup:.2f}x plain generate ({low:.2f} to {high:.2f})"

    @property
    def basis(self) -> str:
        """Where the figures of the verdict come from."""
        same = f"{self.chosen.identical} of {self.chosen.compared} texts are plain generate's"
        told = f"Measured on {self.held_out} other prompts, with a 95 % interval; {same}."
        if self.pays and self.chosen.tokens_per_round < HARDLY_DRAFTED:
            told += (
                " Hardly a draft was accepted: rounds are faster than plain generate's steps here, and speculation "
                "has no part in it."
            )
        if not self.pays and self.interval[1] > 1:
            told += " It is not shown to be slow either: more prompts (--limit, --task) narrow the interval."
        return told

    @property
    def call(self) -> str:
        """What to write into a call of `generate`."""
        given = essential(self.config)
        if len(given) == 1:
            return f'assistant_strategy="{given["strategy"]}"'
        return f"assistant_strategy=SpecDecConfig({', '.join(f'{name}={value!r}' for name, value in given.items())})"

    @property
    def comment(self) -> str:
        """What to say above the config in a file."""
        how = f"{self.batch_size} per call, at temperature {self.temperature:g}"
        prompts = f"{self.held_out} of {', '.join(self.tasks)}, beside {self.choosing} that chose; {how}"
        return comment(self.origin, prompts, self.figures)

    @property
    def sentence(self) -> str:
        """The verdict."""
        if not self.has_rounds:
            return (
                "Do not use speculation here: answers have one token, which the prompt's forward pass gives, so there "
                "is nothing to speculate on."
            )
        label = self.chosen.method.label
        if self.pays:
            drafts = shape(config_of(self.chosen.method), self.batch_size)
            return f"Use {label} ({drafts}): {self.figures} on prompts like these."
        return f"Do not use speculation here: the best, {label}, is {self.figures}."

    def table(self) -> Table:
        """A row per candidate; the chosen one is bold."""
        table = Table(
            title=f"Compared with plain generate on {self.choosing} prompts",
            caption="Decoding gains tokens per round x ms of plain / ms per round. The speed-up is of whole calls.",
        )
        table.add_column("candidate", no_wrap=True)
        for name in ("speed-up", "tokens per round", "ms per round", "accepted", "same text"):
            table.add_column(name, justify="right")
        table.add_row(PLAIN, "1.00x", "1.00", f"{1000 * self.step_seconds:.1f}", "", "")
        for each in self.candidates:
            table.add_row(
                each.method.label,
                f"{each.speedup:.2f}x",
                f"{each.tokens_per_round:.2f}",
                f"{1000 * each.round_seconds:.1f}",
                f"{each.accepted:.0%}",
                f"{each.identical} of {each.compared}",
                style="bold" if each.method.label == self.chosen.method.label else None,
            )
        return table


def shape(config: SpecDecConfig, batch_size: int) -> str:
    """How much a config drafts, in a few words."""
    plan = config.plan(batch_size)
    size = f"{plan.nodes - 1} draft token{'' if plan.nodes == 2 else 's'}"
    form = "in a chain" if plan.width == 1 else f"in a tree, {plan.width} wide and {plan.depth} deep at most"
    if is_constant(config):
        return f"up to {size} {form}, in every round"
    return f"up to {size} {form}, as many as pay in each round"


def plan_strategy(config: RunConfig, console: Console | None = None, save_costs_to: str | None = None) -> StrategyPlan:
    """Measure candidates on a third of the prompts, the fastest on the others, and print a table and the verdict.

    A candidate that leaves open how much it drafts is measured under its default schedule, and with its default size
    in every round. Where that is a chain, the length that a forecast prefers (`planning.forecast`, from that run and
    measured costs) is measured as well, if it promises more than anything so far.

    Args:
        config: the model, the candidates (`strategies`) and the prompts.
        console: where the table goes; standard output by default.
        save_costs_to: a JSON file to add the chosen strategy's costs to, for `Adaptive(profile=...)`.

    Raises:
        SpecDecError: before the model is loaded where prompts are too few; later where plain `generate` fails, or all
            candidates, or the chosen one on a prompt held out.
    """
    console = console or Console(highlight=False, markup=False, emoji=False)
    choosing, held_out = split(load_units(config))
    model, tokenizer = load_target(config, processes().device)
    messages = Console(stderr=True, highlight=False, markup=False, emoji=False)
    trials = Trials(Meter(model, tokenizer, config.temperature, config.seed), config, messages)
    plain, *others = build_methods(config, model, tokenizer)[0]
    found, notes = compare_all(trials, plain, [each for each in others if each.kind == "ours"], choosing)
    best = max(found.candidates, key=lambda each: each.speedup).method
    chosen, failed = confirm(trials, plain, best, held_out)
    planned = StrategyPlan(
        candidates=found.candidates,
        notes=(*found.notes, *notes, *failed),
        step_seconds=found.step_seconds,
        chosen=chosen,
        choosing=sum(len(each.samples) for each in choosing),
        held_out=sum(len(each.samples) for each in held_out),
        tasks=tuple(dict.fromkeys(each.task for each in held_out)),
        batch_size=config.batch_size,
        temperature=config.temperature,
        origin=provenance(config.model, model, 1),
    )
    if planned.has_rounds:
        console.print(planned.table())
    for each in (*planned.notes, planned.sentence, *([planned.basis] if planned.has_rounds else [])):
        console.print(each, soft_wrap=True)
    if save_costs_to is not None:
        console.print(save_costs_of(model, best, found.rows, save_costs_to), soft_wrap=True)
    return planned


def compare_all(
    trials: Trials, plain: Method, own: Sequence[Method], units: Sequence[Unit]
) -> tuple[Comparison, list[str]]:
    """Compare strategies, each with the sizes that are worth trying. Returns also what to say about lengths.

    Raises:
        SpecDecError: none of them can run.
    """
    batch_size = trials.config.batch_size
    labels = [each.label for each in own]
    methods: list[Method] = []
    chains: list[tuple[Method, Method]] = []
    for method in own:
        methods.append(method)
        if leaves_size_open(config_of(method)):
            if not is_constant(config_of(method)):
                constant = replace(config_of(method), schedule=Constant.name)
                methods.append(fixed(method, constant.draft_tokens(batch_size), labels))
            if config_of(methods[-1]).plan(batch_size).width == 1:
                chains.append((method, methods[-1]))
    found = trials.compare(plain, methods, units)
    if not found.candidates:
        raise SpecDecError(f"Nothing could be compared with plain generate. {' '.join(found.notes)}")
    lengths, notes = promising_lengths(trials, chains, found) if found.step_seconds else ([], [])
    if not lengths:
        return found, notes
    more = trials.compare(plain, lengths, units)
    errors = {**more.errors, **found.errors}
    return replace(found, candidates=found.candidates + more.candidates, errors=errors), notes


def promising_lengths(
    trials: Trials, chains: Sequence[tuple[Method, Method]], found: Comparison
) -> tuple[list[Method], list[str]]:
    """Lengths of chains that are forecast to be faster than all that was measured, and a sentence about each chain.

    Args:
        trials: what measures.
        chains: each a strategy, and the same with one length, which was measured.
        found: what that brought.
    """
    methods, notes = [], []
    measured_speedups = {each.method.label: each.speedup for each in found.candidates}
    for method, chain in chains:
        if chain.label not in measured_speedups:
            continue
        longest = config_of(chain).draft_tokens(trials.config.batch_size)
        try:
            calls = tuple(measured_calls(found.rows, chain.label, longest))
            run = MeasuredRun(chain.label, longest, calls, trials.config.batch_size, trials.config.temperature)
            planned, _ = forecast_lengths(trials.meter.model, config_of(chain), run, max(LONGEST, longest))
        except SpecDecError as error:  # answers of one token, or no room for the texts that costs are timed on
            notes.append(f"No other length of {method.label} was tried. {error}")
            continue
        best, known = planned.best, planned.forecasts[longest]
        assert best.speedup is not None and known.speedup is not None
        promise = measured_speedups[chain.label] * best.speedup / known.speedup
        if 0 < best.length != longest and promise > max(measured_speedups.values()):
            methods.append(fixed(method, best.length, {*measured_speedups, *found.errors}))
            notes.append(
                f"{method.label}: {best.length} draft tokens in every round promised {promise:.2f}x, by a forecast "
                f"from {longest}, and were measured as well."
            )
        else:
            notes.append(f"{method.label}: no other draft length promised more than what was measured.")
    return methods, notes


def confirm(trials: Trials, plain: Method, method: Method, units: Sequence[Unit]) -> tuple[Candidate, tuple[str, ...]]:
    """The chosen method on prompts that had no part in the choice, and the prompts that failed.

    Raises:
        SpecDecError: it failed on one, or too few were finished.
    """
    found = trials.compare(plain, [method], units)
    if not found.candidates:
        raise SpecDecError(
            f"{method.label} was the fastest, and on the prompts held out nothing can be said of it. "
            f"{' '.join(found.notes)} Mend that, or name other candidates with --strategy."
        )
    if found.candidates[0].interval is None:
        raise SpecDecError(
            f"Too few prompts were finished to say how sure the gain of {method.label} is. {' '.join(found.notes)} "
            "Give more prompts."
        )
    return found.candidates[0], tuple(found.notes)


def save_costs_of(model: PreTrainedModel, method: Method, rows: Sequence[Row], path: str) -> str:
    """Measure what a strategy costs at the contexts of plain `generate` in these rows, and add it to a file.

    Returns:
        what came of it: a verdict that took long is not thrown away with the costs.
    """
    turns = [turn for row in rows for turn in row["methods"][PLAIN]["turns"]]
    contexts = [max(each["prompt_tokens"]) + max(map(len, each["token_ids"])) / 2 for each in turns]
    low, high = np.quantile(contexts, (0.05, 0.95))
    try:
        with Console(stderr=True).status("Measuring what blocks and drafts cost ..."):
            curve = measure_costs(model, config_of(method), WIDTHS[:12], contexts=spread_contexts(low, high))
        write_costs(path, model, curve.at(1, float((low + high) / 2)))
    except (SpecDecError, OSError) as error:
        return f"Costs were not saved to {path}. {error}"
    return f"Costs saved to {path}, for Adaptive(profile={path!r})."
