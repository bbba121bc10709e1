"""The slot cache by literal slots: where a prefill's columns go, what a forward writes, what a move copies.

K at slot s of row b is `100 * b + s`, V is its negative, in every layer and head.
"""

import pytest
import torch
from transformers.cache_utils import DynamicCache

from hf_specdec.cache import SlotCache

LAYERS, HEADS, WIDTH = 2, 2, 3


def states(values: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of shape `(B, HEADS, L, WIDTH)` that hold these numbers and their negatives."""
    keys = torch.tensor(values, dtype=torch.float32)[:, None, :, None].expand(-1, HEADS, -1, WIDTH)
    return keys, -keys


def filled(values: list[list[int]], slots: list[list[int]], capacity: int = 12, limit: int | None = None) -> SlotCache:
    """A slot cache after a prefill that wrote these numbers, one column after the other."""
    stock = DynamicCache()
    for layer in range(LAYERS):
        stock.update(*states(values), layer)
    return SlotCache(stock, torch.tensor(slots), capacity, limit)


def numbered(rows: int) -> SlotCache:
    """Twelve slots a row, each with its own number."""
    return filled([[100 * row + slot for slot in range(12)] for row in range(rows)], [list(range(12))] * rows)


def held(cache: SlotCache) -> list[list[int]]:
    """The numbers of each row's slots, equal in every layer, head and component, in K and in V."""
    (keys, values), *others = [(layer.keys, layer.values) for layer in cache.slot_layers()]
    assert len(others) == LAYERS - 1
    for more_keys, more_values in others:
        assert torch.equal(more_keys, keys) and torch.equal(more_values, values)
    assert torch.equal(values, -keys)
    assert torch.equal(keys, keys[:, :1, :, :1].expand_as(keys))
    return keys[:, 0, :, 0].long().tolist()


def test_columns_of_a_left_padded_prefill_go_to_the_first_slots():
    """Row 1 has two columns of padding, which go behind its text."""
    cache = filled([[1, 2, 3, 4], [8, 9, 3, 4]], [[0, 1, 2, 3], [2, 3, 0, 1]], capacity=6)
    assert held(cache) == [[1, 2, 3, 4, 0, 0], [3, 4, 8, 9, 0, 0]]


@pytest.mark.parametrize(
    ("sources", "target", "expected"),
    [
        ([7], 5, [0, 1, 2, 3, 4, 7, 6, 7, 8, 9, 10, 11]),
        ([6, 9, 11], 5, [0, 1, 2, 3, 4, 6, 9, 11, 8, 9, 10, 11]),
        ([6, 7, 8], 5, [0, 1, 2, 3, 4, 6, 7, 8, 8, 9, 10, 11]),
    ],
    ids=["one", "a_path", "overlapping"],
)
def test_a_move_copies_a_path_of_one_row(sources, target, expected):
    cache = numbered(3)
    cache.move([1] * len(sources), sources, range(target, target + len(sources)))
    assert held(cache) == [list(range(12)), [100 + slot for slot in expected], list(range(200, 212))]


def test_a_forward_writes_at_the_slots_of_each_row_and_sees_up_to_the_longest():
    """Rows of 3 and 5 committed tokens: their roots are at slots 2 and 4, and four nodes follow from there."""
    cache = numbered(2)
    cache.begin(torch.tensor([[2, 3, 4, 5], [4, 5, 6, 7]]), [3, 5], 4, contiguous=False)
    for layer in cache.slot_layers():
        keys, _ = layer.update(*states([[50, 51, 52, 53], [60, 61, 62, 63]]))
        assert keys.shape[2] == cache.visible == 8
    assert held(cache) == [
        [0, 1, 50, 51, 52, 53, 6, 7, 8, 9, 10, 11],
        [100, 101, 102, 103, 60, 61, 62, 63, 108, 109, 110, 111],
    ]
    assert cache.get_seq_length() == 4


def test_rows_of_one_length_are_written_alike():
    cache = numbered(2)
    cache.begin(torch.tensor([[2, 3], [2, 3]]), [3, 3], 2, contiguous=True)
    for layer in cache.slot_layers():
        layer.update(*states([[50, 51], [60, 61]]))
    assert held(cache) == [[0, 1, 50, 51, *range(4, 12)], [100, 101, 60, 61, *range(104, 112)]]


@pytest.mark.parametrize(("limit", "capacity"), [(None, 8), (6, 6), (4, 6)])
def test_slots_double_up_to_the_limit_and_to_what_a_forward_needs(limit, capacity):
    cache = filled([[0, 1, 2, 3]], [[0, 1, 2, 3]], capacity=4, limit=limit)
    cache.begin(torch.tensor([[4, 5]]), [5], 2, contiguous=True)
    assert cache.capacity == capacity
    assert held(cache) == [[0, 1, 2, 3] + [0] * (capacity - 4)]


def test_rows_that_stay_keep_their_slots():
    cache = numbered(3)
    cache.keep([0, 2])
    cache.move([1], [9], [4])
    assert cache.rows == 2
    assert held(cache) == [list(range(12)), [200, 201, 202, 203, 209, *range(205, 212)]]
    assert [part[0, :, 0].tolist() for part in cache.row(1, 5)[0]] == [
        [200, 201, 202, 203, 209],
        [-200, -201, -202, -203, -209],
    ]
