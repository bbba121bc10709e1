"""Prompt lookup: the longest match, then the most recent, at a cost that does not depend on the history."""

import pickle
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_specdec.control.adaptive import AdaptiveController, Learned
from hf_specdec.control.base import Scope
from hf_specdec.control.cost import CostModel
from hf_specdec.drafters.base import STRATEGIES, build_strategy
from hf_specdec.drafters.prompt_lookup import NgramIndex, PromptLookup, PromptLookupDrafter
from hf_specdec.drafters.suffix_index import ESCAPE
from hf_specdec.errors import SpecDecError
from hf_specdec.state import DecodeView, Plan
from hf_specdec.stats import StepRecord
from hf_specdec.tree import DraftTree

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def rescan(text: list[int], min_ngram: int, max_ngram: int, limit: int) -> list[int]:
    """The definition: scan the whole text for the longest, then most recent, earlier occurrence of its end."""
    for n in range(max_ngram, min_ngram - 1, -1):
        for start in range(len(text) - 1, n - 1, -1):
            if text[start - n : start] == text[-n:]:
                longer = list(text)
                for offset in range(limit):
                    longer.append(longer[start + offset])
                return longer[len(text) :]
    return []


def drafted(tree: DraftTree) -> list[list[int]]:
    """The chain of each row of a tree."""
    return [[t for t, p in zip(ts, ps) if p >= 0] for ts, ps in zip(tree.tokens.tolist(), tree.parents.tolist())]


def propose(text: list[int], depth: int = 4, **options: int) -> list[int]:
    """The draft of a fresh drafter."""
    view = DecodeView.of_sequences([text])
    drafter = PromptLookup(**options).build(None, None)
    drafter.start(view)
    return drafted(drafter.propose(view, Plan.chain(depth)))[0]


@given(TEXTS, st.integers(1, 3), st.integers(0, 3), st.integers(0, 8))
def test_a_draft_is_what_a_rescan_of_the_text_finds(text, min_ngram, more, limit):
    expected = rescan(text, min_ngram, min_ngram + more, limit)
    assert propose(text, limit, min_ngram=min_ngram, max_ngram=min_ngram + more) == expected


@given(TEXTS, st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), max_size=8))
def test_an_index_that_grew_equals_one_built_at_once(text, rounds):
    grown = NgramIndex(1, 4)
    grown.absorb(text)
    for emitted in rounds:
        text = text + emitted
        grown.absorb(text)
    built = NgramIndex(1, 4)
    built.absorb(text)
    assert vars(grown) == vars(built)


def test_the_longest_match_wins_then_the_most_recent():
    text = [1, 2, 3, 10, 9, 2, 3, 11, 9, 3, 12, 1, 2, 3]
    assert propose(text, 1, max_ngram=3) == [10]
    assert propose(text, 1, max_ngram=2) == [11]
    assert propose(text, 1, max_ngram=1) == [12]
    assert propose([5, 6, 1, 5, 6, 2, 5, 6], 1) == [2]


def test_no_match_no_draft():
    assert propose([1, 2, 3, 4]) == []
    assert propose([1]) == []
    assert propose([3, 1, 3], min_ngram=2) == []


@pytest.mark.parametrize("period", [1, 2, 3])
def test_a_copy_that_reaches_the_end_goes_on_repeating(period):
    text = list(range(period)) * 3
    assert propose(text, 10) == [(len(text) + i) % period for i in range(10)]


def test_depth_zero_and_n_gram_size_one_work():
    assert propose([1, 2, 1], 0) == []
    assert propose([1, 2, 1], 1, max_ngram=1) == [2]


@pytest.mark.parametrize(
    "options",
    [{"max_ngram": 0}, {"min_ngram": 0}, {"max_ngram": -1}, {"max_ngram": 2.5}, {"min_ngram": True}]
    + [{"max_ngram": 2, "min_ngram": 3}],
)
def test_invalid_sizes_raise_at_construction(options):
    with pytest.raises(SpecDecError, match=next(iter(options))):
        PromptLookup(**options)


def test_rows_are_independent_and_leave():
    sequences = [[1, 2, 3, 1], [7], [4, 5, 6, 4, 5]]
    view = DecodeView.of_sequences(sequences)
    drafter = PromptLookup().build(None, None)
    drafter.start(view)
    tree = drafter.propose(view, Plan.chain(2))
    assert drafted(tree) == [[2, 3], [], [6, 4]]
    assert tree.tokens[:, 0].tolist() == view.roots()
    assert not tree.sampled.any()
    assert tree.probs is None
    drafter.keep([1, 2])
    rest = [sequences[1] + [8, 7], sequences[2] + [6]]
    view = DecodeView.of_sequences(rest)
    drafter.observe(view, [[8, 7], [6]])
    assert drafted(drafter.propose(view, Plan.chain(2))) == [[8, 7], [4, 5]]
    drafter.keep([])


def test_rows_may_leave_before_the_start():
    drafter = PromptLookup().build(None, None)
    drafter.keep([1])
    view = DecodeView.of_sequences([[1, 2, 1]])
    drafter.start(view)
    assert drafted(drafter.propose(view, Plan.chain(1))) == [[2]]


class CountingTable(dict):
    """A table that counts how often it is read and written."""

    operations = 0

    def get(self, *arguments):
        CountingTable.operations += 1
        return super().get(*arguments)

    def __setitem__(self, key, value):
        CountingTable.operations += 1
        super().__setitem__(key, value)


class CountingText(list):
    """A text that counts how many of its tokens are read; it cannot be scanned otherwise."""

    read = 0

    def __getitem__(self, key):
        result = super().__getitem__(key)
        CountingText.read += len(result) if isinstance(key, slice) else 1
        return result

    def __iter__(self):
        raise AssertionError("the text is scanned")

    __contains__ = index = count = __reversed__ = __iter__


def operations_of_a_round(history: int) -> tuple[int, int]:
    """Table operations and tokens read: absorb 3 tokens and draft 10, after `history` tokens of a repeating text."""
    index = NgramIndex(1, 10)
    index._starts = {n: CountingTable() for n in index._starts}
    text = CountingText([i % 50 for i in range(history)])
    index.absorb(text)
    text.extend((history + i) % 50 for i in range(3))
    CountingTable.operations = CountingText.read = 0
    index.absorb(text)
    assert len(index.draft(text, 10)[0]) == 10
    return CountingTable.operations, CountingText.read


def test_the_cost_does_not_grow_with_the_history():
    short, long = operations_of_a_round(500), operations_of_a_round(50_000)
    assert short == long
    assert short[0] <= 3 * 10 + 10
    assert short[1] <= 3 * sum(range(11)) + sum(range(11)) + 10


def test_it_runs_inside_stock_assisted_decoding():
    drafter = PromptLookup().build(None, None)
    text = torch.tensor([[1, 2, 3, 1]])
    candidates, logits = drafter.get_candidates(text)
    assert candidates[0, :6].tolist() == [1, 2, 3, 1, 2, 3]
    assert logits is None
    longer = torch.cat([text, torch.tensor([[2, 9, 1, 2]])], dim=1)
    assert drafter.get_candidates(longer)[0][0, 8] == 9


def test_settings_round_trip():
    strategy = PromptLookup(max_ngram=4, min_ngram=2)
    assert STRATEGIES["prompt_lookup"] is PromptLookup
    assert build_strategy("prompt_lookup", strategy.to_dict()) == strategy
    assert pickle.loads(pickle.dumps(strategy)) == strategy
    assert isinstance(strategy.build(None, None), PromptLookupDrafter)
    with pytest.raises(SpecDecError, match="max_ngram"):
        build_strategy("prompt_lookup", {"max_ngrm": 3})


@pytest.mark.parametrize(("text", "matched"), [([1, 2, 3, 9, 3], 1), ([1, 2, 3, 9, 1, 2, 3], 3), ([5] * 40, 16)])
def test_longer_matches_are_believed_more(text, matched):
    drafter = PromptLookup().build(None, None)
    view = DecodeView.of_sequences([text])
    drafter.start(view)
    tree = drafter.propose(view, Plan.chain(3))
    ratios = (tree.values[0, 1:] / tree.values[0, :-1]).tolist()
    assert ratios == pytest.approx([(matched + depth) / (matched + depth + ESCAPE) for depth in range(len(ratios))])


def test_a_text_that_copies_late_is_copied_under_the_adaptive_schedule():
    """Short matches that fail say nothing of long ones: simulated, blocks as dear as on a 2-core CPU."""
    costs = CostModel.measured({1: 1.0, 2: 1.7, 3: 2.1, 5: 2.15, 8: 2.2, 11: 2.25})
    drafter = PromptLookup().build(None, None)
    control = AdaptiveController(Scope(lambda rows: Plan.chain(10), drafter, None), Learned(costs))
    rng = random.Random(0)
    source = [rng.randrange(100) for _ in range(60)]
    text = source + [rng.choice(source) for _ in range(150)] + source
    state = [list(text[:61])]
    view = DecodeView.of_sequences(state)
    drafter.start(view)
    rounds_of_copy = 0
    while len(state[0]) < len(text):
        plan = control.plan(view, [len(text) - len(state[0])])
        tree = DraftTree.from_chains(view.roots(), [[]])
        if plan.depth:
            tree = control.prune(view, drafter.propose(view, plan))
        rest, drafted = text[len(state[0]) :], tree.tokens[0, 1:].tolist()
        hits = next((place for place, pair in enumerate(zip(drafted, rest)) if pair[0] != pair[1]), len(drafted))
        emitted = rest[: hits + 1]
        rounds_of_copy += len(state[0]) > 60 + 150
        state[0].extend(emitted)
        drafter.observe(view, [emitted])
        control.observe(
            StepRecord(
                plan=plan,
                rows=1,
                nodes=tree.size,
                context=len(state[0]),
                drafted=[len(drafted)],
                reached=[min(len(drafted), hits + 1)],
                accepted=[hits],
                paths=[[*range(1, hits + 1)]],
                draft_forwards=0,
                draft_seconds=0.01 if plan.depth else 0.0,
                verify_seconds=costs.block(tree.size),
                step_seconds=costs.block(tree.size) + 0.01 * bool(plan.depth),
            )
        )
    assert rounds_of_copy < 30, "60 tokens that are copied"
