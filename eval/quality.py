"""What the texts are worth: metrics of answers, and whether a method's text is plain decoding's.

Metrics are modules of the `evaluate` library in `metrics/`, loaded from the package without a network. A task names
metrics; `METRICS` says which reference columns each wants.
"""

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import evaluate
import torch
from transformers import PreTrainedModel

from hf_specdec import SpecDecError, unknown_name

from .config import PLAIN
from .sandbox import check_sandbox
from .task import Sample

Row = Mapping[str, Any]
DIRECTORY = Path(__file__).parent / "metrics"


@dataclass(frozen=True)
class MetricSpec:
    """What a metric needs of a task.

    Args:
        required: keys that the task's `reference` must have. A column that holds a list is joined by line breaks.
        optional: keys that it may have.
        executes_code: whether the metric runs what the model wrote.
    """

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    executes_code: bool = False


METRICS: dict[str, MetricSpec] = {
    "exact_match": MetricSpec(("answer",)),
    "gsm8k_accuracy": MetricSpec(("answer",)),
    "pass_at_1": MetricSpec(("test",), optional=("entry_point", "prompt", "setup"), executes_code=True),
    "rouge_l": MetricSpec(("summary",)),
}
"""The metrics that a task may name. `identity` is measured for every task and needs no reference."""


class TaskLike(Protocol):
    """The part of a task that is used here."""

    @property
    def name(self) -> str: ...
    @property
    def metrics(self) -> tuple[str, ...]: ...


@functools.cache
def load_metric(name: str) -> Any:
    """The `evaluate.Metric` in `metrics/<name>/<name>.py`.

    Raises:
        SpecDecError: a package that it imports is missing.
    """
    try:
        return evaluate.load(str(DIRECTORY / name / f"{name}.py"), keep_in_memory=True)
    except ImportError as error:
        raise SpecDecError(
            f"The metric {name} cannot be loaded: {error}. Install the packages of the harness: "
            'pip install "hf-specdec[bench]".'
        ) from error


def check_metrics(samples: Mapping[str, Sample], tasks: Mapping[str, TaskLike], allow_code_execution: bool) -> None:
    """Try each task's metrics on its references and empty answers, so that a bad task fails before the first forward.

    Raises:
        SpecDecError: a metric is unknown, lacks a reference, cannot read one, or cannot be run on this machine; or a
            reference is one that no metric of the task reads.
    """
    for task in tasks.values():
        own = [each for each in samples.values() if each.task == task.name]
        known = {key for name in task.metrics for key in (*_spec(name).required, *_spec(name).optional)}
        for key in sorted({key for each in own for key in each.reference} - known):
            if known:
                raise unknown_name(f"key in `reference` of the task {task.name!r}:", key, known)
        for name in task.metrics:
            references = [_reference(name, sample) for sample in own]
            if _spec(name).executes_code and allow_code_execution:
                check_sandbox()
            if references:
                load_metric(name).compute(predictions=[""] * len(references), references=references)


def quality(
    rows: Sequence[Row],
    samples: Mapping[str, Sample],
    tasks: Mapping[str, TaskLike],
    methods: Iterable[Mapping[str, Any]],
    allow_code_execution: bool,
) -> list[dict[str, Any]]:
    """The mean of each metric over the last turns' texts, per task, part and method, each repeat counted.

    Args:
        rows: as in `rows.jsonl`. A unit that failed for a method is left out for that method.
        samples: by id.
        tasks: by name.
        methods: as in `results.json`.
        allow_code_execution: without it a metric that executes code gives one entry, with the reason for its absence.

    Returns:
        Entries of `task`, `part`, `metric`, `values` (by method; None where it has no answers) and `counted` (answers
        by method).

    Raises:
        SpecDecError: as for `check_metrics`.
    """
    labels = [method["label"] for method in methods]
    answers = {label: _answers(rows, samples, label) for label in labels}
    entries: list[dict[str, Any]] = []
    for task in tasks.values():
        parts = list(dict.fromkeys(each.part for each in samples.values() if each.task == task.name))
        for name in task.metrics:
            if _spec(name).executes_code and not allow_code_execution:
                note = "not measured: it runs code that the model wrote; --allow-code-execution allows that"
                entries.append({"task": task.name, "part": "all", "metric": name, "values": None, "note": note})
                continue
            for part in ["all", *(parts if len(parts) > 1 else [])]:
                own = {
                    label: [
                        pair for pair in answers[label] if pair[0].task == task.name and part in ("all", pair[0].part)
                    ]
                    for label in labels
                }
                entries.append(
                    {
                        "task": task.name,
                        "part": part,
                        "metric": name,
                        "values": {label: _value(name, pairs) for label, pairs in own.items()},
                        "counted": {label: len(pairs) for label, pairs in own.items()},
                    }
                )
    return entries


def _spec(name: str) -> MetricSpec:
    if name not in METRICS:
        raise unknown_name("metric", name, METRICS)
    return METRICS[name]


def _answers(rows: Sequence[Row], samples: Mapping[str, Sample], label: str) -> list[tuple[Sample, str]]:
    """Last turns of a method, each cut before the first of its sample's stop texts."""
    found = []
    for row in rows:
        entry = row["methods"].get(label)
        if entry is None or entry["error"] is not None:
            continue
        for each, text in zip(row["samples"], entry["turns"][-1]["text"]):
            sample = samples[each["id"]]
            ends = [text.find(stop) for stop in sample.stop if stop in text]
            found.append((sample, text[: min(ends, default=len(text))]))
    return found


def _value(name: str, pairs: Sequence[tuple[Sample, str]]) -> float | None:
    if not pairs:
        return None
    references = [_reference(name, sample) for sample, _ in pairs]
    return float(load_metric(name).compute(predictions=[text for _, text in pairs], references=references)[name])


def _reference(name: str, sample: Sample) -> str | dict[str, str]:
    """What a metric compares a sample's answer with: a text, or several by key."""
    spec = _spec(name)
    for key in spec.required:
        if sample.reference.get(key) is None:
            raise SpecDecError(
                f"The metric {name} of the task {sample.task!r} wants the reference {key!r}, which {sample.id} lacks; "
                f"map {key!r} to a column in the task's `reference`, or leave the metric out."
            )
    texts = {key: _text(sample.reference.get(key)) for key in (*spec.required, *spec.optional)}
    return texts if len(texts) > 1 else texts[spec.required[0]]


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "\n".join(map(str, value))
    return "" if value is None else str(value)


def identity(rows: Sequence[Row], baseline: str = PLAIN) -> dict[str, dict[str, Any]]:
    """For each other method, how many of its texts are token for token the baseline's, and where the others leave it.

    A text is one turn of one sample. Repeats that give the same pair of texts count once. The turns after one that
    differs answer other prompts and are not compared, nor are units that failed for either method.

    Returns:
        By method: `identical`, `compared`, both again in `by_task`, and `divergences` of `sample`, `turn`, `repeat`,
        `position` and `gap`, which `logit_gaps` fills in.
    """
    labels = dict.fromkeys(label for row in rows for label in row["methods"] if label != baseline)
    return {label: _compare(_pairs(rows, baseline, label)) for label in labels}


class _Pair(NamedTuple):
    """Token ids of a turn by the baseline and by a method."""

    sample: str
    turn: int
    reference: tuple[int, ...]
    text: tuple[int, ...]


def _pairs(rows: Sequence[Row], baseline: str, label: str) -> dict[_Pair, int]:
    """The first repeat that gave each pair."""
    pairs: dict[_Pair, int] = {}
    for row in rows:
        entries = [row["methods"].get(each) for each in (baseline, label)]
        if any(entry is None or entry["error"] is not None for entry in entries):
            continue
        for place, sample in enumerate(row["samples"]):
            for turn, both in enumerate(zip(*(entry["turns"] for entry in entries))):
                reference, text = (tuple(each["token_ids"][place]) for each in both)
                pairs.setdefault(_Pair(sample["id"], turn, reference, text), row["repeat"])
                if reference != text:
                    break
    return pairs


def _compare(pairs: Mapping[_Pair, int]) -> dict[str, Any]:
    if not pairs:
        return {"identical": 0, "compared": 0, "by_task": {}, "divergences": []}
    found = load_metric("identity").compute(
        predictions=[list(pair.text) for pair in pairs], references=[list(pair.reference) for pair in pairs]
    )
    divergences = [
        {"sample": pair.sample, "turn": pair.turn, "repeat": repeat, "position": position, "gap": None}
        for (pair, repeat), position in zip(pairs.items(), found["divergence_positions"])
        if position is not None
    ]
    compared = Counter(_task(pair.sample) for pair in pairs)
    parted = Counter(_task(each["sample"]) for each in divergences)
    by_task = {task: {"identical": count - parted[task], "compared": count} for task, count in compared.items()}
    return {
        "identical": len(pairs) - len(divergences),
        "compared": len(pairs),
        "by_task": by_task,
        "divergences": divergences,
    }


def _task(sample: str) -> str:
    """The task of a sample, from its id."""
    return sample.rpartition("/")[0]


def logit_gaps(
    model: PreTrainedModel,
    identities: Mapping[str, Mapping[str, Any]],
    prompt_ids: Callable[[str, int, str], list[int]],
    rows: Sequence[Row],
    baseline: str = PLAIN,
) -> None:
    """Fill in the `gap` of each divergence: how near to a tie the two tokens are in the target's own logits.

    The gap is |logit of the baseline's token - logit of the other's| after the prompt and the tokens that both texts
    share, from one forward pass in the model's dtype, read as float. It stays None where one text goes on after the
    other's end, and for later turns of later repeats, whose prompts `prompt_ids` does not know.

    Args:
        identities: of `identity`; its divergences are changed in place.
        prompt_ids: the prompt's token ids by sample, turn and method, in the first repeat.
        rows: those that `identities` was made from.
    """
    places = {
        (sample["id"], row["repeat"]): (row, place) for row in rows for place, sample in enumerate(row["samples"])
    }
    for label, found in identities.items():
        for each in found["divergences"]:
            row, place = places[each["sample"], each["repeat"]]
            turn, position = each["turn"], each["position"]
            reference, text = (
                row["methods"][method]["turns"][turn]["token_ids"][place] for method in (baseline, label)
            )
            if position < min(len(reference), len(text)) and not (turn and each["repeat"]):
                ids = [*prompt_ids(each["sample"], turn, baseline), *reference[:position]]
                logits = _next_logits(model, ids)
                each["gap"] = float((logits[reference[position]] - logits[text[position]]).abs())


@torch.no_grad()
def _next_logits(model: PreTrainedModel, ids: Sequence[int]) -> torch.Tensor:
    """Logits of the token after `ids`, of shape `(vocabulary,)`, in float32."""
    keep = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    tokens = torch.tensor([list(ids)], device=model.device)
    return (
        model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False, **keep).logits[0, -1].float()
    )
