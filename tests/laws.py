"""Laws on tiny vocabularies, and the output law of an acceptance rule by enumeration of all that it draws.

A rule draws uniform coins, and one token at the end. Each comparison of a coin is monotone, so a coin right below its
threshold stands for all that are below, and one right above for the rest; the law of the last token is read where it
is drawn. Thresholds come from a reference in fractions; a rule with other thresholds is told apart, since the coins
are within 1e-5 of them.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import pytest
import torch

from hf_specdec.tree import DraftTree
from hf_specdec.verify import Acceptance, Rule

Prefix = tuple[int, ...]
Law = Callable[[Prefix], list[Fraction]]
Joint = dict[Prefix, float]
EDGE = 1e-5


def random_law(vocabulary: int, seed: int, zeros: bool = False) -> Law:
    """A law for every prefix, in whole numbers over their sum."""
    generator, table = random.Random(seed), {}

    def law(prefix: Prefix) -> list[Fraction]:
        if prefix not in table:
            weights = [generator.randint(0 if zeros else 1, 9) for _ in range(vocabulary)]
            weights[generator.randrange(vocabulary)] += 1
            table[prefix] = normalised([Fraction(weight) for weight in weights])
        return table[prefix]

    return law


def point_mass(vocabulary: int, seed: int) -> Law:
    """A deterministic draft: all mass on one token per prefix."""
    generator, table = random.Random(seed), {}

    def law(prefix: Prefix) -> list[Fraction]:
        if prefix not in table:
            token = generator.randrange(vocabulary)
            table[prefix] = one_hot(vocabulary, token)
        return table[prefix]

    return law


def same_everywhere(*tenths: int) -> Law:
    """One law after any prefix."""
    return lambda prefix: [Fraction(each, 10) for each in tenths]


def one_hot(vocabulary: int, token: int) -> list[Fraction]:
    return [Fraction(int(index == token)) for index in range(vocabulary)]


def normalised(weights: Sequence[Fraction]) -> list[Fraction]:
    """Divided by their sum; unchanged where that is 0."""
    total = sum(weights)
    return [weight / total for weight in weights] if total else list(weights)


def without(law: Sequence[Fraction], token: int) -> list[Fraction]:
    return normalised([Fraction(0) if index == token else value for index, value in enumerate(law)])


def target_joint(vocabulary: int, length: int, target: Law) -> Joint:
    """Probability of every sequence of this length."""
    result = {}
    for sequence in itertools.product(range(vocabulary), repeat=length):
        probability = Fraction(1)
        for index, token in enumerate(sequence):
            probability *= target(sequence[:index])[token]
        result[sequence] = float(probability)
    return result


def tensor_of(laws: list[list[list[Fraction]]]) -> torch.Tensor:
    return torch.tensor([[[float(value) for value in law] for law in row] for row in laws])


def distance(first: Joint, second: Joint) -> float:
    """Total variation."""
    return sum(abs(first[key] - second[key]) for key in second) / 2


@dataclass(frozen=True)
class Draft:
    """One outcome of drafting: `told` is what the rule is told of each node's children, by prefix."""

    weight: Fraction
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    sampled: tuple[bool, ...]
    told: Law

    def prefix(self, node: int) -> Prefix:
        """Tokens below the root down to a node."""
        return () if node <= 0 else (*self.prefix(self.parents[node]), self.tokens[node])


def drafts(
    vocabulary: int,
    parents: Sequence[int],
    law: Law,
    sampled: Sequence[bool] | None = None,
    fixed: Law | None = None,
    replacement: bool = False,
) -> list[Draft]:
    """Every draft of this shape.

    Args:
        parents: of the nodes, the root's -1 first.
        law: of the first drawn child of a node.
        sampled: which nodes are drawn; all by default.
        fixed: point masses; the token of a node that is not drawn is its likeliest that no elder sibling has.
        replacement: siblings are drawn from the same law each time.
    """
    drawn = (False, *([True] * (len(parents) - 1))) if sampled is None else tuple(sampled)

    def grow(done: Draft) -> Iterator[Draft]:
        node = len(done.tokens)
        if node == len(parents):
            yield done
            return
        above = parents[node]
        elders = [each for each in range(1, node) if done.parents[each] == above]
        prefix = done.prefix(above)
        if above != 0 and done.parents[above] < 0:
            left = [Fraction(0)] * vocabulary
        elif drawn[node]:
            left = list(law(prefix))
            for elder in elders:
                if drawn[elder] and not replacement:
                    left = without(left, done.tokens[elder])
        else:
            assert fixed is not None
            used = {done.tokens[elder] for elder in elders}
            left = one_hot(vocabulary, max(set(range(vocabulary)) - used, key=lambda token: fixed(prefix)[token]))
        if not any(left):  # nothing is left to draw
            yield from grow(Draft(done.weight, (*done.tokens, 0), (*done.parents, -1), drawn, law))
        for token, share in enumerate(left):
            if share:
                grown = (done.weight * share, (*done.tokens, token), (*done.parents, above))
                yield from grow(Draft(*grown, drawn, law))

    return list(grow(Draft(Fraction(1), (0,), (-1,), drawn, law)))


def rejection_thresholds(draft: Draft, target: Law, stale: bool = False) -> list[Fraction]:
    """Per node below the root, the chance that it is accepted once it is tried.

    Args:
        stale: drawn siblings are judged by the law of the first one.
    """
    state: dict[int, tuple[list[Fraction], list[Fraction]]] = {}
    result = []
    for node in range(1, len(draft.tokens)):
        above, token = draft.parents[node], draft.tokens[node]
        if above < 0:
            result.append(Fraction(0))
            continue
        prefix = draft.prefix(above)
        law, left = state.get(above, (target(prefix), draft.told(prefix)))
        drafted = left if draft.sampled[node] else one_hot(len(law), token)
        own, told = law[token], drafted[token]
        result.append(min(Fraction(1), own / told) if told else Fraction(int(own > 0)))
        rest = normalised([max(Fraction(0), mine - theirs) for mine, theirs in zip(law, drafted)])
        if draft.sampled[node] and not stale:
            left = without(left, token)
        state[above] = (rest if any(rest) else law, left)
    return result


def block_thresholds(draft: Draft, target: Law) -> list[Fraction]:
    """Per node of a chain, below which coin it may be the last accepted one."""
    length = sum(parent >= 0 for parent in draft.parents)

    def told(node: int) -> list[Fraction]:
        law = target(draft.prefix(node))
        return draft.told(draft.prefix(node)) if draft.sampled[node + 1] else one_hot(len(law), draft.tokens[node + 1])

    joint, result = Fraction(1), []
    for node in range(1, length + 1):
        token = draft.tokens[node]
        own, drafted = target(draft.prefix(node - 1))[token], told(node - 1)[token]
        joint = min(Fraction(1), joint * own / drafted)
        if node == length:
            result.append(joint)
            continue
        law = target(draft.prefix(node))
        rest = sum(max(joint * mine - theirs, Fraction(0)) for mine, theirs in zip(law, told(node)))
        result.append(rest / (rest + 1 - joint) if rest + 1 - joint else Fraction(1))
    return result + [Fraction(0)] * (len(draft.tokens) - 1 - length)


def enumerate_rule(
    rule: Rule,
    outcomes: Sequence[Draft],
    target: Law,
    depth: int,
    thresholds: Callable[[Draft, Law], list[Fraction]],
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[Joint, float]:
    """Law of the first `depth + 1` tokens, completed by the target where a round emits fewer, and E[accepted]."""
    vocabulary = len(target(()))
    cases: list[tuple[Draft, list[float], Fraction]] = []
    for draft in outcomes:
        edges = thresholds(draft, target)
        choices = [
            [each for each in ((float(edge) - EDGE, edge), (float(edge) + EDGE, 1 - edge)) if each[1]]
            for edge in edges
        ]
        for combination in itertools.product(*choices):
            share = draft.weight
            for _, part in combination:
                share *= part
            cases.append((draft, [min(max(coin, 0.0), 1 - 1e-7) for coin, _ in combination], share))
    acceptance, laws, tree = run_rule(rule, [(draft, coins) for draft, coins, _ in cases], target, monkeypatch)
    joint = dict.fromkeys(itertools.product(range(vocabulary), repeat=depth + 1), 0.0)
    expected = 0.0
    for row, (_, _, share) in enumerate(cases):
        count = int(acceptance.count[row])
        head = tuple(tree.tokens[row, acceptance.path[row, :count]].tolist())
        expected += float(share) * count
        for token, probability in enumerate(laws[row].tolist()):
            begun = (*head, token)
            for tail in itertools.product(range(vocabulary), repeat=depth + 1 - len(begun)):
                rest = float(share) * probability
                for index, later in enumerate(tail):
                    rest *= float(target((*begun, *tail[:index]))[later])
                joint[begun + tail] += rest
    return joint, expected


def run_rule(
    rule: Rule, cases: Sequence[tuple[Draft, list[float]]], target: Law, monkeypatch: pytest.MonkeyPatch
) -> tuple[Acceptance, torch.Tensor, DraftTree]:
    """The rule's answer to each draft with its coins, and the laws that it draws the last tokens from."""
    drawn_from: list[torch.Tensor] = []

    def keep_law(law: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        drawn_from.append(law / law.sum(-1, keepdim=True))
        return torch.zeros(law.shape[0], 1, dtype=torch.long)

    size = len(cases[0][0].tokens)
    known: dict[tuple[int, Prefix], list[Fraction]] = {}

    def told(draft: Draft, node: int) -> list[Fraction]:
        prefix = draft.prefix(node)
        return known.setdefault((id(draft.told), prefix), draft.told(prefix))

    tree = DraftTree(
        torch.tensor([draft.tokens for draft, _ in cases]),
        torch.tensor([draft.parents for draft, _ in cases]),
        torch.tensor([draft.sampled for draft, _ in cases]) & torch.tensor([d.parents for d, _ in cases]).ge(0),
        tensor_of([[told(draft, node) for node in range(size)] for draft, _ in cases]),
    )
    scores = tensor_of([[target(draft.prefix(node)) for node in range(size)] for draft, _ in cases]).log()
    with monkeypatch.context() as patched:
        coins = torch.tensor([row for _, row in cases])
        patched.setattr(torch, "rand", lambda *_, **__: coins)
        patched.setattr(torch, "multinomial", keep_law)
        acceptance = rule(tree, scores, True, None)
    assert len(drawn_from) == 1
    return acceptance, drawn_from[0], tree
