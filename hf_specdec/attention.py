"""Attention for verify passes: query heads that share a K/V head are packed into the query axis.

Stock sdpa attention copies K and V to every query head (`repeat_kv`) as soon as a mask is given. Packing the group,
`(B, heads, N, D)` to `(B, kv_heads, group * N, D)` with the mask repeated `group` times, computes the same products
without the copy. The function equals stock sdpa outside a verify pass of the same thread, so a model may serve several
threads while it is installed.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

PACKED_SDPA = "hf_specdec_sdpa"

_local = threading.local()
_lock = threading.Lock()
_users: dict[int, int] = {}


def packed_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Scaled dot product attention of a block of N queries under a mask shared by all heads.

    Args:
        query: shape `(B, heads, N, D)`.
        key: shape `(B, kv_heads, S, D)`.
        value: shape `(B, kv_heads, S, W)`.
        attention_mask: shape `(B, 1, N, S)`.
    """
    group = query.shape[1] // key.shape[1]
    packable = (
        getattr(_local, "verifying", False)
        and group > 1
        and attention_mask is not None
        and attention_mask.shape[1] == 1
        and kwargs.get("position_bias") is None
        and kwargs.get("softcap") is None
    )
    if not packable:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal=is_causal, **kwargs
        )
    assert attention_mask is not None
    rows, heads, width, size = query.shape
    output = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(rows, heads // group, group * width, size),
        key,
        value,
        attn_mask=_packed_mask(attention_mask, group, query.dtype),
        dropout_p=dropout,
        scale=scaling,
    )
    return output.reshape(rows, heads, width, value.shape[-1]).transpose(1, 2).contiguous(), None


def _packed_mask(mask: torch.Tensor, group: int, dtype: torch.dtype) -> torch.Tensor:
    """The additive mask of `group` packed heads, made once per forward where sdpa would convert it in every layer."""
    key = (mask.data_ptr(), mask.shape, mask.stride(), mask.dtype, mask.device, group, dtype)
    if key not in _local.masks:
        packed = mask.repeat(1, 1, group, 1)
        if packed.dtype == torch.bool:
            packed = packed.new_zeros(packed.shape, dtype=dtype).masked_fill_(~packed, float("-inf"))
        _local.masks[key] = (packed, mask)  # the mask is held, so that no other takes its address
    packed_mask: torch.Tensor = _local.masks[key][0]
    return packed_mask


AttentionInterface.register(PACKED_SDPA, packed_sdpa)
AttentionMaskInterface.register(PACKED_SDPA, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


@contextmanager
def packed_attention(model: PreTrainedModel) -> Iterator[None]:
    """Route a model with sdpa attention through `packed_sdpa` while at least one call is in here.

    Only models that look their attention function up by name are touched. The name in the decoder's configuration is
    put back when the last call leaves.
    """
    config = model.config.get_text_config(decoder=True)
    with _lock:
        installed = (config._attn_implementation == "sdpa" and model._supports_attention_backend) or id(
            config
        ) in _users
        if installed:
            _users[id(config)] = _users.get(id(config), 0) + 1
            if _users[id(config)] == 1:
                config._attn_implementation_internal = PACKED_SDPA
    try:
        yield
    finally:
        with _lock:
            if installed:
                _users[id(config)] -= 1
                if not _users[id(config)]:
                    del _users[id(config)]
                    config._attn_implementation_internal = "sdpa"


@contextmanager
def verifying() -> Iterator[None]:
    """Forwards of this thread inside are verify passes."""
    _local.verifying, _local.masks = True, {}
    try:
        yield
    finally:
        _local.verifying, _local.masks = False, {}
