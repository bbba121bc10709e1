"""The tree algebra, against literal matrices and against a reference that walks up parent by parent."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specdec import SpecDecError
from hf_specdec.tree import DraftTree, ancestors, keep_nodes

#        0
#      /   \
#     1     2
#    / \     \
#   3   4     5
#       |
#       6
BRANCHING = [-1, 0, 0, 1, 1, 2, 4]


def tree(parents: list[list[int]], tokens: list[list[int]] | None = None) -> DraftTree:
    """A tree with these parents; node i of row b has token `10 * b + i` unless tokens are given."""
    parent_tensor = torch.tensor(parents)
    rows, size = parent_tensor.shape
    numbered = 10 * torch.arange(rows).unsqueeze(1) + torch.arange(size)
    return DraftTree(
        numbered if tokens is None else torch.tensor(tokens), parent_tensor, torch.zeros(rows, size, dtype=torch.bool)
    )


def walk(parents: list[int], node: int) -> list[int]:
    """Reference: the node and everything above it, by following parents. Padding has nothing above it."""
    line = [node]
    while parents[line[-1]] >= 0:
        line.append(parents[line[-1]])
    return line


@st.composite
def parent_rows(draw: st.DrawFn, rows: int | None = None, largest: int = 9) -> list[list[int]]:
    """Parents of one to three rows with up to `largest` nodes, padding anywhere but with no child."""
    size = draw(st.integers(1, largest))
    found = []
    for _ in range(draw(st.integers(1, 3)) if rows is None else rows):
        row = [-1]
        for _ in range(1, size):
            real = [index for index, parent in enumerate(row) if index == 0 or parent >= 0]
            row.append(draw(st.one_of(st.just(-1), st.sampled_from(real))))
        found.append(row)
    return found


def test_depths_of_a_branching_tree_a_chain_and_a_padded_row():
    parents = torch.tensor([BRANCHING, [-1, 0, 1, 2, 3, 4, 5], [-1, 0, 1, -1, -1, -1, -1], [-1] * 7])
    expected = [[0, 1, 1, 2, 2, 2, 3], [0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 0, 0, 0, 0], [0] * 7]
    assert tree(parents.tolist()).depths.tolist() == expected


def test_ancestors_of_a_branching_tree():
    expected = [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0, 0],
        [1, 1, 0, 1, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0],
        [1, 0, 1, 0, 0, 1, 0],
        [1, 1, 0, 0, 1, 0, 1],
    ]
    assert ancestors(torch.tensor([BRANCHING]))[0].int().tolist() == expected


def test_ancestors_of_a_chain_are_lower_triangular():
    chain = torch.tensor([[-1, 0, 1, 2, 3]])
    assert torch.equal(ancestors(chain)[0], torch.ones(5, 5).tril().bool())


def test_padding_sees_itself_alone():
    expected = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    assert ancestors(torch.tensor([[-1, 0, -1, -1]]))[0].int().tolist() == expected


def test_rows_of_a_batch_are_independent():
    rows = [BRANCHING, [-1, 0, 1, 2, 3, 4, 5], [-1, 0, 0, 0, -1, -1, -1]]
    together = ancestors(torch.tensor(rows))
    for index, row in enumerate(rows):
        assert torch.equal(together[index], ancestors(torch.tensor([row]))[0])


def test_a_cut_node_takes_everything_below_it():
    drafted = tree([BRANCHING])
    allowed = torch.ones(1, 7, dtype=torch.bool)
    allowed[0, 1] = False
    kept = keep_nodes(drafted, allowed)
    assert kept.parents.tolist() == [[-1, -1, 0, -1, -1, 2, -1]]
    assert kept.tokens.tolist() == [[0, 0, 2, 0, 0, 5, 0]], "padding holds the root's token"
    assert drafted.parents.tolist() == [BRANCHING], "the argument is not changed"


def test_the_root_survives_a_mask_that_forbids_it():
    kept = keep_nodes(tree([[-1, 0, 1]]), torch.zeros(1, 3, dtype=torch.bool))
    assert kept.parents.tolist() == [[-1, -1, -1]]
    assert kept.tokens.tolist() == [[0, 0, 0]]


def test_padding_stays_padding_whatever_the_mask_says():
    kept = keep_nodes(tree([[-1, 0, -1]]), torch.ones(1, 3, dtype=torch.bool))
    assert kept.parents.tolist() == [[-1, 0, -1]]


def test_flags_of_cut_nodes_are_cleared():
    drafted = DraftTree(torch.tensor([[1, 2, 3]]), torch.tensor([[-1, 0, 1]]), torch.tensor([[False, True, True]]))
    kept = keep_nodes(drafted, torch.tensor([[True, True, False]]))
    assert kept.sampled.tolist() == [[False, True, False]]


def test_chains_of_different_lengths_are_padded():
    drafted = DraftTree.from_chains([7, 8, 9], [[1, 2, 3], [4], []])
    assert drafted.tokens.tolist() == [[7, 1, 2, 3], [8, 4, 8, 8], [9, 9, 9, 9]]
    assert drafted.parents.tolist() == [[-1, 0, 1, 2], [-1, 0, -1, -1], [-1, -1, -1, -1]]
    assert not drafted.sampled.any()
    assert drafted.size == 4


def test_no_draft_at_all_is_the_root_alone():
    drafted = DraftTree.from_chains([7, 8], [[], []])
    assert drafted.size == 1
    assert drafted.tokens.tolist() == [[7], [8]]
    assert {drafted.tokens.dtype, drafted.parents.dtype} == {torch.long}


def test_roots_and_chains_must_agree_in_number():
    with pytest.raises(ValueError):
        DraftTree.from_chains([7], [[1], [2]])


def test_shapes_must_agree():
    ids = torch.zeros(1, 3, dtype=torch.long)
    with pytest.raises(SpecDecError, match="a token, a parent"):
        DraftTree(ids, ids[:, :2], ids.bool())


@settings(max_examples=60, deadline=None)
@given(parent_rows())
def test_depths_and_ancestors_equal_the_walk(rows):
    found_depths, found = tree(rows).depths, tree(rows).seen
    assert torch.equal(found, ancestors(torch.tensor(rows)))
    for row, line in enumerate(rows):
        for node in range(len(line)):
            above = walk(line, node)
            assert found_depths[row, node] == len(above) - 1
            assert set(found[row, node].nonzero().flatten().tolist()) == set(above)


@settings(max_examples=60, deadline=None)
@given(parent_rows(), st.data())
def test_keep_nodes_equals_the_walk(rows, data):
    drafted = tree(rows)
    bits = st.lists(st.booleans(), min_size=len(rows[0]), max_size=len(rows[0]))
    allowed = [data.draw(bits) for _ in rows]
    kept = keep_nodes(drafted, torch.tensor(allowed))
    for row, line in enumerate(rows):
        for node in range(1, len(line)):
            stays = line[node] >= 0 and all(allowed[row][each] for each in walk(line, node)[:-1])
            assert kept.parents[row, node] == (line[node] if stays else -1)
            assert kept.tokens[row, node] == drafted.tokens[row, node if stays else 0]
    again = keep_nodes(kept, torch.tensor(allowed))
    assert torch.equal(again.parents, kept.parents)
    assert torch.equal(again.tokens, kept.tokens)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 50), max_size=5), min_size=1, max_size=4))
def test_from_chains_gives_back_the_chains(chains):
    drafted = DraftTree.from_chains(list(range(60, 60 + len(chains))), chains)
    for row, chain in enumerate(chains):
        real = drafted.parents[row] >= 0
        assert drafted.tokens[row][real].tolist() == chain
        assert drafted.depths[row].max() == len(chain)
