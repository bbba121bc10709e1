"""What a model must be able to do, decided before its first forward pass.

The layer classes of the cache that `generate` prepared decide, not model names. What they cannot show (where positions
come from, which attention function runs) is read from the signature of `forward` and from the configuration.
"""

import inspect
from typing import Any, NoReturn

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from .attention import PACKED_SDPA
from .compat import checkpoints_activations, is_passive_layer, sliding_window_of
from .errors import UnsupportedModelError

KNOWN_CODE = ("torch", "transformers", "hf_specdec", "hf_specdec_eval")
"""Packages whose modules may run in inference mode."""

ADVICE = "Call `generate` without `assistant_strategy` for this model."


def refuse(model: PreTrainedModel, reason: str, advice: str = ADVICE) -> NoReturn:
    """Raise `UnsupportedModelError` for this model."""
    raise UnsupportedModelError(f"{type(model).__name__} cannot decode speculatively: {reason} {advice}")


def check_model(model: PreTrainedModel, cache: Any) -> None:
    """Raise `UnsupportedModelError` unless a block of draft tokens can be verified and rolled back exactly.

    Args:
        cache: what `generate` prepared.
    """
    check_architecture(model)
    check_cache(model, cache)


def check_architecture(model: PreTrainedModel) -> None:
    """What can be said before `generate` prepares anything."""
    if model.config.is_encoder_decoder:
        refuse(model, "encoder-decoder models are not supported yet.")
    if model.training and checkpoints_activations(model):
        refuse(model, "gradient checkpointing in training mode drops the cache.", "Call `model.eval()` first.")
    if model._is_stateful:
        refuse(model, "it carries a recurrent state, which cannot be rolled back after a rejected draft.")
    config = model.config.get_text_config(decoder=True)
    check_cache(model, DynamicCache(config=config))
    if "position_ids" not in inspect.signature(model.forward).parameters or getattr(config, "alibi", False):
        refuse(model, "its positions (ALiBi or counted by the model) cannot be given for each draft token.")
    if "local" in (getattr(config, "attention_layers", None) or ()):
        refuse(model, "its local attention layers count from the end of the cache.")
    attention = config._attn_implementation
    if attention not in ("sdpa", "eager", None, PACKED_SDPA):
        refuse(
            model,
            f"attention {attention!r} takes no mask per draft token.",
            'Load the model with attn_implementation="sdpa", or call `model.set_attn_implementation("sdpa")`.',
        )


def check_cache(model: PreTrainedModel, cache: Any) -> None:
    """Every layer must be plain or sliding attention, with one window for all sliding layers."""
    if not isinstance(cache, Cache) or (not cache.layers and not hasattr(cache, "layer_class_to_replicate")):
        refuse(model, "it keeps a state of its own instead of a key/value cache, which cannot be rolled back.")
    exact_types = (DynamicLayer, DynamicSlidingWindowLayer)
    for layer in cache.layers:
        if type(layer) not in exact_types and not is_passive_layer(layer):
            refuse(
                model,
                f"its cache has layers of type {type(layer).__name__}, whose state cannot be rolled back after a "
                "rejected draft.",
            )
    windows = {window for layer in cache.layers if (window := sliding_window_of(layer)) is not None}
    if len(windows) > 1:
        refuse(model, f"its layers slide over windows of different lengths ({sorted(windows)}).")


def check_rotary(model: PreTrainedModel, max_length: int | None, prompt_length: int) -> None:
    """Raise `UnsupportedModelError` where rotary positions would change for all tokens in the middle of the text.

    Args:
        max_length: tokens after which generation ends, or None.
        prompt_length: tokens of the shortest prompt in the batch.
    """
    config = model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [each for each in (rope, *rope.values()) if isinstance(each, dict)]
    for each in kinds:
        kind = each.get("rope_type", each.get("type"))
        original = each.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        settled = prompt_length
        if kind == "dynamic":
            original = original or getattr(config, "max_position_embeddings", None)
            settled = 0  # beyond the original length they change with each token, however long the prompt is
        crosses = max_length is None or original is None or settled <= original < max_length
        if kind in ("dynamic", "longrope") and crosses:
            refuse(
                model,
                f"its rotary positions ({kind}) change for all tokens once a text passes {original} tokens, which a "
                "draft would trigger too early.",
                f"Keep prompt and new tokens within {original}, or call `generate` without `assistant_strategy`.",
            )


def runs_in_inference_mode(model: PreTrainedModel) -> bool:
    """Forwards may run in inference mode: all weights are ordinary tensors in memory, and no code takes part but that
    of torch, transformers and this package, hooks included.

    What a library replaces during a forward, and what code of others keeps from it or differentiates in it, would
    break there.
    """
    weights = all(
        type(each) is nn.Parameter and each.device.type != "meta" and not hasattr(each, "ds_id")
        for each in model.parameters()
    )
    return weights and all(
        "forward" not in vars(each)
        and not getattr(each, "_is_fsdp_managed_module", False)
        and all(map(_is_known, (type(each).forward, *each._forward_hooks.values(), *each._forward_pre_hooks.values())))
        for each in model.modules()
    )


def _is_known(function: Any) -> bool:
    return (getattr(function, "__module__", None) or "").partition(".")[0] in KNOWN_CODE


def restore_buffers(model: nn.Module) -> None:
    """Make ordinary tensors of the buffers that a module has replaced during a forward in inference mode."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_inference():
                module._buffers[name] = buffer.clone()


def embedding_table(model: PreTrainedModel) -> torch.Tensor:
    """The input embeddings of a draft model, shape `(V, F)`. Raises `UnsupportedModelError` without a table."""
    table = getattr(model.get_input_embeddings(), "weight", None)
    if not isinstance(table, torch.Tensor):
        refuse(
            model,
            "its input embeddings are no table with a `weight`, so it cannot be told which tokens it reads.",
            'Use assistant_strategy="free", which runs no draft model.',
        )
    return table
