"""`hf-specdec plan --tree`: acceptance by rank against hand counts, the choice at given costs, and what is printed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import prompt, tiny
from oracle import Oracle
from rich.console import Console
from text_models import make_tokenizer, save_models
from typer.testing import CliRunner
from whims import Never

import hf_specdec
from hf_specdec import DraftTree, SpecDecConfig, SpecDecError
from hf_specdec.cli import app
from hf_specdec.control import SCHEDULES
from hf_specdec_eval import cost, plan_tree
from hf_specdec_eval.planning import StepCosts
from hf_specdec_eval.tree_plan import RankCounts, choose_tree, measure_acceptance

COSTS = StepCosts(plain_seconds=1.0, verify_seconds={1: 1.0, 32: 2.0})


def tree(tokens: list[int], parents: list[int]) -> DraftTree:
    shape = torch.tensor([parents])
    return DraftTree(torch.tensor([tokens]), shape, torch.zeros_like(shape, dtype=torch.bool))


def test_ranks_are_counted_along_what_was_emitted() -> None:
    counts = RankCounts()
    own = tree([9, 5, 6, 7, 8, 4], [-1, 0, 0, 2, 2, -1])
    counts.count(own, 0, [6, 8, 1])  # second child, second child, then a leaf
    assert (counts.nodes, counts.accepted) == (2, {1: 2})
    counts.count(own, 0, [5, 6])  # first child, a leaf
    counts.count(own, 0, [6, 4])  # second child, none of its children
    counts.count(own, 0, [9])  # none
    counts.count(tree([9], [-1]), 0, [1])  # nothing was proposed
    assert (counts.nodes, counts.accepted) == (6, {0: 1, 1: 3})
    assert counts.acceptance_by_rank() == [1 / 6, 3 / 6]
    with pytest.raises(SpecDecError, match="no draft accepted"):
        RankCounts().acceptance_by_rank()


@pytest.mark.parametrize("siblings", [0, 2])
def test_an_oracle_is_accepted_at_the_rank_that_it_drafts_at(siblings: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No schedule decides what is counted."""
    monkeypatch.setitem(SCHEDULES, "adaptive", Never)
    model, inputs = hf_specdec.enable(tiny()), prompt(1)
    length = inputs["input_ids"].shape[1]
    text = model.generate(**inputs, max_new_tokens=30, do_sample=False)[:, length:]
    config = SpecDecConfig(Oracle.of(text.repeat(1, 2), siblings=siblings), max_draft_tokens=6)
    counts = measure_acceptance(model, config, inputs["input_ids"].tolist(), 30)
    assert counts.acceptance_by_rank() == [0.0] * siblings + [1.0] and counts.nodes > 15


@pytest.mark.usefixtures("constant_schedule")
def test_measuring_leaves_the_text_alone_and_counts_what_the_statistics_count() -> None:
    model, inputs = hf_specdec.enable(tiny()), prompt(1, seed=2)
    accepted = 0
    for strategy in ("recycling", "suffix", "lookahead", "free"):
        config = SpecDecConfig(strategy)
        counts = measure_acceptance(model, config, inputs["input_ids"].tolist(), 40)
        output = model.generate(
            **inputs, max_new_tokens=40, do_sample=False, assistant_strategy=config, return_dict_in_generate=True
        )
        assert sum(counts.accepted.values()) == output.speculation.num_accepted_draft_tokens
        accepted += sum(counts.accepted.values())
    assert accepted > 0


def test_the_choice_weighs_tokens_against_time() -> None:
    planned = choose_tree([0.6, 0.2, 0.1], COSTS, 32, 16)
    assert planned.tokens_per_round == pytest.approx(planned.template.expected_tokens([0.6, 0.2, 0.1]))
    verify = 1 + (len(planned.template) - 1) / 31
    assert planned.speedup == pytest.approx(planned.tokens_per_round / verify)
    assert planned.speedup > 1.5 and planned.largest[1] >= planned.tokens_per_round
    slow_drafts = StepCosts(1.0, {1: 1.0, 32: 2.0}, draft_seconds=0.5)
    assert 1 <= choose_tree([0.6, 0.2, 0.1], slow_drafts, 32, 16).template.depth < planned.template.depth


def test_no_drafts_where_none_pays() -> None:
    planned = choose_tree([0.1], StepCosts(1.0, {1: 1.0, 32: 40.0}), 32, 16)
    assert len(planned.template) == 1 and planned.speedup == 1.0 and "plain generate, no drafts" in planned.sentence


def test_the_tree_is_printed_with_its_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def costs(model: Any, strategy: Any, widths: Any, contexts: Any) -> cost.CostCurve:
        asked.update(widths=widths, contexts=contexts)
        prices = StepCosts(1.0, {each: 1 + each / 100 for each in widths})
        return cost.CostCurve({(1, length): prices for length in contexts})

    monkeypatch.setattr("hf_specdec_eval.tree_plan.measure_costs", costs)
    console = Console(record=True, width=100)
    planned = plan_tree(tiny(), "recycling", [0.5, 0.2], 6, 3, context=200, console=console)
    text = console.export_text()
    assert {1, 6} <= set(asked["widths"]) and asked["contexts"][0] < 200 < asked["contexts"][1]
    assert len(planned.template) == 6 and planned.template.depth <= 3
    assert "1: 0.50" in text and "2: 0.20" in text and "1: 0.25" in text
    assert f"max_draft_tokens={len(planned.template) - 1}, max_depth=" in text and "x plain generate" in text
    for wrong in ([1.5], [0.9, 0.9]):
        with pytest.raises(SpecDecError):
            plan_tree(tiny(), "recycling", wrong)
    with pytest.raises(SpecDecError, match="context=0"):
        plan_tree(tiny(), "recycling", [0.5], context=0)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    save_models(make_tokenizer(), directory, ("target",))
    return directory / "target"


def test_the_command_plans_a_tree(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_specdec_eval.commands.builtin_prompts", lambda tokenizer: [list(range(5, 25)) * 2])
    monkeypatch.setattr("hf_specdec_eval.tree_plan.NEW_TOKENS", 24)
    monkeypatch.setenv("COLUMNS", "200")
    base = ["plan", "--model", str(target), "--strategy", "recycling", "--tree", "--nodes", "5", "--context", "40"]
    result = CliRunner().invoke(app, [*base, "--acceptance", "0.5,0.2"])
    assert result.exit_code == 0, result.output
    assert "last token" in result.stdout and "Best: " in result.stdout and "Accepted by rank" not in result.stdout
    result = CliRunner().invoke(app, base)
    assert result.exit_code == 0, result.output
    assert "Accepted by rank, at " in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tree", "--results", "x"], "--results does not go with --tree"),
        (["--nodes", "4", "--acceptance", "0.5"], "--nodes goes with --tree"),
        (["--tree", "--acceptance", "0.9,0.9"], "sum above 1"),
        (["--tree", "--nodes", "-1"], "nodes=-1"),
        (["--tree", "--nodes", "0"], "nodes=0"),
        (["--tree", "--acceptance", "lots"], "no probability"),
    ],
)
def test_the_command_refuses_what_makes_no_plan(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["plan", "--model", "nowhere", "--strategy", "recycling", *arguments])
    assert result.exit_code == 2 and message in result.stderr
