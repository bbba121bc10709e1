"""The slot cache: K/V of each row at addresses that we choose.

Invariant: slot i of row b holds the K/V of token i of that row, for every committed token but the root. A verify pass
writes node j of row b at slot `length(b) - 1 + j`; what is not accepted stays beyond the committed slots, is masked,
and gets overwritten. Buffers are preallocated and grow by doubling up to `limit`.
"""

from collections.abc import Callable, Sequence

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from .compat import is_passive_layer, sliding_window_of


class SlotLayer(CacheLayerMixin):
    """K/V of one layer, shapes `(B, heads, S, width)`; keys and values may differ in width."""

    is_sliding = False

    def __init__(self, owner: "SlotCache"):
        super().__init__()
        self._owner = owner

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: a layer is filled by `load`."""

    def load(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, capacity: int) -> None:
        """Take over the K/V of a prefill: column c of row b goes to `slots[b, c]`."""
        rows = torch.arange(keys.shape[0], device=keys.device).unsqueeze(1)
        slots = slots.to(keys.device)

        def scatter(states: torch.Tensor) -> torch.Tensor:
            buffer = states.new_zeros(states.shape[0], states.shape[1], capacity, states.shape[3])
            buffer[rows, :, slots] = states.transpose(1, 2)
            return buffer

        self.keys, self.values = scatter(keys), scatter(values)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write at the slots of this forward, return all slots that it may see."""
        assert self.keys is not None and self.values is not None
        start, width, visible = self._owner.start, key_states.shape[2], self._owner.visible
        if start is not None:
            self.keys[:, :, start : start + width] = key_states
            self.values[:, :, start : start + width] = value_states
        else:
            rows, slots = self._owner.index(key_states.device)
            self.keys[rows, :, slots] = key_states.transpose(1, 2)
            self.values[rows, :, slots] = value_states.transpose(1, 2)
        return self.keys[:, :, :visible], self.values[:, :, :visible]

    def resize(self, capacity: int) -> None:
        """Give both buffers `capacity` slots."""
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_zeros(old.shape[0], old.shape[1], capacity, old.shape[3])
            new[:, :, : old.shape[2]] = old
            setattr(self, name, new)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """`(key length, offset)` of the current forward."""
        return self._owner.visible, 0

    def get_seq_length(self) -> int:
        """Committed slots of the longest row."""
        return self._owner.committed

    def get_max_length(self) -> int:
        """No maximum."""
        return -1


class SlotCache(Cache):
    """One `SlotLayer` per attention layer of a filled cache, whose K/V it takes over layer by layer.

    Args:
        filled: the cache of a prefill; its tensors are released as they are copied.
        slots: `LongTensor` of shape `(B, L)`, the slot of each of the L columns of the prefill.
        capacity: slots to allocate at first.
        limit: slots that will never be exceeded, or None.
    """

    def __init__(self, filled: Cache, slots: torch.Tensor, capacity: int, limit: int | None):
        super().__init__(layers=[layer if is_passive_layer(layer) else SlotLayer(self) for layer in filled.layers])
        self._limit = limit
        self.capacity = capacity if limit is None else min(capacity, limit)
        self.rows = slots.shape[0]
        self.writes = 0  # forwards that wrote, whoever ran them
        self.start: int | None = 0
        self.visible = 0
        self.committed = 0
        self._slots = slots
        self._indices: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
        for layer, source in zip(self.layers, filled.layers):
            if isinstance(layer, SlotLayer) and source.is_initialized and source.keys is not None:
                kept = source.keys.shape[2]
                layer.load(source.keys, source.values, slots[:, slots.shape[1] - kept :], self.capacity)
                source.reset()

    def slot_layers(self) -> list[SlotLayer]:
        """The layers that hold K/V."""
        return [layer for layer in self.layers if isinstance(layer, SlotLayer) and layer.is_initialized]

    def begin(self, slots: torch.Tensor, lengths: Sequence[int], width: int, contiguous: bool) -> None:
        """Say where the next forward writes.

        Args:
            slots: `LongTensor` of shape `(B, N)`, a slot for each node.
            lengths: committed tokens of each row, root included.
            width: N.
            contiguous: node j of every row goes to slot `lengths[0] - 1 + j`.
        """
        self.writes += 1
        self.committed = max(lengths) - 1
        self.visible = self.committed + width
        if self.visible > self.capacity:
            doubled = 2 * self.capacity if self._limit is None else min(2 * self.capacity, self._limit)
            self.capacity = max(doubled, self.visible)
            for layer in self.slot_layers():
                layer.resize(self.capacity)
        self._slots = slots
        self._indices = {}
        self.start = lengths[0] - 1 if contiguous else None

    def index(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """`(rows, slots)` of the current forward on a layer's device."""
        if device not in self._indices:
            slots = self._slots.to(device)
            self._indices[device] = (torch.arange(slots.shape[0], device=device).unsqueeze(1), slots)
        return self._indices[device]

    def move(self, rows: Sequence[int], sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slot `sources[i]` of row `rows[i]` to slot `targets[i]`, all at once."""
        indices: dict[torch.device, tuple[torch.Tensor, ...]] = {}
        for layer in self.slot_layers():
            for buffer in (layer.keys, layer.values):
                if buffer.device not in indices:
                    moves = torch.tensor([rows, sources, targets], device=buffer.device)
                    indices[buffer.device] = moves.unbind()
                row, source, target = indices[buffer.device]
                buffer[row, :, target] = buffer[row, :, source]

    def keep(self, rows: Sequence[int]) -> None:
        """Only these rows stay; the memory of the others is released."""
        self.rows = len(rows)
        for layer in self.slot_layers():
            index = torch.tensor(list(rows), device=layer.keys.device)
            layer.keys = layer.keys.index_select(0, index)
            layer.values = layer.values.index_select(0, index)

    def release(self) -> None:
        """Let go of all buffers, once no row stays."""
        for layer in self.slot_layers():
            layer.keys = layer.values = layer.keys.new_empty(0)
            layer.is_initialized = False

    def row(self, row: int, length: int, copied: bool = True) -> list[tuple[torch.Tensor, torch.Tensor] | None]:
        """The first `length` slots of a row per layer, shapes `(heads, length, width)`; copies, or views."""
        held = [
            (layer.keys[row, :, :length], layer.values[row, :, :length])
            if isinstance(layer, SlotLayer) and layer.is_initialized
            else None
            for layer in self.layers
        ]
        return [(own[0].clone(), own[1].clone()) if own and copied else own for own in held]


def fill_cache(
    cache: Cache,
    rows: Sequence[list[tuple[torch.Tensor, torch.Tensor] | None]],
    columns: Callable[[int, int], list[int]],
    length: int,
) -> Cache:
    """Put the K/V of finished rows into a stock cache, in the columns of plain `generate`.

    Args:
        cache: an empty cache with the layers of the model.
        rows: `SlotCache.row` of each row of the caller's batch; each layer's are released as they are copied.
        columns: called with a row and a count; the columns of its first slots.
        length: columns of the result; those without a token hold zeros.
    """
    for index, layer in enumerate(cache.layers):
        held = [own for row in rows if (own := row[index]) is not None]
        if not held:
            continue
        window = sliding_window_of(layer)
        first = 0 if window is None else max(length - window + 1, 0)
        states = []
        for part in (0, 1):
            sample = held[0][part]
            buffer = sample.new_zeros(len(held), sample.shape[0], length, sample.shape[2])
            for row, own in enumerate(held):
                kept = [column for column in columns(row, own[part].shape[1]) if column < length]
                buffer[row, :, kept] = own[part][:, : len(kept)]
            states.append(buffer[:, :, first:])
        layer.update(*states)
        for layers in rows:
            layers[index] = None
        if window is not None:
            layer.cumulative_length = length
    return cache
