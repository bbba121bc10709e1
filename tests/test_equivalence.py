"""Speculative text is plain `generate`'s text, for every family of the table.

Token-identical in fp32, greedy and sampled; after sampling the global generator is where plain `generate` leaves it.
The design is economical: an oracle that errs now and then meets every family, attention, batch and way of choosing
tokens; what depends on the strategy rather than the model meets a few families.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from conftest import (
    FAMILIES,
    IMAGE_TOKEN,
    TEXT_FAMILIES,
    VISION_FAMILIES,
    VOCABULARY,
    WINDOWED_FAMILIES,
    ForwardCounter,
    new_tokens,
    plain,
    prompt,
    randomise,
    tiny,
    without_special_tokens,
)
from oracle import Oracle
from transformers import PreTrainedModel
from whims import Whims

import hf_specdec
from hf_specdec import Adaptive, SpecDecConfig, UnsupportedModelError

SEED = 11
NEW_TOKENS = 20
CORE_FAMILIES = ("llama", "mistral", "qwen3_mixed", "gpt2")
ATTENTIONS = [(family, kind) for family, row in FAMILIES.items() for kind in row.attention]
WAYS = [pytest.param(False, id="greedy"), pytest.param(True, id="sample")]
BATCHES = [pytest.param(1, id="one"), pytest.param(3, id="ragged")]


@functools.cache
def shared(family: str, attention: str | None = None) -> PreTrainedModel:
    """An enabled model that no test changes."""
    return hf_specdec.enable(tiny(family, attention))


def run(model: PreTrainedModel, inputs: dict[str, Any], **options: Any) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Ids and the generator's state after a seeded call, and what speculation did (None for plain `generate`)."""
    output = plain(model, SEED, **inputs, **{"max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True, **options})
    return output.sequences, torch.get_rng_state(), getattr(output, "speculation", None)


@functools.cache
def written(family: str, attention: str | None, batch: int, sample: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and generator state of plain `generate` for the prompt that most tests use."""
    return run(tiny(family, attention), prompt(batch, family), do_sample=sample)[:2]


def check(
    family: str, attention: str | None, batch: int, sample: bool, strategy: Callable[[torch.Tensor], Any]
) -> hf_specdec.SpeculationStats:
    """Assert that a strategy, made from the text to be written, changes nothing. Returns what it did."""
    inputs = prompt(batch, family)
    expected, state = written(family, attention, batch, sample)
    text = new_tokens(inputs, expected)
    found, state_after, stats = run(
        shared(family, attention), inputs, do_sample=sample, assistant_strategy=strategy(text)
    )
    assert found.tolist() == expected.tolist()
    assert torch.equal(state_after, state), "the generator is not where plain `generate` leaves it"
    assert stats.num_emitted_tokens == text.numel()
    return stats


@pytest.mark.parametrize("sample", WAYS)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("family", "attention"), ATTENTIONS)
def test_every_family_with_some_drafts_wrong(family, attention, batch, sample):
    stats = check(family, attention, batch, sample, lambda text: Oracle.of(text, 0.3))
    assert 0 < stats.num_accepted_draft_tokens < stats.num_draft_tokens, "accepted and rejected drafts must both occur"
    assert stats.target_forwards < NEW_TOKENS


@pytest.mark.parametrize("schedule", [Whims(1), Adaptive()], ids=["whims", "adaptive"])
@pytest.mark.parametrize(("batch", "sample"), [(1, True), (3, False)], ids=["one-sample", "ragged-greedy"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_whatever_is_chosen_of_its_drafts(family, batch, sample, schedule):
    """Rounds without drafts, and trees of which any part was left out."""

    def strategy(text: torch.Tensor) -> SpecDecConfig:
        return SpecDecConfig(Oracle.of(text, 0.2, siblings=2), max_draft_tokens=9, schedule=schedule)

    check(family, None, batch, sample, strategy)


@pytest.mark.parametrize("sample", WAYS)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("family", CORE_FAMILIES)
def test_all_drafts_right(family, batch, sample):
    stats = check(family, None, batch, sample, Oracle.of)
    assert stats.draft_acceptance_rate == 1.0
    assert stats.target_forwards == 1 + -(-(NEW_TOKENS - 1) // 6), "six tokens per round after the prompt's own"


@pytest.mark.parametrize("sample", WAYS)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("family", CORE_FAMILIES)
def test_all_drafts_wrong(family, batch, sample):
    stats = check(family, None, batch, sample, lambda text: Oracle.of(text, 1.0))
    assert stats.num_accepted_draft_tokens == 0
    assert stats.target_forwards == NEW_TOKENS


@pytest.mark.parametrize("sample", WAYS)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(
    "family", [*CORE_FAMILIES, "gemma3", "gemma3n", "gpt_oss", "llama4", "deepseek_v3", "qwen2_vl"]
)
def test_trees(family, batch, sample):
    """Wrong siblings come first, so every accepted path has to be moved into place."""

    def strategy(text: torch.Tensor) -> SpecDecConfig:
        return SpecDecConfig(strategy=Oracle.of(text, 0.2, siblings=2), max_draft_tokens=9)

    stats = check(family, None, batch, sample, strategy)
    assert stats.num_accepted_draft_tokens > 0


def noisy_copy(family: str) -> PreTrainedModel:
    """A draft model that agrees with the tiny model of a family now and then."""
    model = tiny(family)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05 * weight.std(correction=0) * torch.randn(weight.shape, generator=generator))
    return model


STRATEGIES: dict[str, Callable[[str], Any]] = {
    "prompt_lookup": lambda family: "prompt_lookup",
    "suffix": lambda family: "suffix",
    "other_family": lambda family: tiny("llama", seed=5),
    "noisy_copy": noisy_copy,
}


@pytest.mark.parametrize("sample", WAYS)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("family", CORE_FAMILIES)
@pytest.mark.parametrize("name", STRATEGIES)
def test_strategies(name, family, batch, sample, each_schedule):
    stats = check(family, None, batch, sample, lambda text: STRATEGIES[name](family))
    if name == "noisy_copy" and each_schedule == "constant":
        assert stats.num_accepted_draft_tokens > 0


@pytest.mark.parametrize("sample", WAYS)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", ["suffix", "noisy_copy"])
@pytest.mark.usefixtures("constant_schedule")
def test_strategies_that_have_something_to_find(name, batch, sample):
    """A low temperature and a repetitive prompt; lookup must not only be right, it must also find things."""
    inputs = prompt(batch, length=40)
    options = {"do_sample": sample, **({"temperature": 0.7} if sample else {}), "max_new_tokens": 48}
    expected, state, _ = run(tiny(), inputs, **options)
    found, state_after, stats = run(shared("llama"), inputs, assistant_strategy=STRATEGIES[name]("llama"), **options)
    assert found.tolist() == expected.tolist()
    assert torch.equal(state_after, state)
    assert stats.num_draft_tokens > 0


@pytest.mark.parametrize("sample", WAYS)
@pytest.mark.parametrize("name", STRATEGIES)
def test_without_enable(name, sample):
    inputs = prompt(3)
    expected, state = written("llama", None, 3, sample)
    found, state_after, _ = run(
        tiny(),
        inputs,
        do_sample=sample,
        custom_generate=hf_specdec.speculative_generate,
        assistant_strategy=STRATEGIES[name]("llama"),
    )
    assert found.tolist() == expected.tolist()
    assert torch.equal(state_after, state)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("family", "attention"), [each for each in ATTENTIONS if each[0] in WINDOWED_FAMILIES])
def test_across_the_edge_of_the_window(family, attention, batch):
    """Prompt 12 (or a row of 7 tokens, inside the window of 8), 40 new tokens, drafts longer than a window."""
    inputs = prompt(batch, family, length=12 if batch == 1 else 24)
    expected, _, _ = run(tiny(family, attention), inputs, max_new_tokens=40)
    for max_draft_tokens in (3, 12):
        strategy = SpecDecConfig(
            strategy=Oracle.of(new_tokens(inputs, expected), 0.1), max_draft_tokens=max_draft_tokens
        )
        found, _, _ = run(shared(family, attention), inputs, max_new_tokens=40, assistant_strategy=strategy)
        assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("family", ["mistral", "qwen3_mixed"])
def test_the_window_is_felt(family):
    """Control: the same weights without a window write another text, so a lost window would be seen above."""
    row = FAMILIES[family]
    options = {**row.options, "sliding_window": None, "use_sliding_window": False}
    options["layer_types"] = ["full_attention"] * 2 if "layer_types" in options else None
    if options["layer_types"] is None:
        del options["layer_types"]
    unbounded = getattr(transformers, row.model)(getattr(transformers, row.config)(**options))
    unbounded.load_state_dict(tiny(family).state_dict())
    inputs = prompt(1, family, length=12)
    assert not torch.equal(
        plain(without_special_tokens(unbounded), **inputs, max_new_tokens=40),
        plain(tiny(family), **inputs, max_new_tokens=40),
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_the_texts_to_be_written_vary(family):
    """Control: a model that repeats one token would make every equality above an easy one."""
    inputs = prompt(1, family)
    text = new_tokens(inputs, written(family, FAMILIES[family].attention[0], 1, False)[0])[0].tolist()
    assert len(set(text)) >= 8
    other = new_tokens(inputs, written(family, FAMILIES[family].attention[0], 1, True)[0])[0].tolist()
    assert text != other


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_the_image_is_felt(family):
    """Control: another image gives another text."""
    inputs = prompt(1, family)
    changed = {**inputs, "pixel_values": 3 * inputs["pixel_values"].flip(-1)}
    assert plain(tiny(family), **inputs).tolist() != plain(tiny(family), **changed).tolist()


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_a_placeholder_for_an_image_is_never_drafted(family):
    """A draft that contains the id of an image placeholder; the text is the same and the model does not fail."""
    inputs = prompt(1, family)
    expected, _ = written(family, None, 1, False)
    text = torch.full_like(new_tokens(inputs, expected), IMAGE_TOKEN)
    found, _, stats = run(shared(family), inputs, assistant_strategy=Oracle.of(text))
    assert found.tolist() == expected.tolist()
    assert stats.num_draft_tokens == 0


@pytest.mark.parametrize("sample", WAYS)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3_mixed", "gemma3", "gpt2"])
def test_a_prompt_of_embeddings(family, batch, sample):
    ids = prompt(batch, family)
    model = tiny(family)
    inputs = {"inputs_embeds": model.get_input_embeddings()(ids["input_ids"]).detach()}
    inputs["attention_mask"] = ids["attention_mask"]
    expected, state, _ = run(model, inputs, do_sample=sample)
    assert expected.shape == (batch, NEW_TOKENS), "there are no prompt ids to return"
    for strategy in (Oracle.of(expected, 0.3), "suffix", "prompt_lookup"):
        found, state_after, _ = run(shared(family), inputs, do_sample=sample, assistant_strategy=strategy)
        assert found.tolist() == expected.tolist()
        assert torch.equal(state_after, state)


@pytest.mark.parametrize("sample", WAYS)
@pytest.mark.parametrize("family", CORE_FAMILIES)
def test_rows_that_end_apart(family, sample):
    """An end-of-text id from the middle of one row's text: rows leave one by one, and the draws stay aligned."""
    inputs = prompt(3, family)
    free = new_tokens(inputs, written(family, None, 3, sample)[0])
    model = tiny(family)
    ends = next(
        token
        for token in free[1, 4:].tolist()
        if token != 0 and any(token not in row for row in free.tolist()) and token not in free[1, :4].tolist()
    )
    options = {"do_sample": sample, "eos_token_id": ends, "pad_token_id": 0}
    expected, state, _ = run(model, inputs, **options)
    assert (new_tokens(inputs, expected)[:, -1] == 0).any(), "some row ends before the others"
    for error_rate in (0.0, 0.3):
        strategy = Oracle.of(free, error_rate)
        found, state_after, stats = run(shared(family), inputs, assistant_strategy=strategy, **options)
        assert found.tolist() == expected.tolist()
        assert torch.equal(state_after, state)
        emitted = [row.num_emitted_tokens for row in stats.rows]
        assert emitted == [row.tolist().index(ends) + 1 if ends in row else len(row) for row in free]


@pytest.mark.parametrize("family", ["llama", "qwen3_mixed", "qwen2_vl"])
def test_the_users_model_and_plain_generate_are_as_before(family):
    model = shared(family)
    inputs = prompt(3, family)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    config = model.config.to_dict()
    run(model, inputs, assistant_strategy="suffix")
    assert model.config.to_dict() == config
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())
    assert run(model, inputs)[0].tolist() == written(family, None, 3, False)[0].tolist()


def test_another_seed_writes_another_text():
    """Control: sampling depends on the seed at all."""
    inputs = prompt(1)
    expected, _ = written("llama", None, 1, True)
    strategy = Oracle.of(new_tokens(inputs, expected), 0.3)
    other = plain(shared("llama"), SEED + 1, **inputs, do_sample=True, assistant_strategy=strategy)
    assert other.tolist() != expected.tolist()


def _layers(**more: Any) -> dict[str, Any]:
    return {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, **more}


RECURRENT = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
REFUSED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "state_space": ("MambaForCausalLM", "MambaConfig", _layers(state_size=4)),
    "state_space_2": (
        "Mamba2ForCausalLM",
        "Mamba2Config",
        _layers(state_size=4, num_heads=4, head_dim=16, n_groups=1),
    ),
    "alibi_bloom": ("BloomForCausalLM", "BloomConfig", _layers(n_layer=2, n_head=4)),
    "alibi_mpt": (
        "MptForCausalLM",
        "MptConfig",
        {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": VOCABULARY},
    ),
    "alibi_falcon": ("FalconForCausalLM", "FalconConfig", _layers(alibi=True, num_attention_heads=4)),
    "local_layers": (
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        _layers(num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=8),
    ),
    "hybrid": (
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        _layers(
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            intermediate_size=48,
            layer_types=["linear_attention", "full_attention"],
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
            **RECURRENT,
        ),
    ),
    "hybrid_jamba": (
        "JambaForCausalLM",
        "JambaConfig",
        _layers(
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=48,
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=2,
            num_experts=2,
            num_experts_per_tok=1,
            use_mamba_kernels=False,
            mamba_d_state=4,
            mamba_dt_rank=2,
        ),
    ),
    "recurrent": (
        "RecurrentGemmaForCausalLM",
        "RecurrentGemmaConfig",
        _layers(num_attention_heads=4, intermediate_size=48, block_types=["recurrent", "attention"], lru_width=32),
    ),
    "encoder_decoder": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
    ),
}


@functools.cache
def refused_model(kind: str) -> PreTrainedModel:
    """A tiny model whose cache, positions or masks cannot verify a block."""
    model, config, options = REFUSED[kind]
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if kind == "encoder_decoder":
        special = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    with torch.random.fork_rng(devices=[]):
        built = getattr(transformers, model)(getattr(transformers, config)(**options, **special))
    built = without_special_tokens(randomise(built.float(), 0.1, 1))
    built.generation_config.decoder_start_token_id = special.get("decoder_start_token_id")
    return built


@pytest.mark.parametrize("enabled", [True, False], ids=["enabled", "callable"])
@pytest.mark.parametrize("kind", REFUSED)
def test_models_that_cannot_verify_are_refused_before_any_forward(kind, enabled):
    model = refused_model(kind)
    inputs = {"input_ids": prompt(1)["input_ids"]}
    assert plain(model, **inputs, max_new_tokens=3).shape[0] == 1, "plain `generate` serves this model"
    options: dict[str, Any] = {"assistant_strategy": "suffix"}
    if enabled:
        model = hf_specdec.enable(tiny_copy(model))
    else:
        options["custom_generate"] = hf_specdec.speculative_generate
    with ForwardCounter(model, parts=enabled) as forwards, pytest.raises(UnsupportedModelError) as caught:
        plain(model, **inputs, **options)
    assert forwards.count == 0
    assert type(model).__name__ in str(caught.value), "the message names the model"
    assert "without `assistant_strategy`" in str(caught.value), "the message says what to do instead"


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_positions_that_change_with_the_length_are_refused_only_where_they_would(kind):
    """They change for all tokens at once when a text passes 40; a draft must not trigger that early."""
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    options = {**FAMILIES["llama"].options, "max_position_embeddings": 40}
    if kind == "longrope":
        options["max_position_embeddings"] = 80
        rope |= {"original_max_position_embeddings": 40, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    with torch.random.fork_rng(devices=[]):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**options, rope_parameters=rope))
    model = hf_specdec.enable(without_special_tokens(randomise(model, 0.4, 2)))
    inputs = prompt(1)
    with ForwardCounter(model) as forwards, pytest.raises(UnsupportedModelError, match=kind):
        plain(model, **inputs, max_new_tokens=17, assistant_strategy="suffix")
    assert forwards.count == 0
    expected = plain(model, **inputs, max_new_tokens=16)
    strategy = Oracle.of(new_tokens(inputs, expected), 0.3)
    assert torch.equal(plain(model, **inputs, max_new_tokens=16, assistant_strategy=strategy), expected)


def test_dynamic_rotary_positions_change_with_each_token_of_a_long_text():
    rope: dict[str, Any] = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    options = {**FAMILIES["llama"].options, "max_position_embeddings": 16}
    with torch.random.fork_rng(devices=[]):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**options, rope_parameters=rope))
    model = hf_specdec.enable(without_special_tokens(randomise(model, 0.4, 2)))
    with pytest.raises(UnsupportedModelError, match="passes 16 tokens"):
        plain(model, **prompt(1), max_new_tokens=4, assistant_strategy="suffix")


def tiny_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy whose class may be swapped."""
    copy = type(model)(model.config).float()
    copy.load_state_dict(model.state_dict())
    copy.generation_config = model.generation_config
    return copy.eval()


@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_a_model_of_the_table_is_never_refused(family):
    """Control: the refusals above are about those models and not about everything."""
    plain(shared(family), **prompt(1, family), max_new_tokens=2, assistant_strategy="suffix")
