"""What a run measures: one frozen object, from the command line, from YAML, or both.

A run's configuration is kept beside its rows; rows of different configurations are never mixed.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from hf_specdec import SpecDecConfig, SpecDecError, known_strategies, unknown_name

DTYPES = ("auto", "float32", "bfloat16", "float16")
CONFIG_FIELDS = tuple(each.name for each in fields(SpecDecConfig) if not each.name.startswith("strategy"))
"""Options of a strategy given as text that are not the strategy's own."""
PLAIN = "plain"
"""Label of plain decoding, which others are compared with, and its kind."""
BASELINES, STOCK = (PLAIN, "plain_compiled"), "stock_"
"""Labels of the baselines, and what those of transformers' own methods begin with."""
SEEDS = 2**63


@dataclass(frozen=True)
class StrategySpec:
    """A strategy under the label that tables show.

    Args:
        label: unique in a run.
        config: the fields of a `SpecDecConfig`. A draft model is a name or a path in `strategy_options["model"]`.
    """

    label: str
    config: dict[str, Any]

    @property
    def draft_model(self) -> str | None:
        """Name or path of the draft model, where the strategy has one."""
        name = self.config.get("strategy_options", {}).get("model")
        return name if isinstance(name, str) else None

    def to_dict(self) -> dict[str, Any]:
        """For YAML and JSON."""
        return {"label": self.label, **self.config}


@dataclass(frozen=True)
class RunConfig:
    """One run of the harness.

    Args:
        model: the target: a hub name or a directory.
        strategies: what to measure beside the baselines.
        tasks: names of tasks that the package has.
        task_files: YAML files of further tasks.
        limit: samples per task; None for all.
        batch_size: samples per call of `generate`.
        max_new_tokens: longest answer; None for each task's own.
        temperature: 0 decodes greedily.
        seed: of the sampling, and of the order of the methods.
        repeats: times that each unit is measured.
        data_dir: a directory with local data sets, or `TASK=PATH` entries.
        output: directory of the results.
        revision, dtype, device_map, attention: as `from_pretrained` takes them.
        allow_code_execution: run generated programs where a metric needs it.
        warm_up_tokens: length of the unmeasured call before the first unit, per method.
    """

    model: str
    strategies: tuple[StrategySpec, ...] = ()
    tasks: tuple[str, ...] = ("builtin",)
    task_files: tuple[str, ...] = ()
    limit: int | None = None
    batch_size: int = 1
    max_new_tokens: int | None = None
    temperature: float = 0.0
    seed: int = 0
    repeats: int = 3
    data_dir: tuple[str, ...] = ()
    output: str = "results"
    revision: str | None = None
    dtype: str = "auto"
    device_map: str | None = None
    attention: str | None = None
    allow_code_execution: bool = False
    warm_up_tokens: int = 8

    def __post_init__(self) -> None:
        for name in ("batch_size", "repeats", "limit", "max_new_tokens", "warm_up_tokens"):
            value = getattr(self, name)
            if value is None and name in ("limit", "max_new_tokens"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise SpecDecError(f"{name}={value!r} is no count; give a whole number of at least 1.")
        heat = self.temperature
        if isinstance(heat, bool) or not isinstance(heat, (int, float)) or not 0 <= heat < math.inf:
            raise SpecDecError(f"temperature={heat!r} is no temperature; give a finite number of at least 0.")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < SEEDS:
            raise SpecDecError(f"seed={self.seed!r} is no seed; give a whole number of at least 0, below 2**63.")
        if not isinstance(self.allow_code_execution, bool):
            raise SpecDecError(f"allow_code_execution={self.allow_code_execution!r} is neither true nor false.")
        self._check_texts()
        if self.dtype not in DTYPES:
            raise unknown_name("dtype", self.dtype, DTYPES)
        if not self.tasks and not self.task_files:
            raise SpecDecError("A run needs a task; give --task NAME or --task-file FILE.")
        labels = [each.label for each in self.strategies]
        twice = sorted({each for each in labels if labels.count(each) > 1})
        if twice:
            raise SpecDecError(f"Strategy {twice[0]!r} is given twice; give each its own label: LABEL@SPEC.")
        for label in labels:
            if label in BASELINES or label.startswith(STOCK):
                raise SpecDecError(
                    f"{label!r} is the label of a baseline, which every run has, and cannot be a strategy's; give "
                    "another: LABEL@SPEC."
                )

    def _check_texts(self) -> None:
        """Raise `SpecDecError` where a field of texts holds something else."""
        for name in ("model", "output", "revision", "device_map", "attention"):
            value = getattr(self, name)
            optional = name not in ("model", "output")
            if not ((value is None and optional) or (isinstance(value, str) and value.strip())):
                raise SpecDecError(f"{name}={value!r} is no text; give a name{'' if optional else ' or a path'}.")
        for name in ("tasks", "task_files", "data_dir"):
            for value in getattr(self, name):
                if not isinstance(value, str) or not value.strip():
                    raise SpecDecError(f"{value!r} in {name} is no text; give names or paths.")

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, JSON-able."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        values["strategies"] = [each.to_dict() for each in self.strategies]
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def with_lengths(self, lengths: Iterable[int]) -> "RunConfig":
        """Each strategy once per draft length, the same in every round, for a sweep."""
        if not self.strategies:
            raise SpecDecError("Draft lengths are those of strategies, and the run has none; give --strategy SPEC.")
        swept = [
            StrategySpec(
                f"{each.label}({length})", {**each.config, "max_draft_tokens": length, "schedule": "constant"}
            )
            for each in self.strategies
            for length in lengths
        ]
        return replace(self, strategies=tuple(swept))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "RunConfig":
        """The run with these fields; strategies as texts, mappings or `StrategySpec`s. None is the same as absent."""
        known = [each.name for each in fields(cls)]
        for name in values:
            if name not in known:
                raise unknown_name("field of a run", name, known)
        ready = {name: value for name, value in values.items() if value is not None}
        if "model" not in ready:
            raise SpecDecError("A run needs a model; give --model NAME_OR_PATH.")
        for name in ("tasks", "task_files", "data_dir", "strategies"):
            if isinstance(ready.get(name), str):
                ready[name] = [ready[name]]
            if name in ready and not isinstance(ready[name], (list, tuple)):
                raise SpecDecError(f"{name}={ready[name]!r} is no list; give one, as in [{ready[name]!r}].")
            if name in ready:
                ready[name] = tuple(ready[name])
        ready["strategies"] = tuple(parse_strategy(each) for each in ready.get("strategies", ()))
        return cls(**ready)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file."""
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SpecDecError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise SpecDecError(f"{path} holds no mapping of names to values.")
    return content


def parse_strategy(given: Any) -> StrategySpec:
    """The strategy that a text or a mapping stands for.

    Args:
        given: `NAME`, `NAME:option=value,...`, a YAML file, or a draft model's name or path; `LABEL@` may go before.
            A mapping has the fields of `SpecDecConfig`, and `label`. Options that `SpecDecConfig` does not have are
            the strategy's own.
    """
    if isinstance(given, StrategySpec):
        return given
    if isinstance(given, Mapping):
        values = dict(given)
        label = values.pop("label", None)
        return _spec(label or str(values.get("strategy", "suffix")), values)
    if not isinstance(given, str) or not given:
        raise SpecDecError(f"strategy {given!r} is neither a text nor a mapping.")
    label, marked, text = given.partition("@")
    if not marked or Path(given).exists():
        label, text = "", given
    if not text:
        raise SpecDecError(f"strategy {given!r} is a label without a strategy; give LABEL@SPEC.")
    if text.endswith((".yaml", ".yml")):
        values = read_yaml(text)
        named = values.pop("label", None)
        return _spec(label or named or Path(text).stem, values)
    name, _, rest = text.partition(":")
    if name not in known_strategies() and ("/" in text or Path(text).is_dir()):
        return _spec(label or Path(text).name, {"strategy": "draft_model", "strategy_options": {"model": text}})
    values = {"strategy": name, "strategy_options": {}}
    for pair in rest.split(",") if rest else []:
        option, separator, value = pair.partition("=")
        if not separator or not option:
            raise SpecDecError(f"{pair!r} in strategy {given!r} is not of the form option=value.")
        where = values if option in CONFIG_FIELDS else values["strategy_options"]
        if option in where:
            raise SpecDecError(f"{option!r} is given twice in strategy {given!r}.")
        where[option] = _value(value)
    return _spec(label or text, values)


def essential(config: Mapping[str, Any]) -> dict[str, Any]:
    """The strategy, and those fields of a `SpecDecConfig` that differ from their defaults."""
    defaults = SpecDecConfig().to_dict()
    return {name: value for name, value in config.items() if name == "strategy" or value != defaults[name]}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _spec(label: str, values: dict[str, Any]) -> StrategySpec:
    """Check the fields now, before a model is loaded; a draft model stays a name."""
    config = SpecDecConfig.from_dict(values).to_dict()
    try:
        json.dumps(config)
    except (TypeError, ValueError) as error:
        raise SpecDecError(f"Strategy {label!r} has a setting that no file can hold: {error}.") from None
    return StrategySpec(str(label), config)
