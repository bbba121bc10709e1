"""The quantised copy: its layers, what it shares with the target, when it is made, and what it refuses."""

import copy
import gc
import threading
import weakref

import pytest
import torch
from accelerate import cpu_offload
from cases import (
    Way,
    call,
    draft_model,
    forward_widths,
    plain_model,
    refused,
    snapshot,
    spec_model,
    ways,
)
from conftest import FAMILIES, new_tokens, plain, prompt, tiny
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

import hf_specdec
from hf_specdec import QuantizedSelf, SpecDecConfig, SpecDecError
from hf_specdec.cache import SlotLayer
from hf_specdec.drafters import DraftModel, quantization
from hf_specdec.drafters.quantization import Int4Linear, Int8Linear, quantized_copy

pytestmark = pytest.mark.usefixtures("constant_schedule")  # drafts are counted, or must be there
INT8, INT4 = "int8_weight_only", "int4_weight_only"
PRECISION = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def made(model, scheme=INT8):
    """The copy that a call with this scheme uses."""
    return quantized_copy(model, scheme, lambda: torch.arange(3, 40))


def tensors(model):
    """A model's parameters and buffers by address."""
    return {each.data_ptr(): each for each in (*model.parameters(), *model.buffers())}


def random_layer(outputs, inputs, dtype, kind="linear"):
    """A layer with a bias whose rows differ in scale; the first row is zero."""
    generator = torch.Generator().manual_seed(outputs + inputs)
    weight = torch.randn(outputs, inputs, generator=generator) * torch.linspace(0, 2, outputs)[:, None]
    layer = torch.nn.Linear(inputs, outputs) if kind == "linear" else Conv1D(outputs, inputs)
    with torch.no_grad():
        layer.weight.copy_(weight if kind == "linear" else weight.t())
        layer.bias.copy_(torch.randn(outputs, generator=generator))
    return layer.to(dtype), weight.to(dtype).float()


@pytest.mark.parametrize("kind", ["linear", "conv1d"])
@pytest.mark.parametrize("dtype", list(PRECISION), ids=str)
@pytest.mark.parametrize(("bits", "shape"), [(8, (48, 64)), (8, (97, 48)), (4, (48, 64)), (4, (4096 + 16, 32))])
@torch.no_grad()
def test_a_layer_is_within_half_a_step_of_its_weights(bits, shape, dtype, kind):
    layer, weight = random_layer(*shape, dtype, kind)
    quantized = {8: Int8Linear, 4: Int4Linear}[bits](layer)
    seen = quantized(torch.eye(shape[1], dtype=dtype)).float() - layer.bias.float()  # (inputs, outputs)
    if bits == 8:
        step = (weight.abs().amax(1) / 127)[:, None].expand(shape)
    else:
        groups = weight.unflatten(1, (-1, 32))
        step = ((groups.amax(2) - groups.amin(2)) / 15).repeat_interleave(32, 1)
    slack = PRECISION[dtype] * (weight.abs().amax() + layer.bias.abs().amax())
    error = (seen.t() - weight).abs()
    assert (error <= step / 2 + slack).all()
    assert error.max() > step.max() / 4, "negative control: it is quantised"


@torch.no_grad()
@pytest.mark.parametrize("kind", [Int8Linear, Int4Linear])
def test_a_layer_takes_blocks_and_batches(kind):
    layer, _ = random_layer(32, 64, torch.float32)
    quantized, hidden = kind(layer), torch.randn(3, 5, 64)
    one_by_one = torch.stack([torch.stack([quantized(each) for each in row]) for row in hidden])
    assert torch.allclose(quantized(hidden), one_by_one, atol=1e-5)
    assert torch.allclose(quantized(hidden.transpose(0, 1)).transpose(0, 1), one_by_one, atol=1e-5)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_an_equal_model_on_the_same_cache_is_always_right(family):
    way = Way("quantized_self", 3, False)
    target, twin = spec_model(family, FAMILIES[family].attention[0]), copy.deepcopy(tiny(family))
    before = snapshot(twin)
    output = call(target, prompt(3, family), way, assistant_strategy=QuantizedSelf(twin))
    assert snapshot(twin) == before
    stats = output.speculation
    assert stats.draft_acceptance_rate == 1.0
    assert twin.config.get_text_config(decoder=True)._attn_implementation == FAMILIES[family].attention[0]


@pytest.mark.parametrize("verifier", ["rejection", "block"])
@ways(("quantized_self",), samples=(True,))
def test_an_equal_model_hands_over_the_law_of_its_drafts(way, verifier):
    """With q = p both rules accept everything; drafts that came from another law would be rejected at times."""
    config = SpecDecConfig(QuantizedSelf(tiny()), verifier=verifier)
    stats = call(spec_model(), prompt(way.batch), way, assistant_strategy=config).speculation
    assert stats.draft_acceptance_rate > 0.99
    other = SpecDecConfig(QuantizedSelf(scheme=INT4), verifier=verifier)
    stats = call(spec_model(), prompt(way.batch), way, assistant_strategy=other).speculation
    assert 0 < stats.draft_acceptance_rate < 1


@ways(("quantized_self",))
def test_a_prompt_of_embeddings_alone(way):
    inputs = prompt(way.batch)
    embedded = plain_model().get_input_embeddings()(inputs["input_ids"])
    given = {"inputs_embeds": embedded, "attention_mask": inputs["attention_mask"]}
    expected = plain(plain_model(), 7, **given, do_sample=way.sample)
    got = plain(spec_model(), 7, **given, do_sample=way.sample, assistant_strategy=QuantizedSelf())
    assert torch.equal(got, expected)


@pytest.mark.parametrize("scheme", [INT8, INT4])
def test_the_copy_adds_the_quantised_weights_and_nothing_else(scheme):
    model = tiny()
    copied = made(model, scheme)
    own = {address: each for address, each in tensors(copied.model).items() if address not in tensors(model)}
    assert sum(each.numel() * each.element_size() for each in own.values()) == copied.memory_bytes
    per_weight = copied.memory_bytes / copied.weights
    assert per_weight < {INT8: 1.2, INT4: 1.2}[scheme], "a scale of 4 bytes for every 32 weights of these tiny layers"
    assert copied.model.get_input_embeddings().weight is model.get_input_embeddings().weight
    assert copied.model.config is model.config


def kv_bytes(monkeypatch, draft):
    """Bytes of all K/V that a call takes over from a prefill."""
    taken = []
    load = SlotLayer.load

    def counted(layer, *given):
        load(layer, *given)
        taken.append(sum(each.numel() * each.element_size() for each in (layer.keys, layer.values)))

    with monkeypatch.context() as patch:
        patch.setattr(SlotLayer, "load", counted)
        plain(spec_model(), **prompt(3), assistant_strategy=SpecDecConfig(draft, max_draft_tokens=4))
    return sum(taken)


def test_there_is_no_second_cache(monkeypatch):
    """A lookup keeps none; a draft model, the control, has one of its own."""
    alone = kv_bytes(monkeypatch, "suffix")
    assert kv_bytes(monkeypatch, QuantizedSelf(scheme=INT8)) == alone
    assert kv_bytes(monkeypatch, DraftModel(draft_model())) > 1.5 * alone


@ways(("quantized_self",))
def test_nothing_is_prefilled_or_caught_up(way):
    with forward_widths(made(spec_model()).model) as widths:
        stats = call(spec_model(), prompt(way.batch), way, assistant_strategy=QuantizedSelf(scheme=INT8)).speculation
    assert set(widths) == {1}
    assert stats.draft_forwards == len(widths) <= stats.num_draft_tokens + 4 * way.batch


class Allocated(TorchDispatchMode):
    """Bytes of the tensors that were made inside and are alive, and the most there ever were."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        inputs = {each.untyped_storage().data_ptr() for each in tree_leaves(args) if isinstance(each, torch.Tensor)}
        output = func(*args, **(kwargs or {}))
        for each in tree_leaves(output):
            if isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() not in inputs:
                size = each.untyped_storage().nbytes()
                self.live += size
                self.peak = max(self.peak, self.live)
                weakref.finalize(each.untyped_storage(), self.release, size)
        return output

    def release(self, size):
        self.live -= size


@pytest.mark.parametrize("scheme", [INT8, INT4])
def test_making_the_copy_takes_little_more_than_the_copy(scheme):
    sizes = {**tiny().config.to_dict(), "vocab_size": 60_000, "hidden_size": 64}
    model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    whole = sum(each.numel() * each.element_size() for each in tensors(model).values())
    with Allocated() as allocated:
        copied = made(model, scheme)
    assert copied.memory_bytes <= allocated.peak < 0.5 * whole
    assert copied.memory_bytes < 0.3 * whole


def test_the_copy_is_made_once_per_target_and_again_when_weights_change(monkeypatch):
    model, calls = hf_specdec.enable(tiny()), []
    original = quantization.make_copy
    monkeypatch.setattr(quantization, "make_copy", lambda *given: calls.append(given) or original(*given))
    for _ in range(2):
        plain(model, **prompt(1), assistant_strategy=QuantizedSelf(scheme=INT8))
    assert len(calls) == 1
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)
    output = plain(model, **prompt(1), assistant_strategy=QuantizedSelf(scheme=INT8), return_dict_in_generate=True)
    assert len(calls) == 2
    assert output.speculation.draft_acceptance_rate > 0.5


def test_the_copy_goes_with_its_target():
    gc.collect()
    model = hf_specdec.enable(tiny())
    held = len(quantization._COPIES)
    plain(model, **prompt(1), assistant_strategy=QuantizedSelf(scheme=INT8))
    target, copied = weakref.ref(model), weakref.ref(made(model).model)
    assert len(quantization._COPIES) == held + 1
    del model
    gc.collect()
    assert target() is None
    assert copied() is None
    assert len(quantization._COPIES) == held


@pytest.mark.parametrize("scheme", ["auto", INT8, INT4])
@ways(("quantized_self",))
def test_the_target_is_unchanged(way, scheme):
    model = hf_specdec.enable(tiny())
    before = snapshot(model)
    call(model, prompt(way.batch), way, assistant_strategy=QuantizedSelf(scheme=scheme))
    assert snapshot(model) == before


def test_what_was_put_around_the_target_stays_there():
    """Hooks, and a function in place of `forward`, are not run for drafts."""
    model = hf_specdec.enable(tiny())
    seen = []
    original = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda hidden: seen.append(hidden.shape[1]) or original(hidden)
    model.model.layers[1].mlp.down_proj.register_forward_hook(lambda *_: seen.append(0))
    output = plain(
        model, **prompt(1), assistant_strategy=QuantizedSelf(), return_dict_in_generate=True, max_new_tokens=12
    )
    assert len(seen) == 2 * output.speculation.target_forwards


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scheme", [INT8, INT4])
def test_half_precision(scheme, dtype):
    model = hf_specdec.enable(tiny().to(dtype))
    output = plain(model, **prompt(3), assistant_strategy=QuantizedSelf(scheme=scheme), return_dict_in_generate=True)
    assert new_tokens(prompt(3), output.sequences).shape == (3, 20)
    assert output.speculation.num_accepted_draft_tokens > 0


@pytest.mark.parametrize(("costs", "chosen"), [((0.5, 0.3), INT4), ((0.4, 0.5), INT8), ((0.5, 0.49), INT8)])
def test_auto_weighs_speed_against_agreement(monkeypatch, costs, chosen):
    """The 4-bit copy overlaps less with the model: it must be faster by more than that costs."""
    model = tiny()
    law = torch.tensor([[0.7, 0.3]])
    answers = {Int4Linear: (torch.tensor([[0.75, 0.25]]), costs[1]), Int8Linear: (law, costs[0])}

    def tried(candidate, ids):
        return answers.get(type(candidate.model.layers[0].self_attn.q_proj), (law, 1.0))

    monkeypatch.setattr(quantization, "try_out", tried)
    copied = made(model, "auto")
    assert copied.scheme == chosen
    assert copied.relative_cost == costs[chosen == INT4]
    assert copied.overlap == pytest.approx(0.95 if chosen == INT4 else 1.0)


def test_the_statistics_say_what_it_takes():
    copied = made(spec_model())
    output = call(spec_model(), prompt(1), Way("quantized_self", 1, False), assistant_strategy="quantized_self")
    (note,) = output.speculation.notes
    assert "weight_only" in note
    assert "MB" in note
    assert "overlapped" in note
    output = call(
        spec_model(), prompt(1), Way("quantized_self", 1, False), assistant_strategy=QuantizedSelf(scheme=INT8)
    )
    (note,) = output.speculation.notes
    assert f"{copied.memory_bytes / 1e6:.3g} MB" in note
    output = call(spec_model(), prompt(1), Way("quantized_self", 1, False), assistant_strategy=QuantizedSelf(tiny()))
    taken = sum(each.numel() * each.element_size() for each in tensors(tiny()).values())
    assert f"{taken / 1e6:.3g} MB" in output.speculation.notes[0]


def test_the_statistics_name_what_stays_as_it_is():
    """Inputs of 40 are no multiple of 16: of the MLPs, `down_proj` is left alone."""
    model = resized(intermediate_size=40)
    copied = made(model)
    layers = [f"model.layers.{index}.mlp.down_proj.weight" for index in range(2)]
    assert list(copied.left) == layers
    assert all(copied.model.get_submodule(name.removesuffix(".weight")).weight.dim() == 2 for name in layers)
    way = Way("quantized_self", 1, False)
    for dtype in (torch.float32, torch.bfloat16):
        stats = call(model.to(dtype), prompt(1), way, assistant_strategy=QuantizedSelf(scheme=INT8)).speculation
        assert stats.notes[0].endswith(f"not quantised: {layers[0]} and 1 more")
    assert made(tiny()).left == ()
    assert any("experts" in name for name in made(tiny("mixtral")).left)
    assert all("lm_head" not in name for name in made(tiny("falcon")).left)


def test_settings_that_make_no_sense_are_refused_at_construction():
    with pytest.raises(SpecDecError, match="Did you mean 'int8_weight_only'"):
        QuantizedSelf(scheme="int8")
    with pytest.raises(SpecDecError, match="PreTrainedModel"):
        QuantizedSelf(torch.nn.Linear(2, 2))
    with pytest.raises(SpecDecError, match="one of them"):
        QuantizedSelf(tiny(), scheme=INT8)
    assert QuantizedSelf(scheme=INT4).to_dict() == {"model": None, "scheme": INT4}


def resized(**sizes):
    """A tiny Llama with other sizes, enabled."""
    return hf_specdec.enable(LlamaForCausalLM(LlamaConfig(**{**tiny().config.to_dict(), **sizes})).eval())


def gpu_without_kernels(model, monkeypatch):
    """The kernel is missing, as on a device that has none."""

    def product(self, rows):
        raise NotImplementedError("Could not run 'aten::_weight_int8pack_mm'")

    monkeypatch.setattr(Int8Linear, "product", product)
    return model


def with_a_lock(model):
    """Something is attached that cannot be copied."""
    model.model.layers[0].lock = threading.Lock()
    return model


def marked_as_quantised(model):
    """What transformers sets when it has loaded quantised weights."""
    model.is_quantized = True
    return model


@pytest.mark.parametrize(
    ("target", "scheme", "reason"),
    [
        (lambda _: hf_specdec.enable(tiny().double()), "auto", "float32, bfloat16 or float16"),
        (
            lambda _: resized(hidden_size=24, intermediate_size=40, num_attention_heads=2),
            INT4,
            "outputs of 16 at 4 bits",
        ),
        (
            lambda _: resized(hidden_size=40, intermediate_size=40, num_attention_heads=1, num_key_value_heads=1),
            "auto",
            "multiples of 16",
        ),
        (lambda _: hf_specdec.enable(cpu_offload(tiny())), "auto", "offloaded"),
        (lambda _: marked_as_quantised(hf_specdec.enable(tiny())), INT8, "quantised already"),
        (lambda _: with_a_lock(hf_specdec.enable(tiny())), "auto", "cannot be copied"),
        (lambda patch: gpu_without_kernels(hf_specdec.enable(tiny()), patch), INT8, "no 8-bit kernel"),
    ],
    ids=["float64", "odd_for_4_bits", "odd_shapes", "offloaded", "quantised", "lock", "no_kernel"],
)
def test_a_target_that_cannot_be_quantised_is_refused(monkeypatch, target, scheme, reason):
    model = target(monkeypatch)
    with refused(model, reason):
        plain(model, **prompt(1), assistant_strategy=QuantizedSelf(scheme=scheme))


@pytest.mark.parametrize(
    ("twin", "reason"),
    [
        (lambda: resized(num_hidden_layers=1), "num_hidden_layers is 1"),
        (lambda: resized(vocab_size=128), "vocab_size is 128"),
        (lambda: tiny("mistral"), "model_type is mistral"),
        (lambda: tiny().bfloat16(), "dtype is torch.bfloat16"),
        (lambda: tiny(attn_implementation="eager"), "attn_implementation is eager"),
    ],
    ids=["layers", "vocabulary", "architecture", "dtype", "attention"],
)
def test_a_model_that_is_not_the_target_is_refused(twin, reason):
    with refused(spec_model(), reason):
        plain(spec_model(), **prompt(1), assistant_strategy=QuantizedSelf(twin()))
