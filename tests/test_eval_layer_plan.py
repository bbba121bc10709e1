"""Which part of a model should draft: forecasts from matches and costs, and the search. No test asserts a time."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import FAMILIES, plain, prompt, randomise, tiny, without_special_tokens
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner
from whims import Never

import hf_specdec
from hf_specdec import Drafter, DraftTree, LayerSkip, Plan, SpecDecConfig, SpecDecError
from hf_specdec.control import SCHEDULES
from hf_specdec_eval import commands, layer_plan, part_probes
from hf_specdec_eval.config import essential
from hf_specdec_eval.layer_plan import (
    LayerPlan,
    PartForecast,
    RoundCosts,
    candidates,
    forecast_part,
    plan_layers,
)
from hf_specdec_eval.part_probes import Probe, probe_parts, round_seconds

LAYERS = 4
SUBLAYERS = [(kind, index) for kind in ("skip_attention", "skip_mlp") for index in range(1, 9)]


def model(layers: int = LAYERS) -> Any:
    """A Llama whose last layer adds little, enabled."""
    config = LlamaConfig(**{**FAMILIES["llama"].options, "num_hidden_layers": layers})
    made = randomise(LlamaForCausalLM(config), 0.4, seed=4)
    with torch.no_grad():
        for weight in made.model.layers[-1].parameters():
            weight.mul_(0.02 if weight.dim() > 1 else 1)
    return hf_specdec.enable(without_special_tokens(made))


def prompts(count: int = 2) -> list[list[int]]:
    return [prompt(1, seed=seed)["input_ids"][0].tolist() for seed in range(count)]


def test_matches_are_those_along_the_targets_own_text():
    """Against the part's own argmax after each prefix, computed with hidden states and the model's norm and head."""
    target = model()
    probes = probe_parts(target, prompts(), [LayerSkip(exit_layer=each) for each in (1, 3, 4)], 12)
    for text, ids in enumerate(prompts()):
        written = plain(target, input_ids=torch.tensor([ids]), max_new_tokens=12)
        states = target(written, output_hidden_states=True).hidden_states
        for probe, exit_layer in zip(probes, (1, 3)):
            choices = target.lm_head(target.model.norm(states[exit_layer])).argmax(-1)[0]
            agreed = (choices[len(ids) : -2] == written[0, len(ids) + 1 : -1]).tolist()
            assert list(probe.agreed[text]) == agreed
        assert all(probes[2].agreed[text])
    assert not all(map(all, probes[0].agreed)) and sum(map(sum, probes[1].agreed)) > sum(map(sum, probes[0].agreed))
    assert all(probe.step_seconds > 0 for probe in probes)


def test_the_text_is_not_changed_by_watching_parts():
    target, ids = model(), prompts(1)[0]
    expected = plain(target, input_ids=torch.tensor([ids]), max_new_tokens=12)
    parts = (LayerSkip(exit_layer=3), LayerSkip(skip_mlp=[1]), LayerSkip(exit_layer=1))
    for order in (parts, parts[::-1]):
        logs = tuple(part_probes.PartLog() for _ in order)
        config = SpecDecConfig(part_probes.Watched(order, logs), max_draft_tokens=1)
        got = plain(target, input_ids=torch.tensor([ids]), max_new_tokens=12, assistant_strategy=config)
        assert torch.equal(got, expected)


def test_rounds_of_all_parts_and_lengths_are_timed():
    parts = [LayerSkip(exit_layer=1), LayerSkip(exit_layer=3), LayerSkip(skip_mlp=[1])]
    timed = round_seconds(model(), prompts(1)[0], parts, [1, 3], 2)
    assert set(timed.verify) == set(timed.draft) == {(part, length) for part in parts for length in (1, 3)}
    assert min(timed.plain, timed.undrafted, *timed.verify.values(), *timed.draft.values()) > 0


def test_drafting_is_told_from_the_rest_of_a_round(monkeypatch):
    """A part that drafts slowly, by a clock of ours: its seconds are in `draft`, by its length, and nowhere else."""
    now = [0.0]
    monkeypatch.setattr(part_probes.time, "perf_counter", lambda: now[0])

    class Slow(Drafter):
        def propose(self, view: Any, plan: Plan) -> DraftTree:
            now[0] += 10.0 * plan.depth + 1
            return DraftTree.from_chains(view.roots(), [[5] * plan.depth] * view.rows, view.device)

        def observe(self, view: Any, emitted: Any) -> None:
            now[0] += 3.0

    monkeypatch.setattr(LayerSkip, "build", lambda *_: Slow())
    part = LayerSkip(exit_layer=3)
    timed = round_seconds(model(), prompts(1)[0], [part], [1, 2, 4], 2)
    assert timed.draft == {(part, length): 10 * length + 1 for length in (1, 2, 4)}
    assert set(timed.verify.values()) <= {0, 3} and timed.undrafted == 0


def test_no_schedule_decides_what_is_asked_and_timed(monkeypatch):
    monkeypatch.setitem(SCHEDULES, "adaptive", Never)
    part = LayerSkip(exit_layer=3)
    assert set(round_seconds(model(), prompts(1)[0], [part], [1, 3], 1).verify) == {(part, 1), (part, 3)}
    (probe,) = probe_parts(model(), prompts(1), [part], 12)
    assert len(probe.agreed[0]) == 10, "each token but the first, which the prompt's forward brings, and the last"


def test_costs_lie_on_lines():
    points: Any = {(1, 1): 10.0, (1, 5): 14.0, (5, 1): 6.0, (5, 5): 8.0, (None, 1): 11.0, (None, 5): 19.0}
    costs = RoundCosts(1.0, 1.0, {key: 2 * own for key, own in points.items()}, points)
    assert costs.verify(1, 1) == 10 and costs.verify(5, 5) == 8
    assert costs.verify(3, 1) == pytest.approx(8) and costs.verify(3, 3) == pytest.approx(9.5)
    assert costs.verify(None, 2) == pytest.approx(13) and costs.draft(None, 2) == pytest.approx(26)
    assert costs.draft(3, 3) == pytest.approx(19)


def flat(step: float) -> RoundCosts:
    keys = [(each, length) for each in (1, 3, None) for length in (1, 8)]
    return RoundCosts(1.0, 1.0, {key: step * key[1] for key in keys}, dict.fromkeys(keys, 1.0))


def test_a_forecast_replays_the_matches():
    """All right, then k drafts and one verify pass bring k + 1 tokens; all wrong, then one."""
    right = forecast_part(LayerSkip(exit_layer=2), Probe(((True,) * 90,), 9.9), flat(0.1), 8)
    assert right.length == 8 and right.match_rate == 1.0 and right.step_share == pytest.approx(0.1)
    assert right.tokens_per_round == pytest.approx(9) and right.speedup == pytest.approx(9 / 1.8)
    wrong = forecast_part(LayerSkip(exit_layer=2), Probe(((False,) * 90,), 9.9), flat(0.1), 8)
    assert wrong.length == 1 and wrong.speedup == pytest.approx(1 / 1.1) and wrong.tokens_per_round == 1
    mixed = forecast_part(LayerSkip(exit_layer=2), Probe(((True, False) * 45,), 9.9), flat(0.5), 8)
    assert mixed.length == 1 and mixed.speedup == pytest.approx(2 / 1.5)


def test_a_part_whose_rounds_were_not_timed_is_forecast_from_its_steps():
    part = LayerSkip(skip_mlp=[1])
    found = forecast_part(part, Probe(((True,) * 90,), 0.1), flat(9.9), 8, timed=False)
    assert found.length == 8 and found.speedup == pytest.approx(9 / 1.8) and found.step_share == pytest.approx(0.1)


def some(speedup: float, part: LayerSkip) -> PartForecast:
    return PartForecast(part, 0.5, 0.5, 2, 1.5, speedup)


def test_a_plan_says_plainly_when_nothing_pays():
    parts = (LayerSkip(exit_layer=1), LayerSkip(skip_attention=[1, 2], skip_mlp=[3]))
    cases = ((0.9, 0.8, 0.95, False), (1.2, 0.8, 0.95, False), (1.2, 1.15, 1.1, False), (1.2, 0.9, 1.1, True))
    for speedup, undrafted, measured, pays in cases:
        planned = LayerPlan((some(0.7, parts[0]), some(speedup, parts[1])), undrafted, measured)
        assert planned.pays is pays and planned.best.part == parts[1]
        assert ("No part of this model pays" in planned.sentence) is not pays
        assert f"{measured:.2f}x measured" in planned.sentence and "without 2 attention, 1 MLP" in planned.sentence
    assert planned.best.config == SpecDecConfig("layer_skip", parts[1].to_dict(), max_draft_tokens=2)


def test_skip_sets_are_within_the_sublayers_and_stay_near_the_best():
    draw = random.Random(1)
    first = candidates(SUBLAYERS, None, 30, draw)
    for each in first:
        chosen = [("skip_attention", index) for index in each.skip_attention]
        chosen += [("skip_mlp", index) for index in each.skip_mlp]
        assert set(chosen) <= set(SUBLAYERS) and 2 <= len(chosen) <= 10
    near = candidates(SUBLAYERS, first[0], 60, draw)
    distances = [
        len(set(each.skip_attention) ^ set(first[0].skip_attention)) + len(set(each.skip_mlp) ^ set(first[0].skip_mlp))
        for each in near
    ]
    assert 1 < sum(distances) / len(distances) < 3


def test_a_whole_plan():
    console = Console(record=True, width=120)
    planned = plan_layers(model(), prompts(), max_length=4, budget=6, new_tokens=10, console=console)
    assert [each.part.exit_layer for each in planned.forecasts] == [1, 2, 3, None]
    skipped = planned.forecasts[-1].part
    assert set(skipped.skip_attention) | set(skipped.skip_mlp) <= {1, 2}, "first and last layer stay"
    assert planned.forecasts[2].match_rate > planned.forecasts[0].match_rate
    assert all(1 <= each.length <= 4 and each.speedup > 0 for each in planned.forecasts) and planned.measured > 0
    text = console.export_text()
    assert "no drafts" in text and "exit_layer=3" in text and "match rate" in text and "measured" in text


@pytest.mark.parametrize("family", ["opt", "gemma3n", "llama"])
def test_sublayers_that_cannot_be_skipped_are_left_out(family):
    """OPT's MLPs are no modules, layers of Gemma 3n read one another's keys; a model of two layers has none inside."""
    measure = layer_plan.PartMeasure(hf_specdec.enable(tiny(family)), prompts(1), 4, 2)
    count = measure.model.config.num_hidden_layers
    kinds = {kind for kind, _ in measure.sublayers(count)}
    assert kinds == {"opt": set(), "gemma3n": {"skip_mlp"}, "llama": set()}[family]
    if family == "opt":
        assert {kind for kind, _ in measure.sublayers(3)} == {"skip_attention"}
    planned = plan_layers(measure.model, prompts(1), 2, 2, 6, Console(record=True))
    assert len(planned.forecasts) == count - 1 + (family == "gemma3n")


def test_what_cannot_be_planned_is_refused():
    with pytest.raises(SpecDecError, match="enable"):
        plan_layers(tiny(), prompts())  # type: ignore[arg-type]
    for wrong in ({"max_length": 0}, {"budget": -1}, {"new_tokens": 1}, {"max_length": True}):
        with pytest.raises(SpecDecError, match=next(iter(wrong))):
            plan_layers(model(), prompts(), **wrong)
    with pytest.raises(SpecDecError, match="needs prompts"):
        plan_layers(model(), [])
    with pytest.raises(SpecDecError, match="1 layer"):
        plan_layers(model(1), prompts())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--layers", "--strategy", "suffix"], "--strategy does not go with --layers"),
        (["--layers", "--context", "64"], "--context does not go with --layers"),
        (["--strategy", "suffix", "--acceptance", "0.5", "--save", "x"], "--save does not go with --acceptance"),
        (["--strategy", "suffix", "--acceptance", "0.5", "--prompt", "x"], "--prompt goes with --layers"),
        (["--tree"], "Give --strategy"),
        (["--layers", "--save", "nowhere/at/all.yaml"], "there is no directory"),
        (["--layers", "--save", "all.txt"], "end in .yaml"),
    ],
    ids=str,
)
def test_options_that_would_be_ignored_are_refused(arguments, says):
    done = CliRunner().invoke(commands.plan_app, ["--model", "absent", *arguments], env={"COLUMNS": "300"})
    assert done.exit_code == 2 and says in done.output


@pytest.mark.parametrize("pays", [True, False])
def test_the_best_setting_is_saved_where_it_pays(pays, tmp_path: Path, monkeypatch):
    target, file = model(), tmp_path / "best.yaml"
    planned = LayerPlan((some(1.3 if pays else 0.9, LayerSkip(exit_layer=3)),), 0.9, 1.2)
    asked: dict[str, Any] = {}

    def fake(model: Any, ids: Any, max_length: int, budget: int) -> LayerPlan:
        asked.update(prompts=len(ids), max_length=max_length, budget=budget)
        return planned

    monkeypatch.setattr(commands, "plan_layers", fake)
    monkeypatch.setattr(commands, "load_target", lambda *_: (target, None))
    monkeypatch.setattr(commands, "prompt_ids", lambda *_: [5, 6])
    done = CliRunner().invoke(
        commands.plan_app, ["--model", "x", "--layers", "--prompt", "a", "--prompt", "b", "--save", str(file)]
    )
    assert asked == {"prompts": 2, "max_length": 8, "budget": 48}
    assert done.exit_code == (0 if pays else 1) and file.exists() is pays
    if pays:
        values = yaml.safe_load(file.read_text())
        assert SpecDecConfig.from_dict(values) == planned.best.config
        assert values == essential(planned.best.config.to_dict()) and "verifier" not in values
        assert "# model: x, float32\n" in file.read_text() and "# prompts: 2\n" in file.read_text()
        assert "# figures: 1.30x expected, 1.20x measured\n" in file.read_text()
