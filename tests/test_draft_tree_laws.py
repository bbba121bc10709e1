"""Draft models that draft trees: the law of what is emitted, with a control that must fail; what siblings bring."""

import dataclasses
import functools
from typing import Any, ClassVar

import pytest
import torch
from cases import SEED, draft_model, spec_model
from test_cases_law import FAIL, PASS, draws, joint_law, p_value, small
from transformers import set_seed

import hf_specdec
from hf_specdec import Plan, SpecDecConfig
from hf_specdec.drafters import DraftModel
from hf_specdec.drafters.base import Drafter


@dataclasses.dataclass(frozen=True, eq=False)
class Wide(DraftModel):
    """Siblings by default. `flipped`: those of the root come in another order than they were drawn."""

    flipped: bool = False
    default_draft_tokens: ClassVar[int] = 6
    default_width: ClassVar[int] = 3
    default_depth: ClassVar[int | None] = 2

    def build(self, target: Any, request: Any) -> Drafter:
        drafter = super().build(target, request)
        propose = drafter.propose

        def flipped(view, plan):
            tree = propose(view, Plan(1, 3, 4))
            return dataclasses.replace(tree, tokens=torch.cat([tree.tokens[:, :1], tree.tokens[:, 1:].flip(1)], 1))

        if self.flipped:
            drafter.propose = flipped
        return drafter


@functools.cache
def enabled_small() -> Any:
    return hf_specdec.enable(small(0))


@pytest.mark.parametrize("options", [{}, {"temperature": 0.6, "top_k": 3}], ids=str)
def test_law_of_trees(options):
    options = {"temperature": 1.0, "top_k": 0, **options}
    ids = draws(enabled_small(), Wide(small(1)), "rejection", 6000, 4, **options)
    assert p_value(ids, joint_law(enabled_small(), 4, **options)) > PASS


def test_control_reordered_siblings():
    ids = draws(enabled_small(), Wide(small(1), flipped=True), "rejection", 6000, 4)
    assert p_value(ids, joint_law(enabled_small(), 4, 1.0, 0)) < FAIL


def test_law_of_trees_in_a_ragged_batch():
    set_seed(SEED)
    ids = enabled_small().generate(
        torch.tensor([[1, 0], [0, 0], [2, 3]]), attention_mask=torch.tensor([[1, 1], [0, 1], [1, 1]]),
        do_sample=True, top_k=0, max_new_tokens=4, num_return_sequences=3000,
        assistant_strategy=SpecDecConfig(strategy=Wide(small(1)), verifier="rejection", max_draft_tokens=6),
    )[:3000, 2:]  # fmt: skip
    assert p_value(ids, joint_law(enabled_small(), 4, 1.0, 0)) > PASS


def mean_length(verifier: str, **plan: int) -> float:
    """Tokens per round at temperature 1 over many prompts, with a draft that agrees now and then."""
    set_seed(SEED)
    output = spec_model().generate(
        torch.randint(3, 88, (100, 8)), do_sample=True, temperature=1.0, top_k=0, max_new_tokens=24,
        attention_mask=torch.ones(100, 8, dtype=torch.long), return_dict_in_generate=True,
        assistant_strategy=SpecDecConfig(DraftModel(draft_model()), verifier=verifier, schedule="constant", **plan),
    )  # fmt: skip
    return output.speculation.mean_acceptance_length


def test_siblings_are_accepted_more_often():
    full = {"max_depth": 3, "max_width": 3, "max_draft_tokens": 21}
    chain, tree = (mean_length("exact", **plan) for plan in ({"max_draft_tokens": 3}, full))
    assert 1.2 < chain < 3 and tree > chain + 0.2
    assert mean_length("rejection", **full) > mean_length("rejection", max_draft_tokens=3) + 0.1
