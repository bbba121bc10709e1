"""Faults that were found by trying to break trees and combined strategies; each stays a test."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from cases import compare, draft_model, plain_model, spec_model, ways
from conftest import prompt, tiny
from transformers.generation import PromptLookupCandidateGenerator

import hf_specdec
from hf_specdec import (
    Adaptive,
    Cascade,
    Drafter,
    DraftModel,
    DraftStrategy,
    DraftTree,
    LayerSkip,
    LookaheadMemory,
    Merge,
    Plan,
    QuantizedSelf,
    SpecDecConfig,
    SpecDecError,
    SuffixMemory,
)
from hf_specdec.control.cost import CostModel
from hf_specdec.drafters.combined import values_of


@ways(["layer_skip"], samples=(False, True))
@pytest.mark.parametrize("turned", [False, True])
def test_two_members_that_draft_on_the_targets_cache(way, turned, each_schedule):
    members = [LayerSkip(exit_layer=1), QuantizedSelf(scheme="int8_weight_only")]
    strategy = Merge(members[::-1] if turned else members)
    config = SpecDecConfig(strategy=strategy, max_width=1, max_draft_tokens=6)
    compare(way, assistant_strategy=config, max_new_tokens=40)


@dataclass(frozen=True)
class Says(DraftStrategy):
    """Answers with what a function makes of the roots."""

    make: Callable[[Any], Any]

    name: ClassVar[str] = "says"
    default_schedule: ClassVar[str | None] = "constant"
    default_draft_tokens: ClassVar[int] = 6
    default_width: ClassVar[int] = 3
    trees: ClassVar[bool] = True
    sampled: ClassVar[bool] = True

    def build(self, target: Any, request: Any) -> Drafter:
        drafter = _Saying()
        drafter.make = self.make
        return drafter


class _Saying(Drafter):
    make: Callable[[Any], Any]

    def propose(self, view, plan):
        return self.make(view)


def drawn(probs: torch.Tensor | None) -> Callable[[Any], DraftTree]:
    def make(view):
        tokens = torch.tensor([[root, 5] for root in view.roots()])
        parents = torch.tensor([[-1, 0]] * view.rows)
        flags = torch.tensor([[False, True]] * view.rows)
        return DraftTree(tokens, parents, flags, None if probs is None else probs.expand(view.rows, 2, -1))

    return make


@pytest.mark.parametrize("verifier", ["exact", "rejection"])
def test_siblings_with_one_token_count_once(verifier):
    plain = plain_model().generate(**prompt(1), do_sample=False, max_new_tokens=12)
    text = plain[0, 24:].tolist()

    def make(view):
        token = text[len(view.tokens(0)) - view.prompt_length(0)]
        tokens = torch.tensor([[view.root(0), token, token, token]])
        return DraftTree(tokens, torch.tensor([[-1, 0, 0, 0]]), torch.zeros(1, 4, dtype=torch.bool))

    call = {**prompt(1), "do_sample": False, "max_new_tokens": 12}
    config = SpecDecConfig(strategy=Says(make), verifier=verifier)
    assert torch.equal(spec_model().generate(**call, assistant_strategy=config), plain)


@pytest.mark.parametrize("probs", [None, 0.0, float("nan")], ids=str)
@pytest.mark.parametrize("verifier", ["rejection", "block"])
def test_drawn_nodes_without_their_law_are_refused(verifier, probs):
    law = None if probs is None else torch.full((1, 2, spec_model().config.vocab_size), probs)
    config = SpecDecConfig(strategy=Says(drawn(law)), verifier=verifier)
    with pytest.raises(SpecDecError, match="the law that each node was drawn from"):
        spec_model().generate(**prompt(1), do_sample=True, max_new_tokens=8, assistant_strategy=config)


@pytest.mark.parametrize(
    "answer", [None, DraftTree.from_chains([1], [[2]]), DraftTree.from_chains([1] * 3, [[2]] * 3)]
)
@pytest.mark.usefixtures("constant_schedule")
def test_a_member_that_answers_nonsense_is_named(answer):
    strategy = Merge(["suffix", Says(lambda view: answer)])
    rows = 2 if isinstance(answer, DraftTree) else 1
    inputs = {name: value[:rows] for name, value in prompt(3).items()}
    with pytest.raises(SpecDecError, match="_Saying must answer with a DraftTree"):
        spec_model().generate(**inputs, do_sample=False, max_new_tokens=8, assistant_strategy=strategy)


def tree_with(**parts: Any) -> Callable[[Any], DraftTree]:
    """A chain of two drawn tokens per row, with some of its tensors replaced by what is made of the rows."""

    def make(view):
        rows, size = view.rows, spec_model().config.vocab_size
        whole = {
            "tokens": torch.tensor([[root, 5, 6] for root in view.roots()]),
            "parents": torch.tensor([[-1, 0, 1]] * rows),
            "sampled": torch.tensor([[False, True, True]] * rows),
            "probs": torch.full((rows, 3, size), 1 / size),
            "values": torch.ones(rows, 3),
        }
        return DraftTree(**{**whole, **{name: part(rows) for name, part in parts.items()}})

    return make


MALFORMED: dict[str, tuple[Callable[[Any], DraftTree], str]] = {
    "three_axes": (
        tree_with(**{name: lambda rows: torch.zeros(rows, 3, 2).long() for name in ("tokens", "parents", "sampled")}),
        r"its tokens have shape \(3, 3, 2\)",
    ),
    "one_axis": (
        tree_with(**{name: lambda rows: torch.zeros(rows).long() for name in ("tokens", "parents", "sampled")}),
        r"its tokens have shape \(3,\)",
    ),
    "no_node": (
        tree_with(**{name: lambda rows: torch.zeros(rows, 0).long() for name in ("tokens", "parents", "sampled")}),
        r"its tokens have shape \(3, 0\)",
    ),
    "values": (tree_with(values=lambda rows: torch.ones(rows, 2)), r"its values have shape \(3, 2\), not \(3, 3\)"),
    "values_of_a_row": (tree_with(values=lambda rows: torch.ones(3)), r"its values have shape \(3,\), not \(3, 3\)"),
    "values_as_a_list": (tree_with(values=lambda rows: [1.0] * 3), "its values are a list, no tensor"),
    "law_of_other_nodes": (
        tree_with(probs=lambda rows: torch.ones(rows, 2, 96)),
        r"its probs have shape \(3, 2, 96\), not \(3, 3, 96\)",
    ),
    "smaller_vocabulary": (
        tree_with(probs=lambda rows: torch.ones(rows, 3, 90) / 90),
        r"its probs have shape \(3, 3, 90\), not \(3, 3, 96\)",
    ),
    "larger_vocabulary": (
        tree_with(probs=lambda rows: torch.ones(rows, 3, 128) / 128),
        r"its probs have shape \(3, 3, 128\), not \(3, 3, 96\)",
    ),
    "fractions": (tree_with(tokens=lambda rows: torch.ones(rows, 3)), "its tokens or parents are no whole numbers"),
    "no_flags": (tree_with(sampled=lambda rows: torch.ones(rows, 3)), "its sampled no booleans"),
    "lists": (tree_with(tokens=lambda rows: [[1, 2, 3]] * rows), "a token, a parent and a flag per node"),
}


@pytest.mark.parametrize("verifier", ["exact", "rejection"])
@pytest.mark.parametrize("member", [False, True], ids=["alone", "member"])
@pytest.mark.parametrize("fault", MALFORMED)
def test_a_malformed_tree_is_an_error_that_names_the_strategy(fault, member, verifier):
    make, says = MALFORMED[fault]
    strategy = Cascade([Says(make), "suffix"]) if member else Says(make)
    config = SpecDecConfig(strategy=strategy, verifier=verifier)
    with pytest.raises(SpecDecError, match=says) as caught:
        spec_model().generate(**prompt(3), do_sample=True, max_new_tokens=8, assistant_strategy=config)
    assert fault == "lists" or ("_Saying must answer" if member else "'says' must answer") in str(caught.value)


def test_control_a_tree_in_order_is_taken():
    for verifier in ("exact", "rejection"):
        config = SpecDecConfig(strategy=Says(tree_with()), verifier=verifier)
        spec_model().generate(**prompt(3), do_sample=True, max_new_tokens=8, assistant_strategy=config)


@pytest.mark.parametrize("strategy", ["recycling", "lookahead", "free", "auto"])
def test_a_row_that_is_all_padding(strategy):
    inputs = prompt(3)
    inputs["attention_mask"][1] = 0
    call = {**inputs, "do_sample": False, "max_new_tokens": 8}
    found = spec_model().generate(**call, assistant_strategy=strategy)
    expected = plain_model().generate(**call)
    assert torch.equal(found[[0, 2]], expected[[0, 2]])


def test_a_quantised_draft_stays_within_the_targets_positions(each_schedule):
    model = tiny("gpt2")
    room = model.config.n_positions
    ids = torch.randint(3, 60, (3, room - 16), generator=torch.Generator().manual_seed(0))
    call = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 16}
    plain = model.generate(**call)
    config = SpecDecConfig(strategy=QuantizedSelf(scheme="int8_weight_only"), max_draft_tokens=6)
    assert torch.equal(hf_specdec.enable(model).generate(**call, assistant_strategy=config), plain)


@pytest.mark.usefixtures("constant_schedule")
def test_a_member_that_runs_a_model_drafts_no_deeper_than_alone():
    call = {**prompt(1), "do_sample": False, "max_new_tokens": 24, "return_dict_in_generate": True}
    alone = spec_model().generate(**call, assistant_strategy=DraftModel(draft_model())).speculation
    merged = spec_model().generate(**call, assistant_strategy=Merge(["suffix", DraftModel(draft_model())])).speculation
    assert merged.draft_forwards <= 2 * alone.draft_forwards


def test_a_token_followed_by_everything_does_not_slow_a_suffix_tree_down():
    """Only the children that stay are looked at further."""
    memory = SuffixMemory()
    memory.add([token for follower in range(100, 2000) for token in (5, follower)])
    index = memory._whole_index()
    looked = []
    advance = index._advance
    index._advance = lambda *args: looked.append(1) or advance(*args)  # type: ignore[method-assign]
    memory.tree([1, 5], Plan(15, 4, 16))
    assert len(looked) <= 4 * 16


def test_values_where_there_are_none_are_halves():
    tree = DraftTree.from_chains([5], [[6, 7]])
    assert values_of(tree).tolist() == [[1.0, 0.5, 0.25]]


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_costs_that_are_none_are_refused(seconds):
    with pytest.raises(SpecDecError, match="no costs"):
        CostModel.from_dict({"blocks": {"1": [seconds]}, "draft_steps": [], "lookups": []})


def test_odd_settings_are_refused_at_construction():
    with pytest.raises(SpecDecError, match="profile=123"):
        Adaptive(profile=123)
    with pytest.raises(SpecDecError, match="strategies"):
        SpecDecConfig(strategy="free", strategy_options={"strategies": ["suffix"]})
    config = SpecDecConfig(
        strategy="merge", strategy_options={"strategies": [{"strategy": "suffix", "strategy_options": None}]}
    )
    assert config.resolved.strategies[0].name == "suffix"
    memory = LookaheadMemory()
    memory.add([])
    assert memory.after(1) == []


@pytest.mark.parametrize("wrap", [lambda factory: factory, lambda factory: Cascade([factory, "suffix"])])
def test_a_row_that_ends_with_its_first_token_beside_generators_of_others(wrap):
    def factory():
        return PromptLookupCandidateGenerator(num_output_tokens=4, max_length=1000)

    call = {**prompt(3), "do_sample": False}
    first = plain_model().generate(**call, max_new_tokens=1)[0, -1].item()
    call |= {"max_new_tokens": 24, "eos_token_id": first}
    plain = plain_model().generate(**call)
    assert torch.equal(spec_model().generate(**call, assistant_strategy=wrap(factory)), plain)
