"""Strategies that write to what they are shown: the text stays plain `generate`'s, or the call ends with an error."""

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from cases import plain_model, spec_model
from conftest import prompt

from hf_specdec import Drafter, DraftStrategy, Lookahead, Merge, Recycling, SpecDecConfig, SpecDecError, loop
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


class Meddling(Scribbling):
    """Does something to the text of the last row, in one of its hooks."""

    hook: str
    write: Any

    def _at(self, hook, view):
        if hook == self.hook:
            self.write(view.tokens(view.rows - 1))

    def start(self, view):
        self._at("start", view)

    def propose(self, view, plan):
        roots = view.roots()
        self._at("propose", view)
        return DraftTree.from_chains(roots, [[3, 4]] * view.rows)

    def learn(self, view, tree, tokens, probs):
        self._at("learn", view)

    def observe(self, view, emitted):
        self._at("observe", view)


def meddling(hook, write):
    return By(type("Meddling", (Meddling,), {"hook": hook, "write": staticmethod(write)}))


@pytest.mark.parametrize("write", [appends, changes_the_last, shortens, empties])
@pytest.mark.parametrize("hook", ["start", "propose", "learn", "observe"])
@pytest.mark.parametrize("schedule", ["constant", "adaptive"])
def test_a_strategy_that_changes_the_text_is_an_error_and_leaves_the_cache(hook, write, schedule):
    inputs = prompt(2)
    width = inputs["input_ids"].shape[1]
    mask = inputs["attention_mask"][:, : width - 1]
    with torch.no_grad():
        first = plain_model()(inputs["input_ids"][:, : width - 1], attention_mask=mask, use_cache=True)
    cache, before = first[CACHE_NAME], copy.deepcopy(first[CACHE_NAME])
    config = SpecDecConfig(strategy=meddling(hook, write), schedule=schedule)
    call = {**inputs, "do_sample": False, "max_new_tokens": 24, CACHE_NAME: cache}
    with pytest.raises(SpecDecError, match="leave the view's tokens alone, but it wrote to them"):
        spec_model().generate(**call, assistant_strategy=config)
    for now, then in zip(cache.layers, before.layers):
        assert now.keys.shape[2] in (width - 1, width)
        real = mask.bool()[:, None, :, None]
        torch.testing.assert_close(now.keys[:, :, : width - 1] * real, then.keys * real)
        torch.testing.assert_close(now.values[:, :, : width - 1] * real, then.values * real)


@pytest.mark.parametrize("hook", ["start", "propose", "learn", "observe"])
def test_what_a_strategy_writes_to_earlier_tokens_changes_nothing(hook):
    call = {**prompt(2), "do_sample": False, "max_new_tokens": 24}

    def write(tokens):
        tokens[: len(tokens) - 1] = [7] * (len(tokens) - 1)

    got = spec_model().generate(**call, assistant_strategy=SpecDecConfig(strategy=meddling(hook, write)))
    assert torch.equal(got, plain_model().generate(**call))


class Emptying(Scribbling):
    """Writes to the lists that it is given."""

    def observe(self, view, emitted):
        for tokens in emitted:
            tokens.clear()
        emitted.clear()

    def keep(self, rows):
        rows.reverse()
        rows[:] = rows[:1]


def ending(rows):
    """A call whose rows end one after the other, and plain `generate`'s answer."""
    call = {**prompt(rows), "do_sample": False, "max_new_tokens": 24}
    width = call["input_ids"].shape[1]
    text = plain_model().generate(**call)[:, width:]
    call |= {"eos_token_id": [int(text[row, 4 + 5 * row]) for row in range(rows - 1)], "pad_token_id": 0}
    return call, plain_model().generate(**call)


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

    class Lending(Scribbling):
        def propose(self, view, plan):
            trees.append(super().propose(view, plan))
            return trees[-1]

        def learn(self, view, tree, tokens, probs):
            pass

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
