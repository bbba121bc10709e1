"""The prompts of a ragged batch, in groups of about equal length.

Plain `generate` pads a batch to its longest prompt, and on a CPU a padded column costs what a token costs. There the
rows run in groups, each padded to its own longest prompt, whenever that saves more columns than a further pass costs.
Rows do not see each other and padding is masked, so their logits, keys and values are the same but for rounding.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from .compat import CACHE_NAME, is_passive_layer

PASS_TOKENS = 64
"""Columns whose time a forward pass takes beside that of its own columns."""
SPLIT = ("attention_mask", "position_ids")
"""What has a row for each row of the batch."""
WHOLE = (CACHE_NAME, "use_cache", "logits_to_keep", "return_dict")
"""What may be given besides and is the same for all rows."""


def run_prompt(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    generation_config: Any,
    kwargs: dict[str, Any],
    known_code: bool,
    run: Callable[[Sequence[int], torch.Tensor, dict[str, Any]], Any],
) -> tuple[Any, torch.Tensor, Cache]:
    """The model's output for a prompt (of the last group, where there are several), the logits of each row's last
    token, shape `(B, 1, V)`, and the filled cache.

    Args:
        kwargs: what `generate` prepared, the cache included.
        known_code: no code of others takes part, which may look across rows and columns; see `ForwardMode.inference`.
        run: called with the numbers, ids and keywords of some rows; the prompt's forward.
    """
    groups = [list(range(input_ids.shape[0]))]
    if known_code and len(groups[0]) > 1:
        groups = row_groups(model, input_ids, generation_config, kwargs)
    if len(groups) == 1:
        outputs = run(groups[0], input_ids, kwargs)
        return outputs, outputs.logits[:, -1:], outputs[CACHE_NAME]
    logits, parts = [], []
    for rows in groups:
        outputs = run(rows, *of_group(model, input_ids, kwargs, rows))
        logits.append(outputs.logits[:, -1:])
        parts.append((rows, outputs[CACHE_NAME]))
    join(kwargs[CACHE_NAME], parts)
    order = torch.tensor([row for rows in groups for row in rows], device=input_ids.device)
    return outputs, torch.cat(logits)[order.argsort()], kwargs[CACHE_NAME]


def prompt_groups(lengths: Sequence[int]) -> list[list[int]]:
    """Rows in groups, short ones first, with the fewest columns in all, `PASS_TOKENS` for each group among them.

    Args:
        lengths: tokens of each row.
    """
    rows = sorted(range(len(lengths)), key=lambda row: lengths[row])
    best: list[tuple[int, int]] = [(0, 0)]  # of the first n rows: columns, and where their last group begins
    for end in range(1, len(rows) + 1):
        longest = lengths[rows[end - 1]]
        costs = [(best[first][0] + PASS_TOKENS + (end - first) * longest, first) for first in range(end)]
        best.append(min(costs))
    groups, end = [], len(rows)
    while end:
        groups.append(sorted(rows[best[end][1] : end]))
        end = best[end][1]
    return groups[::-1]


def row_groups(
    model: PreTrainedModel, input_ids: torch.Tensor, generation_config: Any, kwargs: Mapping[str, Any]
) -> list[list[int]]:
    """The groups that the prompt's rows may run in: one of all rows unless nothing but padding tells it apart."""
    whole = [list(range(input_ids.shape[0]))]
    mask, positions = (kwargs.get(name) for name in SPLIT)
    cache: Any = kwargs.get(CACHE_NAME)
    given = {name for name, value in kwargs.items() if value is not None and value is not False}
    if (
        model.device.type != "cpu"
        or not given <= {*SPLIT, *WHOLE}
        or mask is None
        or mask.shape != input_ids.shape
        or type(cache) is not DynamicCache
        or list(map(type, cache.layers)) != list(map(type, empty_cache(model).layers))
        or cache.get_seq_length() > 0
        or getattr(model.config.get_text_config(decoder=True), "attention_chunk_size", None) is not None
        or generation_config.prefill_chunk_size is not None
    ):
        return whole
    real = mask.bool()
    if bool((real[:, :-1] & ~real[:, 1:]).any()) or not bool(real.any(1).all()):
        return whole
    if positions is not None:
        counted = real.cumsum(1) - 1
        if positions.shape != real.shape or bool(((positions != counted) & real).any()):
            return whole
    return prompt_groups(real.sum(1).tolist())


def empty_cache(model: PreTrainedModel) -> DynamicCache:
    """As `generate` prepares it."""
    return DynamicCache(config=model.config.get_text_config(decoder=True))


def of_group(
    model: PreTrainedModel, input_ids: torch.Tensor, kwargs: Mapping[str, Any], rows: Sequence[int]
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Ids and keywords of some rows without the columns in which none of them has a token, and an empty cache."""
    index = torch.tensor(rows, device=input_ids.device)
    mask = kwargs["attention_mask"].index_select(0, index)
    first = int(mask.bool().any(0).int().argmax())
    cut = {name: kwargs[name].index_select(0, index)[:, first:] for name in SPLIT if kwargs.get(name) is not None}
    return input_ids.index_select(0, index)[:, first:], {**kwargs, **cut, CACHE_NAME: empty_cache(model)}


def join(cache: Cache, parts: Sequence[tuple[Sequence[int], Cache]]) -> None:
    """Fill an empty cache with those of groups, which together have all rows, padded on the left; each is released as
    it is copied."""
    count = sum(len(rows) for rows, _ in parts)
    for number, layer in enumerate(cache.layers):
        if is_passive_layer(layer) or not parts[0][1].layers[number].is_initialized:
            continue
        states = []
        for name in ("keys", "values"):
            held = [(rows, getattr(part.layers[number], name)) for rows, part in parts]
            sample = held[0][1]
            length = max(own.shape[2] for _, own in held)
            padded = sample.new_zeros(count, sample.shape[1], length, sample.shape[3])
            for rows, own in held:
                padded[list(rows), :, length - own.shape[2] :] = own
            states.append(padded)
        layer.update(*states)
        for _, part in parts:
            part.layers[number].reset()


@contextmanager
def last_hidden_states(model: PreTrainedModel, wanted: bool) -> Iterator[list[torch.Tensor]]:
    """Collect what goes into the output layer during forwards of this thread: shapes `(B, L, F)`; nothing unless
    `wanted`."""
    collected: list[torch.Tensor] = []
    if not wanted:
        yield collected
        return
    thread = threading.get_ident()

    def collect(module: torch.nn.Module, args: Any, output: Any) -> None:
        states = getattr(output, "last_hidden_state", None)
        if states is not None and threading.get_ident() == thread:
            collected.append(states)

    handle = model.base_model.register_forward_hook(collect)
    try:
        yield collected
    finally:
        handle.remove()
