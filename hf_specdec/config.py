"""What the user asks for, in one frozen object."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from .control import Schedule, as_schedule
from .drafters.base import DraftStrategy, build_strategy
from .drafters.given import as_strategy
from .errors import SpecDecError, unknown_name
from .state import Plan
from .verify import Verifier, bind_verifier

DEFAULT_SCHEDULE = "adaptive"
"""Where the text does not depend on what is drafted."""

ROUND_TOKENS = 32
"""Tokens that a batched round verifies at most by default, the roots included. Up to here a forward pass on a CPU
costs little more than one of single tokens."""

FILE_ENDINGS = (".yaml", ".yml", ".json")
"""Of a file that holds the fields of a `SpecDecConfig`."""


@dataclass(frozen=True)
class SpecDecConfig:
    """Settings of speculative decoding, validated at construction.

    Args:
        strategy: a registered name, a `DraftStrategy`, a draft model, or a factory of a transformers
            `CandidateGenerator`.
        strategy_options: settings of a strategy that is given by name.
        verifier: acceptance rule. `exact` gives the text of plain `generate`, `rejection` and `block` the same law;
            `typical` and `threshold` are lossy.
        verifier_options: settings of a verifier that has some.
        max_draft_tokens: most draft tokens per row and round, or None for the strategy's default, which is smaller
            while many rows decode: every row is padded to the largest draft of the round. 0 never drafts.
        max_depth: longest path of a draft; None for `max_draft_tokens`, or what the strategy takes for trees.
        max_width: most draft tokens that may stand at the same place, so 1 drafts chains; None for the strategy's
            default, or 1 under a verifier that takes chains alone.
        schedule: policy for the size of drafts: "adaptive", "constant", a `Schedule`, or a dict of name and settings.
            None is the strategy's default, "adaptive" for most, where the text does not depend on what is drafted,
            else "constant", so that the same seed gives the same text there, whatever the clock says.
    """

    strategy: Any = "suffix"
    strategy_options: Mapping[str, Any] = field(default_factory=dict)
    verifier: str = "exact"
    verifier_options: Mapping[str, Any] = field(default_factory=dict)
    max_draft_tokens: int | None = None
    max_depth: int | None = None
    max_width: int | None = None
    schedule: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "_verifier", bind_verifier(self.verifier, self.verifier_options))
        object.__setattr__(self, "verifier_options", dict(self.verifier_options))
        for name, least in (("max_draft_tokens", 0), ("max_depth", 1), ("max_width", 1)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise SpecDecError(
                    f"{name}={value!r} is no number of tokens; give an integer >= {least}, or None for the default."
                )
        if not isinstance(self.strategy_options, Mapping):
            raise SpecDecError(
                f"strategy_options={self.strategy_options!r} is no dict of settings by name; give one, as in "
                "{'max_context': 8}, or leave it out for the defaults."
            )
        object.__setattr__(self, "strategy_options", dict(self.strategy_options))
        strategy = self.strategy
        if isinstance(strategy, str):
            strategy = build_strategy(strategy, dict(self.strategy_options))
        elif self.strategy_options:
            raise SpecDecError(
                "strategy_options belong to a strategy given by name; this one is an object with settings of its own."
            )
        object.__setattr__(self, "_resolved", as_strategy(strategy))
        own = "constant" if self.text_depends_on_drafts else self.resolved.default_schedule
        schedule = (own or DEFAULT_SCHEDULE) if self.schedule is None else self.schedule
        object.__setattr__(self, "_schedule", as_schedule(schedule))

    @property
    def resolved(self) -> DraftStrategy:
        """The strategy object."""
        return self._resolved  # type: ignore[attr-defined]

    @property
    def bound_verifier(self) -> Verifier:
        """The verifier with its settings."""
        return self._verifier  # type: ignore[attr-defined]

    @property
    def bound_schedule(self) -> Schedule:
        """The schedule object."""
        return self._schedule  # type: ignore[attr-defined]

    @property
    def text_depends_on_drafts(self) -> bool:
        """Other drafts may give another text under the same seed, be it of the same law."""
        return not self.bound_verifier.lossless or self.bound_verifier.uses_draft_probs

    def draft_tokens(self, rows: int = 1) -> int:
        """The longest draft of a round with `rows` rows.

        A default shrinks so that a round has about 32 tokens. Where the strategy's drafts cost by the token, a
        schedule that sizes them may go beyond both by its `reach`.
        """
        if self.max_draft_tokens is not None:
            return self.max_draft_tokens
        reach = self.bound_schedule.reach if self.resolved.costs_by_token else 1
        return min(reach * (1 + self.resolved.default_draft_tokens), max(3, reach * ROUND_TOKENS // rows)) - 1

    def plan(self, rows: int = 1) -> Plan:
        """The largest tree that a round with `rows` rows may have."""
        nodes = self.draft_tokens(rows)
        width = self.max_width or (self.resolved.default_width if self.bound_verifier.trees else 1)
        depth = min(nodes, self.max_depth or (self.resolved.default_depth if width > 1 else None) or nodes)
        return Plan(depth, width, 1 + (depth if width == 1 else nodes), own_widths=self.max_width is None)

    @classmethod
    def of(cls, request: Any) -> "SpecDecConfig":
        """The config that an `assistant_strategy` argument stands for.

        Args:
            request: a name, a `DraftStrategy`, a `PreTrainedModel`, a `SpecDecConfig`, a dict of one, a file of one (a
                `Path`, or a string that ends in .yaml, .yml or .json), or a factory of a transformers
                `CandidateGenerator`.
        """
        if isinstance(request, SpecDecConfig):
            return request
        if isinstance(request, Mapping):
            return cls.from_dict(request)
        if isinstance(request, os.PathLike) or (isinstance(request, str) and request.endswith(FILE_ENDINGS)):
            return cls.from_file(request)
        return cls(strategy=request)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> "SpecDecConfig":
        """The config whose fields a YAML or JSON file holds, such as `hf-specdec plan --save FILE` writes.

        Raises:
            SpecDecError: the file cannot be read, holds no mapping, or a field that does not exist or has no such
                value.
        """
        name = os.fspath(path)
        if not name.endswith(FILE_ENDINGS):
            raise SpecDecError(
                f"{name!r} is no file of a SpecDecConfig, which ends in {', '.join(FILE_ENDINGS)}; for a draft model "
                f"in a directory give DraftModel({name!r})."
            )
        try:
            text = Path(path).read_text(encoding="utf-8")
            values = json.loads(text) if name.endswith(".json") else yaml.safe_load(text)
        except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:  # ValueError: no UTF-8, no JSON
            reason = " ".join(str(error).split())
            raise SpecDecError(
                f"{name!r} cannot be read: {reason}. Give a YAML or JSON file with the fields of a SpecDecConfig."
            ) from error
        if not isinstance(values, Mapping):
            raise SpecDecError(
                f"{name!r} holds no mapping; write the fields of a SpecDecConfig into it, as in `strategy: suffix`."
            )
        try:
            return cls.from_dict(values)
        except SpecDecError as error:
            raise SpecDecError(f"{name!r}: {error}") from error

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SpecDecConfig":
        """The config with these fields. Raises `SpecDecError` for a field that does not exist."""
        known = [each.name for each in fields(cls)]
        for name in values:
            if name not in known:
                raise unknown_name("field of SpecDecConfig:", name, known)
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, for YAML and JSON. A strategy object becomes its name and settings."""
        by_name = isinstance(self.strategy, str)
        return {
            "strategy": self.strategy if by_name else self.resolved.name,
            "strategy_options": dict(self.strategy_options) if by_name else self.resolved.to_dict(),
            "verifier": self.verifier,
            "verifier_options": dict(self.verifier_options),
            "max_draft_tokens": self.max_draft_tokens,
            "max_depth": self.max_depth,
            "max_width": self.max_width,
            "schedule": self.schedule
            if self.schedule is None or isinstance(self.schedule, str)
            else {"name": self.bound_schedule.name, **self.bound_schedule.to_dict()},
        }

    def to_vllm(self) -> dict[str, Any]:
        """What vLLM takes as `speculative_config` for the same drafts: `LLM(model, speculative_config=...)`.

        `prompt_lookup` is vLLM's method `ngram`; `suffix` and `draft_model` have the same name there. A number of
        draft tokens that was left out becomes this package's default for one row; `max_width` and `schedule` left out
        ask for nothing, and vLLM drafts chains with the same limit in every round. Suffix's `max_context` becomes
        `suffix_decoding_max_tree_depth`, which bounds match and draft together there.

        Raises:
            SpecDecError: for what vLLM has no counterpart of: other strategies, memories, trees, schedules, lossy
                verifiers.
        """
        from .vllm import to_vllm  # it is made of what is here

        return to_vllm(self)

    @classmethod
    def from_vllm(cls, mapping: Mapping[str, Any], draft_model: Any = None) -> "SpecDecConfig":
        """The config that drafts as vLLM does with this `speculative_config`: chains with one limit for all rounds.

        What is left out has vLLM's default, with one exception: `suffix_decoding_max_cached_requests` left out is 0,
        since what one call remembers for the next is an object here, `Suffix(memory=...)`.

        Args:
            mapping: fields by name; None is the same as absent.
            draft_model: for the method `draft_model`, what to draft with instead of the model that the mapping names:
                a loaded model, another name or path.

        Raises:
            SpecDecError: for a method or field that has no counterpart here.
        """
        from .vllm import from_vllm  # it is made of what is here

        return from_vllm(mapping, draft_model)
