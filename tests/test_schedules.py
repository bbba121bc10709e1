"""Schedules in real calls: the default one, and texts that do not depend on what a schedule chooses."""

import json

import pytest
import torch
from cases import Way, base_text, call, compare, draft_model, new_ids, plain_model, spec_model, ways
from conftest import prompt
from oracle import Oracle
from whims import Whims

from hf_specdec import Adaptive, Auto, DraftTree, SpecDecConfig, SpecDecError
from hf_specdec.drafters import DraftModel, Free, LayerSkip, Lookahead, QuantizedSelf
from hf_specdec.tree import select_nodes


def strategies(text: list[list[int]]):
    return {
        "oracle": Oracle.of([[*own, *own] for own in text], 0.2, siblings=2),
        "free": Free(),
        "auto": Auto(),
        "auto with a model": Auto(draft_model()),
        "auto with layers": Auto(LayerSkip(exit_layer=1)),
        "draft_model": DraftModel(draft_model()),
        "layer_skip": LayerSkip(exit_layer=1),
        "quantized_self": QuantizedSelf(scheme="int4_weight_only"),
        "lookahead": Lookahead(),
    }


@pytest.mark.parametrize("name", strategies([[0]]))
@pytest.mark.parametrize("schedule", [Whims(1), Whims(2), Adaptive()], ids=["whims-1", "whims-2", "adaptive"])
@ways(strategies=("any",))
def test_the_text_does_not_depend_on_what_is_chosen(way, schedule, name):
    text = new_ids(call(plain_model(), prompt(way.batch), way), prompt(way.batch)["input_ids"].shape[1])
    compare(way, assistant_strategy=SpecDecConfig(strategies(text)[name], schedule=schedule))


@pytest.mark.parametrize("name", strategies([[0]]))
@ways(strategies=("any",), batches=(3,))
def test_rows_end_where_they_should_whatever_is_chosen(way, name):
    text = base_text(way)
    config = SpecDecConfig(strategies(text)[name], schedule=Whims(3))
    compare(way, assistant_strategy=config, eos_token_id=[text[0][7], text[1][11]])


def test_adaptive_is_the_default_where_the_text_does_not_depend_on_drafts():
    for verifier in ("exact", "rejection", "block", "typical", "threshold"):
        expected = "adaptive" if verifier == "exact" else "constant"
        assert SpecDecConfig("suffix", verifier=verifier).bound_schedule.name == expected
    assert SpecDecConfig("suffix", verifier="rejection", schedule="adaptive").bound_schedule.name == "adaptive"


def test_schedules_survive_a_dict():
    for schedule in (None, "constant", "adaptive", Adaptive(), {"name": "adaptive", "profile": None}):
        own = SpecDecConfig("suffix", schedule=schedule)
        again = SpecDecConfig.from_dict(json.loads(json.dumps(own.to_dict())))
        assert again.bound_schedule == own.bound_schedule
    for wrong, message in (("adaptve", "'adaptive'"), ({"name": "adaptive", "memry": 1}, "'memory'"), (3, "constant")):
        with pytest.raises(SpecDecError, match=message):
            SpecDecConfig("suffix", schedule=wrong)


def test_a_profile_of_another_machine_is_refused(tmp_path):
    schedule = Adaptive(profile=str(tmp_path / "none.json"))
    with pytest.raises(SpecDecError, match="cannot be read as a file of costs"):
        spec_model().generate(**prompt(1), assistant_strategy=SpecDecConfig("suffix", schedule=schedule))


def test_choices_are_reported():
    inputs = prompt(1)
    text = new_ids(call(plain_model(), inputs, Way("any", 1, False)), inputs["input_ids"].shape[1])
    strategy = Oracle.of(text)
    out = call(
        spec_model(),
        inputs,
        Way("any", 1, False),
        assistant_strategy=SpecDecConfig(strategy, max_draft_tokens=3, schedule=Adaptive(memory="new")),
    )
    stats = json.loads(json.dumps(out.speculation.to_dict()))
    sizes = stats["choices"]["rounds_by_nodes"]
    assert sum(sizes.values()) == stats["num_spec_steps"]
    assert max(map(int, sizes)) <= 4
    assert stats["choices"]["mean_round_seconds"] > 0
    constant = SpecDecConfig(strategy, max_draft_tokens=3, schedule="constant")
    stats = call(spec_model(), inputs, Way("any", 1, False), assistant_strategy=constant).speculation
    assert stats.choices["schedule"] == "constant"
    assert sum(stats.choices["rounds_by_nodes"].values()) == stats.num_spec_steps


@pytest.mark.parametrize("kept", [[[0, 2, 3], [0, 1]], [[0], [0, 1, 4]], [[0], [0]]])
def test_selected_nodes_keep_tokens_and_parents(kept):
    tokens = torch.tensor([[9, 1, 2, 3, 4], [8, 5, 6, 7, 0]])
    parents = torch.tensor([[-1, 0, 0, 2, 3], [-1, 0, 1, -1, 1]])
    tree = DraftTree(tokens, parents, torch.zeros_like(tokens, dtype=torch.bool), values=tokens / 10)
    chosen = select_nodes(tree, kept)
    assert chosen.size == max(map(len, kept))
    for row, own in enumerate(kept):
        for node in range(chosen.size):
            old = own[node] if node < len(own) else 0
            assert chosen.tokens[row, node] == tokens[row, old]
            above = int(chosen.parents[row, node])
            assert (own[above] if above >= 0 else -1) == (parents[row, old] if 0 < node < len(own) else -1)


def test_a_strategy_may_have_a_schedule_of_its_own():
    """The window of `lookahead` pays in later rounds, so it is not pruned unless that is asked for."""
    assert SpecDecConfig(strategy="suffix").bound_schedule.name == "adaptive"
    assert SpecDecConfig(strategy="lookahead").bound_schedule.name == "constant"
    assert SpecDecConfig(strategy="lookahead", schedule="adaptive").bound_schedule.name == "adaptive"
