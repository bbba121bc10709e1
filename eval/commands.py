"""The commands that `hf-specdec` passes on: `bench`, `verify`, `plan`."""

from typing import Annotated

import torch
import typer
from accelerate import PartialState
from rich.console import Console

from hf_specdec import SpecDecConfig, SpecDecError

from .bench import load_target
from .config import DTYPES, RunConfig, parse_strategy
from .length_plan import load_run, plan
from .lossless import verify
from .run import app as bench_app
from .run import clean_errors
from .task import load_samples, load_task

VERIFY_PROMPTS = 6

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


@plan_app.command()
def plan_command(
    model: Model,
    strategy: Annotated[str, typer.Option(help="Whose drafts; as in `hf-specdec bench`.")],
    acceptance: Annotated[
        str | None, typer.Option(help="Probability that a draft token is accepted, or one per position: 0.8,0.7,0.6.")
    ] = None,
    results: Annotated[
        str | None, typer.Option(help="A results.json, or its directory, in place of --acceptance.")
    ] = None,
    label: Annotated[
        str | None, typer.Option(help="Which method of the results. Default: the longest drafts.")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(help="Longest draft. Default: 16, or as many as --acceptance.")
    ] = None,
    context: Annotated[int | None, typer.Option(help="Tokens of context that costs are measured at.")] = None,
    save_costs: Annotated[
        str | None, typer.Option(help="JSON file to add the costs to, for the adaptive schedule's profile.")
    ] = None,
    dtype: Dtype = "auto",
    revision: Revision = None,
    device_map: DeviceMap = None,
    attention: Attention = None,
) -> None:
    """Measure the costs of this machine, and print the expected speed-up for each draft length."""
    with clean_errors():
        if (acceptance is None) == (results is None):
            raise SpecDecError("Give one of --acceptance and --results, for how often drafts are accepted.")
        if label is not None and results is None:
            raise SpecDecError("--label names a method of --results; give that as well.")
        config = SpecDecConfig(**parse_strategy(strategy).config)
        rates = None if acceptance is None else parse_rates(acceptance)
        known = rates if rates is not None else load_run(str(results), config, label)
        longest = (len(rates) if isinstance(rates, list) else 16) if max_length is None else max_length
        loading = target_config(model, dtype, revision, device_map, attention)
        plan(load_target(loading, device())[0], config, known, longest, context, None, save_costs)


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
