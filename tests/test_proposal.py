"""What the loop makes of a strategy's answer: the look on the host and the repair by tensors agree."""

import random

import pytest
import torch

from hf_specdec.control.acceptance import DraftAcceptance
from hf_specdec.drafters.combined import promised
from hf_specdec.proposal import Limits, is_fit, trimmed
from hf_specdec.state import Plan
from hf_specdec.tree import DraftTree, HostRow, RowTree

VOCABULARY, UNREADABLE = 6, [4]


def random_tree(rng: random.Random, rows: int, chain: bool, parts: int = 3) -> DraftTree:
    size = rng.randint(1, 7)
    made = []
    for _ in range(rows):
        tokens = [rng.choice([0, 1, 2, 3, 3, 5, 5, 0, 1, 2, 3, *[-1, 4, 6][:parts]]) for _ in range(size)]
        parents = [-1, *(node - 1 if chain else rng.choice([node - 1, 0, node // 2]) for node in range(1, size))]
        if size > 2 and rng.random() < 0.2:
            parents[rng.randrange(size)] = rng.choice([-1, size - 1])
        made.append(HostRow(tokens, parents, [1.0] * size))
    return DraftTree.from_host(made)


@pytest.mark.parametrize("seed", range(40))
def test_a_tree_passes_on_the_host_exactly_where_there_is_nothing_to_repair(seed):
    rng = random.Random(seed)
    passed = 0
    for _ in range(50):
        rows, chain = rng.randint(1, 3), rng.random() < 0.5
        tree = random_tree(rng, rows, chain, parts=rng.choice([0, 0, 3]))
        roots = [row.tokens[0] if rng.random() < 0.95 else 1 for row in tree.on_host]
        depth = rng.randint(1, 6)
        plan = Plan(depth, 1 if chain else 3, 1 + depth if chain else rng.randint(2, 8))
        limits = Limits(roots, plan, [rng.choice([1, 3, 9, 9]) for _ in range(rows)], VOCABULARY, UNREADABLE)
        repaired, _ = trimmed(tree, limits)
        real = (tree.parents >= 0) | (torch.arange(tree.size) == 0)
        same = repaired.size == tree.size and torch.equal(repaired.parents, tree.parents)
        same = same and torch.equal(torch.where(real, tree.tokens, 0), torch.where(real, repaired.tokens, 0))
        same = same and not any(token in (-1, 4, 6) for row in tree.on_host for token in row.tokens[1:])  # in padding
        assert is_fit(tree, limits) == same
        passed += same
    assert passed, "nothing was tried that passes"


@pytest.mark.parametrize("part", ["tokens", "parents", "sampled", "values"])
def test_a_tree_that_was_written_to_is_looked_at_anew(part):
    tree = DraftTree.from_host([HostRow([1, 2, 3], [-1, 0, 1], [1.0, 0.9, 0.8])])
    limits = Limits([1], Plan.chain(5), [9], VOCABULARY, UNREADABLE)
    assert is_fit(tree, limits)
    getattr(tree, part)[0, 2] = 0
    assert not tree.made_of_lists
    assert not is_fit(tree, limits)
    assert tree.on_host == [
        HostRow(tree.tokens[0].tolist(), tree.parents[0].tolist(), tree.values[0].tolist())  # type: ignore[index]
    ]


def test_a_tree_made_in_inference_mode_is_repaired_by_tensors():
    with torch.inference_mode():
        tree = DraftTree.from_chains([1], [[2, 3]])
    limits = Limits([1], Plan.chain(5), [9], VOCABULARY, UNREADABLE)
    assert not is_fit(tree, limits)
    assert trimmed(tree, limits)[0].tokens.tolist() == [[1, 2, 3]]
    assert tree.on_host == [HostRow([1, 2, 3], [-1, 0, 1], None)]


def test_a_tree_holds_numbers_of_its_own():
    """Whatever it was made of: tensors hash by identity, and lists may be written to."""
    chain = torch.tensor([5, 5])
    tree = DraftTree.from_chains([1], [chain])
    assert {type(token) for token in tree.on_host[0].tokens} == {int}
    row = RowTree(1)
    for token in chain:
        row.add(0, token, 0.5)
    limits = Limits([1], Plan(5, 3, 8), [9], VOCABULARY, UNREADABLE)
    siblings = DraftTree.from_rows([row])
    assert not is_fit(siblings, limits), "two siblings with the same token"
    assert trimmed(siblings, limits)[0].parents.tolist() == [[-1, 0, -1]]
    rows = [HostRow([1, 2], [-1, 0], [1.0, 0.5])]
    tree = DraftTree.from_host(rows)
    rows[0].tokens[1] = 3
    rows[0].values[1] = 0.1  # type: ignore[index]
    assert tree.on_host == [HostRow([1, 2], [-1, 0], [1.0, 0.5])]


def test_a_tree_that_is_used_again_is_read_again():
    tree = DraftTree(torch.tensor([[1, 2]]), torch.tensor([[-1, 0]]), torch.zeros(1, 2, dtype=torch.bool))
    assert tree.on_host[0].tokens == [1, 2]
    tree.tokens[0, 1] = 3
    assert tree.on_host[0].tokens == [1, 3]


def test_a_parent_that_is_no_node_is_padding_to_whoever_judges_it():
    tree = DraftTree(
        torch.tensor([[1, 2, 3]]),
        torch.tensor([[-1, 0, 99]]),
        torch.zeros(1, 3, dtype=torch.bool),
        values=torch.tensor([[1.0, 0.5, 0.4]]),
    )
    assert DraftAcceptance().chances([-1, 0, 99], [1.0, 0.5, 0.4])[2] == 0
    assert DraftAcceptance().chances([-1, 0, 99], None)[2] == 0
    assert 1 < promised(tree, DraftAcceptance().chances) < 2
