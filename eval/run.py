"""`hf-specdec bench`, `accelerate launch eval/run.py`, `accelerate launch -m hf_specdec_eval.run`: one command line.

Progress goes to standard error; the last line on standard output is one JSON object.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from accelerate import PartialState
from rich.console import Console

from hf_specdec import SpecDecError
from hf_specdec_eval.bench import run_bench
from hf_specdec_eval.config import DTYPES, RunConfig, read_yaml
from hf_specdec_eval.headline import headline, tables

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@contextmanager
def clean_errors() -> Iterator[None]:
    """Turn an error of the request into one red line and exit status 2."""
    try:
        yield
    except (SpecDecError, OSError) as error:
        told = " ".join(str(error).split())
        console = Console(stderr=True, highlight=False, markup=False, emoji=False)
        console.print(f"Error: {told}", style="red", soft_wrap=True)
        raise typer.Exit(2) from None


@app.command()
def bench(
    model: Annotated[str | None, typer.Option(help="Target model: a name on the hub or a directory.")] = None,
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            help="What to measure; repeatable: NAME, NAME:option=value,..., a YAML file, or a draft model's name or "
            "path; LABEL@ may go before."
        ),
    ] = None,
    task: Annotated[
        list[str] | None, typer.Option(help="A task of the package; repeatable. Default: builtin.")
    ] = None,
    task_file: Annotated[list[str] | None, typer.Option(help="A task of yours, a YAML file; repeatable.")] = None,
    config: Annotated[str | None, typer.Option(help="A YAML file with a whole run; options override it.")] = None,
    data_dir: Annotated[
        list[str] | None, typer.Option(help="A directory with local data sets, or TASK=PATH; repeatable.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Samples per task. Default: all.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples per call. Default: 1.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Longest answer. Default: the task's.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 decodes greedily. Default: 0.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of sampling and order. Default: 0.")] = None,
    repeats: Annotated[int | None, typer.Option(help="Times that each unit is measured. Default: 3.")] = None,
    draft_lengths: Annotated[
        str | None, typer.Option(help="A sweep: each strategy once per length, as in 1,2,4,8.")
    ] = None,
    output: Annotated[str | None, typer.Option(help="Directory of the results. Default: results.")] = None,
    resume: Annotated[bool, typer.Option(help="Go on with the rows that --output holds.")] = False,
    revision: Annotated[str | None, typer.Option(help="Revision of the model on the hub.")] = None,
    dtype: Annotated[str | None, typer.Option(help=f"Weights' type: {', '.join(DTYPES)}. Default: auto.")] = None,
    device_map: Annotated[str | None, typer.Option(help="As from_pretrained takes it: auto.")] = None,
    attention: Annotated[str | None, typer.Option(help="Attention implementation: sdpa, eager, ...")] = None,
    allow_code_execution: Annotated[
        bool | None, typer.Option(help="Run generated programs, on this machine, where a metric needs it.")
    ] = None,
) -> None:
    """Measure draft strategies against plain and stock `generate` on tasks."""
    given: dict[str, Any] = {
        "model": model, "strategies": strategy, "tasks": task, "task_files": task_file, "data_dir": data_dir,
        "limit": limit, "batch_size": batch_size, "max_new_tokens": max_new_tokens, "temperature": temperature,
        "seed": seed, "repeats": repeats, "output": output, "revision": revision, "dtype": dtype,
        "device_map": device_map, "attention": attention, "allow_code_execution": allow_code_execution,
    }  # fmt: skip
    with clean_errors():
        results, output = carry_out(given, config, draft_lengths, resume)
    if results is not None:
        console = Console(stderr=True, highlight=False, markup=False, emoji=False)
        console.print(*tables(results), f"Reports: {output}/report.md and report.html", sep="\n")
        print(json.dumps(headline(results, output)))
    PartialState().destroy_process_group()  # its threads may abort an interpreter that ends while they run


def carry_out(
    given: dict[str, Any], config: str | None, draft_lengths: str | None, resume: bool
) -> tuple[dict[str, Any] | None, str]:
    """The run that options and a YAML file stand for. Returns its results and where they are."""
    asked = {name: each for name, each in given.items() if each is not None}
    values = {**({} if config is None else read_yaml(config)), **asked}
    if values.get("task_files") and values.get("tasks") is None:
        values["tasks"] = []
    run = RunConfig.from_dict(values)
    if draft_lengths is not None:
        run = run.with_lengths(parse_lengths(draft_lengths))
    return run_bench(run, resume), run.output


def parse_lengths(text: str) -> list[int]:
    """`"1,2,4"` as numbers. Raises `SpecDecError` for anything else."""
    try:
        lengths = [int(each) for each in text.split(",")]
    except ValueError:
        lengths = []
    if not lengths or min(lengths) < 0:
        raise SpecDecError(f"--draft-lengths {text!r} is no list of lengths; give numbers as in 1,2,4,8.")
    return lengths


if __name__ == "__main__":
    app()
