"""`rejection` and `exact` on trees, by enumeration of everything that is drawn, with controls that must fail."""

import dataclasses
import itertools
from fractions import Fraction

import pytest
import torch
from laws import (
    Draft,
    distance,
    drafts,
    enumerate_rule,
    random_law,
    rejection_thresholds,
    same_everywhere,
    target_joint,
    tensor_of,
)

from hf_specdec.tree import DraftTree, keep_nodes, siblings
from hf_specdec.verify import VERIFIERS, lossless

RULE = VERIFIERS["rejection"].rule
SHAPES = {
    "pair": (3, (-1, 0, 0)),
    "pair_of_four": (4, (-1, 0, 0)),
    "three_of_four": (4, (-1, 0, 0, 0)),
    "all_of_three": (3, (-1, 0, 0, 0)),
    "more_than_there_are": (2, (-1, 0, 0, 0)),
    "pair_below_a_token": (3, (-1, 0, 1, 1)),
    "pair_and_a_child_of_the_second": (3, (-1, 0, 0, 2)),
    "pair_and_a_child_each": (3, (-1, 0, 0, 1, 2)),
    "two_pairs_depth_first": (2, (-1, 0, 1, 1, 0)),
    "three_levels": (2, (-1, 0, 0, 1, 1, 3)),
    "chain": (3, (-1, 0, 1, 2)),
}


def depth_of(parents) -> int:
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return max(depths)


@pytest.mark.parametrize("zeros", [False, True], ids=["full", "truncated"])
@pytest.mark.parametrize("shape", SHAPES)
def test_rejection_has_the_targets_law(shape, zeros, monkeypatch):
    vocabulary, parents = SHAPES[shape]
    depth = depth_of(parents)
    for seed in range(3):
        target, draft = random_law(vocabulary, 2 * seed, zeros), random_law(vocabulary, 2 * seed + 1, zeros)
        outcomes = drafts(vocabulary, parents, draft)
        joint, _ = enumerate_rule(RULE, outcomes, target, depth, rejection_thresholds, monkeypatch)
        assert distance(joint, target_joint(vocabulary, depth + 1, target)) < 1e-5


@pytest.mark.parametrize(
    "sampled",
    [flags for flags in itertools.product((False, True), repeat=3) if not all(flags)],
    ids=lambda flags: "".join("d" if flag else "p" for flag in flags),
)
@pytest.mark.parametrize("shape", ["three_of_four", "pair_and_a_child_of_the_second"])
def test_point_masses_beside_drawn_siblings(shape, sampled, monkeypatch):
    """Also where a drawn sibling repeats a point mass: then it can only be refused."""
    vocabulary, parents = SHAPES[shape]
    depth = depth_of(parents)
    target, draft, fixed = (random_law(vocabulary, seed) for seed in (3, 4, 5))
    outcomes = drafts(vocabulary, parents, draft, (False, *sampled), fixed)
    joint, _ = enumerate_rule(RULE, outcomes, target, depth, rejection_thresholds, monkeypatch)
    assert distance(joint, target_joint(vocabulary, depth + 1, target)) < 1e-5


def test_point_masses_are_accepted_as_often_as_the_target_says_them(monkeypatch):
    target = same_everywhere(4, 3, 2, 1)
    outcomes = drafts(4, (-1, 0, 0), target, (False, False, False), target)
    _, accepted = enumerate_rule(RULE, outcomes, target, 1, rejection_thresholds, monkeypatch)
    assert accepted == pytest.approx(0.7, abs=1e-5)


TARGET, DRAFT = same_everywhere(4, 4, 1, 1), same_everywhere(1, 2, 3, 4)
PAIR, TRIPLE = (-1, 0, 0), (-1, 0, 0, 0)


def bias(outcomes, monkeypatch, thresholds=rejection_thresholds, target=TARGET) -> float:
    joint, _ = enumerate_rule(RULE, outcomes, target, 1, thresholds, monkeypatch)
    assert sum(joint.values()) == pytest.approx(1, abs=1e-5)
    return distance(joint, target_joint(4, 2, target))


def stale(draft: Draft, target):
    return rejection_thresholds(draft, target, stale=True)


@pytest.fixture
def stale_rule(monkeypatch):
    """The rule judges every drawn sibling by the law of the first."""
    refuse = lossless.refuse
    monkeypatch.setattr(lossless, "refuse", lambda law, left, *rest: (refuse(law, left, *rest)[0], left))


def test_the_accepted_share_is_that_of_the_reference(monkeypatch):
    """More siblings are accepted more often, and all of them always."""
    shares = [
        enumerate_rule(RULE, drafts(4, parents, DRAFT), TARGET, 1, rejection_thresholds, monkeypatch)[1]
        for parents in ((-1, 0), PAIR, TRIPLE, (-1, 0, 0, 0, 0))
    ]
    assert shares[0] == pytest.approx(0.5, abs=1e-5), "the sum of min(p, q)"
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1, abs=1e-5)


def test_the_toy_passes_what_is_right(monkeypatch):
    """The same target and draft as in the controls below."""
    assert bias(drafts(4, PAIR, DRAFT), monkeypatch) < 1e-5
    assert bias(drafts(4, TRIPLE, DRAFT), monkeypatch) < 1e-5


def test_control_a_stale_law_for_later_siblings(monkeypatch, stale_rule):
    assert bias(drafts(4, PAIR, DRAFT), monkeypatch, stale) > 0.01


def test_siblings_drawn_with_replacement_have_the_law_of_a_stale_rule(monkeypatch, stale_rule):
    """So the bias above is the draft's fault and the rule's together, and not one of the enumeration."""
    assert bias(drafts(4, PAIR, DRAFT, replacement=True), monkeypatch, stale) < 1e-5


def deduplicated(draft: Draft) -> Draft:
    seen: set[int] = set()
    parents = [-1]
    for token in draft.tokens[1:]:
        parents.append(-1 if token in seen else 0)
        seen.add(token)
    return dataclasses.replace(draft, parents=tuple(parents))


def test_control_with_replacement_and_without_duplicates(monkeypatch, stale_rule):
    outcomes = [deduplicated(each) for each in drafts(4, TRIPLE, DRAFT, replacement=True)]
    assert bias(outcomes, monkeypatch, stale) > 0.01


def test_control_siblings_drawn_with_replacement(monkeypatch):
    assert bias(drafts(4, PAIR, DRAFT, replacement=True), monkeypatch) > 0.01


def test_control_siblings_in_the_order_of_the_target(monkeypatch):
    target = random_law(4, 8)

    def reordered(draft: Draft) -> Draft:
        tokens = sorted(draft.tokens[1:], key=lambda token: -target(())[token])
        return dataclasses.replace(draft, tokens=(0, *tokens))

    outcomes = drafts(4, PAIR, DRAFT)
    assert bias(outcomes, monkeypatch, target=target) < 1e-5
    assert bias([reordered(each) for each in outcomes], monkeypatch, target=target) > 0.01


def test_control_an_argmax_child_scored_by_its_softmax(monkeypatch):
    claimed = [
        dataclasses.replace(each, sampled=(False, True, True))
        for each in drafts(4, PAIR, DRAFT, (False, False, False), DRAFT)
    ]
    assert [each.tokens for each in claimed] == [(0, 3, 2)]
    assert bias(claimed, monkeypatch) > 0.01


def test_control_a_sampled_token_dropped_for_its_low_draft_probability(monkeypatch):
    def dropped(draft: Draft) -> Draft:
        parents = [-1, *(0 if DRAFT(())[token] > Fraction(1, 4) else -1 for token in draft.tokens[1:])]
        return dataclasses.replace(draft, parents=tuple(parents))

    for parents in ((-1, 0), PAIR):
        assert bias([dropped(each) for each in drafts(4, parents, DRAFT)], monkeypatch) > 0.01


def test_dropping_by_depth_is_harmless(monkeypatch):
    """What a row's room cuts off is known before anything is drawn."""
    vocabulary, parents = SHAPES["pair_and_a_child_each"]
    target, draft = random_law(vocabulary, 1), random_law(vocabulary, 2)

    def cut(each: Draft) -> Draft:
        tree = DraftTree(torch.tensor([each.tokens]), torch.tensor([each.parents]), torch.tensor([each.sampled]))
        shorter = keep_nodes(tree, tree.depths < 2)
        return dataclasses.replace(each, parents=tuple(shorter.parents[0].tolist()))

    outcomes = [cut(each) for each in drafts(vocabulary, parents, draft)]
    joint, _ = enumerate_rule(RULE, outcomes, target, 2, rejection_thresholds, monkeypatch)
    assert distance(joint, target_joint(vocabulary, 3, target)) < 1e-5


@pytest.mark.parametrize("shape", SHAPES)
def test_exact_emits_what_sequential_sampling_emits(shape):
    """For every draft and every text: noise under which plain sampling says this text makes `exact` emit it."""
    vocabulary, parents = SHAPES[shape]
    depth = depth_of(parents)
    target, draft = random_law(vocabulary, 6), random_law(vocabulary, 7)
    texts = list(itertools.product(range(vocabulary), repeat=depth + 1))
    cases = [(each, text) for each in drafts(vocabulary, parents, draft) for text in texts]
    tree = DraftTree(
        torch.tensor([each.tokens for each, _ in cases]),
        torch.tensor([each.parents for each, _ in cases]),
        torch.zeros(len(cases), len(parents), dtype=torch.bool),
    )
    scores = tensor_of([[target(each.prefix(node)) for node in range(len(parents))] for each, _ in cases]).log()
    said = torch.tensor([text for _, text in cases]).gather(1, tree.depths)
    noise = torch.ones(scores.shape).scatter_(2, said.unsqueeze(2), 1e-9)
    acceptance = VERIFIERS["exact"].rule(tree, scores, True, noise)
    for row, (each, text) in enumerate(cases):
        count = int(acceptance.count[row])
        head = [each.tokens[node] for node in acceptance.path[row, :count].tolist()]
        assert (*head, int(acceptance.next_token[row])) == text[: count + 1]
        further = [each.prefix(node) for node in range(1, len(parents)) if each.parents[node] >= 0]
        assert count == max([0, *(len(path) for path in further if path == text[: len(path)])])


def test_siblings_by_rank():
    #  row 0:   0        row 1: nothing below the root but one token
    #         1 2 4
    #         3   5
    parents = torch.tensor([[-1, 0, 0, 1, 0, 4], [-1, 0, -1, -1, -1, -1]])
    found = [[each.tolist() for each in family] for family in siblings(parents)]
    assert found == [
        [[0, 0, 0, 1], [0, 1, 4, 0], [1, 3, 5, 1], [-1, -1, -1, -1]],
        [[0], [0], [2], [0]],
        [[0], [0], [4], [0]],
    ]
    assert siblings(torch.tensor([[-1], [-1]])) == []
