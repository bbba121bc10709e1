"""What a user may give for a strategy, alone or as a member of others."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.generation import CandidateGenerator

from ..errors import SpecDecError, unknown_name
from .adapter import CandidateAdapter
from .base import DraftStrategy, build_strategy
from .draft_model import DraftModel

FIELDS = ("strategy", "strategy_options")


def as_strategy(given: Any) -> DraftStrategy:
    """The strategy that a name, a `DraftStrategy`, a draft model, a factory of a transformers `CandidateGenerator`, or
    a dict with `strategy` (a name) and `strategy_options` stands for.

    Raises:
        SpecDecError: it stands for none.
    """
    if isinstance(given, DraftStrategy):
        return given
    if isinstance(given, str):
        return build_strategy(given, {})
    if isinstance(given, PreTrainedModel):
        return DraftModel(given)
    if isinstance(given, Mapping) and isinstance(given.get("strategy"), str):
        for name in given:
            if name not in FIELDS:
                raise unknown_name("field of a strategy:", name, FIELDS)
        options = given.get("strategy_options") or {}
        if not isinstance(options, Mapping):
            raise SpecDecError(
                f"strategy_options={options!r} is no dict of settings by name; give one, as in {{'max_context': 8}}."
            )
        return build_strategy(given["strategy"], dict(options))
    kind = given if isinstance(given, type) else type(given)
    if issubclass(kind, DraftStrategy):
        raise SpecDecError(f"{kind.__name__} is a class; pass an object, as in {kind.__name__}().")
    if issubclass(kind, nn.Module):
        raise SpecDecError(
            f"{'The class' if kind is given else 'A'} {kind.__name__} is no PreTrainedModel and cannot draft; pass "
            "the language model of transformers itself: not its class, nor what torch.compile or another library "
            "wrapped around it."
        )
    if isinstance(given, CandidateGenerator) or callable(given):
        return CandidateAdapter(given)
    raise SpecDecError(
        f"{given!r} is no strategy; as assistant_strategy, or as a member of others, give a name, a DraftStrategy, a "
        "draft model, a factory of a CandidateGenerator, or a dict as in "
        "{'strategy': 'suffix', 'strategy_options': {'max_context': 8}}. Several together are Merge([...]) or "
        "Cascade([...])."
    )
