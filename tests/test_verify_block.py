"""`block` by enumeration of everything that is drawn: the target's law, and never fewer tokens than `rejection`."""

import dataclasses
from fractions import Fraction

import pytest
import torch
from laws import (
    Draft,
    block_thresholds,
    distance,
    drafts,
    enumerate_rule,
    point_mass,
    random_law,
    rejection_thresholds,
    target_joint,
)

from hf_specdec.tree import DraftTree
from hf_specdec.verify import VERIFIERS, Acceptance

BLOCK, REJECTION = VERIFIERS["block"].rule, VERIFIERS["rejection"].rule
SHAPES = [(2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (3, 3), (4, 1), (4, 2)]


def chain(depth: int) -> tuple[int, ...]:
    return tuple(range(-1, depth))


def accepted_by_rejection(outcomes, target, depth, monkeypatch) -> float:
    return enumerate_rule(REJECTION, outcomes, target, depth, rejection_thresholds, monkeypatch)[1]


@pytest.mark.parametrize(("vocabulary", "depth"), SHAPES)
@pytest.mark.parametrize("zeros", [False, True], ids=["full", "truncated"])
def test_block_has_the_targets_law_and_accepts_no_less(vocabulary, depth, zeros, monkeypatch):
    gains = []
    for seed in range(3):
        target, draft = random_law(vocabulary, 2 * seed, zeros), random_law(vocabulary, 2 * seed + 1, zeros)
        outcomes = drafts(vocabulary, chain(depth), draft)
        joint, accepted = enumerate_rule(BLOCK, outcomes, target, depth, block_thresholds, monkeypatch)
        assert distance(joint, target_joint(vocabulary, depth + 1, target)) < 1e-5
        gains.append(accepted - accepted_by_rejection(outcomes, target, depth, monkeypatch))
    assert min(gains) > -1e-5
    if depth == 1:
        assert max(gains) < 1e-5, "one token alone is judged as `rejection` does"
    elif not zeros:
        assert max(gains) > 1e-3


def test_the_example_of_the_paper(monkeypatch):
    def target(prefix):
        return [Fraction(1, 3), Fraction(2, 3)]

    def draft(prefix):
        return [Fraction(2, 3), Fraction(1, 3)]

    outcomes = drafts(2, chain(2), draft)
    _, accepted = enumerate_rule(BLOCK, outcomes, target, 2, block_thresholds, monkeypatch)
    assert accepted == pytest.approx(11 / 9, abs=1e-4)
    assert accepted_by_rejection(outcomes, target, 2, monkeypatch) == pytest.approx(10 / 9, abs=1e-4)


@pytest.mark.parametrize(("vocabulary", "depth"), SHAPES)
def test_point_masses_are_judged_as_rejection_does(vocabulary, depth, monkeypatch):
    target, fixed = random_law(vocabulary, 10), point_mass(vocabulary, 11)
    outcomes = drafts(vocabulary, chain(depth), fixed, [False] * (depth + 1), fixed)
    joint, accepted = enumerate_rule(BLOCK, outcomes, target, depth, block_thresholds, monkeypatch)
    assert distance(joint, target_joint(vocabulary, depth + 1, target)) < 1e-5
    assert accepted == pytest.approx(accepted_by_rejection(outcomes, target, depth, monkeypatch), abs=1e-4)


@pytest.mark.parametrize("sampled", [(True, False, True), (False, True, False)], ids=str)
def test_point_masses_between_drawn_tokens(sampled, monkeypatch):
    target, draft, fixed = (random_law(3, seed) for seed in (12, 13, 14))
    outcomes = drafts(3, chain(3), draft, (False, *sampled), fixed)
    joint, accepted = enumerate_rule(BLOCK, outcomes, target, 3, block_thresholds, monkeypatch)
    assert distance(joint, target_joint(3, 4, target)) < 1e-5
    assert accepted > accepted_by_rejection(outcomes, target, 3, monkeypatch) - 1e-5


def test_where_draft_and_target_agree_everything_is_accepted(monkeypatch):
    target = random_law(3, 0)
    joint, accepted = enumerate_rule(BLOCK, drafts(3, chain(2), target), target, 2, block_thresholds, monkeypatch)
    assert distance(joint, target_joint(3, 3, target)) < 1e-5
    assert accepted == pytest.approx(2, abs=1e-4)


def test_a_draft_may_end_by_what_was_drawn_before(monkeypatch):
    """Rows of one block have different lengths; here a draft ends after token 0, which is kept."""

    def ended(draft: Draft) -> Draft:
        parents, over = [-1], False
        for node, token in enumerate(draft.tokens[1:]):
            parents.append(-1 if over else node)
            over = over or token == 0
        return dataclasses.replace(draft, parents=tuple(parents))

    target, draft = random_law(3, 15), random_law(3, 16)
    outcomes = [ended(each) for each in drafts(3, chain(3), draft)]
    joint, _ = enumerate_rule(BLOCK, outcomes, target, 3, block_thresholds, monkeypatch)
    assert distance(joint, target_joint(3, 4, target)) < 1e-5


def test_control_a_draft_that_ends_before_an_unlikely_token(monkeypatch):
    target, draft = random_law(3, 15), random_law(3, 16)

    def ended(each: Draft) -> Draft:
        parents, over = [-1], False
        for node, token in enumerate(each.tokens[1:]):
            over = over or draft(each.prefix(node))[token] < Fraction(3, 10)
            parents.append(-1 if over else node)
        return dataclasses.replace(each, parents=tuple(parents))

    outcomes = [ended(each) for each in drafts(3, chain(2), draft)]
    joint, _ = enumerate_rule(BLOCK, outcomes, target, 2, block_thresholds, monkeypatch)
    assert distance(joint, target_joint(3, 3, target)) > 0.01


def test_control_an_argmax_draft_scored_by_its_softmax(monkeypatch):
    target, soft = random_law(3, 4), random_law(3, 5)
    honest = drafts(3, chain(2), soft, (False, False, False), soft)
    claimed = [dataclasses.replace(each, sampled=(False, True, True)) for each in honest]
    for outcomes, biased in ((honest, False), (claimed, True)):
        joint, _ = enumerate_rule(BLOCK, outcomes, target, 2, block_thresholds, monkeypatch)
        assert (distance(joint, target_joint(3, 3, target)) > 0.01) == biased


def test_control_the_residual_of_rejection(monkeypatch):
    """After a joint refusal the next token is drawn from `b p - q`; `p - q` is biased."""

    def wrong(tree: DraftTree, scores: torch.Tensor, sampling: bool, noise: torch.Tensor | None) -> Acceptance:
        with monkeypatch.context() as patched:
            patched.setattr(torch, "multinomial", lambda law, *_: torch.zeros(len(law), 1, dtype=torch.long))
            right = BLOCK(tree, scores, sampling, noise)
        rows = torch.arange(len(scores))
        law = scores.softmax(-1)[rows, right.count]
        assert tree.probs is not None
        rest = (law - tree.probs[rows, right.count]).clamp(min=0)
        short = (right.count < tree.size - 1) & (rest.sum(-1) > 0)
        law = torch.where(short.unsqueeze(1), rest, law)
        return dataclasses.replace(right, next_token=torch.multinomial(law, 1).squeeze(1))

    target, draft = random_law(3, 2), random_law(3, 3)
    joint, _ = enumerate_rule(wrong, drafts(3, chain(2), draft), target, 2, block_thresholds, monkeypatch)
    assert distance(joint, target_joint(3, 3, target)) > 0.005


@pytest.mark.parametrize("name", ["block", "threshold"])
def test_of_a_tree_the_leading_chain_is_judged(name):
    parents = torch.tensor([[-1, 0, 1, 0, 3]])
    tree = DraftTree(torch.tensor([[0, 1, 1, 1, 1]]), parents, torch.zeros(1, 5, dtype=torch.bool))
    scores = torch.zeros(1, 5, 2)
    scores[..., 1] = 60.0
    acceptance = VERIFIERS[name].rule(tree, scores, True, None)
    assert acceptance.path.tolist() == [[1, 2, -1, -1]]
    assert acceptance.count.tolist() == [2]
