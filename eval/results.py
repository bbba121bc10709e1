"""From rows to `results.json` and the two reports."""

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from .config import PLAIN, RunConfig
from .measure import Meter, prompt_ids
from .methods import Method
from .provenance import provenance
from .quality import identity, logit_gaps, quality
from .report import SCHEMA_VERSION, write_report
from .rows import RESULTS_FILE, Row, write_atomically
from .summary import failures, summarise
from .task import Sample, Task

CONFIDENCE = 0.99
"""Of the intervals. A table holds many of them, and at 0.95 one in twenty would be wrong."""


def build_results(
    config: RunConfig,
    tasks: Sequence[Task],
    samples: Sequence[Sequence[Sample]],
    rows: Sequence[Row],
    methods: Sequence[Method],
    meter: Meter,
    processes: int,
    notes: Sequence[str],
) -> dict[str, Any]:
    """The content of `results.json`."""
    described = [each.to_dict() for each in methods]
    by_id = {each.id: each for own in samples for each in own}
    entries = [entry for row in rows for entry in row["methods"].values()]
    timed = sum(turn["seconds"] for entry in entries for turn in entry["turns"])
    own = sum(row["own_seconds"] for row in rows)
    same = identity(rows, PLAIN)
    if not config.temperature:
        logit_gaps(meter.model, same, prompts_of(rows, by_id, meter.tokenizer), rows)
    origin = provenance(config.model, meter.model, processes)
    return {
        "schema_version": SCHEMA_VERSION,
        "provenance": {**origin, "seed": config.seed},
        "config": config.to_dict(),
        "confidence": CONFIDENCE,
        "methods": described,
        "notes": list(notes),
        "tables": summarise(rows, described, CONFIDENCE),
        "failures": failures(rows),
        "quality": quality(rows, by_id, {each.name: each for each in tasks}, described, config.allow_code_execution),
        "identity": same,
        "time": {
            "wall_seconds": timed + own,
            "measured_seconds": timed,
            "own_seconds": own,
            "own_share": own / timed if timed else 0.0,
        },
    }


def prompts_of(
    rows: Sequence[Row], samples: dict[str, Sample], tokenizer: PreTrainedTokenizerBase
) -> Callable[[str, int, str], list[int]]:
    """A function that gives the prompt's ids of a sample, turn and method."""
    answers = {
        (sample["id"], label): [turn["text"][place] for turn in entry["turns"]]
        for row in rows
        if row["repeat"] == 0
        for place, sample in enumerate(row["samples"])
        for label, entry in row["methods"].items()
    }
    return lambda sample, turn, method: prompt_ids(tokenizer, samples[sample], turn, answers[sample, method][:turn])


def write_results(
    results: dict[str, Any], rows: Sequence[Row], directory: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Write `results.json`, `report.md` and `report.html`."""
    write_atomically(directory / RESULTS_FILE, json.dumps(results, indent=1))
    write_report(results, list(rows), directory, decode=lambda ids: pieces(tokenizer, ids))


def pieces(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """What each token adds to the text; a character of several tokens comes with the last of them."""

    def decode(end: int) -> str:
        return tokenizer.decode(ids[:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)

    whole, shown = decode(len(ids)), [""]
    for end in range(1, len(ids) + 1):
        text = decode(end)
        shown.append(text if whole.startswith(text) and len(text) > len(shown[-1]) else shown[-1])
    return [text[len(before) :] for before, text in pairwise(shown)]
