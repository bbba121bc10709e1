"""A model behind a slot cache: what it can do, the one mask rule, the prefill and the verify forward.

The mask rule: the query at node i of row b sees slots `< length(b) - 1`, its ancestors and itself, further cut by the
layer's window in positions. `SlotModel` serves the target and a draft model alike; `Target` adds what only the target
needs. Prefill is plain `generate`'s own, with the cache that `generate` prepared; its K/V are then taken over.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from .attention import PACKED_SDPA, verifying
from .cache import SlotCache
from .capability import check_rotary
from .compat import CACHE_NAME, sliding_window_of
from .errors import UnsupportedModelError
from .kernels import ForwardMode
from .layers import OutputForms, replaced
from .partial import PartialTarget
from .prompt import last_hidden_states, run_prompt
from .tree import DraftTree, ancestors
from .verify import most_likely

PREFILL_ONLY = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids", "logits_to_keep", "inputs_embeds")
SPARE_SLOTS = 128
PROMPT_PART = 64
"""Positions of a prompt that go through the output layer at once, so that their scores stay small."""
PROMPT_TOP = 256
"""Positions at a prompt's end that do: more cost more time than they save."""


def visible(
    lengths: torch.Tensor, parents: torch.Tensor, window: int | None, chunk: int | None, slots: int
) -> torch.Tensor:
    """The mask rule. `BoolTensor` of shape `(B, N, S)`: may node i of row b see slot s?

    Args:
        lengths: `LongTensor` of shape `(B,)`, committed tokens, root included. Node j sits at slot `lengths - 1 + j`.
        parents: `LongTensor` of shape `(B, N)`.
        window: positions that a sliding layer sees, its own included; None for all.
        chunk: positions per chunk of a chunked layer; None for all.
        slots: S.
    """
    return _visible(lengths, ancestors(parents), window, chunk, slots)


def _visible(
    lengths: torch.Tensor, seen: torch.Tensor, window: int | None, chunk: int | None, slots: int
) -> torch.Tensor:
    """`visible` for the last N of M nodes: `seen` has the shape `(B, N, M)`."""
    size, nodes = seen.shape[1:]
    base = (lengths - 1).unsqueeze(1)
    slot = torch.arange(slots, device=lengths.device).expand(len(seen), -1)
    if nodes == 1 and window is None and chunk is None:  # the most frequent forward, which is short
        return (slot <= base).unsqueeze(1)
    node = slot - base
    committed = (node < 0).unsqueeze(1)
    place = node.clamp(0, nodes - 1).unsqueeze(1).expand(-1, size, -1)
    mask = committed | (seen.gather(2, place) & (node < nodes).unsqueeze(1))
    if window is None and chunk is None:
        return mask
    index = base.unsqueeze(2) + seen.cumsum(-1) - 1  # of the nodes that a node sees: they come in order of depth
    query_index = index[..., -1:]
    key_index = torch.where(committed, slot.unsqueeze(1), index.gather(2, place))
    if window is not None:
        mask = mask & (key_index > query_index - window)
    if chunk is not None:
        mask = mask & (key_index // chunk == query_index // chunk)
    return mask


@dataclass(frozen=True)
class TargetOutput:
    """What a forward brings.

    Args:
        logits: shape `(B, N, V)`; row i predicts the token after node i.
        raw: the model's own output, for hidden states and attentions.
    """

    logits: torch.Tensor
    raw: Any


class SlotModel:
    """A decoder-only model with its own slot cache. Rows may have different lengths.

    Args:
        model: the model; its `forward` is used as it is.
        limit: slots that a row will never exceed, or None.

    Attributes:
        mode: how forwards compute.
    """

    def __init__(self, model: PreTrainedModel, limit: int | None):
        self.model = model
        self.config = model.config.get_text_config(decoder=True)
        self._limit = limit
        self._layer_types = mask_types(self.config)
        self._additive = self.config._attn_implementation not in ("sdpa", PACKED_SDPA)
        self._offset: torch.Tensor | None = None
        self._rest: dict[str, Any] = {}
        self.cache: SlotCache | None = None
        self.mode = ForwardMode(model)
        self.forwards = 0
        self.forward_seconds = 0.0

    @contextmanager
    def timed(self, forwards: int = 1) -> Iterator[None]:
        """Count what runs inside as forward passes of this model."""
        started = time.perf_counter()
        yield
        self.forward_seconds += time.perf_counter() - started
        self.forwards += forwards

    def prefill(self, cache: Cache, attention_mask: torch.Tensor) -> list[int]:
        """Take over the K/V of a prefill that has run. Returns the tokens in the cache per row.

        Args:
            cache: the cache that it filled.
            attention_mask: shape `(B, L)`, with the columns of an earlier turn.
        """
        rows, length = attention_mask.shape
        real = attention_mask.bool()
        order = (~real).long().argsort(dim=1, stable=True)
        slots = torch.empty_like(order).scatter_(1, order, torch.arange(length, device=order.device).expand(rows, -1))
        self.cache = SlotCache(cache, slots, length + SPARE_SLOTS, self._limit)
        return real.sum(1).tolist()

    def position_offset(self, position_ids: torch.Tensor, lengths: Sequence[int]) -> None:
        """Remember by how much each row's positions differ from its token indices: shape `(..., B, 1)`."""
        counted = torch.tensor(lengths, device=position_ids.device).unsqueeze(1)
        self._offset = position_ids[..., -1:] - (counted - 1)

    def run(
        self,
        tokens: torch.Tensor,
        seen: torch.Tensor,
        lengths: Sequence[int],
        keep_last: bool = False,
        window: int | None = None,
    ) -> Any:
        """One forward over the last N of M nodes; node j of row b is written to slot `lengths[b] - 1 + j`.

        The first M - N nodes went through earlier forwards, with the same lengths.

        Args:
            tokens: `LongTensor` of shape `(B, N)`.
            seen: `BoolTensor` of shape `(B, N, M)`: the nodes that each node sees, see `tree.ancestors`.
            lengths: committed tokens of each row, node 0 included.
            keep_last: only the last node's logits are wanted.
            window: token indices that have a position; nodes beyond get the last one, their output is not used.
        """
        assert self.cache is not None
        device = tokens.device
        size = tokens.shape[1]
        before = seen.shape[2] - size
        counted = torch.tensor(lengths, device=device)
        roots = (counted - 1).unsqueeze(1)
        slots = roots + torch.arange(before, before + size, device=device)
        self.cache.begin(slots, [length + before for length in lengths], size, len(set(lengths)) == 1)
        index = roots if seen.shape[2] == 1 else roots + seen.sum(-1) - 1
        if window is not None:
            index = index.clamp(max=window - 1)
        positions = index if self._offset is None else index + self._offset
        masks = self._masks(counted, seen)
        inputs = self._inputs(tokens, masks, positions, keep_last)
        with self.timed(), verifying(), self.mode(tokens.numel()):
            return self.model(**inputs, return_dict=True)

    def _inputs(self, tokens: torch.Tensor, masks: Any, positions: torch.Tensor, keep_last: bool) -> dict[str, Any]:
        inputs = {"input_ids": tokens, "attention_mask": masks, "position_ids": positions, "use_cache": True}
        if keep_last:
            inputs["logits_to_keep"] = 1
        return {**inputs, CACHE_NAME: self.cache}

    def _masks(self, lengths: torch.Tensor, seen: torch.Tensor) -> Any:
        """The mask in the form that the model takes: one, or one per layer type."""
        assert self.cache is not None
        masks = {}
        for name, (window, chunk) in self._layer_types.items():
            mask = _visible(lengths, seen, window, chunk, self.cache.visible).unsqueeze(1)
            if self._additive:
                floor = torch.finfo(self.model.dtype).min
                mask = torch.zeros(mask.shape, dtype=self.model.dtype, device=mask.device).masked_fill_(~mask, floor)
            masks[name] = mask
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def settle(self, paths: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        """Bring the K/V of accepted paths in place: the d-th node belongs at slot `root_slot + d`.

        Args:
            paths: `(row, root_slot, path)` for rows of the last verify pass; the path holds the accepted nodes below
                the root, root side first.
        """
        assert self.cache is not None
        moves = [
            (row, root_slot + node, root_slot + depth)
            for row, root_slot, path in paths
            for depth, node in enumerate(path, start=1)
            if node != depth
        ]
        if moves:
            self.cache.move(*zip(*moves))

    def keep(self, rows: Sequence[int]) -> None:
        """Only these rows stay."""
        assert self.cache is not None
        count = self.cache.rows
        self.cache.keep(rows)

        def select(value: Any, axis: int) -> Any:
            return value.index_select(axis, torch.tensor(list(rows), device=value.device))

        if self._offset is not None and self._offset.shape[-2] == count:
            self._offset = select(self._offset, self._offset.dim() - 2)
        for name, value in self._rest.items():
            if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == count:
                self._rest[name] = select(value, 0)


def mask_types(config: Any) -> dict[str, tuple[int | None, int | None]]:
    """`(window, chunk)` per layer type of the masks that the model takes; a single entry where all layers agree."""
    layers = DynamicCache(config=config).layers
    window = next((each for layer in layers if (each := sliding_window_of(layer)) is not None), None)
    kinds = {
        "full_attention": (None, None),
        "sliding_attention": (window, None),
        "chunked_attention": (None, getattr(config, "attention_chunk_size", None)),
    }
    names = [name for name in kinds if name in (getattr(config, "layer_types", None) or ())]
    return {name: kinds[name] for name in names} if names else {"all": (window, None)}


class Target(SlotModel):
    """The target: prefill as plain `generate`, verify through the model's own input preparation.

    Raises `UnsupportedModelError` at construction when rotary positions would change in the middle of the text.

    Args:
        model: the user's model.
        model_kwargs: what `generate` prepared for `forward`, the cache included.
        max_length: columns after which generation ends, or None.
        spare: nodes that a verify pass may have.
        prompt_length: tokens of the shortest prompt.
        device: where the caller's ids are, and where scores are judged.

    Attributes:
        columns: tokens that a row may have, or None.
        prompt_groups: groups of rows in which the prompt ran.
        drafted_with: the part of the model that ran last since the last verify pass.
        output_forms: what the modules of parts return, known once the prompt has run.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        model_kwargs: dict[str, Any],
        max_length: int | None,
        spare: int,
        prompt_length: int,
        device: torch.device,
    ):
        check_rotary(model, max_length, prompt_length)
        super().__init__(model, None if max_length is None else max_length + spare)
        self._model_kwargs = model_kwargs
        self._prompt_states: dict[int, list[torch.Tensor]] = {}
        self.device = device
        self.columns = max_length
        self.prompt_groups = 0
        self.output_forms = OutputForms()
        self.drafted_with: PartialTarget | None = None
        self._part_modules: list[nn.Module] = []
        self._check_holes(model_kwargs.get("attention_mask"))

    def _check_holes(self, mask: torch.Tensor | None) -> None:
        """Windows and chunks count columns, which are not positions in a row with holes."""
        cut = any(window is not None or chunk is not None for window, chunk in self._layer_types.values())
        if cut and mask is not None and bool(((mask[:, :-1] != 0) & (mask[:, 1:] == 0)).any()):
            raise UnsupportedModelError(
                f"{type(self.model).__name__} has sliding or chunked attention, and `attention_mask` has zeros after "
                "its first one. Pad on the left only, or call `generate` without `assistant_strategy`."
            )

    def start(
        self, input_ids: torch.Tensor, generation_config: Any, keeps_states: bool = False
    ) -> tuple[TargetOutput, list[int]]:
        """Run the prompt. Returns the last position's logits, shape `(B, 1, V)`, and the prompt tokens per row.

        Args:
            keeps_states: keep what `prompt_top` needs.
        """
        kwargs = self._model_kwargs

        def run(rows: Sequence[int], ids: torch.Tensor, own: dict[str, Any]) -> Any:
            seen = replaced(self.output_forms.seen(self._part_modules))
            with seen, last_hidden_states(self.model, keeps_states) as states:
                outputs = self.model._prefill(ids, generation_config, own)
            self.prompt_groups += 1
            self._prompt_states |= {row: [each[place] for each in states] for place, row in enumerate(rows)}
            return outputs

        with self.timed():
            known_code = self.mode.inference
            outputs, logits, cache = run_prompt(self.model, input_ids, generation_config, kwargs, known_code, run)
        if (mask := kwargs.get("attention_mask")) is None:
            embeds = kwargs.get("inputs_embeds")
            length = input_ids.shape[1] if embeds is None else embeds.shape[1]
            mask = torch.ones(len(logits), length, dtype=torch.long, device=logits.device)
        lengths = self.prefill(cache, mask)
        if (positions := kwargs.get("position_ids")) is not None:
            self.position_offset(positions, lengths)
        dropped = (*PREFILL_ONLY, "attention_mask", "position_ids", CACHE_NAME)
        self._rest = {name: value for name, value in kwargs.items() if name not in dropped}
        types = kwargs.get("token_type_ids")
        if types is not None and self.config is self.model.config:  # a text model; vision models mean the prompt alone
            self._rest["token_type_ids"] = types[:, -1:]
        return TargetOutput(logits, outputs), lengths

    def prompt_top(self, row: int, count: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The likeliest tokens after the last `PROMPT_TOP` positions of a prompt that were run, and their softmax:
        shapes `(n, count)`.

        None where the model does not show its hidden states, or has no output layer of its own.

        Args:
            row: of the caller's batch.
        """
        head = self.model.get_output_embeddings()
        if not self._prompt_states.get(row) or head is None:
            return None
        states = torch.cat(self._prompt_states[row])
        mask = self._model_kwargs.get("attention_mask")
        if mask is not None:
            states = states[mask[row, -len(states) :].bool()]
        tops = [most_likely(head(part), count) for part in states[-PROMPT_TOP:].split(PROMPT_PART)]
        return torch.cat([each[1] for each in tops]), torch.cat([each[2] for each in tops])

    def forget_prompt(self) -> None:
        """Release the states that `prompt_top` needs."""
        self._prompt_states = {}

    def partial(
        self,
        exit_layer: int | None = None,
        skip_attention: Sequence[int] = (),
        skip_mlp: Sequence[int] = (),
        keeps: bool = False,
    ) -> PartialTarget:
        """A part of the model that drafts, see `PartialTarget`. To be asked for before the prompt runs."""
        part = PartialTarget(self, exit_layer, skip_attention, skip_mlp, keeps)
        self._part_modules += part.modules
        return part

    def verify(self, tree: DraftTree, lengths: Sequence[int]) -> TargetOutput:
        """One forward over all nodes of all rows; where a part of the model drafted them, what it left to be done."""
        part, self.drafted_with = self.drafted_with, None
        if part is not None and part.continues(tree, lengths):
            outputs = part.verify(tree, lengths)
        else:
            outputs = self.run(tree.tokens, tree.seen, lengths)
        return TargetOutput(outputs.logits, outputs)

    def _inputs(self, tokens: torch.Tensor, masks: Any, positions: torch.Tensor, keep_last: bool) -> dict[str, Any]:
        rest = self._rest
        if (types := rest.get("token_type_ids")) is not None:
            rest = {**rest, "token_type_ids": types.expand(-1, tokens.shape[1])}
        return self.model.prepare_inputs_for_generation(
            tokens,
            attention_mask=masks,
            position_ids=positions,
            is_first_iteration=False,
            **{CACHE_NAME: self.cache},
            **rest,
        )

    def idle(self) -> None:
        """A forward that means nothing, while other processes still step in lock-step."""
        token = torch.zeros(1, 1, dtype=torch.long, device=self.model.device)
        self.model(input_ids=token, use_cache=False)
