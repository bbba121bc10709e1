"""The run: units of prompts over methods in random order, over repeats, over processes.

Each process measures its share of the units and appends rows to its own file; the main process gathers all rows,
computes quality and intervals, and writes the four files.
"""

import hashlib
import os
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from hf_specdec import SpecDecError, enable, unknown_name

from .config import PLAIN, RunConfig
from .measure import Meter
from .methods import Method, build_methods, loading
from .quality import check_metrics
from .results import build_results, write_results
from .rows import ROWS_FILE, Row, RowFile, key, merge_rows, prepare_directory, read_file, read_rows
from .task import Sample, Task, load_samples, load_task

GATHER_LIMIT = timedelta(days=7)
"""How long a process waits for the slowest one."""


@dataclass(frozen=True)
class Unit:
    """What one call of `generate` gets.

    Args:
        number: its place in the run.
        task: the task's name.
        samples: as many as the batch size says, with as many turns each.
    """

    number: int
    task: str
    samples: tuple[Sample, ...]

    def described(self) -> list[dict[str, str]]:
        """Per sample its id, its part, and a digest of all that is asked, by which a resumed run knows its rows."""
        digests = [hashlib.sha256(repr(each).encode()).hexdigest()[:16] for each in self.samples]
        return [{"id": each.id, "part": each.part, "digest": own} for each, own in zip(self.samples, digests)]


def make_units(tasks: Sequence[Task], samples: Sequence[Sequence[Sample]], batch_size: int) -> list[Unit]:
    """The units of a run: the samples of each task in order, `batch_size` at a time."""
    units: list[Unit] = []
    for task, own in zip(tasks, samples):
        batch: list[Sample] = []
        for sample in own:
            if batch and (len(batch) == batch_size or len(sample.turns) != len(batch[0].turns)):
                units.append(Unit(len(units), task.name, tuple(batch)))
                batch = []
            batch.append(sample)
        if batch:
            units.append(Unit(len(units), task.name, tuple(batch)))
    return units


def check_names(tasks: Sequence[Task], samples: Sequence[Sequence[Sample]]) -> None:
    """Raise `SpecDecError` where tables of tasks and parts could not be told apart by their names."""
    for name, count in Counter(each.name for each in tasks).items():
        if count > 1:
            raise SpecDecError(f"The task {name!r} is given {count} times; give it once.")
    for task, own in zip(tasks, samples):
        parts = {each.part for each in own}
        if len(parts) > 1 and "all" in parts:
            raise SpecDecError(
                f"The task {task.name!r} has a part 'all', which is what all parts together are called; rename it "
                "with `parts` in the task file."
            )


def check_rows(rows: Sequence[Row], units: Sequence[Unit], methods: Sequence[Method]) -> None:
    """Raise `SpecDecError` unless the rows of an earlier start are of these prompts and methods."""
    labels = {each.label for each in methods}
    for row in rows:
        before, now = row.get("samples", []), units[row["unit"]].described() if row["unit"] < len(units) else []
        place = f"The row of unit {row['unit']}, repeat {row['repeat']}"
        if len(before) != len(now) or not all(old.items() <= new.items() for old, new in zip(before, now)):
            raise SpecDecError(
                f"{place}, is of other prompts than this run's: a task or its data have changed since. Give another "
                "--output, or put them back."
            )
        if row["methods"].keys() != labels:
            raise SpecDecError(
                f"{place}, has the methods {', '.join(row['methods'])} and this run {', '.join(sorted(labels))}: it "
                "was measured on another kind of device. Give another --output."
            )


def load_target(config: RunConfig, device: torch.device) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The enabled target in evaluation mode, and its tokenizer.

    Raises:
        SpecDecError: it cannot be loaded as asked.
    """
    logging.disable_progress_bar()
    how: dict[str, Any] = {"dtype": config.dtype if config.dtype == "auto" else getattr(torch, config.dtype)}
    if config.device_map is not None:
        how["device_map"] = config.device_map
    if config.attention is not None:
        how["attn_implementation"] = config.attention
    with loading(config.model):
        tokenizer = AutoTokenizer.from_pretrained(config.model, revision=config.revision)
        model = AutoModelForCausalLM.from_pretrained(config.model, revision=config.revision, **how)
        if config.device_map is None:
            model.to(device)
    return enable(model.eval()), tokenizer


def run_bench(config: RunConfig, resume: bool = False, console: Console | None = None) -> dict[str, Any] | None:
    """Measure, and write `rows.jsonl`, `results.json`, `report.md` and `report.html` to the output directory.

    Returns:
        the results, on the main process; None on the others.

    Raises:
        SpecDecError: before anything is measured where the run cannot be made, or where rows cannot be written.
    """
    console = console or Console(stderr=True, highlight=False, markup=False, emoji=False)
    if not config.strategies:
        raise SpecDecError("A run measures strategies and was given none; give --strategy suffix, for example.")
    state = processes()
    tasks = [load_task(each) for each in (*config.tasks, *config.task_files)]
    places = data_dirs(config, tasks)
    directory = Path(config.output)
    with state.main_process_first():
        samples = [load_samples(each, config.limit, places) for each in tasks]
        check_names(tasks, samples)
        by_id = {each.id: each for own in samples for each in own}
        check_metrics(by_id, {each.name: each for each in tasks}, config.allow_code_execution)
        if state.is_local_main_process:  # one per machine: they may not share a file system
            prepare_directory(config, resume or not state.is_main_process)
    units = make_units(tasks, samples, config.batch_size)
    done = read_rows(directory, console.print)
    state.wait_for_everyone()
    model, tokenizer = load_target(config, state.device)
    methods, notes = build_methods(config, model, tokenizer)
    check_rows(done, units, methods)
    meter = Meter(model, tokenizer, config.temperature, config.seed)
    known: set[tuple[int, int]] = set().union(*gather_object([{key(row) for row in done}]))
    todo = [(repeat, unit) for repeat in range(config.repeats) for unit in units if (repeat, unit.number) not in known]
    mine = todo[state.process_index :: state.num_processes]
    name = ROWS_FILE if state.num_processes == 1 else f"rows-{state.process_index}.jsonl"
    warm_up_seconds = warm_up(meter, methods, mine, config.warm_up_tokens)
    with RowFile(directory / name) as file, progress(console, len(mine), state.is_main_process) as advance:
        for row in measured(meter, methods, mine, config, state.process_index):
            file.write(row)
            advance()
    own = done + read_file(directory / name)
    everything = gather_object([{"rows": own, "warm_up_seconds": warm_up_seconds}])
    if not state.is_main_process:
        return None
    rows = {key(row): row for part in everything for row in part["rows"]}
    ordered = [rows[each] for each in sorted(rows)]
    merge_rows(directory, ordered)
    results = build_results(config, tasks, samples, ordered, methods, meter, state.num_processes, notes)
    results["time"]["warm_up_seconds"] = sum(part["warm_up_seconds"] for part in everything)
    write_results(results, ordered, directory, tokenizer)
    return results


def processes() -> PartialState:
    """This process among those of the run.

    Raises:
        SpecDecError: the launcher was asked for several processes and started one.
    """
    if {"ACCELERATE_MIXED_PRECISION", "MASTER_ADDR"} <= os.environ.keys() and "LOCAL_RANK" not in os.environ:
        raise SpecDecError(
            "accelerate launch was asked for several processes and started one, which is what it does on CPUs. Add "
            "--multi_gpu, which starts them on CPUs as well."
        )
    return PartialState(cpu=not torch.accelerator.is_available(), timeout=GATHER_LIMIT)


def data_dirs(config: RunConfig, tasks: Sequence[Task]) -> str | dict[str, str] | None:
    """Where local data sets are: one directory, or a file or directory per task."""
    pairs = [each.split("=", 1) for each in config.data_dir if "=" in each]
    named, plain = dict(pairs), [each for each in config.data_dir if "=" not in each]
    if len(named) < len(pairs):
        raise SpecDecError("--data-dir TASK=PATH is given twice for one task; give it once.")
    if (named and plain) or len(plain) > 1:
        raise SpecDecError("--data-dir is one directory, or any number of TASK=PATH.")
    known = [each.name for each in tasks]
    for name in named:
        if name not in known:
            raise unknown_name("task of this run in --data-dir:", name, known)
    return named or (plain[0] if plain else None)


def warm_up(meter: Meter, methods: Sequence[Method], todo: Sequence[tuple[int, Unit]], tokens: int) -> float:
    """One short call of each method, not measured. Returns its seconds.

    Raises:
        SpecDecError: plain `generate` or a strategy cannot run at all. A baseline that cannot
            fails in each row.
    """
    started = time.perf_counter()
    for method in methods if todo else ():
        entry = meter.run(method, todo[0][1].samples, tokens)
        if entry["error"] is not None and (method.kind == "ours" or method.label == PLAIN):
            raise SpecDecError(f"{method.label} cannot run here, nothing was measured. {entry['error']}")
    return time.perf_counter() - started


def measured(
    meter: Meter, methods: Sequence[Method], todo: Sequence[tuple[int, Unit]], config: RunConfig, process: int
) -> Iterator[Row]:
    """A row for each unit and repeat, with the methods in an order that only the seed decides."""
    started = time.perf_counter()
    for repeat, unit in todo:
        order = list(methods)
        random.Random(f"{config.seed}/{repeat}/{unit.number}").shuffle(order)
        entries = {each.label: meter.run(each, unit.samples, config.max_new_tokens) for each in order}
        timed = sum(turn["seconds"] for entry in entries.values() for turn in entry["turns"])
        now = time.perf_counter()
        yield {
            "unit": unit.number,
            "repeat": repeat,
            "task": unit.task,
            "samples": unit.described(),
            "order": [each.label for each in order],
            "process": process,
            "own_seconds": now - started - timed,
            "methods": {each.label: entries[each.label] for each in methods},
        }
        started = now


class progress:
    """A progress bar on the main process; calling what it enters with moves it on."""

    def __init__(self, console: Console, total: int, shown: bool):
        columns = (
            TextColumn("measuring"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=console, disable=not shown)
        self._total = total

    def __enter__(self) -> Any:
        self._bar.start()
        task = self._bar.add_task("units", total=self._total)
        return lambda: self._bar.advance(task)

    def __exit__(self, *failure: object) -> None:
        self._bar.stop()
