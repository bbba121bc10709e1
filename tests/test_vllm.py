"""vLLM's `speculative_config`: there and back, and what has no counterpart on the other side is refused."""

import dataclasses
import json

import pytest
from cases import draft_model, spec_model
from conftest import prompt

from hf_specdec import (
    Auto,
    Cascade,
    DraftModel,
    Free,
    LayerSkip,
    Lookahead,
    Merge,
    PromptLookup,
    QuantizedSelf,
    Recycling,
    SpecDecConfig,
    SpecDecError,
    Suffix,
    SuffixMemory,
    known_strategies,
)
from hf_specdec.vllm import METHODS

CHAINS = {"max_width": 1, "schedule": "constant"}
CONFIGS = [
    SpecDecConfig(strategy, verifier=verifier, max_draft_tokens=tokens, **CHAINS)
    for verifier in ("exact", "rejection", "block")
    for strategy, tokens in (
        (PromptLookup(max_ngram=4, min_ngram=2), 7),
        (Suffix(max_context=9, min_probability=0.3, max_tokens_factor=2.0), 11),
        (DraftModel("org/small"), 3),
    )
]
NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 8}
SMALL = {"method": "draft_model", "model": "org/small", "num_speculative_tokens": 5}
DRAWN = {"draft_sample_method": "probabilistic"}
WHOLE = [
    {**NGRAM, "prompt_lookup_max": 5, "prompt_lookup_min": 2},
    {**NGRAM, "prompt_lookup_max": 5, "prompt_lookup_min": 2, "rejection_sample_method": "standard"},
    {
        **SUFFIX,
        "suffix_decoding_max_tree_depth": 24,
        "suffix_decoding_max_spec_factor": 1.0,
        "suffix_decoding_min_token_prob": 0.1,
        "suffix_decoding_max_cached_requests": 0,
        "rejection_sample_method": "block",
    },
    SMALL,
    {**SMALL, **DRAWN, "rejection_sample_method": "standard"},
    {**SMALL, **DRAWN, "rejection_sample_method": "block"},
]


def named(config: SpecDecConfig) -> str:
    return f"{config.resolved.name}-{config.verifier}"


@pytest.mark.parametrize("config", CONFIGS, ids=named)
def test_a_config_comes_back(config):
    values = json.loads(json.dumps(config.to_vllm()))
    assert SpecDecConfig.from_vllm(values).to_dict() == config.to_dict()


@pytest.mark.parametrize("values", WHOLE, ids=str)
def test_what_vllm_is_given_comes_back(values):
    assert SpecDecConfig.from_vllm(values).to_vllm() == values


def test_the_names_of_vllm():
    assert SpecDecConfig("prompt_lookup").to_vllm() == {
        "method": "ngram",
        "num_speculative_tokens": PromptLookup.default_draft_tokens,
        "prompt_lookup_max": 5,
        "prompt_lookup_min": 1,
    }
    assert SpecDecConfig(Suffix(max_context=9, min_probability=0.3, max_tokens_factor=2.0)).to_vllm() == {
        "method": "suffix",
        "num_speculative_tokens": Suffix.default_draft_tokens,
        "suffix_decoding_max_tree_depth": 9,
        "suffix_decoding_min_token_prob": 0.3,
        "suffix_decoding_max_spec_factor": 2.0,
        "suffix_decoding_max_cached_requests": 0,
    }
    drawn = {"rejection_sample_method": "standard", "draft_sample_method": "probabilistic"}
    config = SpecDecConfig(DraftModel("org/small"), verifier="rejection", max_draft_tokens=5)
    assert config.to_vllm() == {**SMALL, **drawn}


@pytest.mark.parametrize(
    ("values", "strategy", "tokens"),
    [
        (NGRAM, PromptLookup(max_ngram=5, min_ngram=5), 4),
        ({**NGRAM, "prompt_lookup_max": 7}, PromptLookup(max_ngram=7, min_ngram=7), 4),
        ({**NGRAM, "prompt_lookup_min": 3}, PromptLookup(max_ngram=3, min_ngram=3), 4),
        ({"model": "[ngram]", "num_speculative_tokens": 2}, PromptLookup(max_ngram=5, min_ngram=5), 2),
        ({**NGRAM, "model": "ngram", "max_model_len": None}, PromptLookup(max_ngram=5, min_ngram=5), 4),
        ({**NGRAM, "parallel_drafting": False}, PromptLookup(max_ngram=5, min_ngram=5), 4),
        ({"method": "suffix"}, Suffix(max_context=24, min_probability=0.1, max_tokens_factor=1.0), 24),
        (
            {"method": "suffix", "suffix_decoding_max_tree_depth": 12},
            Suffix(max_context=12, min_probability=0.1, max_tokens_factor=1.0),
            12,
        ),
        ({**SUFFIX, "suffix_decoding_min_token_prob": 0}, Suffix(24, min_probability=0, max_tokens_factor=1.0), 8),
    ],
    ids=str,
)
def test_what_is_left_out_has_the_default_of_vllm(values, strategy, tokens):
    config = SpecDecConfig.from_vllm(values)
    assert (config.resolved, config.draft_tokens()) == (strategy, tokens)
    assert (config.max_width, config.schedule, config.verifier) == (1, "constant", "exact")


@pytest.mark.parametrize(
    ("fields", "verifier"),
    [
        ({}, "exact"),
        ({"rejection_sample_method": "standard"}, "exact"),
        ({"rejection_sample_method": "standard", "draft_sample_method": "greedy"}, "exact"),
        (DRAWN, "rejection"),
        ({"rejection_sample_method": "block", **DRAWN}, "block"),
    ],
    ids=str,
)
def test_the_verifier_of_a_draft_model_follows_how_it_is_sampled(fields, verifier):
    assert SpecDecConfig.from_vllm({**SMALL, **fields}).verifier == verifier


def test_a_longest_path_is_a_limit_of_a_chain():
    assert SpecDecConfig("prompt_lookup", max_draft_tokens=8, max_depth=3).to_vllm()["num_speculative_tokens"] == 3


OTHERS = [
    Auto(),
    Cascade(strategies=["prompt_lookup", "suffix"]),
    Free(),
    LayerSkip(exit_layer=1),
    Lookahead(),
    Merge(strategies=["prompt_lookup", "suffix"]),
    QuantizedSelf(),
    Recycling(),
]


def test_every_strategy_is_translated_or_among_those_refused_below():
    own = {name for name, each in known_strategies().items() if each.__module__.startswith("hf_specdec.")}
    assert {each.name for each in (*OTHERS, *METHODS)} == own


@pytest.mark.parametrize(
    ("config", "says"),
    [
        *((SpecDecConfig(strategy), f"'{strategy.name}' has no counterpart") for strategy in OTHERS),
        (SpecDecConfig("suffix", verifier="typical"), "verifier='typical'"),
        (SpecDecConfig("suffix", verifier="threshold", verifier_options={"threshold": 0.5}), "verifier='threshold'"),
        (SpecDecConfig("suffix", schedule="adaptive"), "schedule='adaptive'"),
        (SpecDecConfig("suffix", max_width=2), "max_width=2"),
        (SpecDecConfig("suffix", max_draft_tokens=0), "max_draft_tokens=0"),
        (SpecDecConfig(Suffix(memory=SuffixMemory())), "memory="),
        (SpecDecConfig(DraftModel("org/small", vocabulary=[1, 2])), "vocabulary="),
        (SpecDecConfig(DraftModel("org/small", tokenizer=object())), "tokenizer="),
        (SpecDecConfig(draft_model()), "save_pretrained"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_vllm_has_no_counterpart_of_is_refused(config, says):
    with pytest.raises(SpecDecError) as caught:
        config.to_vllm()
    assert says in str(caught.value)


def translated(config: SpecDecConfig) -> dict[str, object] | str:
    """What vLLM is given, or why not."""
    try:
        return config.to_vllm()
    except SpecDecError as error:
        return str(error)


@pytest.mark.parametrize("strategy", [Suffix(), PromptLookup(), DraftModel("org/small")], ids=lambda each: each.name)
def test_no_option_of_a_strategy_is_dropped(strategy):
    other = {"max_context": 3, "min_probability": 0.7, "max_tokens_factor": 9.0, "memory": SuffixMemory()}
    other |= {"max_ngram": 9, "min_ngram": 2, "model": "org/other", "tokenizer": object(), "vocabulary": [3]}
    values = SpecDecConfig(strategy).to_vllm()
    for option in dataclasses.fields(strategy):
        changed = SpecDecConfig(dataclasses.replace(strategy, **{option.name: other[option.name]}))
        answer = translated(changed)
        assert option.name in answer if isinstance(answer, str) else answer != values


@pytest.mark.parametrize(
    ("values", "says"),
    [
        *(
            ({"method": method, "model": "org/head", "num_speculative_tokens": 3}, f"method={method!r}")
            for method in ("eagle", "eagle3", "medusa", "mtp", "mlp_speculator", "ngram_gpu", "dflash", 7, ["ngram"])
        ),
        ({"model": "org/small", "num_speculative_tokens": 5}, "names no method"),
        ("ngram", "it is no mapping"),
        ({"method": "ngram"}, "num_speculative_tokens=None"),
        ({**NGRAM, "num_speculative_tokens": 0}, "num_speculative_tokens=0"),
        ({**NGRAM, "num_speculative_tokens": True}, "num_speculative_tokens=True"),
        ({**NGRAM, "prompt_lookup_max": 2, "prompt_lookup_min": 3}, "min_ngram=3 exceeds max_ngram=2"),
        ({**NGRAM, "prompt_lookup_max": 0}, "ngram=0"),
        ({**NGRAM, "suffix_decoding_max_tree_depth": 8}, "suffix_decoding_max_tree_depth=8"),
        ({**NGRAM, "promt_lookup_max": 3}, "promt_lookup_max=3"),
        ({**NGRAM, "model": "org/small"}, "model='org/small'"),
        ({**NGRAM, **DRAWN}, "draft_sample_method='probabilistic'"),
        ({**NGRAM, "rejection_sample_method": "synthetic"}, "rejection_sample_method='synthetic'"),
        ({**NGRAM, "num_speculative_tokens_per_batch_size": [[1, 8, 4]]}, "num_speculative_tokens_per_batch_size="),
        ({**SUFFIX, "suffix_decoding_max_cached_requests": 100}, 'Suffix(memory="new")'),
        ({**SUFFIX, "suffix_decoding_max_spec_factor": 0}, "max_tokens_factor=0"),
        ({**SMALL, "draft_tensor_parallel_size": 2}, "draft_tensor_parallel_size=2"),
        ({**SMALL, "use_heterogeneous_vocab": True}, "use_heterogeneous_vocab=True"),
        ({**SMALL, "draft_sample_method": "gumbel"}, "draft_sample_method='gumbel'"),
        ({**SMALL, "rejection_sample_method": "block"}, "draft_sample_method='probabilistic'"),
        ({**SMALL, "model": None}, "needs 'model'"),
    ],
    ids=str,
)
def test_what_there_is_no_counterpart_of_here_is_refused(values, says):
    with pytest.raises(SpecDecError) as caught:
        SpecDecConfig.from_vllm(values)
    assert says in str(caught.value)


def test_a_loaded_model_stands_for_the_one_that_is_named():
    for values in (SMALL, {**SMALL, "model": None}):
        assert SpecDecConfig.from_vllm(values, draft_model=draft_model()).resolved.model is draft_model()
    with pytest.raises(SpecDecError, match="draft_model= goes with"):
        SpecDecConfig.from_vllm(NGRAM, draft_model=draft_model())


@pytest.mark.parametrize("values", [{**NGRAM, "prompt_lookup_min": 1}, SUFFIX, {**SMALL, **DRAWN}], ids=str)
def test_what_comes_from_vllm_decodes(values):
    draft = draft_model() if values["method"] == "draft_model" else None
    inputs = {**prompt(), "max_new_tokens": 16, "do_sample": False}
    plain = spec_model().generate(**inputs)
    config = SpecDecConfig.from_vllm(values, draft_model=draft)
    output = spec_model().generate(**inputs, assistant_strategy=config, return_dict_in_generate=True)
    assert output.sequences.tolist() == plain.tolist()
    assert output.speculation.num_draft_tokens > 0
