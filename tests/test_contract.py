"""The contract of draft strategies: every registered one, and a phrase book written as a user would write one.

The text is plain `generate`'s whatever a strategy proposes; a strategy stays within its plans, leaves nothing behind,
and can be shared, pickled and written down.
"""

import ast
import inspect
import json
import pickle

import pytest
import torch
from cases import Copy, Way, base_text, call, compare, copying, in_threads, refused, snapshot, spec_model, ways
from conftest import ForwardCounter, prompt, tiny
from contract import NAMES, STRATEGIES, PhraseBook, Various, assert_drawn_from_its_law, assert_within, make, watched
from test_cases_law import PASS, draws, joint_law, p_value, small
from transformers import LogitsProcessorList, StoppingCriteriaList

import hf_specdec
from hf_specdec import VERIFIERS, DecodeView, DraftTree, Plan, SpecDecConfig, SpecDecError
from hf_specdec.drafters import base
from hf_specdec.generate import mismatch

OTHER_VERIFIERS = [name for name, verifier in VERIFIERS.items() if verifier.lossless and name != "exact"]
each_strategy = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    monkeypatch.setattr(base, "STRATEGIES", dict(STRATEGIES))


def repeating() -> dict:
    """Options under which a text repeats itself, so that every strategy finds something."""
    return {"logits_processor": LogitsProcessorList([Copy()]), "max_new_tokens": 40}


@ways(NAMES)
def test_the_text_is_plain_generates(way):
    compare(way, assistant_strategy=make(way.strategy))


@ways(NAMES)
@pytest.mark.usefixtures("constant_schedule")
def test_a_text_that_repeats_itself_is_drafted(way):
    pair = compare(way, inputs=copying(way.batch), assistant_strategy=make(way.strategy), **repeating())
    assert pair.spec.speculation.num_draft_tokens > 0


@ways(NAMES, batches=(3,))
def test_rows_end_apart(way, each_schedule):
    """One with its first token, one in the middle of the text, one at the limit."""
    text = base_text(way)
    compare(way, eos_token_id=[text[0][0], text[1][9]], assistant_strategy=make(way.strategy))


@ways(NAMES, samples=(False,))
def test_limits_of_a_few_tokens(way):
    for count in (1, 2, 3):
        compare(way, max_new_tokens=count, assistant_strategy=make(way.strategy))


@ways(NAMES, samples=(False,))
def test_a_prompt_of_one_token(way):
    ids = torch.tensor([[7], [8], [9]])[: way.batch]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    compare(way, inputs=inputs, assistant_strategy=make(way.strategy))


@pytest.mark.parametrize("most", [0, 1])
@ways(NAMES, samples=(False,))
def test_hardly_any_draft_tokens(way, most):
    config = SpecDecConfig(strategy=make(way.strategy), max_draft_tokens=most)
    stats = compare(way, assistant_strategy=config).spec.speculation
    assert stats.num_draft_tokens <= most * stats.num_spec_steps


@pytest.mark.parametrize("verifier", OTHER_VERIFIERS)
@ways(NAMES, samples=(False,))
def test_every_lossless_verifier_is_served_or_refused(way, verifier):
    config = SpecDecConfig(strategy=make(way.strategy), verifier=verifier)
    if mismatch(config.resolved, config.bound_verifier):
        with refused(spec_model(), repr(verifier)):
            call(spec_model(), prompt(way.batch), way, assistant_strategy=config)
        return
    compare(way, inputs=copying(way.batch), assistant_strategy=config, **repeating())


@each_strategy
def test_the_law_under_rejection_is_the_targets(name):
    config = SpecDecConfig(strategy=make(name, small(1)), verifier="rejection")
    if mismatch(config.resolved, config.bound_verifier):
        pytest.skip("it cannot say what law its drafts have")
    target = hf_specdec.enable(small(0))
    ids = draws(target, config.resolved, "rejection", 4000, 3)
    assert p_value(ids, joint_law(target, 3, 1.0, 0)) > PASS


@ways(NAMES, samples=(False,))
def test_plans_are_respected(way):
    chosen = make(way.strategy)
    config = SpecDecConfig(strategy=chosen, schedule=Various(), max_draft_tokens=11)
    with watched(chosen) as watch:
        compare(way, inputs=copying(way.batch), assistant_strategy=config, **repeating())
    assert watch.rounds
    for rows, plan, tree in watch.rounds:
        assert_within(plan, rows, tree)
        if not chosen.trees:
            assert_within(Plan(plan.depth, 1, plan.nodes), rows, tree)


@pytest.mark.parametrize(
    ("plan", "parents", "tokens"),
    [
        (Plan.chain(2), [-1, 0, 1, 2], [9, 1, 2, 3]),
        (Plan(2, 1, 9), [-1, 0, 1, 2], [9, 1, 2, 3]),
        (Plan(2, 2, 3), [-1, 0, 0, 1], [9, 1, 2, 3]),
        (Plan(2, 2, 9), [-1, 0, 0, 0], [9, 1, 2, 3]),
        (Plan(2, 2, 9), [-1, 0, 0], [9, 1, 1]),
        (Plan(2, 1, 9), [-1, -1, 0], [9, 9, 1]),
        (Plan(3, 3, 9), [-1, 0, -1, 2], [9, 1, 9, 2]),
    ],
    ids=["large", "deep", "nodes", "wide", "twins", "chain_with_a_gap", "below_padding"],
)
def test_control_a_tree_that_breaks_its_plan_is_noticed(plan, parents, tokens):
    tree = DraftTree(torch.tensor([tokens]), torch.tensor([parents]), torch.zeros(1, len(tokens), dtype=torch.bool))
    with pytest.raises(AssertionError):
        assert_within(plan, 1, tree)


@ways(NAMES, samples=(True,))
def test_drawn_tokens_come_with_their_law(way):
    chosen = make(way.strategy)
    config = SpecDecConfig(strategy=chosen, verifier="rejection")
    if mismatch(config.resolved, config.bound_verifier):
        pytest.skip("it cannot say what law its drafts have")
    with watched(chosen) as watch:
        call(spec_model(), copying(way.batch), way, assistant_strategy=config, **repeating())
    for _, _, tree in watch.rounds:
        assert_drawn_from_its_law(tree)
        assert chosen.sampled or not tree.sampled.any()


class Broken(Exception):
    """What the tests raise."""


@ways(NAMES, samples=(False,))
def test_a_call_that_breaks_leaves_nothing_behind(way):
    """The drafter is told, the target is as before, and the same strategy serves the next call."""

    def breaks(input_ids, scores, **_):
        if input_ids.shape[1] >= 24 + 9:
            raise Broken
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    chosen, before = make(way.strategy), snapshot(spec_model())
    described = json.dumps(chosen.to_dict())
    criteria = StoppingCriteriaList([breaks])
    with watched(chosen) as watch, pytest.raises(Broken):
        call(spec_model(), prompt(way.batch), way, assistant_strategy=chosen, stopping_criteria=criteria)
    assert watch.calls[0] == "start" and watch.calls[-1] == "finish" and watch.calls.count("finish") == 1
    assert snapshot(spec_model()) == before
    compare(way, assistant_strategy=chosen)
    assert json.dumps(chosen.to_dict()) == described


@ways(NAMES, batches=(3,), samples=(False,))
@pytest.mark.usefixtures("constant_schedule")
def test_a_drafter_lives_once_and_hears_who_leaves(way):
    text, chosen = base_text(way), make(way.strategy)
    with watched(chosen) as watch:
        compare(way, eos_token_id=[text[0][7], text[1][11]], assistant_strategy=chosen)
    assert [watch.calls[0], watch.calls[-1]] == ["start", "finish"]
    assert watch.calls.count("start") == watch.calls.count("finish") == 1
    assert "keep" in watch.calls
    assert len({rows for rows, _, _ in watch.rounds}) > 1


@ways(NAMES)
@pytest.mark.usefixtures("constant_schedule")
def test_two_calls_draft_the_same(way):
    """Nothing is carried from call to call where no memory was given."""
    chosen, runs = make(way.strategy), []
    for _ in range(2):
        stats = compare(way, inputs=copying(way.batch), assistant_strategy=chosen, **repeating()).spec.speculation
        runs.append((stats.num_draft_tokens, stats.acceptance_histogram, stats.draft_forwards))
    assert runs[0] == runs[1]


@each_strategy
def test_threads_share_a_strategy(name):
    """Greedy, since threads share the global generator."""
    jobs = [(batch, seed) for seed in (0, 1) for batch in (1, 3)]
    expected = [base_text(Way(name, batch, False), inputs=prompt(batch, seed=seed)) for batch, seed in jobs]
    chosen = make(name)

    def work(index):
        batch, seed = jobs[index]
        output = spec_model().generate(
            **prompt(batch, seed=seed), max_new_tokens=24, do_sample=False, assistant_strategy=chosen
        )
        assert output[:, 24:].tolist() == expected[index]

    in_threads(work, len(jobs))


@each_strategy
@pytest.mark.usefixtures("constant_schedule")
def test_a_pickled_strategy_drafts_the_same(name):
    chosen, way = make(name), Way(name, 3, False)
    again = pickle.loads(pickle.dumps(chosen))
    assert again.to_dict() == chosen.to_dict()
    drafted = [
        compare(way, inputs=copying(3), assistant_strategy=each, **repeating()).spec.speculation.acceptance_histogram
        for each in (chosen, again)
    ]
    assert drafted[0] == drafted[1]


@each_strategy
def test_settings_go_through_json_and_back(name):
    chosen = make(name)
    written = json.dumps(SpecDecConfig(strategy=chosen).to_dict())
    again = SpecDecConfig.from_dict(json.loads(written))
    assert type(again.resolved) is type(chosen)
    assert json.dumps(again.to_dict()) == written
    assert json.loads(json.dumps(again.resolved.to_dict())) == json.loads(json.dumps(chosen.to_dict()))


@each_strategy
def test_a_setting_that_does_not_exist_is_named(name):
    with pytest.raises(SpecDecError, match="no_such_setting"):
        SpecDecConfig(strategy=name, strategy_options={"no_such_setting": 1})


def drafter_of(strategy, inputs):
    """The drafter that a greedy call of one row would use."""
    build, made = type(strategy).build, []

    def building(self, target, request):
        made.append(build(self, target, request))
        raise Broken

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(strategy), "build", building)
        with pytest.raises(Broken):
            spec_model().generate(**inputs, max_new_tokens=40, do_sample=False, assistant_strategy=strategy)
    return made[0]


@pytest.mark.parametrize("copied", [False, True], ids=["any_text", "repeating"])
@each_strategy
def test_stock_assisted_decoding_takes_it(name, copied):
    """The drafter as the candidate generator of transformers' own loop, which is for one row."""
    model, inputs = tiny(), copying(1) if copied else prompt(1)
    options = {"do_sample": False, **(repeating() if copied else {"max_new_tokens": 24})}
    expected = model.generate(**inputs, **options)
    drafter = drafter_of(make(name), inputs)
    if drafter.on_target:
        with pytest.raises(SpecDecError, match="drafts on the target's own K/V"):
            drafter.get_candidates(inputs["input_ids"])
        return
    model._get_candidate_generator = lambda *_, **__: drafter
    with ForwardCounter(model) as forwards:
        found = model.generate(**inputs, **options, prompt_lookup_num_tokens=3)
    assert torch.equal(found[:, : expected.shape[1]], expected)
    assert forwards.count <= options["max_new_tokens"]


@each_strategy
def test_a_strategy_says_what_it_is(name):
    cls, strategy = STRATEGIES[name], make(name)
    assert cls.name == name
    assert cls.needs and "\n" not in cls.needs
    assert strategy.default_draft_tokens >= 1 and strategy.default_width >= 1
    assert cls.__doc__ and not cls.__doc__.startswith(f"{cls.__name__}("), "a docstring of its own"


def test_the_phrase_book_proposes_the_rest_of_a_phrase():
    book = PhraseBook([[5, 6, 7, 8], [7, 9], [6, 7, 1, 2]])

    def drafted(*text):
        tree = book.build(None, None).propose(DecodeView.of_sequences([list(text)]), Plan.chain(2))
        return tree.tokens[0, 1:].tolist()

    assert drafted(1, 5) == [6, 7]
    assert drafted(5, 6, 7) == [8], "the phrase of which most is there"
    assert drafted(6, 7) == [1, 2]
    assert drafted(7) == [9]
    assert drafted(7, 9) == drafted(4) == [], "a whole phrase, and no phrase"


def test_a_drafter_is_one_short_module_over_public_names():
    source = inspect.getsource(inspect.getmodule(PhraseBook))
    imported = [node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    assert len(source.splitlines()) <= 150
    assert [name for name in imported if name.startswith("hf_specdec")] == ["hf_specdec"]
    assert source.count("register_strategy(") == 1
