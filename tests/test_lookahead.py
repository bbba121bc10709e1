"""Lookahead decoding: the window against the paper's rules, what the pool learns, limits, the memory."""

import json
import pickle

import pytest
import torch
from cases import Way, compare, spec_model, ways
from conftest import VOCABULARY, new_tokens, plain, prompt, tiny
from hypothesis import given, settings
from hypothesis import strategies as st

import hf_specdec
from hf_specdec import (
    DecodeView,
    Lookahead,
    LookaheadMemory,
    Merge,
    Plan,
    SpecDecConfig,
    SpecDecError,
    Suffix,
)
from hf_specdec.drafters.base import build_strategy

BIG = Plan(20, 20, 200)
SETTINGS = {
    "default": SpecDecConfig(Lookahead()),
    "pool alone": SpecDecConfig(Lookahead(window=0)),
    "the authors'": SpecDecConfig(Lookahead(window=7, ngram=5, guesses=7), max_draft_tokens=55),
    "bigrams": SpecDecConfig(Lookahead(ngram=2)),
    "one column": SpecDecConfig(Lookahead(window=1, ngram=3)),
    "chains": SpecDecConfig(Lookahead(), max_width=1),
    "narrow": SpecDecConfig(Lookahead(), max_draft_tokens=7, max_width=2, max_depth=3),
}


def markov() -> torch.nn.Module:
    """A model whose next token depends on the last one alone, so that greedy text soon goes round in a circle."""
    model = tiny()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight.zero_()
    return hf_specdec.enable(model)


def started(strategy: Lookahead, *texts: list[int]):
    """A drafter that has seen these texts, and the view of them."""
    drafter = strategy.build(None, None)
    view = DecodeView.of_sequences(list(texts))
    drafter.start(view)
    return drafter, view


# Exactness


@pytest.mark.parametrize("config", SETTINGS.values(), ids=SETTINGS.keys())
@ways(strategies=("lookahead",))
def test_the_text_is_that_of_plain_generate(way: Way, config: SpecDecConfig):
    pair = compare(way, assistant_strategy=config)
    if config.strategy.guesses > 1:
        assert pair.spec.speculation.num_draft_tokens > 0


@pytest.mark.parametrize("verifier", ["rejection", "typical", "block"])
def test_other_verifiers_decode_greedily_as_plain(verifier):
    compare(Way("lookahead", 3, False), assistant_strategy=SpecDecConfig(Lookahead(), verifier=verifier))


@ways(strategies=("lookahead",), batches=(3,))
def test_rows_that_end_leave_with_their_windows(way: Way):
    ends = sorted(range(3, VOCABULARY, 7))
    compare(way, assistant_strategy=Lookahead(), eos_token_id=ends)


def test_a_window_inside_a_merged_tree():
    compare(Way("merge", 3, True), assistant_strategy=Merge([Suffix(), Lookahead()]))
    compare(
        Way("merge", 1, False), assistant_strategy=SpecDecConfig(Merge([Suffix(), Lookahead()]), max_draft_tokens=9)
    )


# The window


def test_the_mask_of_the_window_is_the_papers():
    """W = 3, N = 4: level 0 at 1 and 2 behind the root, level 1 at 1 to 3, level 2 at 2 to 4."""
    drafter, view = started(Lookahead(window=3, ngram=4), [50])
    window = drafter._windows[0]
    window.columns = [[0, 21, 31], [12, 22, 32], [13, 23, 33]]
    tree = drafter.propose(view, BIG)
    order = [50, 12, 13, 21, 22, 23, 31, 32, 33]
    assert sorted(tree.tokens[0].tolist()) == sorted(order)
    nodes = torch.tensor([tree.tokens[0].tolist().index(token) for token in order])
    assert tree.depths[0, nodes].tolist() == [0, 1, 2, 1, 2, 3, 2, 3, 4]
    assert tree.seen[0][nodes][:, nodes].int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0, 0],
        [1, 0, 0, 1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 1, 0, 0, 0],
        [1, 0, 0, 1, 0, 0, 1, 0, 0],
        [1, 1, 0, 0, 1, 0, 0, 1, 0],
        [1, 1, 1, 0, 0, 1, 0, 0, 1],
    ]


def guess(path: list[int]) -> int:
    """Some function of a whole path."""
    value = 7
    for token in path:
        value = (value * 31 + token * 17 + 5) % 89
    return 3 + value


@pytest.mark.parametrize(("count", "ngram"), [(1, 2), (3, 2), (1, 4), (3, 4), (5, 3), (4, 6)])
def test_the_window_moves_as_in_the_paper_level_by_level(count, ngram):
    """Against levels P as the paper has them: P[0] has a token less, since the root is that of column 0."""
    drafter, view = started(Lookahead(window=count, ngram=ngram), [5, 9, 4, 8, 11, 40, 7])
    grams: list[list[int]] = []
    drafter._pool.add = grams.append  # type: ignore[method-assign]
    columns = drafter._windows[0].columns
    levels = [[column[level] for column in columns] for level in range(ngram - 1)]
    levels[0] = levels[0][1:]
    for root in (40, 41, 9, 9, 60):
        view = DecodeView.of_sequences([[5, root]])
        tree = drafter.propose(view, BIG)
        predicted = [guess(tree.tokens[0][tree.seen[0, node]].tolist()) for node in range(tree.size)]
        drafter.learn(view, tree, torch.tensor([[[token] for token in predicted]]), torch.ones(1, tree.size, 1))
        paths = [levels[0][:i] + [levels[level][i] for level in range(1, ngram - 1)] for i in range(count)]
        new = [guess([root, *path]) for path in paths]
        keys = [root, *levels[0]]
        values = [[*(levels[level][i] for level in range(1, ngram - 1)), new[i]] for i in range(count)]
        assert grams[-count:] == [[key, *value] for key, value in zip(keys, values)]
        levels = [*levels[1:], new]
        levels[0] = levels[0][1:]
        now = drafter._windows[0].columns
        assert [[column[level] for column in now] for level in range(ngram - 1)][1:] == levels[1:]
        assert [column[0] for column in now][1:] == levels[0]


def test_columns_that_do_not_fit_wait():
    drafter, view = started(Lookahead(window=4, ngram=4), [50])
    columns = [[0, 21, 31], [12, 22, 32], [13, 23, 33], [14, 24, 34]]
    drafter._windows[0].columns = [list(column) for column in columns]
    for plan, fitting in ((Plan(9, 9, 6), 2), (Plan(3, 9, 99), 2), (Plan(9, 1, 99), 0), (Plan(1, 9, 99), 0), (BIG, 4)):
        drafter._windows[0].columns = [list(column) for column in columns]
        tree = drafter.propose(view, plan)
        shown = torch.full((1, tree.size, 1), 77)
        drafter.learn(view, tree, shown, torch.ones(1, tree.size, 1))
        now = drafter._windows[0].columns
        assert [column[-1] == 77 for column in now] == [True] * fitting + [False] * (4 - fitting)
        assert now[fitting:] == columns[fitting:] or not fitting


def test_a_column_that_another_strategy_crowded_out_waits():
    drafter, view = started(Lookahead(window=2, ngram=3), [50])
    drafter._windows[0].columns = [[0, 21], [12, 22]]
    tree = drafter.propose(view, BIG)
    kept = hf_specdec.tree.keep_nodes(tree, tree.tokens != 22)
    drafter.learn(view, kept, torch.full((1, tree.size, 1), 77), torch.ones(1, tree.size, 1))
    assert drafter._windows[0].columns == [[21, 77], [12, 22]]


def test_ends_of_text_and_unreadable_tokens_do_not_stay_in_the_window():
    drafter = Lookahead(window=2, ngram=3).build(None, None)
    drafter._unusable = {2, 90}
    view = DecodeView.of_sequences([[5, 2, 90, 6, 50]])
    drafter.start(view)
    for token in (2, 90, 2):
        tree = drafter.propose(view, BIG)
        drafter.learn(view, tree, torch.full((1, tree.size, 1), token), torch.ones(1, tree.size, 1))
        assert {each for column in drafter._windows[0].columns for each in column} <= {5, 6, 50}


def test_windows_of_rows_differ_and_no_global_number_is_drawn():
    before = torch.get_rng_state()
    drafter, view = started(Lookahead(), list(range(3, 60)), list(range(3, 60)))
    tree = drafter.propose(view, BIG)
    drafter.learn(view, tree, torch.full((2, tree.size, 1), 7), torch.ones(2, tree.size, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert drafter._windows[0].columns != drafter._windows[1].columns


# What it learns


def test_a_text_that_goes_round_in_circles_is_soon_accepted_whole():
    model, inputs = markov(), prompt(3)
    for window in (0, 5):
        output = plain(
            model,
            **inputs,
            max_new_tokens=100,
            return_dict_in_generate=True,
            assistant_strategy=Lookahead(window=window),
        )
        assert torch.equal(output.sequences, plain(model, **inputs, max_new_tokens=100))
        assert output.speculation.mean_acceptance_length > 2.5


def test_the_window_finds_what_the_text_has_not_said_yet():
    model, inputs = markov(), prompt(1)
    forwards = []
    for window in (0, 8):
        config = SpecDecConfig(Lookahead(window=window), max_draft_tokens=60)
        output = plain(model, **inputs, max_new_tokens=30, return_dict_in_generate=True, assistant_strategy=config)
        forwards.append(output.speculation.target_forwards)
    assert forwards[1] < forwards[0]


def test_the_pool_holds_the_text():
    drafter, view = started(Lookahead(window=0, ngram=3), [7, 8, 9, 7, 5, 6, 7])
    tree = drafter.propose(view, BIG)
    assert tree.tokens[0].tolist() == [7, 5, 6, 8, 9] and tree.parents[0].tolist() == [-1, 0, 1, 0, 3]
    chain = drafter.propose(view, Plan.chain(9))
    assert chain.tokens[0].tolist() == [7, 5, 6]
    view = DecodeView.of_sequences([[7, 8, 9, 7, 5, 6, 7, 1, 2, 7]])
    drafter.observe(view, [[1, 2, 7]])
    assert drafter.propose(view, Plan.chain(9)).tokens[0].tolist() == [7, 1, 2]


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.lists(st.integers(3, 8), min_size=1, max_size=25), min_size=1, max_size=3),
    st.builds(Plan, st.integers(1, 8), st.integers(1, 6), st.integers(2, 40)),
    st.integers(0, 4),
    st.integers(2, 5),
)
def test_trees_stay_within_the_plan(texts, plan, window, ngram):
    drafter, view = started(Lookahead(window=window, ngram=ngram), *texts)
    for _ in range(3):
        tree = drafter.propose(view, plan)
        assert tree.size <= plan.nodes and tree.depths.max() <= plan.depth
        for tokens, parents, values in zip(tree.tokens.tolist(), tree.parents.tolist(), tree.values.tolist()):
            real = [(parent, token) for parent, token in zip(parents, tokens) if parent >= 0]
            assert len(set(real)) == len(real), "siblings must differ"
            assert max(map(parents.count, range(tree.size)), default=0) <= plan.width
            assert all(values[node] <= values[parent] for node, parent in enumerate(parents) if parent >= 0)
        if window:
            predicted = torch.randint(3, 9, (*tree.tokens.shape, 1), generator=torch.Generator().manual_seed(1))
            drafter.learn(view, tree, predicted, torch.ones(predicted.shape))


def test_all_of_a_default_round_fits():
    for strategy in (Lookahead(), Lookahead(window=7, ngram=5, guesses=7), Lookahead(window=0), Lookahead(ngram=2)):
        drafter, view = started(strategy, list(range(10, 80)))
        for first in range(strategy.guesses):
            drafter._pool.add([79, *range(100 + 10 * first, 99 + 10 * first + strategy.ngram)])
        if strategy.window:
            drafter._windows[0].columns = [
                [200 + 10 * column + level for level in range(strategy.ngram - 1)] for column in range(strategy.window)
            ]
        config = SpecDecConfig(strategy)
        wide = SpecDecConfig(strategy, max_draft_tokens=strategy.default_draft_tokens)
        tree = drafter.propose(view, wide.plan())
        assert tree.size == 1 + strategy.default_draft_tokens and tree.depths.max() == strategy.default_depth
        assert config.plan().nodes <= 32
    assert SpecDecConfig(Lookahead()).plan().nodes == 1 + Lookahead().default_draft_tokens


def test_stock_assisted_decoding_takes_it():
    drafter = Lookahead().build(None, None)
    ids, _ = drafter.get_candidates(torch.tensor([[7, 8, 9, 4, 7]]))
    assert ids.tolist() == [[7, 8, 9, 4, 7, 8, 9, 4]]


# Memory and settings


def test_a_memory_carries_over_to_the_next_call():
    model, inputs = spec_model(), prompt(1)
    strategy = Lookahead(memory="new")
    calls = [
        plain(model, **inputs, max_new_tokens=30, return_dict_in_generate=True, assistant_strategy=strategy)
        for _ in range(2)
    ]
    assert torch.equal(calls[0].sequences, calls[1].sequences) and len(strategy.memory) > 10
    assert calls[1].speculation.target_forwards < calls[0].speculation.target_forwards
    assert new_tokens(inputs, calls[0].sequences).shape[1] == 30


def test_a_memory_is_bounded_and_forgets_the_oldest():
    memory = LookaheadMemory(per_token=2, max_tokens=3)
    for gram in ([1, 2, 3], [1, 4, 5], [1, 2, 3], [1, 6, 7]):
        memory.add(gram)
    assert memory.after(1) == [(6, 7), (2, 3)] and memory.after(9) == []
    for first in (2, 3, 1, 4):
        memory.add([first, 8])
    assert len(memory) == 3 and memory.after(2) == [] and memory.after(1)[0] == (8,)
    assert repr(memory) == "LookaheadMemory(3 of 3 tokens, 2 n-grams each)"


def test_a_memory_is_saved_and_loaded(tmp_path):
    memory = LookaheadMemory(per_token=2, max_tokens=3)
    for gram in ([1, 2, 3], [4, 5], [1, 6, 7]):
        memory.add(gram)
    path = tmp_path / "pool.json"
    memory.save(path)
    for copy in (LookaheadMemory.load(path), pickle.loads(pickle.dumps(memory)), Lookahead(memory=str(path)).memory):
        assert copy.__getstate__() == memory.__getstate__() and copy.path == str(path)
        copy.add([9, 9])
        copy.add([8, 8])
        assert len(copy) == 3 and copy.after(4) == []
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"format": "hf_specdec recycling memory 1"}', '"grams": [[1, 2]]', '"grams": [[1, [["x"]]]]',
     '"grams": [[true, [[1]]]]', '"per_token": 0', '"grams": 3'],
)  # fmt: skip
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "pool.json"
    if content.startswith('"'):
        LookaheadMemory().save(path)
        content = json.dumps({**json.loads(path.read_text()), **json.loads(f"{{{content}}}")})
    path.write_text(content)
    with pytest.raises(SpecDecError, match="cannot be read"):
        LookaheadMemory.load(path)
    with pytest.raises(SpecDecError, match="no lookahead memory"):
        Lookahead(memory=str(tmp_path / "nowhere.json"))


@pytest.mark.parametrize(
    "wrong",
    [{"window": -1}, {"window": True}, {"window": 2.0}, {"ngram": 1}, {"ngram": "4"}, {"guesses": 0}, {"memory": 3}],
    ids=str,
)
def test_settings_that_cannot_be_are_refused(wrong):
    with pytest.raises(SpecDecError, match=next(iter(wrong))):
        Lookahead(**wrong)
    with pytest.raises(SpecDecError):
        LookaheadMemory(per_token=0)


def test_settings_round_trip_by_name():
    strategy = Lookahead(window=0, ngram=3, guesses=2, memory="new")
    again = build_strategy("lookahead", strategy.to_dict())
    assert again.to_dict() == strategy.to_dict() == {"window": 0, "ngram": 3, "guesses": 2, "memory": "new"}
    assert SpecDecConfig.from_dict(SpecDecConfig(Lookahead()).to_dict()).resolved == Lookahead()
