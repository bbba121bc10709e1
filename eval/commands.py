"""The commands that `hf-specdec` passes on: `bench`, `verify`, `plan`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import torch
import typer
import yaml
from accelerate import PartialState
from rich.console import Console

from hf_specdec import SpecDecConfig, SpecDecError, optimal_template

from .bench import load_target
from .config import DTYPES, RunConfig, parse_strategy
from .layer_plan import plan_layers
from .length_plan import load_run, plan
from .lossless import verify
from .measure import prompt_ids
from .run import app as bench_app
from .run import clean_errors
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


Drafts = Annotated[str | None, typer.Option(help="Whose drafts; as in `hf-specdec bench`.")]
Rates = Annotated[
    str | None,
    typer.Option(
        help="Probability that a draft token is accepted, or one per position: 0.8,0.7,0.6. With --tree, one per "
        "candidate at the same place, the likeliest first: 0.6,0.2,0.1."
    ),
]
Results = Annotated[str | None, typer.Option(help="A results.json, or its directory, in place of --acceptance.")]
Label = Annotated[str | None, typer.Option(help="Which method of the results. Default: the longest drafts.")]
PlanTree = Annotated[
    bool, typer.Option("--tree", help="Plan a tree. Without --acceptance, it is measured on prompts of the package.")
]
Nodes = Annotated[
    int | None, typer.Option(help=f"Most nodes of a tree, the last token included. Default: {DEFAULT_NODES}.")
]
Longest = Annotated[
    int | None,
    typer.Option(help="Longest draft, or path of a tree. Default: 16, or as many as --acceptance; 8 with --layers."),
]
Context = Annotated[int | None, typer.Option(help="Tokens of context that costs are measured at.")]
PlanLayers = Annotated[
    bool, typer.Option("--layers", help="Search the part of the model that drafts best (strategy layer_skip).")
]
Prompts = Annotated[
    list[str] | None,
    typer.Option(help=f"With --layers: your prompts; repeatable. Default: {PLAN_PROMPTS} of the package."),
]
Budget = Annotated[int | None, typer.Option(help="With --layers: skip sets to try. Default: 48.")]
SaveCosts = Annotated[
    str | None, typer.Option(help="JSON file to add the costs to, for the adaptive schedule's profile.")
]
Save = Annotated[str | None, typer.Option(help="With --layers: YAML file for the best setting.")]


@plan_app.command()
def plan_command(
    model: Model,
    strategy: Drafts = None,
    acceptance: Rates = None,
    results: Results = None,
    label: Label = None,
    tree: PlanTree = False,
    nodes: Nodes = None,
    max_length: Longest = None,
    context: Context = None,
    layers: PlanLayers = False,
    prompt: Prompts = None,
    budget: Budget = None,
    save: Save = None,
    save_costs: SaveCosts = None,
    dtype: Dtype = "auto",
    revision: Revision = None,
    device_map: DeviceMap = None,
    attention: Attention = None,
) -> None:
    """Measure this machine's costs; print the speed-up to expect of each draft length, or the best tree or layers."""
    with clean_errors():
        if layers:
            others = {"--strategy": strategy, "--acceptance": acceptance, "--results": results, "--nodes": nodes}
            others |= {"--label": label, "--context": context, "--tree": tree or None, "--save-costs": save_costs}
            refuse_options(others, layers)
        else:
            refuse_options({"--prompt": prompt, "--budget": budget, "--save": save}, layers)
        loading = target_config(model, dtype, revision, device_map, attention)
        if layers:
            best_layers(loading, prompt, 8 if max_length is None else max_length, budget, save)
            return
        if strategy is None:
            raise SpecDecError("Give --strategy for the length of its drafts, or --layers for a part of the model.")
        if label is not None and results is None:
            raise SpecDecError("--label names a method of --results; give that as well.")
        config = SpecDecConfig(**parse_strategy(strategy).config)
        rates = None if acceptance is None else parse_rates(acceptance)
        if tree:
            if results is not None:
                raise SpecDecError("--results tells nothing about candidates at the same place; drop it, or --tree.")
            print_tree(loading, config, rates, nodes or DEFAULT_NODES, max_length or DEFAULT_DEPTH, context)
            return
        if nodes is not None:
            raise SpecDecError("--nodes is the size of a tree; give --tree as well, or --max-length alone.")
        if (acceptance is None) == (results is None):
            raise SpecDecError("Give one of --acceptance and --results, for how often drafts are accepted.")
        known = rates if rates is not None else load_run(str(results), config, label)
        longest = (len(rates) if isinstance(rates, list) else 16) if max_length is None else max_length
        plan(load_target(loading, device())[0], config, known, longest, context, None, save_costs)


def refuse_options(given: Mapping[str, object], layers: bool) -> None:
    """Raise `SpecDecError` for an option of `plan` that would be ignored."""
    for option, value in given.items():
        if value is not None:
            how = "does not go with --layers; leave it out" if layers else "goes with --layers; give that as well"
            raise SpecDecError(f"{option} {how}.")


def best_layers(
    loading: RunConfig, prompts: list[str] | None, max_length: int, budget: int | None, save: str | None
) -> None:
    """Search the part of a model that drafts best, and write it down if it pays. Status 1 if there is nothing to."""
    if save is not None and not Path(save).parent.is_dir():
        raise SpecDecError(f"--save {save}: there is no directory {Path(save).parent}; make it first.")
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
    Path(save).write_text(yaml.safe_dump(planned.best.config.to_dict(), sort_keys=False), encoding="utf-8")
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
