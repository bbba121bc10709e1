"""Tasks: what a benchmark asks the model, as data.

A task is a YAML file whose keys are the fields of `Task`; `datasets` loads its rows, and each row becomes a `Sample`.
Adding one needs no code (docs/tasks.md). Samples come round-robin over the task's parts, so every start of the list is
a fair mixture. What a task asks for and its data do not have is an error that names the task, the data, the columns.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from string import Formatter
from typing import Any

import yaml
from datasets import Dataset, load_dataset

from hf_specdec import SpecDecError, unknown_name

SCHEMA_VERSION = 1
TASKS = Path(__file__).parent / "tasks"
LOADERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}  # by a data file's suffix


@dataclass(frozen=True)
class Sample:
    """One conversation that a model is asked to have.

    Args:
        id: the task's name and the number of the row, as in `gsm8k/7`.
        task: the task's name.
        part: the part of the task, or the task's name where it has none.
        turns: user messages, in order; at least one.
        reference: what the task's metrics compare an answer with.
        max_new_tokens: longest answer to one turn.
        stop: texts that end an answer.
        chat: whether the chat template is used; None: where the tokenizer has one.
        system: system message.
    """

    id: str
    task: str
    part: str
    turns: tuple[str, ...]
    reference: dict[str, Any]
    max_new_tokens: int
    stop: tuple[str, ...]
    chat: bool | None
    system: str | None


@dataclass(frozen=True)
class DatasetSource:
    """Where rows come from: the arguments of `datasets.load_dataset`.

    Args:
        path: a hub id; or `json`, `csv` or `parquet`, with `data_files`.
        name: a configuration of the data set.
        split: as in `test` or `train[:100]`.
        revision: commit or tag of a hub data set.
        data_files: paths or URLs. Paths are relative to the task's file, or to the hub data set.
    """

    path: str
    name: str | None = None
    split: str = "train"
    revision: str | None = None
    data_files: tuple[str, ...] = ()

    @property
    def is_local(self) -> bool:
        """Whether all rows are in files of this machine."""
        return self.path in LOADERS.values() and not any("://" in each for each in self.data_files)

    def __str__(self) -> str:
        return ", ".join(self.data_files) or self.path + (f" ({self.name})" if self.name else "")


@dataclass(frozen=True)
class Task:
    """One benchmark task; the fields are the keys of its YAML file.

    Args:
        version: version of these keys.
        name: letters, digits, `_`, `-` and `.`; names the task's local data file, too.
        description: what is measured, where the data come from, under which licence.
        dataset: where the rows are.
        max_new_tokens: longest answer to one turn.
        prompt: the column that holds the user message, or a template with `{column}` in it.
        turns: instead of `prompt`, the column that holds a list of user messages.
        max_turns: how many of the turns are asked; None for all.
        part: the column that names the part of the task a row belongs to.
        parts: part by value of that column, where they differ; must then have all of its values.
        reference: column by the name under which a metric wants it.
        chat: whether the chat template is used; None: where the tokenizer has one.
        system: system message.
        stop: texts that end an answer.
        metrics: names of metrics of the last answer.
    """

    version: int
    name: str
    description: str
    dataset: DatasetSource
    max_new_tokens: int
    prompt: str | None = None
    turns: str | None = None
    max_turns: int | None = None
    part: str | None = None
    parts: Mapping[str, str] = field(default_factory=dict)
    reference: Mapping[str, str] = field(default_factory=dict)
    chat: bool | None = None
    system: str | None = None
    stop: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()


def task_names() -> list[str]:
    """Names of the tasks that come with the package."""
    return sorted(each.stem for each in TASKS.glob("*.yaml"))


def load_task(name_or_path: str | Path) -> Task:
    """The task of this name, or the one that a YAML file describes.

    Raises:
        SpecDecError: there is none, or the file breaks the schema.
    """
    path = Path(name_or_path).expanduser()
    if path.suffix not in (".yaml", ".yml"):
        if str(name_or_path) not in task_names():
            raise unknown_name("task (a task of your own is a path that ends in .yaml):", name_or_path, task_names())
        path = TASKS / f"{name_or_path}.yaml"
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SpecDecError(f"The task file {path} cannot be read: {error}. Give the path of a YAML file.") from error
    return _task(values, path)


def load_samples(
    task: Task, limit: int | None = None, data_dir: str | Path | Mapping[str, str | Path] | None = None
) -> list[Sample]:
    """Samples of a task, round-robin over its parts and in the order of the rows within each part.

    Args:
        task: what to load.
        limit: at most so many samples; None for all.
        data_dir: local copies of data: a directory, or a file or directory by task name. In a directory the task's
            file is `<task>.<json|jsonl|csv|parquet>`, else the only such file whose name starts with the task's.
            A task whose own data file is local needs none.

    Raises:
        SpecDecError: the rows cannot be loaded, or lack what the task asks for.
    """
    if limit is not None and limit < 1:
        raise SpecDecError(f"limit={limit} asks for no samples; give a number above 0, or None for all.")
    source = _local_copy(task, data_dir) or task.dataset
    where = f"the task {task.name!r} in {source}"
    rows = _load_rows(task, source)
    columns = _prompt_columns(task, where)
    wanted = [("prompt" if task.prompt else "turns", each) for each in columns]
    wanted += [("part", task.part)] if task.part else []
    wanted += [(f"reference: {key}", column) for key, column in task.reference.items()]
    for key, column in wanted:
        if column not in rows.column_names:
            raise unknown_name(f"column of {where}, asked for by its key `{key}`:", column, rows.column_names)
    parts = _parts(task, rows, where)
    order = _round_robin(parts)[:limit]
    picked = zip(order, rows.select(order))
    return [_sample(task, row, number, parts[number], columns, where) for number, row in picked]


_TEXT, _COUNT, _SWITCH = "a text", "a whole number above 0", "true or false"
_TEXTS, _MAPPING, _ANY_MAPPING = "a list of texts", "a mapping of texts", "a mapping with `path` in it"
_SOURCE_KEYS = {"path": _TEXT, "name": _TEXT, "split": _TEXT, "revision": _TEXT, "data_files": _TEXTS}
_TASK_KEYS = {
    **dict.fromkeys(("name", "description", "prompt", "turns", "part", "system"), _TEXT),
    **dict.fromkeys(("version", "max_new_tokens", "max_turns"), _COUNT),
    **dict.fromkeys(("parts", "reference"), _MAPPING),
    **dict.fromkeys(("stop", "metrics"), _TEXTS),
    "dataset": _ANY_MAPPING,
    "chat": _SWITCH,
}


def _as(kind: str, value: Any) -> Any:
    """`value` as what a key of this kind holds, or None where it is no such thing."""
    if kind == _TEXTS and isinstance(value, str):
        value = [value]
    texts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    all_texts = all(isinstance(each, str) and each for each in texts)
    fits = {
        _TEXT: isinstance(value, str) and bool(value.strip()),
        _COUNT: isinstance(value, int) and not isinstance(value, bool) and value > 0,
        _SWITCH: isinstance(value, bool),
        _TEXTS: isinstance(value, list) and all_texts,
        _MAPPING: isinstance(value, dict) and all_texts,
        _ANY_MAPPING: isinstance(value, dict),
    }
    if not fits[kind]:
        return None
    if kind == _MAPPING:
        return {str(key): each for key, each in value.items()}
    return tuple(value) if kind == _TEXTS else value


def _read(values: Any, kinds: Mapping[str, str], required: Sequence[str], where: str) -> dict[str, Any]:
    """The values of a YAML mapping, checked; null is the same as absent."""
    if not isinstance(values, dict):
        raise SpecDecError(f"{where} holds no mapping; write `key: value` lines, with the keys {', '.join(kinds)}.")
    for key in values:
        if key not in kinds:
            raise unknown_name(f"key of {where}:", key, kinds)
    given = {key: _as(kinds[key], value) for key, value in values.items() if value is not None}
    for key in required:
        if key not in given:
            raise SpecDecError(f"{where} has no `{key}`, and cannot do without it; give {kinds[key]}.")
    for key, value in given.items():
        if value is None:
            raise SpecDecError(f"`{key}` of {where} is {values[key]!r}; give {kinds[key]}.")
    return given


def _task(values: Any, path: Path) -> Task:
    """The task that the content of a YAML file describes."""
    where = f"the task file {path}"
    if isinstance(values, dict) and values.get("version", SCHEMA_VERSION) != SCHEMA_VERSION:
        raise SpecDecError(
            f"{where} has version {values['version']!r}, and this release reads version {SCHEMA_VERSION}; write the "
            "task with the keys of docs/tasks.md."
        )
    given = _read(values, _TASK_KEYS, ("version", "name", "description", "dataset", "max_new_tokens"), where)
    given["dataset"] = _source(given["dataset"], path)
    task = Task(**given)
    if not re.fullmatch(r"[\w.-]+", task.name):
        raise SpecDecError(f"`name` of {where} is {task.name!r}; use letters, digits, `_`, `-` and `.` only.")
    if (task.prompt is None) == (task.turns is None):
        raise SpecDecError(f"{where} needs one of `prompt` and `turns`, and not both.")
    for key, needed in (("parts", "part"), ("max_turns", "turns")):
        if getattr(task, key) and not getattr(task, needed):
            raise SpecDecError(f"`{key}` of {where} needs `{needed}`, the column that it is about.")
    _prompt_columns(task, where)
    return task


def _source(values: Any, path: Path) -> DatasetSource:
    """The source that `dataset` describes, with paths of local files made absolute."""
    where = f"`dataset` in the task file {path}"
    source = DatasetSource(**_read(values, _SOURCE_KEYS, ("path",), where))
    if source.path not in LOADERS.values():
        return source
    if not source.data_files:
        raise SpecDecError(f"{where} has the path {source.path!r} and no `data_files`; name the files to read.")
    base = path.parent.resolve()
    files = tuple(each if "://" in each else str(base / Path(each).expanduser()) for each in source.data_files)
    return replace(source, data_files=files)


def _local_copy(task: Task, data_dir: str | Path | Mapping[str, str | Path] | None) -> DatasetSource | None:
    """The task's data in `data_dir`, or None where the task's own source is to be used."""
    named = isinstance(data_dir, Mapping)
    given = data_dir.get(task.name) if isinstance(data_dir, Mapping) else data_dir
    if given is None:
        return None
    place = Path(given).expanduser()
    if place.is_file() and named and place.suffix in LOADERS:
        return DatasetSource(LOADERS[place.suffix], data_files=(str(place.resolve()),))
    suffixes = ", ".join(LOADERS)
    if not place.is_dir():
        kinds = "no directory and no data file" if named else "no directory"
        raise SpecDecError(
            f"The data of the task {task.name!r} are to come from {place}, which is {kinds}; give a directory that "
            f"holds {task.name}.<suffix>, or {task.name}=FILE. Files end in {suffixes}."
        )
    files = sorted(each for each in place.iterdir() if each.suffix in LOADERS and each.is_file())
    matches = [each for each in files if each.stem == task.name]
    matches = matches or [each for each in files if each.name.startswith(task.name)]
    if len(matches) == 1:
        return DatasetSource(LOADERS[matches[0].suffix], data_files=(str(matches[0].resolve()),))
    if not matches and not named and task.dataset.is_local:
        return None
    found = ", ".join(each.name for each in matches or files) or "no data file"
    raise SpecDecError(
        f"{place} has {'more than one file' if matches else 'no file'} for the task {task.name!r}: found {found}. "
        f"Leave one whose name starts with {task.name!r} and ends in {suffixes}, or give {task.name}=FILE."
    )


def _load_rows(task: Task, source: DatasetSource) -> Dataset:
    split = source.split.split("[")[0]
    try:
        rows = load_dataset(
            source.path,
            source.name,
            split=source.split,
            revision=source.revision,
            data_files={split: list(source.data_files)} if source.data_files else None,
        )
    except StopIteration:  # a file without a byte
        rows = Dataset.from_list([])
    except Exception as error:  # what the hub's client, the file system and the readers of each format raise
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        said = dict.fromkeys(f"{type(each).__name__}: {str(each).strip()[:300]}" for each in (error, cause))
        remedy = "Check the network and the name, or give a local copy of the data (--data-dir)."
        if source.is_local:
            remedy = "Check that the files are there, whole and in this format, and that `split` exists."
        raise SpecDecError(
            f"The task {task.name!r} cannot load {source}, split {source.split!r} ({'; '.join(said)}). {remedy}"
        ) from error
    if not len(rows):
        raise SpecDecError(
            f"The task {task.name!r} has no rows: {source}, split {source.split!r} is empty (columns: "
            f"{', '.join(rows.column_names) or 'none'}). Give data with at least one row."
        )
    return rows


def _prompt_columns(task: Task, where: str) -> list[str]:
    """The columns that user messages are made of."""
    if task.turns:
        return [task.turns]
    prompt = task.prompt or ""
    if "{" not in prompt:
        return [prompt]
    try:
        found = [
            (name, spec, conversion) for _, name, spec, conversion in Formatter().parse(prompt) if name is not None
        ]
    except ValueError as error:
        raise SpecDecError(f"`prompt` of {where} is no template ({error}); write {{{{ and }}}} for braces.") from error
    if not found:
        raise SpecDecError(f"`prompt` of {where} has no column in it; name at least one, as in {{question}}.")
    for name, spec, conversion in found:
        if not name or spec or conversion or set(name) & set(".["):
            raise SpecDecError(f"`prompt` of {where} has a place {name!r} that is no column; write {{column}}.")
    return [name for name, _, _ in found]


def _parts(task: Task, rows: Dataset, where: str) -> list[str]:
    """The part of each row."""
    if task.part is None:
        return [task.name] * len(rows)
    values = [str(each) for each in rows[task.part]]
    if "None" in values:
        raise SpecDecError(f"Row {values.index('None')} of {where} has no part in {task.part!r}; every row needs one.")
    if not task.parts:
        return values
    for value in dict.fromkeys(values):
        if value not in task.parts:
            raise unknown_name(f"value in column {task.part!r} of {where}, not in its `parts`:", value, task.parts)
    return [task.parts[each] for each in values]


def _round_robin(parts: Sequence[str]) -> list[int]:
    """Row numbers: the first row of each part, the second of each, and so on."""
    seen: Counter[str] = Counter()
    ranks = []
    for part in parts:
        ranks.append(seen[part])
        seen[part] += 1
    first = {part: place for place, part in enumerate(seen)}
    return sorted(range(len(parts)), key=lambda number: (ranks[number], first[parts[number]]))


def _sample(task: Task, row: Mapping[str, Any], number: int, part: str, columns: Sequence[str], where: str) -> Sample:
    """Row `number` of the data as a sample."""
    if task.turns:
        turns = row[task.turns]
        turns = tuple(turns[: task.max_turns]) if isinstance(turns, list) else (None,)
    elif task.prompt in columns:
        turns = (row[columns[0]],)
    else:
        turns = ((task.prompt or "").format_map({each: _written(row[each]) for each in columns}).strip(),)
    if not turns or not all(isinstance(each, str) and each.strip() for each in turns):
        raise SpecDecError(
            f"Row {number} of {where} has no {'list of texts' if task.turns else 'text'} in "
            f"{', '.join(map(repr, columns))}; every row needs one. Mend or remove the row."
        )
    return Sample(
        id=f"{task.name}/{number}",
        task=task.name,
        part=part,
        turns=turns,
        reference={key: row[column] for key, column in task.reference.items()},
        max_new_tokens=task.max_new_tokens,
        stop=task.stop,
        chat=task.chat,
        system=task.system,
    )


def _written(value: Any) -> str:
    """A cell in a template: lists one item a line, an absent value empty."""
    if isinstance(value, list):
        return "\n".join(map(str, value))
    return "" if value is None else str(value)
