"""Every difference between supported transformers versions, and nothing else.

Supported: `transformers>=5.20,<6`.
"""

import inspect
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import PreTrainedModel, cache_utils

TRANSFORMERS_VERSION = Version(transformers.__version__)

CACHE_NAME = "cache" if TRANSFORMERS_VERSION >= Version("5.24.0.dev0") else "past_key_values"
"""Name of the cache in `forward`, in model outputs and among the keywords of `generate`."""

_PASSIVE_LAYER = getattr(cache_utils, "DummyLayer", None)


def is_passive_layer(layer: object) -> bool:
    """A layer that stores nothing: it reuses the K/V of another layer or has no attention (a class since 5.23)."""
    return _PASSIVE_LAYER is not None and isinstance(layer, _PASSIVE_LAYER)


def sliding_window_of(layer: object) -> int | None:
    """The window of a sliding layer of a dynamic cache, else None."""
    return layer.sliding_window if isinstance(layer, cache_utils.DynamicSlidingWindowLayer) else None


def checkpoints_activations(model: PreTrainedModel) -> bool:
    """Activations are recomputed in training mode (the attribute has a new name in later versions)."""
    new = "is_activation_checkpointing"
    return bool(getattr(model, new if hasattr(type(model), new) else "is_gradient_checkpointing", False))


def decode_context(model: PreTrainedModel) -> AbstractContextManager[Any]:
    """What plain `generate` enters around its decoding loop (experts kernels), where the version has it."""
    optimize = getattr(model, "_optimize_model_for_decode", None)
    return optimize() if optimize is not None else nullcontext()


def lost_keywords() -> dict[str, Any]:
    """Keywords that `generate` takes from its caller and does not hand to a `custom_generate` callable.

    Reads the frame of the calling `generate`; without it they would be dropped in silence.
    """
    frame: FrameType | None = inspect.currentframe()
    while frame is not None and not (
        frame.f_code.co_name == "generate" and "generation_mode_kwargs" in frame.f_locals
    ):
        frame = frame.f_back
    if frame is None:
        return {}
    names = ("streamer", "synced_gpus", "assistant_model")
    return {name: value for name in names if (value := frame.f_locals.get(name)) not in (None, False)}


def needs_synced_gpus(model: PreTrainedModel) -> bool:
    """What plain `generate` decides when `synced_gpus` is not given: sharded parameters in several processes."""
    from transformers.generation import utils

    sharded = utils.is_deepspeed_zero3_enabled() or utils.is_fsdp_managed_module(model)
    return (
        bool(sharded)
        and torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and (torch.distributed.get_world_size() > 1)
    )
