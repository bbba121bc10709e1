"""Tree templates: Medusa's lists of paths, and Sequoia's programme against all trees of up to six nodes."""

import functools
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specdec import SpecDecError, TreeTemplate, fastest_template, optimal_template, template
from hf_specdec.tree import DraftTree

ACCEPTANCES = st.lists(st.sampled_from([0.0, 0.05, 0.1, 0.2, 0.3, 0.6]), min_size=1, max_size=4).filter(
    lambda values: sum(values) <= 1
)


@functools.cache
def shapes(size: int) -> list[tuple[tuple, ...]]:
    """All ordered trees of this many nodes: each is the tuple of its root's subtrees."""
    if size == 1:
        return [()]
    found = []
    for first in range(1, size):
        for head, rest in itertools.product(shapes(first), shapes(size - first)):
            found.append((head, *rest))
    return found


def expectation(shape: tuple, acceptance: list[float], depth: int) -> float:
    """Expected tokens, by the definition; -inf for a tree that is too deep or has more children than ranks."""
    if shape and (not depth or len(shape) > len(acceptance)):
        return -math.inf
    return 1 + sum(
        chance * value if (value := expectation(below, acceptance, depth - 1)) > 0 else -math.inf
        for chance, below in zip(acceptance, shape)
    )


def best_by_force(acceptance: list[float], nodes: int, depth: int) -> float:
    return max(expectation(shape, acceptance, depth) for size in range(1, nodes + 1) for shape in shapes(size))


def test_all_shapes_are_counted_by_catalan_numbers():
    assert [len(shapes(size)) for size in range(1, 7)] == [1, 1, 2, 5, 14, 42]


@settings(max_examples=150, deadline=None)
@given(ACCEPTANCES, st.integers(1, 6), st.integers(0, 6))
def test_the_optimal_tree_brings_as_much_as_the_best_of_all(acceptance, nodes, depth):
    found = optimal_template(acceptance, nodes, depth)
    assert len(found) <= nodes and found.depth <= depth and found.width <= len(acceptance)
    assert found.expected_tokens(acceptance) == pytest.approx(best_by_force(acceptance, nodes, depth))


@settings(max_examples=60, deadline=None)
@given(
    ACCEPTANCES,
    st.integers(1, 6),
    st.integers(0, 4),
    st.floats(0, 2),
    st.lists(st.floats(0.1, 5), min_size=6, max_size=6),
)
def test_the_fastest_tree_takes_the_least_time_per_token_of_all(acceptance, nodes, depth, draft, verify):  # fmt: skip
    def rate(shape: TreeTemplate) -> float:
        return (shape.depth * draft + verify[len(shape) - 1]) / shape.expected_tokens(acceptance)

    found = fastest_template(acceptance, draft, lambda size: verify[size - 1], nodes, depth)
    by_force = min(
        (levels * draft + verify[size - 1]) / best
        for size in range(1, nodes + 1)
        for levels in range(depth + 1)
        if (best := max(expectation(shape, acceptance, levels) for shape in shapes(size))) > 0
    )
    assert len(found) <= nodes and found.depth <= depth
    if min(acceptance) > 0 and sorted(verify) == verify:  # a smaller tree is never dearer
        assert rate(found) == pytest.approx(by_force)


@settings(max_examples=60, deadline=None)
@given(ACCEPTANCES, st.integers(1, 9), st.integers(0, 5))
def test_templates_are_in_order_and_their_paths_give_them_back(acceptance, nodes, depth):
    found = optimal_template(acceptance, nodes, depth)
    assert template(found.paths) == found
    assert found.parents[0] == found.ranks[0] == -1
    seen: dict[int, int] = {}
    for node, (parent, rank) in enumerate(zip(found.parents, found.ranks)):
        assert parent < node
        if node:
            assert rank == seen.get(parent, 0), "an elder sibling is missing"
            seen[parent] = rank + 1
    parents = torch.tensor([found.parents])
    tree = DraftTree(torch.zeros_like(parents), parents, torch.zeros_like(parents, dtype=torch.bool))
    assert tree.depths.max() == found.depth


def test_a_template_from_medusas_kind_of_list():
    found = template([(0,), (1,), (0, 0)])
    assert found == TreeTemplate((-1, 0, 0, 1), (-1, 0, 1, 0))
    assert (found.depth, found.width, len(found)) == (2, 2, 4)
    assert found.values([0.6, 0.2]) == pytest.approx([1.0, 0.6, 0.2, 0.36])
    assert found.expected_tokens([0.6]) == pytest.approx(1.96)
    assert template([]) == template([()]) == TreeTemplate() and TreeTemplate().depth == TreeTemplate().width == 0


def test_a_chain_is_best_where_nothing_but_the_first_is_ever_right():
    assert optimal_template([0.7, 0.0], 5, 9).parents == (-1, 0, 1, 2, 3)
    assert optimal_template([0.1, 0.1, 0.1], 4, 1).parents == (-1, 0, 0, 0)


def test_drafting_costs_depth_and_verifying_costs_size():
    free = fastest_template([0.5, 0.2], 0.0, lambda size: 1.0, 12, 6)
    assert len(free) == 12
    shallow = fastest_template([0.5, 0.2], 0.4, lambda size: 1.0, 12, 6)
    assert 0 < shallow.depth < free.depth
    assert len(fastest_template([0.5, 0.2], 0.0, lambda size: size, 12, 6)) == 1


@pytest.mark.parametrize("paths", [[(0, 0)], [(0,), (0,)], [(-1,)], [(True,)], [(0,), ("x",)]], ids=str)
def test_lists_that_make_no_tree_are_refused(paths):
    with pytest.raises(SpecDecError):
        template(paths)


@pytest.mark.parametrize(
    ("acceptance", "nodes", "depth"),
    [([1.2], 3, 3), ([0.7, 0.7], 3, 3), ([-0.1], 3, 3), ([True], 3, 3), (["x"], 3, 3), ([0.5], 0, 3), ([0.5], 3, -1)],
)
def test_what_is_no_acceptance_or_size_is_refused(acceptance, nodes, depth):
    with pytest.raises(SpecDecError):
        optimal_template(acceptance, nodes, depth)
