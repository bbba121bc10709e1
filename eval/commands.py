"""The commands that `hf-specdec` passes on: `bench`, `verify`, `plan`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
import yaml
from accelerate import PartialState
from rich.console import Console

from hf_specdec import SpecDecConfig, SpecDecError, optimal_template, read_costs

from .bench import load_target
from .config import DTYPES, RunConfig, essential, parse_strategy
from .layer_plan import plan_layers
from .length_plan import load_run, plan
from .lossless import verify
from .measure import prompt_ids
from .provenance import comment, provenance
from .run import app as bench_app
from .run import clean_errors
from .strategy_plan import DEFAULT_LIMIT, default_candidates, plan_strategy
from .task import Sample, load_samples, load_task
from .tree_plan import DEFAULT_DEPTH, DEFAULT_NODES, builtin_prompts, measure_acceptance, plan_tree

VERIFY_PROMPTS = 6
PLAN_PROMPTS = 6

Model = Annotated[str, typer.Option(help="Target model: a name on the hub or a directory.")]
Dtype = Annotated[str, typer.Option(help=f"Weights' type: {', '.join(DTYPES)}.")]
Revision = Annotated[str | None, typer.Option(help="Revision of the model on the hub.")]
DeviceMap = Annotated[str | None, typer.Option(help="As from_pretrained takes it: auto.")]
Attention = Annotated[str | None, typer.Option(help="Attention implementation: sdpa, eager, ...")]

verify_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
plan_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def target_config(
    model: str, dtype: str, revision: str | None, device_map: str | None, attention: str | None, seed: int = 0
) -> RunConfig:
    """How a model is loaded, and the seed."""
    return RunConfig(
        model=model, dtype=dtype, revision=revision, device_map=device_map, attention=attention, seed=seed
    )


def device() -> torch.device:
    """The device of a command that runs in one process."""
    return PartialState(cpu=not torch.accelerator.is_available()).device


@verify_app.command()
def verify_command(
    model: Model,
    strategy: Annotated[list[str], typer.Option(help="What to check; repeatable; as in `hf-specdec bench`.")],
    prompt: Annotated[
        list[str] | None,
        typer.Option(help=f"What to ask; repeatable. Default: {VERIFY_PROMPTS} prompts of the package."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest text that is compared.")] = 64,
    samples: Annotated[int | None, typer.Option(help="Draws per test of a law. Default: as many as it takes.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of all sampling.")] = 0,
    dtype: Dtype = "auto",
    revision: Revision = None,
    device_map: DeviceMap = None,
    attention: Attention = None,
) -> None:
    """Check that strategies give the text, or the law, of plain `generate`. Status 0 if they do, 1 if not."""
    console = Console(highlight=False, markup=False, emoji=False)
    with clean_errors():
        configs = [SpecDecConfig(**parse_strategy(each).config) for each in strategy]
        loading = target_config(model, dtype, revision, device_map, attention, seed)
        prompts = prompt or [each.turns[0] for each in load_samples(load_task("builtin"), VERIFY_PROMPTS, None)]
        with Console(stderr=True).status("Checking ..."):
            verdict = verify(*load_target(loading, device()), configs, prompts, max_new_tokens, samples, seed)
    console.print(verdict.table())
    console.print(verdict.sentence, soft_wrap=True)
    if not verdict.passed:
        raise typer.Exit(1)


Drafts = Annotated[
    list[str] | None,
    typer.Option(help="A candidate, as in `hf-specdec bench`; repeatable. Default: auto, suffix, prompt_lookup."),
]
DraftModelName = Annotated[
    str | None, typer.Option(help="A small model to draft with, by itself and in auto, beside the default candidates.")
]
Tasks = Annotated[list[str] | None, typer.Option(help="A task of the package; repeatable. Default: builtin.")]
TaskFiles = Annotated[list[str] | None, typer.Option(help="Your prompts: a task, a YAML file; repeatable.")]
DataDirs = Annotated[list[str] | None, typer.Option(help="Where local data are, or TASK=PATH; repeatable.")]
Limit = Annotated[int | None, typer.Option(help=f"Prompts per task. Default: {DEFAULT_LIMIT}.")]
BatchSize = Annotated[int | None, typer.Option(help="Prompts per call. Default: 1.")]
NewTokens = Annotated[int | None, typer.Option(help="Longest answer. Default: the task's.")]
Temperature = Annotated[float | None, typer.Option(help="0 decodes greedily. Default: 0.")]
Seed = Annotated[int | None, typer.Option(help="Seed of sampling and order. Default: 0.")]
Repeats = Annotated[int | None, typer.Option(help="Times that each prompt is measured. Default: 1.")]
Rates = Annotated[
    str | None,
    typer.Option(
        help="Only the length table, for this probability that a draft token is accepted, or one per position: "
        "0.8,0.7,0.6. With --tree, one per candidate at the same place, the likeliest first: 0.6,0.2,0.1."
    ),
]
Results = Annotated[
    str | None, typer.Option(help="Only the length table, for the acceptance in a results.json or its directory.")
]
Label = Annotated[str | None, typer.Option(help="Which method of --results. Default: the longest drafts.")]
PlanTree = Annotated[
    bool,
    typer.Option("--tree", help="Only a tree for --strategy. Acceptance is measured on prompts of the package."),
]
Nodes = Annotated[
    int | None, typer.Option(help=f"Most nodes of a tree, the last token included. Default: {DEFAULT_NODES}.")
]
Longest = Annotated[
    int | None,
    typer.Option(
        help="Longest draft of the length table, path of a tree, or draft of --layers. Default: 16, or as many as "
        "--acceptance; 8 with --layers."
    ),
]
Context = Annotated[int | None, typer.Option(help="Tokens of context that tables and trees are priced at.")]
PlanLayers = Annotated[
    bool, typer.Option("--layers", help="Only the part of the model that drafts best (strategy layer_skip).")
]
Prompts = Annotated[
    list[str] | None,
    typer.Option(help=f"With --layers: your prompts; repeatable. Default: {PLAN_PROMPTS} of the package."),
]
Budget = Annotated[int | None, typer.Option(help="With --layers: skip sets to try. Default: 48.")]
SaveCosts = Annotated[
    str | None, typer.Option(help="JSON file to add the costs to, for the adaptive schedule's profile.")
]
Save = Annotated[
    str | None,
    typer.Option(help="YAML file for what to use, for assistant_strategy and --strategy; none where nothing pays."),
]

ANSWER = (
    "--strategy --draft-model --task --task-file --data-dir --limit --batch-size --max-new-tokens --temperature "
    "--seed --repeats --save --save-costs"
)
MODES = {
    mode: frozenset(options.split())
    for mode, options in {
        "": ANSWER,
        "--layers": "--layers --prompt --max-length --budget --save",
        "--tree": "--tree --strategy --acceptance --nodes --max-length --context",
        "--results": "--results --strategy --label --max-length --context --save-costs",
        "--acceptance": "--acceptance --strategy --max-length --context --save-costs",
    }.items()
}
"""The options of each kind of plan, beside those that load the model. The first that is asked for counts; without one
of them, the whole answer is asked for."""


@plan_app.command()
def plan_command(
    model: Model,
    strategy: Drafts = None,
    draft_model: DraftModelName = None,
    task: Tasks = None,
    task_file: TaskFiles = None,
    data_dir: DataDirs = None,
    limit: Limit = None,
    batch_size: BatchSize = None,
    max_new_tokens: NewTokens = None,
    temperature: Temperature = None,
    seed: Seed = None,
    repeats: Repeats = None,
    save: Save = None,
    save_costs: SaveCosts = None,
    tree: PlanTree = False,
    acceptance: Rates = None,
    nodes: Nodes = None,
    results: Results = None,
    label: Label = None,
    max_length: Longest = None,
    context: Context = None,
    layers: PlanLayers = False,
    prompt: Prompts = None,
    budget: Budget = None,
    dtype: Dtype = "auto",
    revision: Revision = None,
    device_map: DeviceMap = None,
    attention: Attention = None,
) -> None:
    """Measure strategies on your prompts and tell which to use and what it gains, or not to speculate.

    With --tree, --acceptance, --results or --layers: only the details of one strategy.
    """
    given: dict[str, Any] = {
        "--strategy": strategy, "--draft-model": draft_model, "--task": task, "--task-file": task_file,
        "--data-dir": data_dir, "--limit": limit, "--batch-size": batch_size, "--max-new-tokens": max_new_tokens,
        "--temperature": temperature, "--seed": seed, "--repeats": repeats, "--save": save, "--save-costs": save_costs,
        "--tree": tree or None, "--acceptance": acceptance, "--nodes": nodes, "--results": results, "--label": label,
        "--max-length": max_length, "--context": context, "--layers": layers or None, "--prompt": prompt,
        "--budget": budget,
    }  # fmt: skip
    with clean_errors():
        given = {option: value for option, value in given.items() if value is not None and value != []}
        mode = plan_mode(given)
        loading = target_config(model, dtype, revision, device_map, attention)
        if mode == "--layers":
            best_layers(loading, prompt, 8 if max_length is None else max_length, budget, save)
        elif mode == "":
            best_strategy(loading, given)
        else:
            plan_details(loading, mode, given)


def plan_mode(given: Mapping[str, Any]) -> str:
    """What is asked for. Raises `SpecDecError` for an option that would be ignored."""
    mode = next((each for each in MODES if each in given), "")
    for option in given:
        if option in MODES[mode]:
            continue
        homes = [each for each, options in MODES.items() if each and option in options]
        if option not in MODES[""] and mode in ("", "--acceptance"):
            raise SpecDecError(f"{option} goes with {' or '.join(homes)}; give that as well.")
        raise SpecDecError(f"{option} does not go with {mode}; leave it out.")
    return mode


def best_strategy(loading: RunConfig, given: Mapping[str, Any]) -> None:
    """Tell which strategy to use, and write it down if it pays."""
    save, costs = given.get("--save"), given.get("--save-costs")
    check_places(save, costs)
    if "--draft-model" in given and "--strategy" in given:
        raise SpecDecError(
            "--draft-model joins the default candidates, and --strategy replaces them; leave one out. A draft model "
            "among candidates of yours is --strategy draft_model:model=NAME."
        )
    own = {"--strategy", "--draft-model", "--save", "--save-costs"}
    fields = {"--task": "tasks", "--task-file": "task_files"}
    values = {fields.get(each, each[2:].replace("-", "_")): given[each] for each in given if each not in own}
    if "task_files" in values:
        values.setdefault("tasks", [])
    candidates = given.get("--strategy") or default_candidates(given.get("--draft-model"))
    defaults = {"limit": DEFAULT_LIMIT, "repeats": 1, "strategies": candidates}
    planned = plan_strategy(RunConfig.from_dict({**loading.to_dict(), **defaults, **values}), save_costs_to=costs)
    console = Console(highlight=False, markup=False, emoji=False)
    if not planned.pays:
        if save is not None:
            console.print(f"{save} was not written.", soft_wrap=True)
        return
    console.print(f"In Python: {planned.call}", soft_wrap=True)
    if save is not None:
        save_config(save, planned.config, planned.comment)
        console.print(f'Saved: assistant_strategy="{save}", or hf-specdec generate --strategy {save}', soft_wrap=True)


def check_places(save: str | None, costs: str | None = None) -> None:
    """Raise `SpecDecError` where a file could not be written, or not be loaded, before anything is measured."""
    for option, path in {"--save": save, "--save-costs": costs}.items():
        if path is not None and not Path(path).parent.is_dir():
            raise SpecDecError(f"{option} {path}: there is no directory {Path(path).parent}; make it first.")
        if path is not None and Path(path).is_dir():
            raise SpecDecError(f"{option} {path} is a directory; give the path of a file.")
    if save is not None and not save.endswith((".yaml", ".yml")):
        raise SpecDecError(f"--save {save}: strategies are loaded from files that end in .yaml; give such a name.")
    if costs is not None and Path(costs).exists():
        try:
            read_costs(costs)
        except SpecDecError as error:
            raise SpecDecError(f"--save-costs adds to what is in the file, or makes a new one. {error}") from None


def save_config(path: str, config: Mapping[str, Any], told: str) -> None:
    """Write the fields of a `SpecDecConfig` that differ from their defaults as YAML, below a comment."""
    Path(path).write_text(told + yaml.safe_dump(essential(config), sort_keys=False), encoding="utf-8")


def plan_details(loading: RunConfig, mode: str, given: Mapping[str, Any]) -> None:
    """The tree of one strategy, or its length table."""
    strategies = given.get("--strategy", [])
    if len(strategies) != 1:
        raise SpecDecError(f"Give --strategy once: {mode} is about the drafts of one.")
    config = SpecDecConfig(**parse_strategy(strategies[0]).config)
    rates = parse_rates(given["--acceptance"]) if "--acceptance" in given else None
    context, costs = given.get("--context"), given.get("--save-costs")
    if mode == "--tree":
        nodes, depth = given.get("--nodes", DEFAULT_NODES), given.get("--max-length", DEFAULT_DEPTH)
        print_tree(loading, config, rates, nodes, depth, context)
        return
    check_places(None, costs)
    known = load_run(given["--results"], config, given.get("--label")) if rates is None else rates
    longest = given.get("--max-length", len(rates) if isinstance(rates, list) else 16)
    plan(load_target(loading, device())[0], config, known, longest, context, None, costs)


def best_layers(
    loading: RunConfig, prompts: list[str] | None, max_length: int, budget: int | None, save: str | None
) -> None:
    """Search the part of a model that drafts best, and write it down if it pays. Status 1 if there is nothing to."""
    check_places(save)
    given = [Sample("prompt", "prompt", "prompt", (each,), {}, 1, (), None, None) for each in prompts or []]
    samples = given or load_samples(load_task("builtin"), PLAN_PROMPTS, None)
    target, tokenizer = load_target(loading, device())
    ids = [prompt_ids(tokenizer, each, 0, ()) for each in samples]
    planned = plan_layers(target, ids, max_length, 48 if budget is None else budget)
    if save is None:
        return
    console = Console(highlight=False, markup=False, emoji=False)
    if not planned.pays:
        console.print(f"{save} was not written.", soft_wrap=True)
        raise typer.Exit(1)
    asked = f"{len(ids)}{'' if prompts else ' of the package'}"
    told = comment(provenance(loading.model, target, 1), asked, planned.figures)
    save_config(save, planned.best.config.to_dict(), told)
    console.print(f"Saved to {save}: hf-specdec bench --strategy {save}", soft_wrap=True)


def print_tree(
    loading: RunConfig,
    config: SpecDecConfig,
    rates: float | list[float] | None,
    nodes: int,
    depth: int,
    context: int | None,
) -> None:
    """The best tree for an acceptance by rank, which is measured where none is given."""
    by_rank = rates if isinstance(rates, list) or rates is None else [rates]
    optimal_template(by_rank or [], nodes, depth)  # refuses what is none before a model is loaded
    target, tokenizer = load_target(loading, device())
    console = Console(highlight=False)
    if by_rank is None:
        with Console(stderr=True).status("Measuring acceptance ..."):
            counts = measure_acceptance(target, config, builtin_prompts(tokenizer))
        by_rank = counts.acceptance_by_rank()
        shown = ", ".join(f"{each:.3f}" for each in by_rank)
        console.print(f"Accepted by rank, at {counts.nodes} nodes that had candidates: {shown}")
    plan_tree(target, config, by_rank, nodes, depth, context, console)


def parse_rates(text: str) -> float | list[float]:
    """`"0.8"` as a number, `"0.8,0.7"` as a list. Raises `SpecDecError` for anything else."""
    try:
        rates = [float(each) for each in text.split(",")]
    except ValueError:
        raise SpecDecError(f"--acceptance {text!r} is no probability, and no list as in 0.8,0.7,0.6.") from None
    return rates[0] if len(rates) == 1 else rates


COMMANDS = {
    name: typer.main.get_command(app)
    for name, app in (("bench", bench_app), ("verify", verify_app), ("plan", plan_app))
}
