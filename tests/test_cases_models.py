"""Cases 21, 22, 24, 37, 38 and 39: windows, caches that cannot roll back, odd prompts, ties, modes and devices."""

import pytest
import torch
import transformers
from accelerate import cpu_offload, dispatch_model
from cases import (
    CACHE,
    FEW_OWN_WAYS,
    OWN_WAYS,
    SOME,
    Way,
    call,
    compare,
    draft_model,
    plain_model,
    refused,
    spec_model,
    strategy,
    suppress_refusal,
    tokenizers,
    ways,
)
from conftest import FAMILIES, PAD, TEXT_FAMILIES, WINDOWED_FAMILIES, prompt, tiny

import hf_specdec
from hf_specdec.drafters import DraftModel


def pair_of(model_of):
    """A plain target and an enabled one, made alike."""
    return model_of(), hf_specdec.enable(model_of())


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        (family, attention)
        for family in WINDOWED_FAMILIES
        if family in TEXT_FAMILIES
        for attention in FAMILIES[family].attention
    ],
)
@ways(("oracle-0", "oracle-0.3", "tree-0.3"), samples=(False,))
def test_case_21_across_the_edge_of_a_window(way, family, attention):
    models = (plain_model(family, attention), spec_model(family, attention))
    inputs = prompt(way.batch, length=12 if way.batch == 1 else 24)
    compare(way, inputs=inputs, models=models, max_new_tokens=40)


@pytest.mark.parametrize("family", ["mistral", "qwen3_mixed"])
@ways(("draft_model", "suffix"), also=FEW_OWN_WAYS)
def test_case_21_every_kind_of_draft(way, family, each_schedule):
    models = (plain_model(family), spec_model(family))
    chosen = DraftModel(models[0]) if way.strategy == "draft_model" else strategy(way.strategy)
    pair = compare(way, models=models, assistant_strategy=chosen, max_new_tokens=40)
    stats = pair.spec.speculation
    if way.strategy == "draft_model":
        assert stats.num_accepted_draft_tokens == stats.num_draft_tokens
        assert stats.num_draft_tokens > 0 or each_schedule == "adaptive"


RECURRENT = {
    "Mamba": {"state_size": 4},
    "Mamba2": {"state_size": 4, "num_heads": 4, "head_dim": 16, "n_groups": 1},
    "FalconMamba": {"state_size": 4},
    "Jamba": {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "num_experts": 2},
    "Lfm2": {"num_attention_heads": 4, "num_key_value_heads": 2, "full_attn_idxs": [1], "intermediate_size": 48},
}


@pytest.mark.parametrize("architecture", list(RECURRENT))
@pytest.mark.parametrize("batch", [1, 3])
def test_case_22_a_cache_that_cannot_be_rolled_back_is_refused(architecture, batch):
    options = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": PAD, "eos_token_id": None}
    config = getattr(transformers, f"{architecture}Config")(**options, **RECURRENT[architecture])
    if architecture == "Jamba":
        config.use_mamba_kernels = False
    model = hf_specdec.enable(getattr(transformers, f"{architecture}ForCausalLM")(config).eval())
    with refused(model, "cache", "state", "rolled back", "layer", error=hf_specdec.UnsupportedModelError):
        model.generate(**prompt(batch), max_new_tokens=6, assistant_strategy="suffix")


@ways(also=OWN_WAYS)
def test_case_24_prompt_of_one_token(way):
    ids = torch.tensor([[7], [8], [9]])[: way.batch]
    compare(way, inputs={"input_ids": ids, "attention_mask": torch.ones_like(ids)})


@ways(("suffix", "oracle-0.3", "tree-0.3"), also=OWN_WAYS)
def test_case_24_one_real_token_beside_long_rows(way):
    inputs = prompt(way.batch)
    inputs["attention_mask"][-1, :-1] = 0
    inputs["input_ids"][-1, :-1] = PAD
    compare(way, inputs=inputs)


@pytest.mark.parametrize("limit", [24, 20])
@ways(SOME, samples=(False,), also=OWN_WAYS)
def test_case_24_prompt_longer_than_max_length(way, limit):
    with pytest.raises(ValueError) as expected:
        plain_model().generate(**prompt(way.batch), max_length=limit, do_sample=False)
    chosen = strategy(way.strategy, [[1]] * way.batch)
    with refused(spec_model(), str(expected.value), error=type(expected.value)):
        spec_model().generate(**prompt(way.batch), max_length=limit, do_sample=False, assistant_strategy=chosen)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@ways(("oracle-0", "oracle-0.3", "tree-0.3", "suffix", "draft_model"), batches=(3,), also=OWN_WAYS)
def test_case_24_a_row_that_is_all_padding(way, attention):
    inputs = prompt(3)
    inputs["input_ids"][1] = PAD
    inputs["attention_mask"][1] = 0
    models = (plain_model("llama", attention), spec_model("llama", attention))
    try:
        call(models[0], inputs, way)
    except Exception as error:
        with pytest.raises(type(error)):
            call(models[1], inputs, way, assistant_strategy=strategy(way.strategy, [[1]] * 3))
        return
    compare(way, inputs=inputs, models=models)


@ways(("suffix", "prompt_lookup"), batches=(1,), samples=(False,), also=OWN_WAYS)
def test_case_24_no_prompt_at_all(way):
    expected = plain_model().generate(max_new_tokens=12, do_sample=False)
    options = {"assistant_strategy": strategy(way.strategy), **tokenizers(way)}
    output = spec_model().generate(max_new_tokens=12, do_sample=False, **options)
    assert torch.equal(output, expected)


@ways(SOME)
def test_case_24_embeddings_as_the_prompt(way):
    embedded = plain_model().get_input_embeddings()(prompt(way.batch)["input_ids"]).detach()
    inputs = {"inputs_embeds": embedded, "attention_mask": prompt(way.batch)["attention_mask"]}
    expected = call(plain_model(), inputs, way)
    chosen = strategy(way.strategy, expected.sequences.tolist())
    if way.strategy == "draft_model":
        with refused(spec_model(), "inputs_embeds"):
            call(spec_model(), inputs, way, assistant_strategy=chosen)
        return
    output = call(spec_model(), inputs, way, assistant_strategy=chosen)
    assert output.sequences.tolist() == expected.sequences.tolist()


@ways(("suffix", "oracle-0.3", "tree-0.3"), also=OWN_WAYS)
def test_case_24_without_an_attention_mask(way):
    """Where pads are not declared, plain `generate` infers the mask from the pad id."""
    inputs = prompt(way.batch)
    expected = call(plain_model(), {"input_ids": inputs["input_ids"]}, way).sequences
    chosen = strategy(way.strategy, expected[:, 24:].tolist())
    output = call(spec_model(), {"input_ids": inputs["input_ids"]}, way, assistant_strategy=chosen)
    assert output.sequences.tolist() == expected.tolist()


@ways(("suffix", "oracle-0.3", "tree-0.3"), batches=(3,), also=OWN_WAYS)
def test_case_24_right_padding(way):
    """Plain `generate` warns and goes on: the same text, or a refusal that names the padding."""
    inputs = {name: tensor.flip(1) for name, tensor in prompt(3).items()}
    with suppress_refusal("padding"):
        compare(way, inputs=inputs)


@pytest.mark.parametrize("zeroed", ["all", "half"])
@ways(also=OWN_WAYS)
def test_case_37_ties_break_as_in_plain_generate(way, zeroed):
    def tied():
        model = tiny()
        with torch.no_grad():
            model.lm_head.weight[:: 1 if zeroed == "all" else 2] = 0
            model.lm_head.weight *= -1 if zeroed == "half" else 1
        return model

    compare(way, models=pair_of(tied))


@ways(SOME, also=OWN_WAYS)
def test_case_38_train_mode_without_dropout(way):
    plain, spec = pair_of(lambda: tiny().train())
    compare(way, models=(plain, spec))
    assert spec.training
    assert all(module.training for module in spec.modules())


@ways(("oracle-0.3", "draft_model"))
def test_case_38_train_mode_with_dropout(way):
    """Text under dropout is random in plain `generate` too; the mode and the length are not."""
    spec = hf_specdec.enable(tiny("gpt2").train())
    draft = tiny().train()
    chosen = DraftModel(draft) if way.strategy == "draft_model" else strategy(way.strategy, [[5, 6, 7]] * way.batch)
    output = call(spec, prompt(way.batch), way, assistant_strategy=chosen)
    assert output.sequences.shape[1] == 24 + 24
    assert all(module.training for module in [*spec.modules(), *draft.modules()])


@ways(("draft_model",))
def test_case_38_a_draft_in_train_mode_stays_there(way):
    draft = tiny().train()
    compare(way, assistant_strategy=DraftModel(draft))
    assert all(module.training for module in draft.modules())


SPREADS = {
    "one_device": lambda model: dispatch_model(model, {"": "cpu"}, force_hooks=True),
    "by_layer": lambda model: dispatch_model(
        model,
        {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "cpu", "model.norm": "cpu",
         "model.rotary_emb": "cpu", "lm_head": "cpu"},
        force_hooks=True,
    ),
    "offloaded": lambda model: cpu_offload(model, execution_device=torch.device("cpu")),
}  # fmt: skip


@pytest.mark.parametrize("spread", list(SPREADS))
@ways(("oracle-0.3", "prompt_lookup", "draft_model"), also=FEW_OWN_WAYS)
def test_case_39_targets_spread_by_a_device_map(way, spread):
    for enable_first in (False, True):
        model = tiny()
        model = (
            hf_specdec.enable(SPREADS[spread](model))
            if not enable_first
            else SPREADS[spread](hf_specdec.enable(model))
        )
        if spread == "offloaded" and way.strategy.startswith("quantized"):
            with refused(model, "offloaded"):
                call(model, prompt(way.batch), way, assistant_strategy=strategy(way.strategy))
        else:
            compare(way, models=(plain_model(), model))


@pytest.mark.parametrize("spread", list(SPREADS))
@ways(("draft_model",))
def test_case_39_drafts_spread_by_a_device_map(way, spread):
    compare(way, assistant_strategy=DraftModel(SPREADS[spread](tiny())))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a second device")
@pytest.mark.parametrize("devices", [("cuda", "cpu"), ("cpu", "cuda")], ids="-".join)
@pytest.mark.parametrize("verifier", ["exact", "rejection"])
@ways(("draft_model",))
def test_case_39_target_and_draft_on_different_devices(way, devices, verifier):
    target, draft = tiny().to(devices[0]), draft_model()
    inputs = {name: tensor.to(devices[0]) for name, tensor in prompt(way.batch).items()}
    expected = call(target, inputs, way).sequences
    own = tiny().to(devices[1])
    own.load_state_dict(draft.state_dict())
    config = hf_specdec.SpecDecConfig(strategy=DraftModel(own), verifier=verifier)
    output = call(hf_specdec.enable(target), inputs, way, assistant_strategy=config)
    assert output.sequences.device == inputs["input_ids"].device
    assert output.speculation.num_accepted_draft_tokens > 0
    if verifier == "exact" or not way.sample:
        assert output.sequences.tolist() == expected.tolist()


@ways(("suffix",), batches=(1,))
def test_a_second_turn_on_a_sliding_window_model(way):
    """The cache of a sliding layer is returned in the form that plain `generate` continues from."""
    for family in ("mistral", "qwen3_mixed"):
        plain, spec = plain_model(family), spec_model(family)
        turns = []
        for model, options in ((plain, {}), (spec, {"assistant_strategy": "suffix"})):
            first = call(model, prompt(1), way, **options)
            ids = torch.cat([first.sequences, torch.tensor([[10, 11]])], dim=1)
            again = {"input_ids": ids, "attention_mask": torch.ones_like(ids), CACHE: first.cache}
            turns.append(call(plain, again, way).sequences.tolist())
        assert turns[0] == turns[1]


def test_enable_keeps_what_a_model_is():
    model = tiny()
    kind = type(model)
    enabled = hf_specdec.enable(model)
    assert enabled is model
    assert isinstance(enabled, kind)
    assert hf_specdec.enable(enabled) is enabled
    assert type(hf_specdec.enable(enabled)) is type(enabled)
    way = Way("suffix", 1, False)
    assert call(enabled, prompt(1), way).sequences.tolist() == call(plain_model(), prompt(1), way).sequences.tolist()
