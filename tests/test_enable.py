"""`enable`: a class swap that survives copying, pickling and saving; and drafters inside stock assisted decoding."""

import copy
import pickle

import pytest
import torch
from conftest import plain, prompt, tiny
from transformers import LlamaForCausalLM

import hf_specdec
from hf_specdec import PromptLookup, SpecDecConfig, SpecDecError, SpeculativeGenerationMixin, Suffix

OPTIONS = {"max_new_tokens": 24, "do_sample": False}


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_an_enabled_model_can_be_copied(copied):
    model = hf_specdec.enable(tiny())
    again = copied(model)
    assert isinstance(again, SpeculativeGenerationMixin) and isinstance(again, LlamaForCausalLM)
    expected = model.generate(**prompt(1), **OPTIONS)
    assert torch.equal(again.generate(**prompt(1), **OPTIONS, assistant_strategy="suffix"), expected)


def test_enabled_twice_is_enabled_once():
    model = hf_specdec.enable(tiny())
    assert hf_specdec.enable(model) is model
    assert type(model).__mro__.count(SpeculativeGenerationMixin) == 1
    assert type(hf_specdec.enable(tiny())) is type(model)


def test_what_has_no_generate_is_refused():
    with pytest.raises(SpecDecError, match="get_base_model"):
        hf_specdec.enable(torch.nn.Linear(2, 2))


def test_a_setting_that_a_strategy_needs_is_named():
    with pytest.raises(SpecDecError, match="needs model"):
        SpecDecConfig(strategy="draft_model")


@pytest.mark.parametrize("strategy", [PromptLookup(), Suffix()], ids=["prompt_lookup", "suffix"])
def test_a_chain_drafter_runs_inside_stock_assisted_decoding(strategy):
    model = tiny()
    inputs = prompt(1)
    inputs = {name: value.repeat(1, 2) for name, value in inputs.items()}
    expected = plain(model, **inputs, **OPTIONS)
    drafter = strategy.build(None, None)
    asked = []
    get_candidates = drafter.get_candidates
    drafter.get_candidates = lambda *args, **kwargs: asked.append(1) or get_candidates(*args, **kwargs)
    model._get_candidate_generator = lambda **kwargs: drafter
    got = model.generate(**inputs, **OPTIONS, prompt_lookup_num_tokens=3)
    assert asked, "stock decoding must have asked our drafter"
    assert torch.equal(got, getattr(expected, "sequences", expected))
