"""Strategies that write to what they are shown: the text stays plain `generate`'s, or the call ends with an error."""

import copy
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy
import pytest
import torch
from cases import plain_model, spec_model
from conftest import prompt
from transformers.generation import CandidateGenerator
from transformers.generation.streamers import BaseStreamer

from hf_specdec import Adaptive, Drafter, DraftStrategy, Lookahead, Merge, Recycling, SpecDecConfig, loop
from hf_specdec.compat import CACHE_NAME
from hf_specdec.tree import DraftTree


@dataclass(frozen=True)
class By(DraftStrategy):
    """Drafts by a drafter of this class."""

    name: ClassVar[str] = "by"

    drafter: type[Drafter]

    def build(self, target: Any, request: Any) -> Drafter:
        return self.drafter()


class Buffering(Drafter):
    """Writes to the tree that it proposed, past torch's own count of writes, as soon as the target has seen it."""

    top_tokens = 1

    def propose(self, view, plan):
        self.tree = DraftTree.from_chains(view.roots(), [[3, 4]] * view.rows)
        return self.tree

    def learn(self, view, tree, tokens, probs):
        if tree.size == 3:
            self.tree.tokens.numpy()[:, 1:] = tokens[:, :2, 0]


@pytest.mark.parametrize("schedule", ["constant", "adaptive"])
def test_what_a_strategy_writes_after_the_forward_changes_nothing(schedule):
    call = {**prompt(1), "do_sample": False, "max_new_tokens": 24}
    config = SpecDecConfig(strategy=By(Buffering), schedule=schedule)
    assert torch.equal(spec_model().generate(**call, assistant_strategy=config), plain_model().generate(**call))


class Scribbling(Drafter):
    """Writes to all that it is shown of a forward."""

    top_tokens = 2

    def propose(self, view, plan):
        return DraftTree.from_chains(view.roots(), [[3, 4]] * view.rows)

    def learn(self, view, tree, tokens, probs):
        tree.tokens[:, 1:] = tokens[:, :-1, 0]
        tree.on_host[0].tokens[1:] = tokens[0, :-1, 0].tolist()
        tokens[:] = 5
        probs[:] = 0


@pytest.mark.parametrize("schedule", ["constant", "adaptive"])
@pytest.mark.parametrize("sample", [False, True])
def test_what_a_strategy_writes_to_its_lesson_changes_nothing(schedule, sample):
    call = {**prompt(2), "do_sample": sample, "max_new_tokens": 24}
    config = SpecDecConfig(strategy=By(Scribbling), schedule=schedule)
    torch.manual_seed(0)
    plain = plain_model().generate(**call)
    torch.manual_seed(0)
    assert torch.equal(spec_model().generate(**call, assistant_strategy=config), plain)


class Growing(Scribbling):
    """Resizes the tree that it is shown."""

    def learn(self, view, tree, tokens, probs):
        tree.tokens.resize_(view.rows, 3000)


def test_a_tree_that_is_resized_after_the_forward_counts_as_what_was_verified():
    call = {**prompt(2), "do_sample": False, "max_new_tokens": 24, "return_dict_in_generate": True}
    config = SpecDecConfig(strategy=By(Growing), schedule="adaptive")
    out = spec_model().generate(**call, assistant_strategy=config)
    assert torch.equal(out.sequences, plain_model().generate(**call).sequences)
    assert set(out.speculation.choices["rounds_by_nodes"]) <= {"1", "2", "3"}


def appends(tokens):
    tokens.append(3)


def changes_the_last(tokens):
    tokens[-1] = (tokens[-1] + 1) % 90


def shortens(tokens):
    del tokens[4:]


def empties(tokens):
    tokens.clear()


HOOKS = ["start", "propose", "learn", "observe", "keep", "finish", "forwards"]


class Hooked(Drafter):
    """Does something to the text of its first row, in one of its hooks."""

    top_tokens = 2
    view: Any = None
    hook = ""
    write: Any

    def _at(self, hook, view):
        if hook == self.hook:
            self.write(view.tokens(0))

    def start(self, view):
        self.view = view
        self._at("start", view)

    def propose(self, view, plan):
        self._at("propose", view)
        return DraftTree.from_chains(view.roots(), [[3, 4]] * view.rows)

    def learn(self, view, tree, tokens, probs):
        self._at("learn", view)

    def observe(self, view, emitted):
        self._at("observe", view)

    def keep(self, rows):
        self._at("keep", self.view)

    def finish(self):
        if self.view is not None and self.view.rows:
            self._at("finish", self.view)

    @property
    def forwards(self):
        if self.view is not None and self.view.rows:
            self._at("forwards", self.view)
        return 0


def hooked(hook, write):
    return By(type("Hooked", (Hooked,), {"hook": hook, "write": staticmethod(write)}))


def ending(rows):
    """A call whose rows end one after the other, and plain `generate`'s answer."""
    call = {**prompt(rows), "do_sample": False, "max_new_tokens": 24}
    width = call["input_ids"].shape[1]
    text = plain_model().generate(**call)[:, width:]
    call |= {"eos_token_id": [int(text[row, 4 + 5 * row]) for row in range(rows - 1)], "pad_token_id": 0}
    return call, plain_model().generate(**call)


def prompt_cache(call):
    """A cache of the prompt but its last token."""
    width = call["input_ids"].shape[1] - 1
    with torch.no_grad():
        out = plain_model()(
            call["input_ids"][:, :width], attention_mask=call["attention_mask"][:, :width], use_cache=True
        )
    return out[CACHE_NAME], copy.deepcopy(out[CACHE_NAME])


def still_holds_the_prompt(cache, before, mask):
    for now, then in zip(cache.layers, before.layers):
        width = then.keys.shape[2]
        assert now.keys.shape[2] in (width, width + 1)
        real = mask[:, :width].bool()[:, None, :, None]
        torch.testing.assert_close(now.keys[:, :, :width] * real, then.keys * real)
        torch.testing.assert_close(now.values[:, :, :width] * real, then.values * real)


@pytest.mark.parametrize("write", [appends, changes_the_last, shortens, empties])
@pytest.mark.parametrize("hook", [each for each in HOOKS if each != "finish"])
@pytest.mark.parametrize("schedule", ["constant", "adaptive"])
def test_no_strategy_can_write_to_the_text(hook, write, schedule):
    call, _ = ending(3)
    cache, before = prompt_cache(call)
    config = SpecDecConfig(strategy=hooked(hook, write), schedule=schedule)
    with pytest.raises((AttributeError, TypeError), match="RowTokens"):
        spec_model().generate(**call, **{CACHE_NAME: cache}, assistant_strategy=config)
    still_holds_the_prompt(cache, before, call["attention_mask"])


def test_what_is_read_of_the_text_is_the_readers():
    model, call = spec_model(), {**prompt(2), "do_sample": False, "max_new_tokens": 24}

    class Reading(Hooked):
        def observe(self, view, emitted):
            copies = [view.tokens(0)[:], list(view.tokens(0)), view.roots(), view.lengths()]
            assert copies[0] == copies[1] == view.tokens(0) and view.tokens(0)[-1] == view.root(0)
            assert torch.equal(torch.tensor(view.tokens(0)), torch.tensor(copies[0]))
            text, ids = view.tokens(0), copies[0]
            assert text + [5] == [*ids, 5] and [5] + text == [5, *ids] and text[1:3] == ids[1:3]
            assert ids[3] in text and text.index(ids[3]) == ids.index(ids[3])
            assert text.count(ids[3]) == ids.count(ids[3])
            assert list(reversed(text)) == ids[::-1] and bool((numpy.array(ids) == text).all())
            assert not hasattr(view, "emitted") and not hasattr(view, "commit")
            for each in copies:
                each.clear()

    got = model.generate(**call, assistant_strategy=SpecDecConfig(strategy=By(Reading), schedule="constant"))
    assert torch.equal(got, plain_model().generate(**call))


class Interrupt(BaseException):
    """As KeyboardInterrupt, which would end the tests."""


def interrupted(tokens):
    raise Interrupt


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("schedule", ["constant", "adaptive"])
def test_an_error_of_a_strategy_comes_out_and_leaves_the_callers_cache(hook, schedule):
    call, _ = ending(3)
    cache, before = prompt_cache(call)
    strategy = hooked(hook, interrupted)
    if hook == "finish":  # when no row is left
        strategy = By(type("Finishing", (Hooked,), {"finish": interrupted}))
    config = SpecDecConfig(strategy=strategy, schedule=schedule)
    with pytest.raises(Interrupt):
        spec_model().generate(**call, **{CACHE_NAME: cache}, assistant_strategy=config)
    still_holds_the_prompt(cache, before, call["attention_mask"])


def test_a_member_that_fails_as_it_ends_keeps_no_other_from_ending():
    ended = []
    failing = By(type("Failing", (Hooked,), {"finish": interrupted}))
    other = By(type("Other", (Hooked,), {"finish": lambda self: ended.append(1)}))
    with pytest.raises(Interrupt):
        spec_model().generate(**prompt(1), max_new_tokens=4, assistant_strategy=Merge([failing, other]))
    assert ended


def test_a_streamer_that_fails_at_the_end_leaves_the_cache_as_plain_generate_does():
    class Failing(BaseStreamer):
        def put(self, value):
            pass

        def end(self):
            raise Interrupt

    lengths = []
    for model, more in ((plain_model(), {}), (spec_model(), {"assistant_strategy": "suffix"})):
        call = {**prompt(1), "do_sample": False, "max_new_tokens": 12}
        cache, _ = prompt_cache(call)
        with pytest.raises(Interrupt):
            model.generate(**call, **{CACHE_NAME: cache}, streamer=Failing(), **more)
        lengths.append(cache.get_seq_length())
    assert lengths[0] == lengths[1]


@pytest.mark.parametrize("sample", [False, True])
def test_a_strategy_that_draws_as_it_ends_leaves_the_generator(sample):
    class Drawing(Hooked):
        def finish(self):
            torch.rand(7)

    states = []
    for model, more in ((plain_model(), {}), (spec_model(), {"assistant_strategy": By(Drawing)})):
        torch.manual_seed(0)
        model.generate(**prompt(2), do_sample=sample, max_new_tokens=12, **more)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_a_candidate_generator_has_ids_of_its_own():
    class Writing(CandidateGenerator):
        def __init__(self, input_ids):
            self.ids = input_ids
            input_ids[0, 5] = 7

        def get_candidates(self, input_ids, **kwargs):
            self.ids[:] = 8
            return input_ids, None

        def update_candidate_strategy(self, input_ids, scores, num_matches):
            pass

    call = {**prompt(2), "do_sample": False, "max_new_tokens": 12}
    given = call["input_ids"].clone()
    got = spec_model().generate(**call, assistant_strategy=Writing)
    assert torch.equal(call["input_ids"], given)
    assert torch.equal(got, plain_model().generate(**call))


class Learnt(Hooked):
    """Is sure of its drafts, some of which are right."""

    def propose(self, view, plan):
        tree = DraftTree.from_chains(view.roots(), [[3, 4]] * view.rows)
        return replace(tree, values=torch.tensor([[1.0, 0.9, 0.8]] * view.rows))


class Clearing(Learnt):
    def learn(self, view, tree, tokens, probs):
        for row in tree.on_host:
            row.parents.clear()


def test_what_a_strategy_writes_to_its_lesson_does_not_reach_the_schedule():
    tries = []
    for drafter in (Learnt, Clearing):
        schedule = Adaptive(memory="new")
        for seed in range(3):
            call = {**prompt(2, seed=seed), "do_sample": False, "max_new_tokens": 24}
            spec_model().generate(**call, assistant_strategy=SpecDecConfig(strategy=By(drafter), schedule=schedule))
        tries.append(sum(sum(each.lookup.first_values._tries) for each in schedule.memory._learned.values()))
    assert tries[1] > 0.5 * tries[0] > 0


class Emptying(Scribbling):
    """Writes to the lists that it is given."""

    def observe(self, view, emitted):
        for tokens in emitted:
            tokens.clear()
        emitted.clear()

    def keep(self, rows):
        rows.reverse()
        rows[:] = rows[:1]


@pytest.mark.parametrize("strategy", [By(Emptying), Merge([By(Emptying), "suffix"])])
def test_what_a_strategy_writes_to_its_lists_changes_nothing(strategy):
    call, plain = ending(4)
    config = SpecDecConfig(strategy=strategy, schedule="constant")
    assert torch.equal(spec_model().generate(**call, assistant_strategy=config), plain)


class Quiet(Scribbling):
    """Writes to nothing."""

    def learn(self, view, tree, tokens, probs):
        pass


@pytest.mark.parametrize("learner", [Recycling, Lookahead])
@pytest.mark.parametrize("nested", [False, True])
def test_a_member_sees_nothing_of_what_another_writes(learner, nested):
    """Neither in lessons nor in lists."""
    call, plain = ending(4)
    tables = {}
    for drafter in (Quiet, Scribbling, Emptying, Growing):
        own = learner(memory="new")
        members = Merge([By(drafter), Merge([By(drafter), own]) if nested else own])
        config = SpecDecConfig(strategy=members, schedule="constant")
        assert torch.equal(spec_model().generate(**call, assistant_strategy=config), plain)
        tables[drafter] = own.memory.__getstate__()
    assert tables[Quiet]["table" if learner is Recycling else "grams"]
    assert all(table == tables[Quiet] for table in tables.values())


@pytest.mark.parametrize("schedule", ["constant", "adaptive"])
def test_a_tree_that_is_written_to_while_it_is_looked_at_is_verified_as_it_was(schedule, monkeypatch):
    """As by another thread of the strategy."""
    trees, looks = [], loop.is_fit

    class Lending(Quiet):
        def propose(self, view, plan):
            trees.append(super().propose(view, plan))
            return trees[-1]

    def looked_at(tree, limits):
        fit = looks(tree, limits)
        trees[-1].tokens[:] = 99999
        trees[-1].on_host[0].tokens[:] = [99999] * 3
        return fit

    monkeypatch.setattr(loop, "is_fit", looked_at)
    call = {**prompt(2), "do_sample": False, "max_new_tokens": 24}
    config = SpecDecConfig(strategy=By(Lending), schedule=schedule)
    assert torch.equal(spec_model().generate(**call, assistant_strategy=config), plain_model().generate(**call))
    assert trees
