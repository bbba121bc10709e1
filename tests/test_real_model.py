"""SmolLM2-135M-Instruct in float32: the texts of every strategy are those of plain `generate`."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

import hf_specdec
from hf_specdec.demo_model import smollm2_directory
from hf_specdec.demo_prompts import PROMPTS

pytestmark = [pytest.mark.real_model, pytest.mark.slow]
SAMPLED = {"do_sample": True, "temperature": 0.8}


@pytest.fixture(scope="module")
def model():
    return hf_specdec.enable(AutoModelForCausalLM.from_pretrained(smollm2_directory(), dtype=torch.float32).eval())


@pytest.fixture(scope="module")
def inputs():
    tokenizer = AutoTokenizer.from_pretrained(smollm2_directory(), padding_side="left")
    chats = [[{"role": "user", "content": prompt.text}] for prompt in PROMPTS[:3]]
    return tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )


@pytest.mark.parametrize("options", [{"do_sample": False}, SAMPLED], ids=["greedy", "sample"])
def test_the_text_is_plain_generates(model, inputs, options):
    options = {**options, "max_new_tokens": 24}
    set_seed(0)
    expected, state = model.generate(**inputs, **options), torch.get_rng_state()
    for strategy in ("prompt_lookup", "suffix"):
        set_seed(0)
        assert torch.equal(model.generate(**inputs, **options, assistant_strategy=strategy), expected), strategy
        assert torch.equal(torch.get_rng_state(), state), strategy
