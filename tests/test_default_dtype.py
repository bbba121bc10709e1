"""torch's default dtype and device are the user's: what is computed here does not depend on them."""

import pytest
import torch
from cases import plain_model, spec_model
from conftest import prompt, tiny

from hf_specdec import DraftModel, LayerSkip, SpecDecConfig
from hf_specdec.tree import DraftTree
from hf_specdec.verify import block, rejection

DRAFT = tiny(seed=1)


@pytest.fixture(params=[torch.bfloat16, torch.float16, torch.float64], ids=str)
def default_dtype(request):
    spec_model(), plain_model()  # models have the dtype that they are made with
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(torch.float32)


STRATEGIES = ["suffix", "prompt_lookup", "lookahead", "recycling", "free", "auto", LayerSkip(1), DraftModel(DRAFT)]
each_strategy = pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda each: getattr(each, "name", each))


@each_strategy
@pytest.mark.parametrize("schedule", ["constant", "adaptive"])
def test_the_text_is_plain_generates(default_dtype, strategy, schedule):
    for seed in range(12):
        call = {**prompt(3, seed=seed), "do_sample": seed > 1, "max_new_tokens": 32, "temperature": 4.0}
        torch.manual_seed(seed)
        plain = plain_model().generate(**call)
        torch.manual_seed(seed)
        got = spec_model().generate(**call, assistant_strategy=SpecDecConfig(strategy=strategy, schedule=schedule))
        assert torch.equal(got, plain)


@each_strategy
@pytest.mark.parametrize("sample", [False, True])
def test_the_default_device_is_not_asked(strategy, sample):
    """As where a model stays on the CPU after `torch.set_default_device("cuda")`."""
    call = {**prompt(3), "do_sample": sample, "max_new_tokens": 16, "repetition_penalty": 1.2}
    torch.manual_seed(0)
    plain = plain_model().generate(**call)
    torch.manual_seed(0)
    with torch.device("meta"):
        got = spec_model().generate(**call, assistant_strategy=SpecDecConfig(strategy=strategy))
    assert torch.equal(got, plain)


@pytest.mark.parametrize("verifier", ["rejection", "block", "typical", "threshold"])
@pytest.mark.parametrize("strategy", ["free", DraftModel(DRAFT)], ids=["free", "draft_model"])
def test_other_verifiers_run(default_dtype, verifier, strategy):
    config = SpecDecConfig(strategy=strategy, verifier=verifier, max_width=1)
    out = spec_model().generate(**prompt(3), do_sample=True, max_new_tokens=24, assistant_strategy=config)
    assert out.shape[1] == 24 + 24


@pytest.mark.parametrize("rule", [rejection, block])
def test_a_rare_draft_is_as_rare_as_the_target_says(default_dtype, rule):
    """Coins in steps of 1/256 accepted it four times too often."""
    torch.manual_seed(0)
    count = 40_000
    scores = torch.tensor([0.999, 0.001], dtype=torch.float32).log().expand(count, 2, 2)
    accepted = rule(DraftTree.from_chains([0] * count, [[1]] * count), scores, True, None)
    first = torch.where(accepted.count > 0, 1, accepted.next_token)
    assert int((first == 1).sum()) < 40 + 5 * 40**0.5
