"""The facts about transformers and torch that the package stands on, each pinned by a test of its own.

A new transformers version that changes one of them fails here, and the test's name says what to look at. Nothing here
decodes speculatively; the last tests compare what the package claims with what this version has.
"""

import copy
import inspect
import json
import threading
from typing import Any

import pytest
import torch
import transformers
from conftest import FAMILIES, IMAGE_TOKENS, PAD, VOCABULARY, ForwardCounter, plain, prompt, tiny
from packaging.version import Version
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
    cache_utils,
)
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation import CandidateGenerator
from transformers.generation.streamers import BaseStreamer

import hf_specdec
from hf_specdec import compat, options

VERSION = Version(transformers.__version__)
CACHE = "past_key_values" if Version("5.24.0") > VERSION else "cache"
SHORT = {"max_new_tokens": 4}
LOST = ("streamer", "synced_gpus", "assistant_model", "tokenizer", "assistant_tokenizer")


class Recorder(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.values: list[torch.Tensor] = []
        self.ends = 0

    def put(self, value: torch.Tensor) -> None:
        self.values.append(value)

    def end(self) -> None:
        self.ends += 1


def arrived(model: Any, **kwargs: Any) -> dict[str, Any]:
    """What `generate` hands to a callable that takes everything."""
    seen: dict[str, Any] = {}

    def callable_(model: Any, input_ids: Any, **rest: Any) -> Any:
        seen.update(model=model, input_ids=input_ids, **rest)
        return input_ids

    model.generate(custom_generate=callable_, **{**SHORT, **kwargs})
    return seen


# ------------------------------------------------------------------------------------------------------- the callable


def test_the_callable_gets_the_prepared_pieces_by_these_names():
    model = tiny()
    seen = arrived(model, **prompt())
    assert seen["model"] is model
    for name in ("logits_processor", "stopping_criteria", "generation_config", "use_cache", CACHE, "position_ids"):
        assert name in seen
    assert isinstance(seen["logits_processor"], LogitsProcessorList)
    assert isinstance(seen["stopping_criteria"], StoppingCriteriaList)


def test_what_the_callable_returns_is_what_generate_returns():
    assert tiny().generate(custom_generate=lambda *_, **__: "anything", **SHORT, **prompt()) == "anything"


def test_a_keyword_in_the_callables_signature_reaches_it():
    seen = {}

    def callable_(model, input_ids, assistant_strategy=None, **rest):
        seen.update(assistant_strategy=assistant_strategy, rest=rest)

    tiny().generate(custom_generate=callable_, assistant_strategy="suffix", **SHORT, **prompt())
    assert seen["assistant_strategy"] == "suffix"
    assert "assistant_strategy" not in seen["rest"]


def test_a_keyword_that_nobody_knows_is_refused_by_generate():
    with pytest.raises(ValueError, match="assistant_strategy"):
        arrived(tiny(), assistant_strategy="suffix", **prompt())


@pytest.mark.parametrize("name", LOST)
def test_these_keywords_are_lost_even_when_the_callable_names_them(name):
    """Hence the mixin captures them, and the bare callable refuses what it can find of them."""
    values = {"streamer": Recorder(), "synced_gpus": False, "assistant_model": tiny()}
    seen = {}

    def callable_(
        model, input_ids, streamer=None, synced_gpus=None, assistant_model=None, tokenizer=None,
        assistant_tokenizer=None, **rest,
    ):  # fmt: skip
        seen.update(locals())

    tiny().generate(custom_generate=callable_, **{name: values.get(name, object())}, **SHORT, **prompt())
    assert seen[name] is None
    assert name not in seen["rest"]


def test_stop_strings_with_a_callable_ask_for_the_tokenizer_that_was_lost():
    with pytest.raises(ValueError, match="tokenizer"):
        arrived(tiny(), stop_strings=["a"], tokenizer=object(), **prompt())


def test_the_tokenizer_reaches_the_criteria_through_this_method():
    """The mixin overrides it to put the tokenizer back."""
    parameters = inspect.signature(GenerationMixin._get_stopping_criteria).parameters
    assert "tokenizer" in parameters
    source = inspect.getsource(GenerationMixin.generate)
    call = source[source.index("self._get_stopping_criteria(") :]
    assert "tokenizer=" in call[: call.index(")\n")], "it is passed by keyword"


def test_the_streamer_gets_the_prompt_before_the_callable_runs():
    streamer = Recorder()
    found = []
    inputs = prompt(1)

    def callable_(*_: Any, **__: Any) -> None:
        found.append(len(streamer.values))

    tiny().generate(custom_generate=callable_, streamer=streamer, **SHORT, **inputs)
    assert found == [1]
    assert torch.equal(streamer.values[0], inputs["input_ids"])
    assert streamer.ends == 0, "ending the stream is left to the callable, which does not have it"


def test_plain_generate_streams_one_call_per_step_and_ends_once():
    streamer = Recorder()
    inputs = prompt(1)
    ids = plain(tiny(), **inputs, max_new_tokens=5, streamer=streamer)
    assert [value.shape for value in streamer.values] == [inputs["input_ids"].shape] + [torch.Size([1])] * 5
    assert torch.cat([value.flatten() for value in streamer.values]).tolist() == ids[0].tolist()
    assert streamer.ends == 1


def test_beams_are_silently_turned_into_rows():
    assert arrived(tiny(), num_beams=3, **prompt(1))["input_ids"].shape[0] == 3


def test_return_sequences_are_expanded_into_neighbouring_rows():
    inputs = prompt(3)
    seen = arrived(tiny(), num_return_sequences=2, do_sample=True, **inputs)
    assert torch.equal(seen["input_ids"], inputs["input_ids"].repeat_interleave(2, dim=0))
    assert torch.equal(seen["attention_mask"], inputs["attention_mask"].repeat_interleave(2, dim=0))
    assert seen["position_ids"].shape == (6, 24)


def test_an_all_ones_mask_arrives_as_none_with_its_length_kept():
    seen = arrived(tiny(), **prompt(1))
    assert seen["attention_mask"] is None
    assert seen["generation_config"]._mask_length == 24


def test_a_padded_mask_arrives_as_it_is():
    inputs = prompt(3)
    assert torch.equal(arrived(tiny(), **inputs)["attention_mask"], inputs["attention_mask"])


def test_one_row_of_logits_is_preset():
    assert arrived(tiny(), **prompt())["logits_to_keep"] == 1


@pytest.mark.parametrize("batch", [1, 3])
def test_positions_arrive_and_count_real_tokens(batch):
    inputs = prompt(batch)
    expected = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    found = arrived(tiny(), **inputs)["position_ids"]
    real = inputs["attention_mask"].bool()
    assert torch.equal(found[real], expected[real])


def test_positions_of_the_qwen2_vl_family_have_a_leading_axis_and_lag_behind_the_columns():
    inputs = prompt(1, "qwen2_vl")
    positions = arrived(tiny("qwen2_vl"), **inputs)["position_ids"]
    assert positions.shape == (4, 1, 24)
    assert positions[1, 0, -1] < 23, "an image takes fewer positions than tokens"
    assert positions[:, 0, -1].diff().eq(0).sum() >= 2


def test_images_arrive_encoded():
    """The vision tower has already run."""
    seen = arrived(tiny("llava"), **prompt(1, "llava"))
    assert "mm_encoder_outputs" in seen
    assert "pixel_values" not in seen
    assert int((seen["input_ids"] == tiny("llava").config.image_token_id).sum()) == IMAGE_TOKENS


def test_a_prompt_of_embeddings_has_no_columns_of_ids():
    model, inputs = tiny(), prompt(3)
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    seen = arrived(model, inputs_embeds=embeds, attention_mask=inputs["attention_mask"])
    assert seen["input_ids"].shape == (3, 0)
    assert seen["inputs_embeds"].shape == (3, 24, 32)
    assert seen["generation_config"].max_length == 4, "lengths count new tokens alone"


def test_the_paged_cache_leaves_for_continuous_batching_before_the_callable_is_looked_at(monkeypatch):
    class Left(Exception):
        pass

    def leave(*_: Any, **__: Any) -> None:
        raise Left

    model = tiny()
    monkeypatch.setattr(model, "generate_batch", leave)
    with pytest.raises(Left):
        arrived(model, cache_implementation="paged", **prompt())


def test_a_pipeline_hands_unknown_keywords_to_generate(monkeypatch):
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {f"t{index}": index for index in range(VOCABULARY)}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="t2"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="t0", unk_token="t2")
    model = tiny()
    seen = {}

    def generate(**kwargs: Any) -> torch.Tensor:
        seen.update(kwargs)
        return kwargs["input_ids"]

    monkeypatch.setattr(model, "generate", generate)
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    pipe("t5 t6", assistant_strategy="suffix", max_new_tokens=2)
    assert seen["assistant_strategy"] == "suffix"


# ----------------------------------------------------------------------------------- lengths, processors and criteria


def test_sampling_brings_a_top_k_of_50_by_default():
    processors = arrived(tiny(), do_sample=True, **prompt())["logits_processor"]
    assert [type(each).__name__ for each in processors] == ["TopKLogitsWarper"]
    assert processors[0].top_k == 50
    assert not arrived(tiny(), do_sample=False, **prompt())["logits_processor"]


def test_max_length_looks_at_columns_alone():
    criterion = MaxLengthCriteria(5)
    assert criterion(torch.zeros(2, 5, dtype=torch.long), None).tolist() == [True, True]
    assert criterion(torch.zeros(2, 4, dtype=torch.long), None).tolist() == [False, False]


def test_criteria_answer_per_row_and_are_joined_by_or():
    class Even(transformers.StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            return input_ids[:, -1] % 2 == 0

    criteria = StoppingCriteriaList([Even(), MaxLengthCriteria(9)])
    assert criteria(torch.tensor([[1, 2], [1, 3]]), None).tolist() == [True, False]
    assert criteria.max_length == 9


def test_an_end_of_text_id_makes_a_criterion_with_that_attribute():
    """Plain `generate` pads finished rows if and only if some criterion has it."""
    criteria = arrived(tiny(), eos_token_id=7, **prompt())["stopping_criteria"]
    assert any(hasattr(each, "eos_token_id") for each in criteria)
    without = arrived(tiny(), **prompt())["stopping_criteria"]
    assert not any(hasattr(each, "eos_token_id") for each in without)


def test_without_an_end_of_text_id_rows_that_meet_a_criterion_go_on():
    class RowZero(transformers.StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            done = torch.zeros(len(input_ids), dtype=torch.bool)
            done[0] = input_ids.shape[1] >= 26
            return done

    inputs = prompt(3)
    stopped = plain(tiny(), **inputs, max_new_tokens=6, stopping_criteria=StoppingCriteriaList([RowZero()]))
    assert torch.equal(stopped, plain(tiny(), **inputs, max_new_tokens=6))


def test_prepared_special_tokens_are_tensors_on_the_config():
    config = arrived(tiny(), eos_token_id=[7, 9], **prompt())["generation_config"]
    assert config._eos_token_tensor.tolist() == [7, 9]
    assert config._pad_token_tensor.tolist() == PAD


def test_repetition_penalty_reads_padded_rows_by_their_own_offset():
    processors = arrived(tiny(), repetition_penalty=2.0, **prompt(3))["logits_processor"]
    ignore = getattr(processors[0], "prompt_ignore_length", None)
    if Version("5.23.0") <= VERSION:
        assert torch.as_tensor(ignore).flatten().tolist() == [0, 5, 17]
    else:
        assert ignore is None


# ----------------------------------------------------------------------------------------------------------- sampling


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("vocabulary", [7, 1000])
def test_multinomial_is_argmax_of_p_over_exponential_noise(rows, vocabulary):
    """Same token and same generator state after; some entries are zero, as top-k leaves them."""
    probs = torch.rand(rows, vocabulary, generator=torch.Generator().manual_seed(1))
    probs[:, ::3] = 0
    probs /= probs.sum(1, keepdim=True)
    for seed in range(20):
        first, second = (torch.Generator().manual_seed(seed) for _ in range(2))
        drawn = torch.multinomial(probs, 1, generator=first).squeeze(1)
        noise = torch.empty_like(probs).exponential_(generator=second)
        assert torch.equal(drawn, (probs / noise).argmax(1))
        assert torch.equal(first.get_state(), second.get_state())


def test_other_noise_is_told_apart():
    """Control: the draws of another seed, and uniform noise in place of exponential, choose other tokens."""
    probs = torch.full((1, 1000), 1e-3)
    drawn = torch.multinomial(probs, 1, generator=torch.Generator().manual_seed(1))
    for noise in (
        torch.empty_like(probs).exponential_(generator=torch.Generator().manual_seed(2)),
        torch.rand(probs.shape, generator=torch.Generator().manual_seed(1)),
    ):
        assert (probs / noise).argmax(1) != drawn.squeeze(1)


def test_plain_sampling_is_one_draw_per_step_over_the_whole_batch_finished_rows_included():
    """Rebuild a sampled text from its own scores and noise drawn apart: tokens and final generator state."""
    inputs = prompt(3)
    eos = int(plain(tiny(), 5, **inputs, do_sample=True, max_new_tokens=8)[1, -6])
    out = plain(
        tiny(), 5, **inputs, do_sample=True, max_new_tokens=8, eos_token_id=eos, output_scores=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    state = torch.get_rng_state()
    torch.manual_seed(5)
    finished = torch.zeros(3, dtype=torch.bool)
    for step, scores in enumerate(out.scores):
        noise = torch.empty_like(scores).exponential_()
        token = (scores.softmax(-1) / noise).argmax(-1)
        token[finished] = PAD
        assert torch.equal(token, out.sequences[:, 24 + step])
        finished |= token == eos
    assert 0 < finished.sum() < 3
    assert torch.equal(torch.get_rng_state(), state)


def test_greedy_leaves_the_generator_alone():
    state = torch.get_rng_state()
    plain(tiny(), **prompt(3))
    assert torch.equal(torch.get_rng_state(), state)


def test_scores_are_processed_in_float32():
    model = tiny().to(torch.bfloat16)
    seen = []

    class Look(transformers.LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            seen.append(scores.dtype)
            return scores

    plain(model, **prompt(), max_new_tokens=2, logits_processor=LogitsProcessorList([Look()]))
    assert seen == [torch.float32] * 2


# ------------------------------------------------------------------------------------------------------------- caches


def test_the_name_of_the_cache_in_this_version():
    assert CACHE in inspect.signature(tiny().forward).parameters
    assert CACHE in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    assert CACHE in tiny()(**prompt())
    assert compat.CACHE_NAME == CACHE


def test_an_empty_dynamic_cache_is_prepared_and_says_it_is_nobodys():
    cache = arrived(tiny(), **prompt())[CACHE]
    assert type(cache) is DynamicCache
    assert cache.get_seq_length() == 0
    assert not getattr(cache, "_is_user_defined", False)


def test_the_users_own_cache_is_passed_through_and_marked():
    own = DynamicCache()
    cache = arrived(tiny(), **{CACHE: own}, **prompt())[CACHE]
    assert cache is own
    assert cache._is_user_defined


@pytest.mark.parametrize("family", FAMILIES)
def test_layer_classes_of_the_prepared_cache_tell_windows(family):
    cache = arrived(tiny(family), **prompt(1, family))[CACHE]
    passive = getattr(cache_utils, "DummyLayer", type(None))  # layers that share the K/V of others; a class since 5.23
    assert {type(layer) for layer in cache.layers} <= {DynamicLayer, DynamicSlidingWindowLayer, passive}
    if family == "gemma3n":
        assert len(cache.layers) == (4 if hasattr(cache_utils, "DummyLayer") else 2)
    windows = {layer.sliding_window for layer in cache.layers if isinstance(layer, DynamicSlidingWindowLayer)}
    row = FAMILIES[family]
    chunked = family == "llama4"
    assert windows == ({8} if row.window or chunked else set())


def test_a_model_with_recurrent_layers_shows_it_in_the_layer_classes():
    config = transformers.Qwen3NextConfig(
        num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], vocab_size=VOCABULARY
    )
    names = [type(layer).__name__ for layer in DynamicCache(config=config).layers]
    assert names[1] == "DynamicLayer"
    assert names[0] != "DynamicLayer"


def test_a_sliding_layer_keeps_columns_and_not_positions():
    """It cuts to the last `window - 1` columns whatever they are: rejected drafts would push real tokens out."""
    layer = DynamicSlidingWindowLayer(sliding_window=4)
    for column in range(8):
        states = torch.full((1, 1, 1, 1), float(column))
        layer.update(states, states)
    assert layer.keys.flatten().tolist() == [5.0, 6.0, 7.0]
    assert layer.get_seq_length() == 8


def test_a_dynamic_layer_keeps_columns_in_order_and_can_be_reset():
    layer = DynamicLayer()
    layer.update(torch.ones(2, 1, 3, 4), torch.zeros(2, 1, 3, 4))
    assert layer.keys.shape == (2, 1, 3, 4)
    assert layer.is_initialized
    layer.reset()
    assert layer.keys is None or layer.get_seq_length() == 0


# ---------------------------------------------------------------------------------------- the recipe for the forwards


def test_prefill_is_one_method_with_these_parameters():
    parameters = list(inspect.signature(GenerationMixin._prefill).parameters)
    assert parameters[:4] == ["self", "input_ids", "generation_config", "model_kwargs"]


def test_input_preparation_takes_these_parameters():
    parameters = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    for name in ("input_ids", "next_sequence_length", "attention_mask", "inputs_embeds", "is_first_iteration"):
        assert name in parameters


@pytest.mark.parametrize("family", ["llama", "qwen3_mixed", "gemma3", "qwen2_vl"])
def test_input_preparation_leaves_explicit_masks_and_positions_alone(family):
    model = tiny(family)
    mask = torch.ones(1, 1, 3, 7, dtype=torch.bool)
    masks = {"full_attention": mask, "sliding_attention": mask} if family in ("qwen3_mixed", "gemma3") else mask
    positions = torch.tensor([[4, 5, 5]])
    tokens = torch.tensor([[3, 4, 5]])
    prepared = model.prepare_inputs_for_generation(
        tokens, attention_mask=masks, position_ids=positions, is_first_iteration=False, **{CACHE: DynamicCache()}
    )
    assert torch.equal(prepared["input_ids"], tokens)
    assert torch.equal(prepared["position_ids"], positions)
    found = prepared["attention_mask"]
    if isinstance(masks, dict):
        assert {name: id(each) for name, each in found.items()} == {name: id(mask) for name in masks}
    else:
        assert found is mask


def logits(family: str, attention: str, mask: Any) -> torch.Tensor:
    """Logits of an unpadded prompt of 16 under an explicit mask; None is the model's own."""
    ids = prompt(1, family, length=16)["input_ids"]
    with torch.no_grad():
        return tiny(family, attention)(input_ids=ids, attention_mask=mask).logits


def causal(window: int | None = None) -> torch.Tensor:
    """A `(1, 1, 16, 16)` mask; a window of w sees the w last positions."""
    distance = torch.arange(16)[:, None] - torch.arange(16)[None, :]
    mask = distance >= 0
    return (mask if window is None else mask & (distance < window))[None, None]


def additive(mask: torch.Tensor) -> torch.Tensor:
    """The same mask, to be added to scores."""
    return torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)


def test_sdpa_takes_a_boolean_mask_and_uses_it_as_it_is():
    close = {"atol": 1e-4, "rtol": 1e-4}
    torch.testing.assert_close(logits("llama", "sdpa", causal()), logits("llama", "sdpa", None), **close)
    assert (logits("llama", "sdpa", causal(3)) - logits("llama", "sdpa", None)).abs().max() > 0.1


def test_eager_adds_its_mask_so_that_a_boolean_one_is_wrong():
    close = {"atol": 1e-4, "rtol": 1e-4}
    torch.testing.assert_close(logits("llama", "eager", additive(causal())), logits("llama", "eager", None), **close)
    assert (logits("llama", "eager", causal()) - logits("llama", "eager", None)).abs().max() > 0.1


def test_a_model_whose_layers_all_slide_takes_one_mask_that_the_caller_must_cut():
    close = {"atol": 1e-4, "rtol": 1e-4}
    torch.testing.assert_close(logits("mistral", "sdpa", causal(8)), logits("mistral", "sdpa", None), **close)
    assert (logits("mistral", "sdpa", causal()) - logits("mistral", "sdpa", None)).abs().max() > 0.1


@pytest.mark.parametrize("family", ["qwen3_mixed", "gemma3", "cohere2"])
def test_a_model_that_mixes_layers_takes_a_mask_per_layer_type(family):
    """A single 4D mask turns the window off in silence."""
    native = logits(family, "sdpa", None)
    masks = {"full_attention": causal(), "sliding_attention": causal(8)}
    torch.testing.assert_close(logits(family, "sdpa", masks), native, atol=1e-4, rtol=1e-4)
    assert (logits(family, "sdpa", causal()) - native).abs().max() > 1e-2


def test_a_chunked_layer_takes_its_mask_under_its_own_name():
    ids = torch.arange(16)
    chunks = causal() & (ids[:, None] // 8 == ids[None, :] // 8)
    masks = {"full_attention": causal(), "chunked_attention": chunks}
    native = logits("llama4", "sdpa", None)
    torch.testing.assert_close(logits("llama4", "sdpa", masks), native, atol=1e-4, rtol=1e-4)
    assert (logits("llama4", "sdpa", {**masks, "chunked_attention": causal()}) - native).abs().max() > 1e-2


def test_positions_given_to_the_forward_are_used():
    model, ids = tiny(), prompt(1)["input_ids"]
    with torch.no_grad():
        native = model(input_ids=ids).logits
        moved = model(input_ids=ids, position_ids=torch.arange(24).unsqueeze(0) * 2).logits
    assert (native - moved).abs().max() > 0.1


def _causal(size: int) -> torch.Tensor:
    return torch.ones(size, size, dtype=torch.bool).tril()[None, None]


def test_a_registered_attention_function_is_used_and_the_switch_is_the_config():
    calls = []

    def counted(module: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(module.layer_idx)
        return transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"](module, *args, **kwargs)

    AttentionInterface.register("tests_counted", counted)
    model = tiny()
    ids = prompt(1)["input_ids"]
    expected = model(input_ids=ids, attention_mask=_causal(24)).logits
    assert not calls
    model.config._attn_implementation_internal = "tests_counted"
    assert model.config._attn_implementation == "tests_counted"
    found = model(input_ids=ids, attention_mask=_causal(24)).logits
    assert calls == [0, 1]
    assert torch.equal(found, expected)


def test_only_models_that_follow_the_interface_may_be_switched():
    """Falcon asks the config for the literal name "sdpa": another name sends it down its eager path."""
    assert tiny("llama")._can_set_attn_implementation()
    assert not tiny("falcon")._can_set_attn_implementation()


@pytest.mark.skipif(torch.backends.mps.is_available() or torch.xpu.is_available(), reason="masked GQA is native there")
def test_a_mask_makes_stock_attention_copy_keys_and_values_to_every_query_head(monkeypatch):
    """What the package's own attention function is for."""
    from transformers.integrations import sdpa_attention

    copies = []

    def counted(states: torch.Tensor, groups: int) -> torch.Tensor:
        copies.append(groups)
        return states.repeat_interleave(groups, dim=1)

    monkeypatch.setattr(sdpa_attention, "repeat_kv", counted)
    model, ids = tiny(), prompt(1)["input_ids"]
    model(input_ids=ids)
    assert not copies
    model(input_ids=ids, attention_mask=_causal(24))
    assert copies == [2] * 4, "keys and values of two layers"


def test_hidden_states_by_index_count_from_this_base():
    """From 5.23 an index is one into the full tuple, before it is one of the layers' outputs."""
    model, ids = tiny(), prompt(1)["input_ids"]
    with torch.no_grad():
        full = model(input_ids=ids, output_hidden_states=True).hidden_states
        try:
            one = model(input_ids=ids, output_hidden_states=[1]).hidden_states
        except (TypeError, ValueError):
            pytest.skip("this version takes no list")
    assert len(full) == 3
    given = [each for each in one if each is not None]
    picked = [index for index, each in enumerate(full) if any(torch.equal(each, other) for other in given)]
    assert picked == ([1] if Version("5.23.0") <= VERSION else [2])


# ----------------------------------------------------------------------------------------------------- the class swap


def swapped(model: Any, name: str) -> Any:
    """The model with a class that has one more base."""

    class Extra:
        mark = True

    model.__class__ = type(name, (Extra, type(model)), {})
    return model


def test_a_swapped_class_keeps_isinstance_and_plain_generate():
    inputs = prompt(3)
    model = swapped(tiny(), "LlamaForCausalLM")
    assert isinstance(model, transformers.LlamaForCausalLM)
    assert model.mark
    assert torch.equal(plain(model, **inputs), plain(tiny(), **inputs))


def test_saving_writes_the_name_of_the_class(tmp_path):
    """Hence the swapped class must carry the model's own name."""
    swapped(tiny(), "SpecLlamaForCausalLM").save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["SpecLlamaForCausalLM"]


def test_decoding_methods_are_looked_up_on_the_class():
    model = tiny()
    called = []

    class Extra:
        def _sample(self, *args: Any, **kwargs: Any) -> Any:
            called.append(True)
            return super()._sample(*args, **kwargs)  # type: ignore[misc]

    model.__class__ = type("LlamaForCausalLM", (Extra, type(model)), {})
    plain(model, **prompt(), max_new_tokens=2)
    assert called == [True]


def test_enable_keeps_the_class_the_saved_files_and_plain_generate(tmp_path):
    inputs = prompt(3)
    model = hf_specdec.enable(tiny())
    assert isinstance(model, transformers.LlamaForCausalLM)
    assert hf_specdec.enable(model) is model, "enabling twice changes nothing"
    assert torch.equal(plain(model, **inputs), plain(tiny(), **inputs))
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is transformers.LlamaForCausalLM
    assert torch.equal(plain(loaded, **inputs), plain(tiny(), **inputs))


def test_an_enabled_model_can_be_copied_and_moved():
    model = copy.deepcopy(hf_specdec.enable(tiny()))
    inputs = prompt(1)
    found = plain(model.to("cpu"), **inputs, assistant_strategy="suffix")
    assert torch.equal(found, plain(tiny(), **inputs))


def test_other_models_of_the_class_are_not_touched():
    hf_specdec.enable(tiny())
    with pytest.raises((ValueError, TypeError), match="assistant_strategy"):
        plain(tiny(), **prompt(), assistant_strategy="suffix")


# -------------------------------------------------------------------------------------------- stock assisted decoding


def test_the_interface_of_a_stock_candidate_generator():
    assert list(inspect.signature(CandidateGenerator.get_candidates).parameters)[:2] == ["self", "input_ids"]
    parameters = list(inspect.signature(CandidateGenerator.update_candidate_strategy).parameters)
    assert parameters == ["self", "input_ids", "scores", "num_matches"]


def test_stock_assisted_decoding_serves_one_row_only():
    with pytest.raises(ValueError, match="batch"):
        plain(tiny(), **prompt(3), assistant_model=tiny(seed=1))


def test_synced_gpus_is_decided_inside_generate_and_not_handed_on():
    """With a callable the decision is lost, so the mixin takes it itself."""
    assert "synced_gpus" not in arrived(tiny(), synced_gpus=True, **prompt())
    assert "synced_gpus" in inspect.signature(GenerationMixin._has_unfinished_sequences).parameters
    assert compat.needs_synced_gpus(tiny()) is False


def test_lost_keywords_are_found_in_the_callers_frame():
    """What the bare callable goes by to refuse a streamer that it would never see."""
    model = tiny()
    with ForwardCounter(model) as forwards, pytest.raises(hf_specdec.UnsupportedOptionError, match="streamer"):
        plain(
            model,
            **prompt(),
            streamer=Recorder(),
            custom_generate=hf_specdec.speculative_generate,
            assistant_strategy="suffix",
        )
    assert forwards.count == 0


def test_generate_may_run_in_another_thread():
    """Frames, context variables and the attention switch are per thread."""
    model = hf_specdec.enable(tiny())
    inputs = prompt(1)
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(plain(model, **inputs, assistant_strategy="suffix")))
    thread.start()
    thread.join()
    assert torch.equal(found[0], plain(tiny(), **inputs))


# ------------------------------------------------------------------------------------------------- every option known

POPPED = ("tokenizer", "assistant_tokenizer", "trust_remote_code")


def known_options() -> dict[str, str]:
    """Every option of this version's `generate` and where it comes from."""
    config = dict.fromkeys(vars(GenerationConfig()), "a field of GenerationConfig")
    parameters = inspect.signature(GenerationMixin.generate).parameters.values()
    named = [each.name for each in parameters if each.name != "self" and each.kind is not each.VAR_KEYWORD]
    return config | dict.fromkeys((*named, *POPPED), "a parameter of `generate`")


def test_the_options_that_generate_pops_from_its_keywords():
    source = inspect.getsource(GenerationMixin.generate)
    source += inspect.getsource(GenerationMixin._extract_generation_mode_kwargs)
    popped = {line.split('kwargs.pop("')[1].split('"')[0] for line in source.splitlines() if 'kwargs.pop("' in line}
    assert popped - {"input_ids"} == set(POPPED)


@pytest.mark.parametrize("name", known_options())
def test_every_option_is_honoured_or_refused(name):
    where = known_options()[name]
    listed = [table for table in ("HONOURED", "REFUSED") if name in getattr(options, table)]
    assert listed, (
        f"`{name}` is {where} in transformers {VERSION} and in neither table of hf_specdec/options.py. Find out what "
        "it does in a decoding loop of ours: add it to HONOURED if it keeps its meaning, with a test, or to REFUSED "
        "with what to do instead."
    )
    assert len(listed) == 1, f"`{name}` is both honoured and refused in hf_specdec/options.py; it must be one of them."


def test_a_new_option_would_be_noticed(monkeypatch):
    """Control: an option that no table knows makes the walk fail."""
    real = GenerationConfig.__init__

    def with_more(self: GenerationConfig, **kwargs: Any) -> None:
        real(self, **kwargs)
        self.brand_new_option = None

    monkeypatch.setattr(GenerationConfig, "__init__", with_more)
    assert "brand_new_option" in known_options()
    with pytest.raises(AssertionError, match="brand_new_option"):
        test_every_option_is_honoured_or_refused("brand_new_option")


@pytest.mark.parametrize("name", sorted(options.REFUSED))
def test_every_refusal_says_what_to_do(name):
    sentence = len(options.REFUSED[name]) > 20 and options.REFUSED[name].endswith(".")
    assert sentence, f"REFUSED[{name!r}] must be a sentence that says what to do instead"


REFUSED_VALUES: dict[str, Any] = {
    "num_beams": 2,
    "prompt_lookup_num_tokens": 3,
    "assistant_early_exit": 1,
    "penalty_alpha": 0.5,
    "dola_layers": "low",
    "guidance_scale": 1.5,
    "token_healing": True,
    "assistant_ensemble_weight": 0.5,
    "low_memory": True,
    "use_mtp": True,
    "cache_implementation": "static",
    "use_cache": False,
}


@pytest.mark.parametrize("enabled", [True, False], ids=["enabled", "callable"])
@pytest.mark.parametrize("name", REFUSED_VALUES)
def test_a_refused_option_is_named_before_any_forward(name, enabled):
    model = tiny()
    keywords: dict[str, Any] = {"assistant_strategy": "suffix", name: REFUSED_VALUES[name]}
    if enabled:
        model = hf_specdec.enable(model)
    else:
        keywords["custom_generate"] = hf_specdec.speculative_generate
    # On the callable's route plain `generate` may complain first, in its own words.
    spelled = name.replace("_", "[_ ]")
    with ForwardCounter(model) as forwards, pytest.raises(ValueError, match=spelled) as caught:
        plain(model, **prompt(), **keywords)
    assert forwards.count == 0
    if enabled:
        assert isinstance(caught.value, hf_specdec.UnsupportedOptionError)
