"""The ways to call `generate` that a run compares: plain, what transformers has, and our strategies."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec import VERIFIERS, Auto, DraftModel, SpecDecConfig, SpecDecError

from .config import PLAIN, RunConfig, StrategySpec

STOCK_LOOKUP_TOKENS = 10


@dataclass(frozen=True)
class Method:
    """One way to call `generate`.

    Args:
        label: unique in a run.
        kind: "plain", "stock" or "ours".
        arguments: what is added to the call.
        spec: the strategy, for ours.
    """

    label: str
    kind: str
    arguments: dict[str, Any] = field(default_factory=dict)
    spec: StrategySpec | None = None

    def to_dict(self) -> dict[str, Any]:
        """What results say about it."""
        config = {} if self.spec is None else self.spec.config
        verifier = config.get("verifier")
        return {
            "label": self.label,
            "kind": self.kind,
            "lossless": verifier is None or VERIFIERS[verifier].lossless,
            "verifier": verifier,
            "strategy": config.get("strategy"),
            "max_draft_tokens": config.get("max_draft_tokens"),
        }


def build_methods(
    config: RunConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[Method], list[str]]:
    """The methods of a run, plain `generate` first, and a sentence for each baseline that cannot run here.

    A draft model is loaded once, and serves our strategy and the stock baseline beside it.
    """
    methods, notes = [Method(PLAIN, PLAIN)], []
    if model.device.type == "cuda":  # there generate compiles by default once the cache is static
        methods.append(Method("plain_compiled", PLAIN, {"cache_implementation": "static"}))
    names = dict.fromkeys(each.draft_model for each in config.strategies)
    drafts = {name: DraftModel(name).load(model) for name in names if name is not None}
    if config.batch_size == 1:
        methods.append(Method("stock_prompt_lookup", "stock", {"prompt_lookup_num_tokens": STOCK_LOOKUP_TOKENS}))
        for number, draft in enumerate(drafts.values(), start=1):
            label = "stock_assistant" if len(drafts) == 1 else f"stock_assistant_{number}"
            methods.append(Method(label, "stock", {"assistant_model": draft}))
    else:
        notes.append("transformers' own assisted generation takes one prompt at a time, so it is not compared.")
    return methods + [_ours(each, drafts, tokenizer) for each in config.strategies], notes


@contextmanager
def loading(name: str) -> Iterator[None]:
    """Name the model in whatever transformers, torch and the readers of weights and tokenizers raise inside."""
    try:
        yield
    except Exception as error:
        told = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise SpecDecError(f"{name} cannot be loaded. {told}") from error


def _ours(spec: StrategySpec, drafts: dict[str, PreTrainedModel], tokenizer: PreTrainedTokenizerBase) -> Method:
    """The method of a strategy; a draft model's name becomes the model, one object for all that draft with it."""
    fields = dict(spec.config)
    if (name := spec.draft_model) is not None and fields["strategy"] in (DraftModel.name, Auto.name):
        fields["strategy_options"] = {**fields["strategy_options"], "model": drafts[name]}
    return Method(spec.label, "ours", {"assistant_strategy": SpecDecConfig(**fields)}, spec)
