"""The one mask rule, against matrices drawn by hand and against a reference with one loop per rule.

Rows of a matrix are queries (nodes), columns are slots.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tree import BRANCHING, parent_rows, walk

from hf_specdec.target import visible

CHAIN = [-1, 0, 1, 2]


def drawn(picture: str) -> list[list[int]]:
    """A matrix from a picture: `x` is seen, `.` is not, blanks group the columns."""
    return [[int(sign == "x") for sign in line if sign in "x."] for line in picture.split("\n") if line.strip()]


def seen(lengths, parents, window=None, chunk=None, slots=10) -> list[list[list[int]]]:
    """`visible` as nested lists of 0 and 1."""
    mask = visible(torch.tensor(lengths), torch.tensor(parents), window, chunk, slots)
    assert mask.dtype == torch.bool
    return mask.int().tolist()


def reference(length: int, parents: list[int], window: int | None, chunk: int | None, slots: int) -> list[list[int]]:
    """The rule, said slot by slot."""
    base = length - 1
    depth = [len(walk(parents, node)) - 1 for node in range(len(parents))]
    rows = []
    for node in range(len(parents)):
        query = base + depth[node]
        row = []
        for slot in range(slots):
            committed = slot < base
            scratch = 0 <= slot - base < len(parents) and slot - base in walk(parents, node)
            index = slot if committed else base + depth[slot - base] if scratch else None
            sees = index is not None
            sees = sees and (window is None or index > query - window)
            sees = sees and (chunk is None or index // chunk == query // chunk)
            row.append(int(sees))
        rows.append(row)
    return rows


def test_a_chain_sees_what_came_before():
    expected = drawn("""
        xxxx x... ..
        xxxx xx.. ..
        xxxx xxx. ..
        xxxx xxxx ..
    """)
    assert seen([5], [CHAIN]) == [expected]


def test_a_tree_sees_its_own_branch():
    expected = drawn("""
        xxx x......
        xxx xx.....
        xxx x.x....
        xxx xx.x...
        xxx xx..x..
        xxx x.x..x.
        xxx xx..x.x
    """)
    assert seen([4], [BRANCHING]) == [expected]


def test_ragged_rows_start_where_their_text_ends():
    first = drawn("""
        x..... .
        xx.... .
        x.x... .
    """)
    second = drawn("""
        xxxx x..
        xxxx xx.
        xxxx xxx
    """)
    assert seen([1, 5], [[-1, 0, 0], [-1, 0, 1]], slots=7) == [first, second]


def test_padding_nodes_see_the_text_and_themselves():
    expected = drawn("""
        xx x...
        xx xx..
        xx ..x.
        xx ...x
    """)
    assert seen([3], [[-1, 0, -1, -1]], slots=6) == [expected]


def test_a_window_counts_positions_along_a_chain():
    expected = drawn("""
        ..xx x...
        ...x xx..
        .... xxx.
        .... .xxx
    """)
    assert seen([5], [CHAIN], window=3, slots=8) == [expected]


def test_a_window_counts_positions_and_not_slots_in_a_tree():
    """Node 6 sits six slots after the root and three positions: the root is at the window's edge, not far outside."""
    expected = drawn("""
        ..xxx x......
        ...xx xx.....
        ...xx x.x....
        ....x xx.x...
        ....x xx..x..
        ....x x.x..x.
        ..... xx..x.x
    """)
    assert seen([6], [BRANCHING], window=4, slots=12) == [expected]


def test_a_window_in_slots_would_be_another_matrix():
    """Control: cutting by slot distance hides the root from node 6, so the matrix above can tell the two apart."""
    mask = visible(torch.tensor([6]), torch.tensor([BRANCHING]), None, None, 12)
    slots = torch.arange(12)
    by_slot = mask & (slots[None, None, :] > (5 + torch.arange(7))[None, :, None] - 4)
    assert not torch.equal(by_slot, visible(torch.tensor([6]), torch.tensor([BRANCHING]), 4, None, 12))


def test_a_window_wider_than_the_text_changes_nothing():
    assert seen([4], [BRANCHING], window=100) == seen([4], [BRANCHING])


def test_a_window_of_one_sees_itself_alone():
    expected = drawn("""
        ... x..
        ... .x.
        ... ..x
    """)
    assert seen([4], [[-1, 0, 0]], window=1, slots=6) == [expected]


def test_a_chunk_starts_afresh_at_its_first_position():
    """Chunks of four: the text's last token is position 6, the nodes are positions 6 to 9, and 8 opens a chunk."""
    expected = drawn("""
        ....xx x...
        ....xx xx..
        ...... ..x.
        ...... ..xx
    """)
    assert seen([7], [CHAIN], chunk=4, slots=10) == [expected]


def test_chunks_count_positions_in_a_tree():
    """Root at position 2 of chunks of four; only node 6, three deep, is in the next chunk."""
    expected = drawn("""
        xx x......
        xx xx.....
        xx x.x....
        .. ...x...
        .. ....x..
        .. .....x.
        .. ....x.x
    """)
    assert seen([3], [BRANCHING], chunk=4, slots=9) == [expected]


@pytest.mark.parametrize(("window", "chunk"), [(None, None), (3, None), (None, 4)])
def test_nothing_beyond_the_block_is_seen(window, chunk):
    mask = visible(torch.tensor([3, 6]), torch.tensor([CHAIN, CHAIN]), window, chunk, 16)
    assert not mask[0, :, 2 + 4 :].any()
    assert not mask[1, :, 5 + 4 :].any()


@pytest.mark.parametrize(("window", "chunk"), [(None, None), (3, None), (None, 4)])
def test_every_node_sees_itself(window, chunk):
    """Padding included: a query that sees nothing would be not-a-number in the softmax."""
    parents = torch.tensor([BRANCHING, [-1, 0, 1, -1, -1, -1, -1]])
    lengths = torch.tensor([3, 6])
    mask = visible(lengths, parents, window, chunk, 16)
    for row in range(2):
        for node in range(7):
            assert mask[row, node, lengths[row] - 1 + node]


@pytest.mark.parametrize("wrong", ["causal", "siblings", "length"])
def test_a_wrong_mask_is_told_apart(wrong):
    """Control: the usual mistakes give another matrix for the tree that the tests use."""
    right = visible(torch.tensor([4]), torch.tensor([BRANCHING]), None, None, 10)
    slots = torch.arange(10)
    mistakes = {
        "causal": (slots[None, :] <= 3 + torch.arange(7)[:, None])[None],
        "siblings": visible(torch.tensor([4]), torch.tensor([[-1, 0, 1, 2, 3, 4, 5]]), None, None, 10),
        "length": visible(torch.tensor([5]), torch.tensor([BRANCHING]), None, None, 10),
    }
    assert not torch.equal(mistakes[wrong], right)


@settings(max_examples=80, deadline=None)
@given(
    parent_rows(),
    st.lists(st.integers(1, 12), min_size=3, max_size=3),
    st.one_of(st.none(), st.integers(1, 9)),
    st.one_of(st.none(), st.integers(1, 9)),
    st.integers(0, 3),
)
def test_the_rule_equals_the_reference(rows, lengths, window, chunk, spare):
    lengths = lengths[: len(rows)]
    slots = max(lengths) - 1 + len(rows[0]) + spare
    expected = [reference(length, row, window, chunk, slots) for length, row in zip(lengths, rows)]
    assert seen(lengths, rows, window, chunk, slots) == expected
