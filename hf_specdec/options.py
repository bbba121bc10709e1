"""Every option of `generate`: honoured or refused, none dropped.

A name is in exactly one of the two tables. Refused options raise `UnsupportedOptionError` when they are set to
something that would change the result.
"""

from collections.abc import Callable, Mapping
from typing import Any

from .errors import UnsupportedOptionError

HONOURED = frozenset(
    # parameters of `generate`
    "self inputs generation_config logits_processor stopping_criteria prefix_allowed_tokens_fn synced_gpus streamer "
    "custom_generate kwargs tokenizer assistant_tokenizer trust_remote_code "
    # lengths and ends
    "max_length max_new_tokens min_length min_new_tokens max_time stop_strings eos_token_id pad_token_id bos_token_id "
    "forced_bos_token_id forced_eos_token_id decoder_start_token_id num_return_sequences "
    # sampling and logits
    "do_sample temperature top_k top_p top_h min_p typical_p epsilon_cutoff eta_cutoff repetition_penalty "
    "encoder_repetition_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids suppress_tokens "
    "begin_suppress_tokens sequence_bias exponential_decay_length_penalty remove_invalid_values renormalize_logits "
    "watermarking_config "
    # outputs
    "return_dict_in_generate output_scores output_logits output_hidden_states output_attentions "
    # how the prompt runs
    "prefill_chunk_size use_cache cache_implementation "
    # of no effect on how `generate` decodes with a dynamic cache and one beam
    "transformers_version _from_model_config cache_config max_cache_len compile_config disable_compile "
    "continuous_batching_config early_stopping length_penalty is_assistant".split()
)

_STOCK = "Remove it, or remove `assistant_strategy` to use the assisted decoding of transformers."
_BEAMS = "Use num_beams=1 (num_return_sequences works), or call `generate` without `assistant_strategy`."

_LENGTH = "Give the draft length with assistant_strategy=SpecDecConfig(..., max_draft_tokens=...)."

REFUSED: dict[str, str] = {
    "num_assistant_tokens": _LENGTH,
    "num_assistant_tokens_schedule": _LENGTH,
    "assistant_confidence_threshold": _LENGTH,
    "max_matching_ngram_size": "Give it to the strategy: assistant_strategy=PromptLookup(max_ngram=...).",
    "assistant_lookbehind": _STOCK,
    "target_lookbehind": _STOCK,
    "assistant_model": "Pass the draft model as assistant_strategy=model instead.",
    "prompt_lookup_num_tokens": 'Use assistant_strategy="prompt_lookup" instead.',
    "assistant_early_exit": _STOCK,
    "assistant_ensemble_weight": _STOCK,
    "speculation_type": _STOCK,
    "use_mtp": _STOCK,
    "num_beams": _BEAMS,
    "num_beam_groups": _BEAMS,
    "diversity_penalty": _BEAMS,
    "constraints": _BEAMS,
    "force_words_ids": _BEAMS,
    "penalty_alpha": "Contrastive search is not speculative; call `generate` without `assistant_strategy`.",
    "dola_layers": "DoLa changes the law of each token; call `generate` without `assistant_strategy`.",
    "low_memory": "It belongs to contrastive search; call `generate` without `assistant_strategy`.",
    "guidance_scale": "Classifier-free guidance keeps a second cache; call `generate` without `assistant_strategy`.",
    "negative_prompt_ids": "Classifier-free guidance keeps a second cache; call without `assistant_strategy`.",
    "negative_prompt_attention_mask": "Classifier-free guidance keeps a second cache; call plain `generate`.",
    "token_healing": "Heal the prompt before the call (`model.heal_tokens`) and leave the option off.",
}

_UNSET: dict[str, Callable[[Any], bool]] = {
    "num_assistant_tokens": lambda value: value == 20,
    "num_assistant_tokens_schedule": lambda value: value == "constant",
    "assistant_confidence_threshold": lambda value: value == 0.4,
    "assistant_lookbehind": lambda value: value == 10,
    "target_lookbehind": lambda value: value == 10,
    "num_beams": lambda value: value == 1,
    "num_beam_groups": lambda value: value == 1,
    "diversity_penalty": lambda value: value == 0,
    "guidance_scale": lambda value: value == 1,
    "low_memory": lambda value: value is False,
    "use_mtp": lambda value: value is False,
    "token_healing": lambda value: value is False,
}
"""Values that mean "not set": the defaults that `generate` fills in."""

DYNAMIC_CACHES = (None, "dynamic", "hybrid")


def check_options(options: Mapping[str, Any]) -> None:
    """Raise `UnsupportedOptionError` for the first option that cannot be honoured.

    Args:
        options: values by name, those of the generation config and of the call alike.
    """
    for name, advice in REFUSED.items():
        value = options.get(name)
        if value is None or (name in _UNSET and _UNSET[name](value)):
            continue
        shown = repr(value) if isinstance(value, (bool, int, float, str)) else type(value).__name__
        raise UnsupportedOptionError(f"`{name}={shown}` cannot be combined with `assistant_strategy`. {advice}")
    if options.get("use_cache") is False:
        raise UnsupportedOptionError(
            "`use_cache=False` cannot be combined with `assistant_strategy`: rejected drafts are rolled back in the "
            "cache. Remove it, or call `generate` without `assistant_strategy`."
        )
    if (kind := options.get("cache_implementation")) not in DYNAMIC_CACHES:
        raise UnsupportedOptionError(
            f"`cache_implementation={kind!r}` cannot be combined with `assistant_strategy`, which keeps a slot cache "
            "of its own. Remove it, or call `generate` without `assistant_strategy`."
        )
