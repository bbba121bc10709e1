"""`merge`, `cascade` and `free`: what becomes of several proposals."""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from cases import draft_model, plain_model, spec_model
from conftest import prompt
from oracle import ChainOracle, Oracle
from transformers.generation import PromptLookupCandidateGenerator

from hf_specdec import (
    Auto,
    Cascade,
    Drafter,
    DraftModel,
    DraftStrategy,
    DraftTree,
    Free,
    LayerSkip,
    Lookahead,
    Merge,
    Plan,
    PromptLookup,
    QuantizedSelf,
    Recycling,
    SpecDecConfig,
    SpecDecError,
    Suffix,
)
from hf_specdec.control.adaptive import AdaptiveController
from hf_specdec.drafters.combined import fill_rows
from hf_specdec.drafters.recycling import RecyclingDrafter
from hf_specdec.generate import check_combination
from hf_specdec.state import DecodeView
from hf_specdec.tree import RowTree, grow_best_first, union


def row_tree(root: int, *nodes: tuple[int, int, float]) -> RowTree:
    tree = RowTree(root)
    for parent, token, value in nodes:
        tree.add(parent, token, value)
    return tree


def paths(tree: RowTree) -> dict[tuple[int, ...], float]:
    """Values by path of tokens."""
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens[1:], tree.parents[1:]):
        found.append((*found[parent], token))
    return dict(zip(found, tree.values))


def test_a_node_of_a_union_is_refused_where_all_that_hold_it_are_wrong():
    one = row_tree(0, (0, 1, 0.5), (1, 2, 0.4))
    two = row_tree(0, (0, 3, 0.6), (0, 1, 0.8), (2, 2, 0.4), (2, 4, 0.2))
    above = 1 - 0.5 * 0.2
    expected = {(): 1, (1,): above, (3,): 0.6, (1, 2): above * (1 - 0.2 * 0.5), (1, 4): above * 0.25}
    assert paths(union([one, two], 9, 9)) == pytest.approx(expected)


def test_a_union_is_cut_to_its_most_valuable_nodes():
    tree = row_tree(0, (0, 1, 0.5), (1, 2, 0.4), (0, 3, 0.45), (3, 4, 0.1))
    assert paths(union([tree], 9, 4)) == pytest.approx({(): 1, (1,): 0.5, (3,): 0.45, (1, 2): 0.4})
    assert paths(union([tree], 1, 4)) == {(): 1, (1,): 0.5, (1, 2): 0.4}, "width 1 leaves a path"


def test_a_value_is_never_above_its_parents():
    tree = row_tree(0, (0, 1, 0.5), (1, 2, 0.9))
    assert tree.values == [1.0, 0.5, 0.5]


def test_best_first_growth_takes_the_most_probable_nodes():
    """Each node has children 0, 1, 2 with probabilities 0.5, 0.3, 0.2."""
    tree = grow_best_first(9, None, lambda _: [(0, 0.5, None), (1, 0.3, None), (2, 0.2, None)], 3, 2, 7)
    assert paths(tree) == pytest.approx(
        {(): 1, (0,): 0.5, (1,): 0.3, (0, 0): 0.25, (0, 1): 0.15, (1, 0): 0.15, (0, 0, 0): 0.125}
    )
    shallow = grow_best_first(9, None, lambda _: [(0, 0.5, None), (1, 0.3, None), (2, 0.2, None)], 1, 2, 7)
    assert paths(shallow) == {(): 1, (0,): 0.5, (1,): 0.3}


def test_best_first_growth_passes_over_a_token_that_comes_again():
    asked = []

    def expand(_):
        asked.append(1)
        assert len(asked) < 100, "it goes on for ever"
        return [(5, 0.5, None), (5, 0.4, None), (2, 0.1, None)]

    tree = grow_best_first(9, None, expand, 2, 3, 99)
    assert paths(tree) == pytest.approx(
        {(): 1, (5,): 0.5, (2,): 0.1, (5, 5): 0.25, (5, 2): 0.05, (2, 5): 0.05, (2, 2): 0.01}
    )


def test_a_tree_without_values_is_given_halves():
    tree = DraftTree.from_chains([5], [[6, 7]])
    assert RowTree.of(tree, 0).values == [1.0, 0.5, 0.25]


def test_rows_are_filled_from_the_other_tree():
    one = DraftTree.from_chains([1, 2], [[5], []])
    law = torch.rand(2, 3, 8)
    drawn = torch.tensor([[False, True, True]] * 2)
    two = DraftTree(torch.tensor([[1, 3, 4], [2, 6, 7]]), torch.tensor([[-1, 0, 1]] * 2), drawn, law)
    filled = fill_rows(one, two)
    assert filled.parents.tolist() == [[-1, 0, -1], [-1, 0, 1]]
    assert filled.tokens[1].tolist() == [2, 6, 7] and filled.tokens[0, 1] == 5
    assert filled.sampled.tolist() == [[False] * 3, [False, True, True]]
    assert torch.equal(filled.probs[1], law[1]) and not filled.probs[0].any()


@dataclass(frozen=True)
class Counted(DraftStrategy):
    """Says the same tokens in some rounds; counts the questions."""

    said: tuple[int, ...]
    every: int

    name: ClassVar[str] = "counted"
    asked: ClassVar[list[int]] = []

    def build(self, target: Any, request: Any) -> Drafter:
        return _CountedDrafter(self)


class _CountedDrafter(Drafter):
    def __init__(self, strategy: Counted):
        self.strategy = strategy
        self.round = 0

    def propose(self, view: DecodeView, plan: Plan) -> DraftTree:
        self.round += 1
        Counted.asked.append(self.round)
        said: Sequence[int] = self.strategy.said if self.round % self.strategy.every == 0 else ()
        return DraftTree.from_chains(view.roots(), [list(said)[: plan.depth]] * view.rows)


def test_later_members_of_a_cascade_are_asked_only_for_want_of_a_proposal():
    view = DecodeView.of_sequences([[1, 2, 3]])
    drafter = Cascade([Counted((4,), 2), Counted((5, 6), 1)]).build(None, SimpleNamespace(vocab_size=9))
    Counted.asked.clear()
    assert drafter.propose(view, Plan.chain(4)).tokens.tolist() == [[3, 5, 6]]
    assert drafter.propose(view, Plan.chain(4)).tokens.tolist() == [[3, 4]]
    assert Counted.asked == [1, 1, 2]


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (Auto(), True),
        (Free(), True),
        (Cascade(["recycling", "suffix"]), True),
        (Suffix(), False),
        (Recycling(), False),
        (Merge(["suffix", "prompt_lookup"]), False),
        (Merge(["recycling", Lookahead(window=5)]), False),
        (Merge(["suffix", "recycling", Lookahead(window=5)]), False),
    ],
    ids=lambda each: getattr(each, "name", str(each)),
)
def test_what_drafts_without_being_taught(strategy, expected):
    settings = SimpleNamespace(_eos_token_tensor=None)
    request = SimpleNamespace(vocab_size=60, unreadable=[], rows=1, generation_config=settings)
    drafter = strategy.build(SimpleNamespace(model=plain_model(), columns=None), request)
    assert drafter.drafts_untaught == expected


@pytest.mark.parametrize("strategy", ["free", "auto"])
def test_an_untaught_plan_leaves_recycling_out(strategy, monkeypatch):
    asked, told = [], []
    propose, learn = RecyclingDrafter.propose, RecyclingDrafter.learn
    monkeypatch.setattr(RecyclingDrafter, "propose", lambda self, *args: asked.append(1) or propose(self, *args))
    monkeypatch.setattr(RecyclingDrafter, "learn", lambda self, *args: told.append(1) or learn(self, *args))
    call = {**prompt(3), "do_sample": False, "max_new_tokens": 24, "return_dict_in_generate": True}
    plain = plain_model().generate(**call).sequences
    for taught in (True, False):
        asked.clear(), told.clear()
        monkeypatch.setattr(AdaptiveController, "_teaching_pays", lambda self, rows, pays=taught: pays)
        output = spec_model().generate(**call, assistant_strategy=strategy)
        assert torch.equal(output.sequences, plain)
        assert bool(asked) == bool(told) == taught
        rounds = sum(output.speculation.choices["rounds_by_nodes"].values())
        assert output.speculation.choices["untaught_rounds"] == (0 if taught else rounds)


@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", [Merge, Cascade], ids=lambda kind: kind.name)
def test_a_draft_model_in_a_combination_keeps_its_cache_in_order(kind, batch, sample, each_schedule):
    """The target itself as draft, beside a member whose tokens are accepted now and then: it is never wrong."""
    call = {**prompt(batch), "do_sample": sample, "max_new_tokens": 24}
    torch.manual_seed(3)
    plain = plain_model().generate(**call)
    text = plain[:, 24:].tolist()
    strategy = kind([ChainOracle.of(text, 0.5), DraftModel(plain_model())])
    torch.manual_seed(3)
    output = spec_model().generate(**call, return_dict_in_generate=True, assistant_strategy=strategy)
    assert torch.equal(output.sequences, plain)
    if kind is Merge and each_schedule == "constant":
        assert output.speculation.acceptance_by_depth[0] == 1.0


def test_free_is_suffix_and_recycling():
    free = Free(suffix={"max_context": 8}, recycling=Recycling(top_tokens=3))
    assert free.strategies == (free.suffix, free.recycling)
    assert free.suffix == Suffix(max_context=8)
    config = SpecDecConfig(strategy=free)
    again = SpecDecConfig.from_dict(config.to_dict())
    assert again.resolved.to_dict() == free.to_dict()
    call = {**prompt(3), "do_sample": False, "max_new_tokens": 24}
    ids = spec_model().generate(**call, assistant_strategy="free")
    assert torch.equal(ids, plain_model().generate(**call))


def test_members_come_in_every_form_and_go_round_as_dicts():
    given = ["suffix", PromptLookup(), {"strategy": "recycling", "strategy_options": {"top_tokens": 2}}, draft_model()]
    strategy = Merge(given)
    assert [each.name for each in strategy.strategies] == ["suffix", "prompt_lookup", "recycling", "draft_model"]
    names = [each["strategy"] for each in strategy.to_dict()["strategies"]]
    assert names == ["suffix", "prompt_lookup", "recycling", "draft_model"]
    assert Merge(Merge(["suffix", "recycling"]).to_dict()["strategies"]).strategies == (Suffix(), Recycling())


def test_members_and_strategies_are_given_alike():
    """What a call takes, a combination takes, and the text stays plain `generate`'s."""

    def factory(**_):
        return PromptLookupCandidateGenerator(num_output_tokens=4, max_length=1000)

    call = {**prompt(3), "do_sample": False, "max_new_tokens": 24}
    ids = spec_model().generate(**call, assistant_strategy=Merge([factory, "suffix"]))
    assert torch.equal(ids, plain_model().generate(**call))
    member = {"strategy": "recycling", "strategy_options": {"top_tokens": 2}}
    assert SpecDecConfig(strategy=member).resolved == Merge([member]).strategies[0] == Recycling(top_tokens=2)
    for given in (3, Suffix, torch.nn.Linear(2, 2), {"strategy": "suffix", "option": 1}):
        told = []
        for make in (lambda given: SpecDecConfig(strategy=given), lambda given: Merge([given])):
            with pytest.raises(SpecDecError) as caught:
                make(given)
            told.append(str(caught.value))
        assert told[0] == told[1]


MODEL = {"model": "some/model", "vocabulary": [1, 2]}


@pytest.mark.parametrize(
    "make",
    [
        lambda: Auto(model=MODEL), lambda: Auto(model="some/model"), lambda: Merge(["suffix", {"strategy": "free"}]),
        lambda: Free(suffix={"max_context": 8}), lambda: LayerSkip(skip_mlp=[1, 2]), lambda: QuantizedSelf(),
        lambda: DraftModel(**MODEL), lambda: Suffix(memory="new"), lambda: Lookahead(memory="new"),
    ],
)  # fmt: skip
def test_strategies_serve_as_keys(make):
    strategy = make()
    assert {strategy: 1}[strategy] == 1
    again = pickle.loads(pickle.dumps(strategy))
    assert again.to_dict() == strategy.to_dict()
    assert strategy != again or hash(strategy) == hash(again)


def test_auto_says_its_model():
    assert Auto(model=MODEL).to_dict() == {"model": MODEL}
    assert Auto(**Auto(model=MODEL).to_dict()).to_dict() == {"model": MODEL}
    assert Auto().to_dict() == {"model": None}
    other = {"strategy": "layer_skip", "strategy_options": {"exit_layer": 1}}
    assert Auto(model=other).model == Auto(model=LayerSkip(exit_layer=1)).model == LayerSkip(exit_layer=1)
    assert Auto(**Auto(model=other).to_dict()).to_dict() == {"model": other}
    assert isinstance(Auto(model="quantized_self").model, QuantizedSelf)
    with pytest.raises(SpecDecError, match="strategy_options=5 is no dict"):
        Auto(model={"strategy": "layer_skip", "strategy_options": 5})
    assert Auto() == Auto()


@pytest.mark.parametrize("given", [[], "suffix", None, ["sufix"], [3], [{"strategy": "suffix", "option": 1}], [{}]])
def test_what_is_no_list_of_strategies_is_refused(given):
    with pytest.raises(SpecDecError):
        Merge(given)


def test_free_refuses_what_is_no_setting():
    for settings in ({"suffix": "x"}, {"suffix": {"depth": 3}}, {"recycling": Suffix()}):
        with pytest.raises(SpecDecError):
            Free(**settings)


def test_a_merge_with_members_that_draw_serves_no_verifier_of_laws():
    config = SpecDecConfig(strategy=Merge(["suffix", DraftModel(draft_model())]), verifier="rejection")
    with pytest.raises(SpecDecError, match="the law that drafts were drawn from"):
        check_combination(config)
    check_combination(SpecDecConfig(strategy=Merge(["suffix", "recycling"]), verifier="rejection"))
    check_combination(SpecDecConfig(strategy=Cascade(["suffix", DraftModel(draft_model())]), verifier="block"))


@pytest.mark.usefixtures("constant_schedule")
def test_trees_of_members_may_be_trees():
    call = {**prompt(3), "do_sample": False, "max_new_tokens": 24}
    plain = plain_model().generate(**call)
    strategy = Merge([Oracle.of(plain[:, 24:], 0.2, siblings=2), "suffix"])
    config = SpecDecConfig(strategy=strategy, max_draft_tokens=20)
    output = spec_model().generate(**call, assistant_strategy=config, return_dict_in_generate=True)
    assert torch.equal(output.sequences, plain)
    assert output.speculation.num_accepted_draft_tokens > 24
