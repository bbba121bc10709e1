"""A `SpecDecConfig` as vLLM's `speculative_config`, and back. What has no counterpart is refused, nothing dropped.

Names and defaults are those of `SpeculativeConfig` in vLLM's `vllm/config/speculative.py`. vLLM drafts chains, with
the same limit in every round. Its `standard` rule takes what is looked up, and a draft model's tokens unless
`draft_sample_method` is `probabilistic`, as point masses: the law of the text is then that of `exact`, which is what
stands for it here. That the same seed gives the same text holds for no two engines.
"""

from collections.abc import Mapping
from typing import Any

from .config import SpecDecConfig
from .control import Constant
from .drafters import DraftModel, DraftStrategy, PromptLookup, Suffix
from .errors import SpecDecError

METHODS: dict[type[DraftStrategy], str] = {PromptLookup: "ngram", Suffix: "suffix", DraftModel: "draft_model"}

OPTIONS: dict[str, dict[str, str]] = {
    "ngram": {"prompt_lookup_max": "max_ngram", "prompt_lookup_min": "min_ngram"},
    "suffix": {
        "suffix_decoding_max_tree_depth": "max_context",
        "suffix_decoding_max_spec_factor": "max_tokens_factor",
        "suffix_decoding_min_token_prob": "min_probability",
    },
    "draft_model": {"model": "model"},
}
"""Of each method: vLLM's fields, and what they are called in the strategy."""

CACHED_REQUESTS = "suffix_decoding_max_cached_requests"
KNOWN = ("method", "num_speculative_tokens", "rejection_sample_method")
OWN = {
    "ngram": tuple(OPTIONS["ngram"]),
    "suffix": (*OPTIONS["suffix"], CACHED_REQUESTS),
    "draft_model": ("model", "draft_sample_method"),
}
"""Fields that one method has beside `KNOWN`."""

SUFFIX_DEFAULTS: dict[str, Any] = {
    "suffix_decoding_max_tree_depth": 24,
    "suffix_decoding_max_spec_factor": 1.0,
    "suffix_decoding_min_token_prob": 0.1,
}
NGRAM_DEFAULT = 5


def to_vllm(config: SpecDecConfig) -> dict[str, Any]:
    """See `SpecDecConfig.to_vllm`."""
    strategy = config.resolved
    method = METHODS.get(type(strategy))
    if method is None:
        known = ", ".join(each.name for each in METHODS)
        raise SpecDecError(
            f"Strategy {strategy.name!r} has no counterpart in vLLM, which can be given {known}; use one of these."
        )
    tokens = strategy.default_draft_tokens if config.max_draft_tokens is None else config.max_draft_tokens
    tokens = min(tokens, config.max_depth or tokens)
    _check_drafts(config, tokens)
    for option in {"suffix": ("memory",), "draft_model": ("tokenizer", "vocabulary")}.get(method, ()):
        if getattr(strategy, option) is not None:
            raise SpecDecError(f"{option}= of strategy {strategy.name!r} has no counterpart in vLLM; leave it out.")
    values: dict[str, Any] = {"method": method, "num_speculative_tokens": tokens}
    settings = strategy.to_dict()
    values |= {name: settings[ours] for name, ours in OPTIONS[method].items()}
    if method == "draft_model" and not values["model"]:
        raise SpecDecError(
            "vLLM loads its draft model by name or path, and this one has none; save it (`save_pretrained`) and give "
            "DraftModel(path)."
        )
    if method == "suffix":
        values[CACHED_REQUESTS] = 0
    if config.verifier != "exact":
        values["rejection_sample_method"] = "block" if config.verifier == "block" else "standard"
        if method == "draft_model":
            values["draft_sample_method"] = "probabilistic"
    return values


def _check_drafts(config: SpecDecConfig, tokens: int) -> None:
    """Raise `SpecDecError` for a verifier, a size or a shape of drafts that vLLM cannot be asked for."""
    if config.verifier not in ("exact", "rejection", "block"):
        raise SpecDecError(
            f"verifier={config.verifier!r} has no counterpart among the values of vLLM's rejection_sample_method; use "
            "'exact', 'rejection' or 'block'."
        )
    if config.schedule is not None and type(config.bound_schedule) is not Constant:
        raise SpecDecError(
            f"schedule={config.bound_schedule.name!r} has no counterpart in vLLM, whose draft length is fixed; use "
            "schedule='constant', or leave it out."
        )
    if config.max_width is not None and config.max_width > 1:
        raise SpecDecError(
            f"max_width={config.max_width} asks for trees and vLLM takes chains; use max_width=1, or leave it out."
        )
    if not tokens:
        raise SpecDecError(
            "max_draft_tokens=0 never drafts, and vLLM's num_speculative_tokens is at least 1; start vLLM without "
            "speculative_config instead."
        )


def from_vllm(given: Any, draft_model: Any = None) -> SpecDecConfig:
    """See `SpecDecConfig.from_vllm`."""
    if not isinstance(given, Mapping):
        raise SpecDecError(
            f"from_vllm({type(given).__name__}): it is no mapping; give what vLLM takes as speculative_config."
        )
    values = {name: value for name, value in given.items() if value is not None}
    method = _method(values)
    if method != "draft_model" and values.get("model") in (method, f"[{method}]"):
        del values["model"]  # vLLM fills it in itself
    for name, value in values.items():
        if name not in (*KNOWN, *OWN[method]) and value is not False:
            raise SpecDecError(
                f"speculative_config: {name}={value!r} has no counterpart here for method {method!r}, of which "
                f"{', '.join((*KNOWN, *OWN[method]))} are translated; leave it out."
            )
    if draft_model is not None and method != "draft_model":
        raise SpecDecError(f"draft_model= goes with vLLM's method 'draft_model', not with {method!r}; leave it out.")
    verifier = _verifier(method, values)
    strategy = _strategy(method, values, draft_model)
    tokens = values.get("num_speculative_tokens", strategy.max_context if isinstance(strategy, Suffix) else None)
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        raise SpecDecError(
            f"speculative_config: num_speculative_tokens={tokens!r}, but vLLM needs a whole number of at least 1 for "
            f"method {method!r}; give one."
        )
    return SpecDecConfig(strategy, verifier=verifier, max_draft_tokens=tokens, max_width=1, schedule="constant")


def _method(values: Mapping[str, Any]) -> str:
    """The method. Raises `SpecDecError` where none is named, or one that has no counterpart."""
    method = values.get("method")
    if method is None and values.get("model") in ("ngram", "[ngram]"):
        return "ngram"
    known = ", ".join(map(repr, OPTIONS))
    if method is None:
        raise SpecDecError(
            "speculative_config names no method: vLLM finds it in the files of the model, which are not read here; "
            f"add 'method', one of {known}."
        )
    if not isinstance(method, str) or method not in OPTIONS:
        raise SpecDecError(
            f"speculative_config: method={method!r} has no counterpart here; use one of {known}, which have."
        )
    return method


def _verifier(method: str, values: Mapping[str, Any]) -> str:
    """The verifier of vLLM's two fields for it."""
    rule, sampling = values.get("rejection_sample_method"), values.get("draft_sample_method")
    if rule not in (None, "standard", "block"):
        raise SpecDecError(
            f"speculative_config: rejection_sample_method={rule!r} has no counterpart; use 'standard' or 'block', "
            "or leave it out."
        )
    if sampling not in (None, "greedy", "probabilistic"):
        raise SpecDecError(
            f"speculative_config: draft_sample_method={sampling!r} is neither 'greedy' nor 'probabilistic'; use one, "
            "or leave it out."
        )
    law_is_used = method != "draft_model" or sampling == "probabilistic"  # what is looked up is a point mass
    if rule == "block":
        if not law_is_used:
            raise SpecDecError(
                "speculative_config: block verification draws a draft model's tokens from its law here, vLLM takes "
                "the likeliest by default; add draft_sample_method='probabilistic', or leave rejection_sample_method "
                "out."
            )
        return "block"
    return "rejection" if law_is_used and (rule or sampling) else "exact"


def _strategy(method: str, values: Mapping[str, Any], draft_model: Any) -> DraftStrategy:
    """The strategy with vLLM's settings, those left out with vLLM's defaults."""
    if method == "ngram":
        largest = values.get("prompt_lookup_max", values.get("prompt_lookup_min", NGRAM_DEFAULT))
        return PromptLookup(max_ngram=largest, min_ngram=values.get("prompt_lookup_min", largest))
    if method == "suffix":
        if cached := values.get(CACHED_REQUESTS):
            raise SpecDecError(
                f"speculative_config: {CACHED_REQUESTS}={cached!r} has no counterpart here, where a memory is bounded "
                "by its tokens and shared by object; give 0 or leave it out, and for a memory use "
                'assistant_strategy=Suffix(memory="new").'
            )
        return Suffix(**{ours: values.get(name, SUFFIX_DEFAULTS[name]) for name, ours in OPTIONS["suffix"].items()})
    if draft_model is None and "model" not in values:
        raise SpecDecError("speculative_config: method 'draft_model' needs 'model', the name or path of one; add it.")
    return DraftModel(values["model"] if draft_model is None else draft_model)
