"""Suffix decoding: counts and the path rule against a brute-force reference; the memory that outlives a call."""

import json
import pickle
import threading
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specdec.drafters import suffix_index
from hf_specdec.drafters.base import STRATEGIES, build_strategy
from hf_specdec.drafters.suffix import Suffix, SuffixMemory
from hf_specdec.drafters.suffix_index import Node, PathRule, ScoredDraft, SuffixIndex
from hf_specdec.errors import SpecDecError
from hf_specdec.state import DecodeView, Plan
from hf_specdec.tree import DraftTree

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=30)
TEXTS = st.lists(TOKENS, min_size=1, max_size=6)
CONTEXTS = st.integers(1, 5)
RULES = st.builds(PathRule, st.sampled_from([0.0, 0.2, 0.4, 1.0]), st.sampled_from([0.5, 1.0, 3.0, 100.0]))
EVERYTHING = PathRule(0.0, float("inf"))


def reference(
    texts: list[list[int]], end: list[int], max_context: int, limit: int, rule: PathRule, growing: bool
) -> ScoredDraft:
    """The definition, by scanning. `growing`: the draft continues the last of `texts`, which then is `end` itself."""
    places = [(number, position) for number, text in enumerate(texts) for position in range(len(text))]
    occurrences = {
        length: [(n, p) for n, p in places if p >= length - 1 and texts[n][: p + 1][-length:] == end[-length:]]
        for length in range(1, min(max_context, len(end)) + 1)
    }
    lengths = [length for length, found in occurrences.items() if len(found) > growing]
    best = ScoredDraft()
    for length in lengths:
        if length + 1 in lengths and len(occurrences[length + 1]) == len(occurrences[length]):
            continue
        allowed = int(min(limit, rule.max_tokens_factor * length + 1e-6))
        draft = scan_path(texts, occurrences[length], length, max_context, allowed, rule.min_probability, growing)
        if draft.score >= best.score:
            best = draft
    return best


def scan_path(texts, at, length, max_context, limit, min_probability, growing) -> ScoredDraft:
    """One path: the occurrences `at` shrink with each token drafted."""
    tokens, score = [], 0.0
    probability = len(at) / (len(at) + (not growing))
    copied = None
    while len(tokens) < limit:
        if copied is None and (len(at) == 1 or length + len(tokens) > max_context):
            copied = max(at)
        if copied is None:
            followers = [(n, p + 1) for n, p in at if p + 1 < len(texts[n])]
            if not followers:
                break
            counts = Counter(texts[n][p] for n, p in followers)
            latest = {texts[n][p]: (n, p) for n, p in sorted(followers)}
            token = max(counts, key=lambda token: (counts[token], latest[token]))
            probability *= counts[token] / len(at)
            at = [(n, p) for n, p in followers if texts[n][p] == token]
        else:
            number, position = copied[0], copied[1] + 1
            known = texts[number] + (tokens if growing and number == len(texts) - 1 else [])
            if position >= len(known):
                break
            token, copied = known[position], (number, position)
        if probability < min_probability:
            break
        tokens.append(token)
        score += probability
    return ScoredDraft(tokens, score)


def shape(node: Node | int) -> object:
    """Everything that a trie says, to compare two."""
    if isinstance(node, int):
        return 1, node, {}
    return node.count, node.last, {token: shape(child) for token, child in node.children.items()}


def index_of(texts: list[list[int]], max_context: int) -> SuffixIndex:
    """An index of texts that have ended."""
    index = SuffixIndex(max_context)
    for text in texts:
        index.extend(text)
        index.end_text()
    return index


def drafted(tree: DraftTree) -> list[list[int]]:
    """The chain of each row of a tree."""
    return [[t for t, p in zip(ts, ps) if p >= 0] for ts, ps in zip(tree.tokens.tolist(), tree.parents.tolist())]


def started(strategy: Suffix, *sequences: list[int], prompt_lengths: list[int] | None = None):
    """A drafter that has absorbed these rows, and the view of them."""
    view = DecodeView.of_sequences(list(sequences), prompt_lengths=prompt_lengths)
    drafter = strategy.build(None, None)
    drafter.start(view)
    return drafter, view


def propose(text: list[int], depth: int = 4, **options) -> list[int]:
    """The draft of a fresh drafter."""
    drafter, view = started(Suffix(**options), text)
    return drafted(drafter.propose(view, Plan.chain(depth)))[0]


class TestIndex:
    """Counts and paths."""

    @given(TOKENS, CONTEXTS, st.integers(0, 12), RULES)
    @settings(max_examples=300)
    def test_a_draft_in_the_text_itself_is_the_definition(self, text, max_context, limit, rule):
        index = SuffixIndex(max_context)
        index.extend(text)
        expected = reference([text], text, max_context, limit, rule, growing=True)
        assert index.draft(index.matched, limit, rule) == expected

    @given(TEXTS, TOKENS, CONTEXTS, st.integers(0, 12), RULES)
    @settings(max_examples=300)
    def test_a_draft_from_other_texts_is_the_definition(self, texts, end, max_context, limit, rule):
        index = index_of(texts, max_context)
        expected = reference(texts, end, max_context, limit, rule, growing=False)
        assert index.draft(index.match(end), limit, rule, unseen=1) == expected

    @given(TEXTS, TOKENS, CONTEXTS, RULES, st.data())
    @settings(max_examples=300)
    def test_forgotten_texts_leave_no_trace(self, texts, end, max_context, rule, data):
        forgotten = data.draw(st.integers(0, len(texts)))
        index = index_of(texts, max_context)
        for _ in range(forgotten):
            index.forget_first_text()
        rest = texts[forgotten:]
        expected = reference(rest, end, max_context, 8, rule, growing=False)
        assert index.draft(index.match(end), 8, rule, unseen=1) == expected
        assert len(index.text) == sum(len(text) + 1 for text in rest)
        for _ in rest:
            index.forget_first_text()
        assert (index.text, index.root.children) == ([], {})

    @given(TEXTS, st.integers(1, 4))
    def test_texts_may_come_and_go(self, texts, kept):
        index = SuffixIndex(3)
        for number, text in enumerate(texts):
            index.extend(text)
            index.end_text()
            if number >= kept:
                index.forget_first_text()
        rest = texts[-kept:]
        for end in ([0], [1], [2], [0, 1], [2, 2, 1]):
            expected = reference(rest, end, 3, 6, EVERYTHING, growing=False)
            assert index.draft(index.match(end), 6, EVERYTHING, unseen=1) == expected

    @given(TOKENS, CONTEXTS, st.data())
    def test_an_index_that_grew_in_rounds_equals_one_built_at_once(self, text, max_context, data):
        cut = data.draw(st.integers(0, len(text)))
        grown, built = SuffixIndex(max_context), SuffixIndex(max_context)
        grown.extend(text[:cut])
        grown.draft(grown.matched, 8, EVERYTHING)
        grown.extend(text[cut:])
        built.extend(text)
        assert shape(grown.root) == shape(built.root)
        assert list(map(shape, grown.matched)) == list(map(shape, built.matched))

    def test_counts_decide_then_recency(self):
        assert propose([1, 5, 1, 6, 1, 5, 1, 7, 1], 1) == [5]
        assert propose([1, 5, 1, 6, 1], 1) == [6]
        assert propose([1, 6, 1, 5, 1, 6, 1, 5, 9, 1], 1) == [5]

    def test_the_longest_match_wins_ties(self):
        text = [1, 2, 3, 10, 9, 3, 11, 2, 3]
        assert propose(text, 1) == [10]
        assert propose(text, 1, max_context=1) == [11]

    def test_a_frequent_continuation_outweighs_a_longer_match_seen_once(self):
        text = [1, 2, 7, 0] + [3, 2, 8, 0] * 4 + [1, 2]
        assert propose(text, 1) == [8]
        assert propose(text, 3)[0] == 8

    @pytest.mark.parametrize("period", [1, 2, 3])
    def test_a_repetition_goes_on_repeating(self, period):
        text = list(range(period)) * 3
        assert propose(text, 12, max_tokens_factor=100) == [(len(text) + i) % period for i in range(12)]

    def test_the_path_ends_below_the_minimum_probability(self):
        text = [1, 2, 1, 3, 1, 4, 1]  # three continuations of 1, and the current one
        assert propose(text, 1, min_probability=0.25) == [4]
        assert propose(text, 1, min_probability=0.26) == []

    def test_a_longer_match_is_followed_further(self):
        text = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2]
        assert propose(text, 9, max_tokens_factor=1) == [3, 4]
        assert propose(text, 9, max_tokens_factor=2.5) == [3, 4, 5, 6, 7]
        assert propose(text, 9, max_tokens_factor=0.5) == [3]


class CountingTable(dict):
    """Children of a node that count how often they are read and written, and cannot be scanned."""

    operations = 0

    def get(self, *arguments):
        CountingTable.operations += 1
        return super().get(*arguments)

    def __getitem__(self, key):
        CountingTable.operations += 1
        return super().__getitem__(key)

    def __setitem__(self, key, value):
        CountingTable.operations += 1
        super().__setitem__(key, value)

    def __iter__(self):
        raise AssertionError("the children are scanned")

    keys = values = items = __iter__


class CountingNode(Node):
    """A node with counting children."""

    def __init__(self, count, last):
        super().__init__(count, last)
        self.children = CountingTable()


@pytest.mark.parametrize("period", [1, 50, 10**9])
def test_the_cost_does_not_grow_with_the_history(monkeypatch, period):
    monkeypatch.setattr(suffix_index, "Node", CountingNode)
    costs = []
    for history in (500, 50_000):
        index = SuffixIndex(8)
        index.extend(position % period for position in range(history))
        CountingTable.operations = 0
        index.extend((history + offset) % period for offset in range(3))
        appended, CountingTable.operations = CountingTable.operations, 0
        index.draft(index.matched, 10, EVERYTHING)
        costs.append((appended, CountingTable.operations))
    assert costs[0] == costs[1]
    appended, drafted_with = costs[1]
    assert appended <= 3 * 3 * (8 + 1)
    assert drafted_with <= 8 * 10


class TestDrafter:
    """Rows of one call."""

    def test_rows_are_independent_and_leave(self):
        sequences = [[1, 2, 3, 1], [7], [4, 5, 6, 4, 5]]
        drafter, view = started(Suffix(), *sequences)
        tree = drafter.propose(view, Plan.chain(2))
        assert drafted(tree) == [[2, 3], [], [6, 4]]
        assert tree.tokens[:, 0].tolist() == view.roots()
        assert not tree.sampled.any()
        assert tree.probs is None
        drafter.keep([1, 2])
        view = DecodeView.of_sequences([sequences[1] + [8, 7], sequences[2] + [6]])
        drafter.observe(view, [[8, 7], [6]])
        assert drafted(drafter.propose(view, Plan.chain(2))) == [[8, 7], [4, 5]]
        assert drafted(drafter.propose(view, Plan.chain(0))) == [[], []]
        drafter.keep([])
        drafter.finish()

    def test_rows_may_leave_before_the_start(self):
        drafter = Suffix(memory=SuffixMemory()).build(None, None)
        drafter.keep([1])
        drafter.finish()

    @pytest.mark.parametrize(
        "options",
        [{"max_context": 0}, {"max_context": 2.5}, {"max_context": True}, {"min_probability": -0.1}]
        + [{"min_probability": 1.5}, {"min_probability": float("nan")}, {"max_tokens_factor": 0}]
        + [{"max_tokens_factor": float("nan")}, {"memory": 5}],
    )
    def test_invalid_settings_raise_at_construction(self, options):
        with pytest.raises(SpecDecError, match=next(iter(options))):
            Suffix(**options)

    def test_settings_round_trip(self):
        strategy = Suffix(max_context=1, min_probability=0.5, max_tokens_factor=2.0)
        assert STRATEGIES["suffix"] is Suffix
        assert build_strategy("suffix", json.loads(json.dumps(strategy.to_dict()))) == strategy
        assert pickle.loads(pickle.dumps(strategy)) == strategy
        with pytest.raises(SpecDecError, match="max_context"):
            build_strategy("suffix", {"max_contxt": 3})


class TestMemory:
    """What outlives a call."""

    def test_answers_without_prompts_enter_when_rows_leave_and_when_the_call_ends(self):
        memory = SuffixMemory()
        sequences = [[1, 2, 3], [4, 5, 6]]
        drafter, _ = started(Suffix(memory=memory), *sequences, prompt_lengths=[2, 1])
        sequences[0].extend([7, 8])  # the last round of a row that leaves is committed, and never observed
        assert len(memory) == 0
        drafter.keep([1])
        assert len(memory) == 3
        sequences[1].append(9)
        drafter.finish()
        drafter.finish()
        assert memory.__getstate__()["texts"] == [[3, 7, 8], [5, 6, 9]]

    def test_a_later_call_drafts_from_it(self):
        memory = SuffixMemory()
        memory.add([5, 6, 7, 8])
        assert propose([1, 6], 3, memory=memory) == [7, 8]
        assert propose([1, 6], 3) == []
        memory.add([6, 9])
        memory.add([6, 9])
        assert propose([1, 6], 1, memory=memory) == [9]

    def test_the_better_score_wins_and_this_text_on_ties(self):
        memory = SuffixMemory()
        memory.add([6, 7])
        assert propose([6, 1, 6], 1, memory=memory) == [1]
        memory.add([6, 7])
        assert propose([6, 1, 6], 1, memory=memory) == [7]

    def test_the_oldest_answers_leave(self):
        memory = SuffixMemory(max_tokens=5)
        memory.add([1, 2, 3])
        memory.add([4, 5])
        assert len(memory) == 5
        memory.add([6])
        assert memory.__getstate__()["texts"] == [[4, 5], [6]]
        memory.add(list(range(10, 20)))
        assert memory.__getstate__()["texts"] == [[15, 16, 17, 18, 19]]
        memory.add([])
        assert len(memory) == 5

    @given(TEXTS, TOKENS)
    def test_a_bounded_memory_drafts_like_a_new_one_with_what_is_left(self, texts, end):
        memory, new = SuffixMemory(40, 3), SuffixMemory(10_000, 3)
        for text in texts:
            memory.add(text)
        for text in memory.__getstate__()["texts"]:
            new.add(text)
        assert memory.draft(end, 6, EVERYTHING) == new.draft(end, 6, EVERYTHING)

    def test_save_and_load(self, tmp_path):
        path = str(tmp_path / "memory.json")
        memory = SuffixMemory(max_tokens=50, max_context=3)
        strategy = Suffix(memory=memory)
        memory.add([5, 6, 7])
        assert strategy.to_dict()["memory"] == "new"
        memory.save(path)
        assert strategy.to_dict()["memory"] == path
        assert [entry.name for entry in tmp_path.iterdir()] == ["memory.json"]
        loaded = SuffixMemory.load(path)
        assert loaded.__getstate__() == memory.__getstate__()
        again = build_strategy("suffix", json.loads(json.dumps(strategy.to_dict())))
        assert again.memory.__getstate__() == memory.__getstate__()

    @pytest.mark.parametrize(
        "content",
        [b"", b"{", b"\xff\xfe", b"[]", b"{}", b'{"format": "other"}']
        + [b'{"format": "hf_specdec suffix memory 1", "max_tokens": 5, "max_context": 2, "texts": [["a"]]}']
        + [b'{"format": "hf_specdec suffix memory 1", "max_tokens": 5, "max_context": 2, "texts": [[-1]]}']
        + [b'{"format": "hf_specdec suffix memory 1", "max_tokens": 5, "max_context": 2, "texts": 3}']
        + [b'{"format": "hf_specdec suffix memory 1", "max_tokens": 0, "max_context": 2, "texts": []}'],
    )
    def test_a_damaged_file_is_refused(self, tmp_path, content):
        path = tmp_path / "memory.json"
        path.write_bytes(content)
        with pytest.raises(SpecDecError, match=r"memory\.json"):
            SuffixMemory.load(path)

    def test_a_missing_file_is_refused_with_a_remedy(self, tmp_path):
        with pytest.raises(SpecDecError, match="save"):
            Suffix(memory=str(tmp_path / "none.json"))

    @pytest.mark.parametrize("options", [{"max_tokens": 0}, {"max_context": -1}, {"max_tokens": 1.5}])
    def test_invalid_sizes_raise_at_construction(self, options):
        with pytest.raises(SpecDecError, match=next(iter(options))):
            SuffixMemory(**options)

    def test_a_strategy_with_a_memory_pickles(self):
        memory = SuffixMemory(max_tokens=20)
        memory.add([5, 6, 7])
        copy = pickle.loads(pickle.dumps(Suffix(memory=memory)))
        assert copy.memory.__getstate__() == memory.__getstate__()
        copy.memory.add([1])
        assert len(memory) == 3

    def test_an_interrupted_add_does_no_damage(self, monkeypatch):
        memory = SuffixMemory(max_tokens=6, max_context=3)
        memory.add([1, 2, 3])
        memory.add([1, 2, 4])
        with monkeypatch.context() as patch:
            patch.setattr(SuffixIndex, "append", lambda self, token: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                memory.add([1, 2, 5])
        assert memory.draft([1, 2], 1, EVERYTHING).tokens == [5]
        assert len(memory) == 6
        for token in range(9):
            memory.add([token])
        assert memory.__getstate__()["texts"] == [[3], [4], [5], [6], [7], [8]]

    def test_threads_share_it(self):
        memory = SuffixMemory(max_tokens=300, max_context=4)
        strategy = Suffix(memory=memory)
        failures: list[BaseException] = []

        def call(seed: int) -> None:
            try:
                for number in range(30):
                    text = [(seed + number + step) % 7 for step in range(12)]
                    drafter, view = started(strategy, text, prompt_lengths=[4])
                    drafter.propose(view, Plan.chain(6))
                    drafter.finish()
                    pickle.dumps(memory)
            except BaseException as failure:
                failures.append(failure)

        threads = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        texts = memory.__getstate__()["texts"]
        assert len(memory) == sum(map(len, texts)) == 296
        new = SuffixMemory(10_000, 4)
        for text in texts:
            new.add(text)
        for end in ([1, 2, 3], [6, 0], [5]):
            assert memory.draft(end, 6, EVERYTHING) == new.draft(end, 6, EVERYTHING)


def blend(texts: list[list[int]], end: list[int], max_context: int) -> dict[int, float]:
    """The definition of a tree's first level, by scanning: `texts[-1]` is `end` itself."""
    weight, before, blended = 1.0, 0, Counter()
    for length in range(min(max_context, len(end)), 0, -1):
        places = [
            (number, place)
            for number, text in enumerate(texts)
            for place in range(length - 1, len(text))
            if text[place - length + 1 : place + 1] == end[-length:]
        ]
        if len(places) < 2 or len(places) == before:
            continue
        before = len(places)
        followers = Counter(texts[number][place + 1] for number, place in places if place + 1 < len(texts[number]))
        if not followers:
            continue
        total = sum(followers.values())
        believed = weight * total / (total + len(followers) * suffix_index.ESCAPE / length)
        for token, count in followers.items():
            blended[token] += believed * count / total
        weight -= believed
        if weight < suffix_index.NEGLIGIBLE:
            break
    return dict(blended)


class TestTree:
    @given(TEXTS, CONTEXTS)
    @settings(max_examples=200, deadline=None)
    def test_the_first_level_is_the_blend_over_all_matched_contexts(self, texts, max_context):
        index = SuffixIndex(max_context)
        for text in texts[:-1]:
            index.extend(text)
            index.end_text()
        index.extend(texts[-1])
        tree = index.tree(index.matched, texts[-1][-1], depth=1, width=9, nodes=99)
        assert dict(zip(tree.tokens[1:], tree.values[1:])) == pytest.approx(blend(texts, texts[-1], max_context))

    @given(TOKENS, CONTEXTS, st.integers(1, 6), st.integers(1, 3), st.integers(2, 12))
    @settings(max_examples=200, deadline=None)
    def test_trees_stay_within_the_plan_and_their_paths_occurred(self, text, max_context, depth, width, nodes):
        index = SuffixIndex(max_context)
        index.extend(text)
        tree = index.tree(index.matched, text[-1], depth, width, nodes)
        assert len(tree) <= nodes
        found = [[]]
        for token, parent in zip(tree.tokens[1:], tree.parents[1:]):
            found.append([*found[parent], token])
        assert max(map(len, found)) <= depth
        assert max(Counter(tree.parents[1:]).values(), default=0) <= width
        for path in found[1:]:
            wanted, whole = [text[-1], *path], [*text, *path]
            assert any(whole[start : start + len(wanted)] == wanted for start in range(len(text) - 1))

    def test_a_repetition_goes_on_repeating(self):
        index = SuffixIndex(4)
        index.extend([7, 8, 9] * 4)
        tree = index.tree(index.matched, 9, 8, 1, 9)
        assert tree.tokens == [9, *[7, 8, 9] * 2, 7, 8]

    def test_a_memory_adds_its_own_continuations(self):
        memory = SuffixMemory()
        memory.add([1, 2, 3, 4])
        drafter = Suffix(memory=memory).build(None, None)
        view = DecodeView.of_sequences([[2, 9, 1, 2]])
        drafter.start(view)
        tree = drafter.propose(view, Plan(3, 4, 9))
        assert {3, 9} <= set(tree.tokens[0].tolist())

    def test_a_plan_for_chains_gives_the_chain(self):
        text = [1, 2, 3, 1, 2, 4, 1, 2]
        view = DecodeView.of_sequences([text])
        drafter = Suffix().build(None, None)
        drafter.start(view)
        tree = drafter.propose(view, Plan.chain(5))
        assert tree.parents.tolist() == [list(range(-1, tree.size - 1))]
