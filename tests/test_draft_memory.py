"""What drafting with the target's own parts takes in memory, counted as bytes of live tensors.

The process's own size is left out of it: every tensor that an operation returns is counted until its storage is
released. The peak of a call is that of its tensors, beside the model's weights.
"""

import gc

import pytest
import torch
from conftest import PADDINGS, plain
from test_quantized_self import Allocated, kv_bytes, made, tensors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import hf_specdec
from hf_specdec import DraftModel, LayerSkip, QuantizedSelf, SpecDecConfig

LENGTH, LAYERS = 400, 12  # so that K/V are most of what a call takes
PARTS = [LayerSkip(exit_layer=2), LayerSkip(skip_attention=[1, 2], skip_mlp=[2])]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000, hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=1024, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return hf_specdec.enable(LlamaForCausalLM(config).eval())


def weights(model: PreTrainedModel) -> int:
    return sum(each.numel() * each.element_size() for each in tensors(model).values())


def call(model: PreTrainedModel, strategy: object, **options: object) -> tuple[int, int]:
    """Bytes of a call's tensors at their peak, and of those that live when it has ended."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 1000, (len(PADDINGS), LENGTH), generator=generator)
    mask = torch.stack([(torch.arange(LENGTH) >= padding).long() for padding in PADDINGS])
    config = None if strategy is None else SpecDecConfig(strategy=strategy, max_draft_tokens=4, max_width=1)
    gc.collect()
    with Allocated() as allocated:
        plain(model, input_ids=ids, attention_mask=mask, max_new_tokens=14, assistant_strategy=config, **options)
        gc.collect()
        return allocated.peak, allocated.live


@pytest.fixture(scope="module")
def plain_peak(model) -> int:
    return call(model, None)[0]


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_a_part_adds_at_most_3_percent_to_the_targets_peak(model, plain_peak, part):
    peak, left = call(model, part)
    assert peak + weights(model) <= 1.03 * (plain_peak + weights(model))
    assert left == 0


@pytest.mark.parametrize("scheme", ["int8_weight_only", "int4_weight_only"])
def test_a_quantised_copy_adds_its_weights_and_nothing_else(model, plain_peak, scheme):
    """The copy is made before; then the call takes what plain `generate` takes."""
    copied = made(model, scheme)
    own = {address: each for address, each in tensors(copied.model).items() if address not in tensors(model)}
    assert sum(each.numel() * each.element_size() for each in own.values()) == copied.memory_bytes
    peak, left = call(model, QuantizedSelf(scheme=scheme))
    assert peak + weights(model) <= 1.03 * (plain_peak + weights(model))
    assert left == 0


@pytest.mark.parametrize("strategy", [PARTS[0], "suffix"], ids=str)
def test_a_cache_that_is_returned_is_filled_layer_by_layer(model, strategy):
    """The slots of a layer go as the returned cache gets its K/V, so that there is never a second copy of all."""
    peaks = []
    for chosen in (None, strategy):
        peak, left = call(model, chosen, return_dict_in_generate=True)
        assert left == 0
        peaks.append(peak + weights(model))
    assert peaks[1] <= 1.03 * peaks[0]


def test_control_a_draft_model_is_seen(model, plain_peak):
    """It keeps K/V of its own, as many as the target's here."""
    peak, _ = call(model, DraftModel(model))
    assert peak + weights(model) > 1.03 * (plain_peak + weights(model))


def test_there_is_no_second_cache(monkeypatch):
    """A lookup keeps none."""
    alone = kv_bytes(monkeypatch, "suffix")
    for strategy in (LayerSkip(exit_layer=1), LayerSkip(skip_mlp=[1]), QuantizedSelf(scheme="int8_weight_only")):
        assert kv_bytes(monkeypatch, strategy) == alone
