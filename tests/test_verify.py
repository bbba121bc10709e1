"""The acceptance rules by exact enumeration on tiny vocabularies, against a reference, with controls that must fail.

`rejection` is enumerated over its coins: between two thresholds the outcome does not depend on a coin, so the middle
of each interval stands for all of it, weighted by its length; the law of the last token is read where it is drawn.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from laws import Law, distance, point_mass, random_law, target_joint, tensor_of
from scipy.stats import chisquare

from hf_specdec.tree import DraftTree
from hf_specdec.verify import VERIFIERS, sample_with

SHAPES = [(2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (3, 3), (4, 1), (4, 2)]
GREEDY = [name for name in VERIFIERS if name != "threshold"]


def chains(drafts: list[tuple[int, ...]], sampled: bool, probs: torch.Tensor | None) -> DraftTree:
    tree = DraftTree.from_chains([0] * len(drafts), drafts)
    return replace(tree, sampled=(tree.parents >= 0) & sampled, probs=probs)


def rejection_joint(vocabulary, depth, target, draft, monkeypatch, sampled=True, label=None):
    """Output law of `rejection` over the first `depth + 1` tokens; `label` is the draft law that it is told."""
    label = label or draft
    cases = []
    for drafted in itertools.product(range(vocabulary), repeat=depth):
        weight = Fraction(1)
        for index, token in enumerate(drafted):
            weight *= draft(drafted[:index])[token]
        if not weight:
            continue
        for halves in itertools.product((0, 1), repeat=depth):
            coins, share = [], weight
            for index, half in enumerate(halves):
                told = label(drafted[:index])[drafted[index]] if sampled else Fraction(1)
                own = target(drafted[:index])[drafted[index]]
                threshold = min(Fraction(1), own / told) if told else Fraction(1)
                low, high = (Fraction(0), threshold) if half == 0 else (threshold, Fraction(1))
                share *= high - low
                coins.append(float((low + high) / 2))
            if share:
                cases.append((drafted, coins, share))
    prefixes = [[drafted[:index] for index in range(depth + 1)] for drafted, _, _ in cases]
    scores = tensor_of([[target(prefix) for prefix in row] for row in prefixes]).log()
    probs = tensor_of([[label(prefix) for prefix in row] for row in prefixes])
    drawn_from = []

    def keep_law(law, *_, **__):
        drawn_from.append(law / law.sum(-1, keepdim=True))
        return torch.zeros(law.shape[0], 1, dtype=torch.long)

    with monkeypatch.context() as patched:
        coins = torch.tensor([row for _, row, _ in cases])
        patched.setattr(torch, "rand", lambda *_, **__: coins)
        patched.setattr(torch, "multinomial", keep_law)
        tree = chains([drafted for drafted, _, _ in cases], sampled, probs if sampled else None)
        acceptance = VERIFIERS["rejection"].rule(tree, scores, True, None)
    assert len(drawn_from) == 1
    joint = dict.fromkeys(itertools.product(range(vocabulary), repeat=depth + 1), 0.0)
    for (drafted, _, share), count, law in zip(cases, acceptance.count.tolist(), drawn_from[0].tolist(), strict=True):
        for token, probability in enumerate(law):
            head = (*drafted[:count], token)
            for tail in itertools.product(range(vocabulary), repeat=depth + 1 - len(head)):
                rest = Fraction(1)
                for index, later in enumerate(tail):
                    rest *= target((*head, *tail[:index]))[later]
                joint[head + tail] += float(share * rest) * probability
    return joint


@pytest.mark.parametrize(("vocabulary", "depth"), SHAPES)
@pytest.mark.parametrize("zeros", [False, True], ids=["full", "truncated"])
def test_rejection_has_the_targets_law(vocabulary, depth, zeros, monkeypatch):
    for seed in range(3):
        target, draft = random_law(vocabulary, 2 * seed, zeros), random_law(vocabulary, 2 * seed + 1, zeros)
        joint = rejection_joint(vocabulary, depth, target, draft, monkeypatch)
        assert distance(joint, target_joint(vocabulary, depth + 1, target)) < 1e-6


@pytest.mark.parametrize(("vocabulary", "depth"), SHAPES)
def test_rejection_of_a_point_mass_has_the_targets_law(vocabulary, depth, monkeypatch):
    target, draft = random_law(vocabulary, 10), point_mass(vocabulary, 11)
    joint = rejection_joint(vocabulary, depth, target, draft, monkeypatch, sampled=False)
    assert distance(joint, target_joint(vocabulary, depth + 1, target)) < 1e-6


def test_rejection_where_draft_and_target_agree(monkeypatch):
    """The residual is zero everywhere: no division of 0 by 0, everything is accepted."""
    target = random_law(3, 0)
    joint = rejection_joint(3, 2, target, target, monkeypatch)
    assert distance(joint, target_joint(3, 3, target)) < 1e-6


def test_control_an_argmax_draft_scored_by_its_softmax(monkeypatch):
    target, soft = random_law(3, 4), random_law(3, 5)

    def argmax(prefix):
        best = max(range(3), key=lambda token: soft(prefix)[token])
        return [Fraction(int(token == best)) for token in range(3)]

    joint = rejection_joint(3, 2, target, argmax, monkeypatch, label=soft)
    assert distance(joint, target_joint(3, 3, target)) > 0.01
    honest = rejection_joint(3, 2, target, argmax, monkeypatch, sampled=False)
    assert distance(honest, target_joint(3, 3, target)) < 1e-6


def scores_of(target: Law, drafts: list[tuple[int, ...]], depth: int) -> torch.Tensor:
    rows = [[target(drafted[: min(index, len(drafted))]) for index in range(depth + 1)] for drafted in drafts]
    return tensor_of(rows).log()


def first_token_p_value(acceptance, tree: DraftTree, law: list[Fraction]) -> float:
    """Chi-square test of the first emitted token."""
    first = torch.where(acceptance.count > 0, tree.tokens[:, 1] if tree.size > 1 else -1, acceptance.next_token)
    counts = torch.bincount(first, minlength=len(law)).tolist()
    return float(chisquare(counts, [float(value) * len(first) for value in law]).pvalue)


DRAWS = 60_000
PARTS = [Fraction(4, 10), Fraction(4, 10), Fraction(1, 10), Fraction(1, 10)]
DRAFT = [Fraction(1, 10), Fraction(3, 10), Fraction(2, 10), Fraction(4, 10)]


def one_step(kept: Callable[[torch.Tensor], torch.Tensor], name: str = "rejection") -> float:
    """Draft one token from `DRAFT`, keep it where `kept` says so, verify; p-value of the output."""
    law = torch.tensor([float(value) for value in DRAFT]).expand(DRAWS, -1)
    drawn = torch.multinomial(law, 1).squeeze(1)
    return verified(drawn, kept(drawn), name)


def verified(drawn: torch.Tensor, keep: torch.Tensor, name: str) -> float:
    """The p-value of what a rule makes of these drafts from `DRAFT`."""
    law = torch.tensor([float(value) for value in DRAFT]).expand(DRAWS, -1)
    tree = DraftTree(
        torch.stack([torch.zeros_like(drawn), torch.where(keep, drawn, 0)], 1),
        torch.stack([torch.full_like(drawn, -1), torch.where(keep, 0, -1)], 1),
        torch.stack([torch.zeros_like(keep), keep], 1),
        torch.stack([law, law], 1),
    )
    scores = torch.tensor([float(value) for value in PARTS]).log().expand(DRAWS, 2, -1)
    acceptance = VERIFIERS[name].rule(tree, scores, True, None)
    return first_token_p_value(acceptance, tree, PARTS)


def everything(drawn: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(drawn, dtype=torch.bool)


@pytest.mark.parametrize("name", ["rejection", "block"])
def test_by_sampling(name):
    assert one_step(everything, name) > 1e-3


@pytest.mark.parametrize("name", ["rejection", "block"])
def test_control_a_token_dropped_after_it_was_drawn(name):
    """Dropping what the draft finds unlikely, after the draw, biases the output; dropping at random does not."""
    assert one_step(lambda drawn: torch.tensor([float(value) for value in DRAFT])[drawn] > 0.25, name) < 1e-9
    assert one_step(lambda drawn: torch.rand(drawn.shape) > 0.5, name) > 1e-3


@pytest.mark.parametrize("name", ["rejection", "block"])
def test_control_shared_noise(name, monkeypatch):
    """Noise that chose the draft and draws the residual too: the residual depends on why the draft was refused."""
    law = torch.tensor([float(value) for value in DRAFT]).expand(DRAWS, -1)
    p_values = {}
    for shared in (True, False):
        noise = torch.empty(DRAWS, 4).exponential_()
        drawn = (law / noise).argmax(-1)
        last = noise if shared else torch.empty(DRAWS, 4).exponential_()
        with monkeypatch.context() as patched:
            patched.setattr(torch, "multinomial", lambda left, *_, last=last: (left / last).argmax(-1, keepdim=True))
            p_values[shared] = verified(drawn, everything(drawn), name)
    assert p_values[True] < 1e-9 < 1e-3 < p_values[False]


@pytest.mark.parametrize(("vocabulary", "depth"), SHAPES)
def test_exact_emits_what_sequential_sampling_emits(vocabulary, depth):
    """For every draft: the emitted tokens are those of sampling one by one with the same noise."""
    target = random_law(vocabulary, 20)
    drafts = list(itertools.product(range(vocabulary), repeat=depth)) * 8
    noise = torch.empty(len(drafts), depth + 1, vocabulary).exponential_()
    tree = chains(drafts, False, None)
    acceptance = VERIFIERS["exact"].rule(tree, scores_of(target, drafts, depth), True, noise)
    for row, drafted in enumerate(drafts):
        text: tuple[int, ...] = ()
        while True:
            law = torch.tensor([float(value) for value in target(text)])
            text = (*text, int((law / noise[row, len(text)]).argmax()))
            if len(text) > depth or text != drafted[: len(text)]:
                break
        count = int(acceptance.count[row])
        assert (*drafted[:count], int(acceptance.next_token[row])) == text
        assert acceptance.path[row].tolist() == [*range(1, count + 1)] + [-1] * (acceptance.path.shape[1] - count)


def test_exact_by_sampling_has_the_targets_law():
    target = random_law(4, 30)
    drafts = [(index % 4,) for index in range(DRAWS)]
    noise = torch.empty(DRAWS, 2, 4).exponential_()
    tree = chains(drafts, False, None)
    acceptance = VERIFIERS["exact"].rule(tree, scores_of(target, drafts, 1), True, noise)
    assert first_token_p_value(acceptance, tree, target(())) > 1e-3


def test_noise_is_that_of_multinomial():
    """`torch.multinomial(p, 1)` is `argmax(p / e)` with `e ~ Exp(1)` from the same generator, and leaves it there."""
    for rows, vocabulary in ((1, 7), (3, 1000)):
        probs = torch.randn(rows, vocabulary).softmax(-1)
        own, stock = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
        for _ in range(50):
            expected = torch.multinomial(probs, 1, generator=stock).squeeze(1)
            noise = torch.empty(rows, vocabulary).exponential_(generator=own)
            assert torch.equal((probs / noise).argmax(-1), expected)
            assert torch.equal(sample_with(probs.log(), noise), expected)
        assert torch.equal(own.get_state(), stock.get_state())


@pytest.mark.parametrize("name", GREEDY)
def test_greedy_follows_the_argmax(name):
    scores = torch.full((3, 4, 5), -1.0)
    for node, token in enumerate((2, 3, 1, 4)):
        scores[:, node, token] = 1.0
    tree = chains([(2, 3, 1), (2, 0, 1), (0, 3, 1)], False, None)
    acceptance = VERIFIERS[name].rule(tree, scores, False, None)
    assert acceptance.count.tolist() == [3, 1, 0]
    assert acceptance.next_token.tolist() == [4, 3, 2]
    assert acceptance.path.tolist() == [[1, 2, 3], [1, -1, -1], [-1, -1, -1]]


@pytest.mark.parametrize("name", GREEDY)
def test_greedy_ties_go_to_the_first_id(name):
    tree = chains([(0, 0)], False, None)
    acceptance = VERIFIERS[name].rule(tree, torch.zeros(1, 3, 5), False, None)
    assert acceptance.count.tolist() == [2]
    assert acceptance.next_token.tolist() == [0]


@pytest.mark.parametrize("name", list(VERIFIERS))
@pytest.mark.parametrize("sampling", [False, True])
def test_padding_is_never_accepted(name, sampling):
    """Rows of one block have drafts of different length, and none at all."""
    drafts = [(1, 1, 1), (1,), ()]
    tree = DraftTree.from_chains([1, 1, 1], drafts)
    scores = torch.zeros(3, 4, 2)
    scores[..., 1] = 60.0
    noise = torch.ones(3, 4, 2)
    acceptance = VERIFIERS[name].rule(tree, scores, sampling, noise)
    assert acceptance.count.tolist() == [3, 1, 0]
    assert acceptance.next_token.tolist() == [1, 1, 1]


def test_exact_goes_to_the_child_that_matches_in_a_tree():
    #       0
    #     1   2
    #    3 4   5
    parents = torch.tensor([[-1, 0, 0, 1, 1, 2]])
    tree = DraftTree(torch.tensor([[9, 1, 2, 3, 4, 3]]), parents, torch.zeros(1, 6, dtype=torch.bool))
    for choices, path, following in (
        ((1, 4, 0, 0, 7, 0), [1, 4], 7),
        ((2, 0, 3, 0, 0, 8), [2, 5], 8),
        ((5,) * 6, [], 5),
    ):
        scores = torch.nn.functional.one_hot(torch.tensor([choices]), 10).float()
        acceptance = VERIFIERS["exact"].rule(tree, scores, False, None)
        kept = [node for node in acceptance.path[0].tolist() if node >= 0]
        assert (kept, acceptance.count.item(), acceptance.next_token.item()) == (path, len(path), following)


def test_the_rules_change_nothing_they_are_given():
    tree = chains([(1, 2), (0, 1)], True, torch.full((2, 3, 4), 0.25))
    scores, noise = torch.randn(2, 3, 4), torch.ones(2, 3, 4)
    before = [tensor.clone() for tensor in (tree.tokens, tree.parents, tree.sampled, tree.probs, scores, noise)]
    for entry in VERIFIERS.values():
        entry.rule(tree, scores, True, noise)
    for old, new in zip(before, (tree.tokens, tree.parents, tree.sampled, tree.probs, scores, noise)):
        assert torch.equal(old, new)
