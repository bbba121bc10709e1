"""The law of what is emitted with a draft model that shares some of the target's tokens."""

import dataclasses
from typing import Any

import pytest
import torch
from bridged import letters
from cases import SEED
from conftest import randomise, without_special_tokens
from test_cases_law import FAIL, PASS, joint_law, p_value, small
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

import hf_specdec
from hf_specdec import SpecDecConfig
from hf_specdec.drafters import DraftModel, bridged_model

LAW_TARGET, LAW_DRAFT = "dabc", "xbyca"  # a, b and c are shared; d is the target's alone


def crossed() -> DraftModel:
    """A draft model of five letters, three of which the target has."""
    config = LlamaConfig(**{**small(1).config.to_dict(), "vocab_size": 5})
    return DraftModel(
        without_special_tokens(randomise(LlamaForCausalLM(config), 0.5, 3)), tokenizer=letters(LAW_DRAFT, ())
    )


def drawn(model: Any, verifier: str, **options: Any) -> torch.Tensor:
    """6,000 times three new ids: shape `(6000, 3)`."""
    set_seed(SEED)
    config = SpecDecConfig(strategy=crossed(), verifier=verifier)
    return torch.cat(
        [
            model.generate(
                torch.tensor([[1, 0]]), attention_mask=torch.ones(1, 2, dtype=torch.long), do_sample=True,
                max_new_tokens=3, num_return_sequences=600, assistant_strategy=config,
                tokenizer=letters(LAW_TARGET, ()), **options,
            )[:, 2:]
            for _ in range(10)
        ]
    )  # fmt: skip


@pytest.mark.parametrize("law_options", [{}, {"temperature": 0.6, "top_k": 3}], ids=str)
@pytest.mark.parametrize("verifier", ["exact", "rejection", "block"])
def test_the_law_is_the_targets(verifier, law_options):
    law_options = {"temperature": 1.0, "top_k": 0, **law_options}
    model = hf_specdec.enable(small(0))
    ids = drawn(model, verifier, **law_options)
    assert p_value(ids, joint_law(model, 3, **law_options)) > PASS


def test_control_a_law_of_more_than_the_shared_tokens(monkeypatch):
    """Drawn among shared tokens, and handed over as a law that gives the others something, too."""
    tree_of = bridged_model.ChainDraw.tree

    def mislabelled(self):
        tree = tree_of(self)
        return dataclasses.replace(tree, probs=tree.probs * 0.5 + 0.5 / tree.probs.shape[2])

    monkeypatch.setattr(bridged_model.ChainDraw, "tree", mislabelled)
    model = hf_specdec.enable(small(0))
    ids = drawn(model, "rejection", temperature=1.0, top_k=0)
    assert p_value(ids, joint_law(model, 3, 1.0, 0)) < FAIL


def test_draft_tokens_are_shared_ones_under_rejection():
    model = hf_specdec.enable(small(0))
    config = SpecDecConfig(strategy=crossed(), verifier="rejection")
    trees = []
    strategy = config.resolved
    build = strategy.build

    def watched(*args):
        drafter = build(*args)
        propose = drafter.propose
        drafter.propose = lambda *more: trees.append(propose(*more)) or trees[-1]
        return drafter

    object.__setattr__(strategy, "build", watched)
    model.generate(
        torch.tensor([[1, 2]]), do_sample=True, max_new_tokens=20, assistant_strategy=config,
        tokenizer=letters(LAW_TARGET, ()),
    )  # fmt: skip
    for tree in trees:
        assert (tree.tokens[:, 1:] > 0).all() and tree.sampled[:, 1:].all()
        assert torch.allclose(tree.probs[:, :-1].sum(-1), torch.ones(()))
        assert (tree.probs[:, :, 0] == 0).all()
