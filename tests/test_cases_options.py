"""Cases 11, 12, 14, 23 and 36, and the ways to name a strategy: an option is honoured or refused by name."""

import pytest
import torch
from cases import (
    CACHE,
    FEW_OWN_WAYS,
    OWN_WAYS,
    SOME,
    STRATEGIES,
    Way,
    base_text,
    call,
    compare,
    draft_model,
    plain_model,
    refused,
    spec_model,
    strategy,
    suppress_refusal,
    tokenizer,
    ways,
)
from conftest import prompt
from transformers import DynamicCache, GenerationConfig, StaticCache, pipeline
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

import hf_specdec
from hf_specdec import SpecDecConfig, SpecDecError
from hf_specdec.drafters import DraftModel, PromptLookup, Suffix, SuffixMemory

GREEDY = Way("suffix", 1, False)
REFUSED = {
    "num_beams": {"num_beams": 2},
    "num_beams_sampled": {"num_beams": 2, "do_sample": True},
    "penalty_alpha": {"penalty_alpha": 0.6, "top_k": 4},
    "dola_layers": {"dola_layers": "low"},
    "constraints": {"constraints": [object()]},
    "force_words_ids": {"force_words_ids": [[5]]},
    "num_beam_groups": {"num_beam_groups": 2},
    "diversity_penalty": {"diversity_penalty": 0.5},
}
EITHER = {
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 4},
    "assistant_early_exit": {"assistant_early_exit": 1},
    "token_healing": {"token_healing": True},
    "prefill_chunk_size": {"prefill_chunk_size": 7},
    "use_mtp": {"use_mtp": True},
    "low_memory": {"low_memory": True},
    "assistant_model": {"assistant_model": draft_model},
    "use_cache": {"use_cache": False},
    "compile_config": {"disable_compile": True},
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_case_11_other_decoding_modes_are_refused(name):
    option = name.removesuffix("_sampled")
    with refused(spec_model(), option, error=ValueError):
        spec_model().generate(**prompt(1), **REFUSED[name], max_new_tokens=6, assistant_strategy="suffix")


@pytest.mark.parametrize("name", [name for name in REFUSED if name not in ("constraints", "force_words_ids")])
def test_case_11_also_from_a_generation_config(name):
    config = GenerationConfig(**{"max_new_tokens": 6, **REFUSED[name]})
    with refused(spec_model(), name.removesuffix("_sampled"), error=ValueError):
        spec_model().generate(**prompt(1), generation_config=config, assistant_strategy="suffix")


@pytest.mark.parametrize("name", list(EITHER))
def test_options_are_honoured_or_refused_by_name(name):
    options = {key: value() if callable(value) else value for key, value in EITHER[name].items()}
    expected = base_text(GREEDY)
    try:
        output = call(spec_model(), prompt(1), GREEDY, assistant_strategy="suffix", **options)
    except SpecDecError:
        with refused(spec_model(), name):
            call(spec_model(), prompt(1), GREEDY, assistant_strategy="suffix", **options)
    else:
        assert output.sequences[:, 24:].tolist() == expected


@pytest.mark.parametrize(
    "implementation",
    ["dynamic", "static", "offloaded", "offloaded_static", "quantized", "hybrid", "sliding_window", "paged"],
)
def test_case_14_cache_implementations(implementation):
    expected = base_text(GREEDY)
    try:
        output = call(
            spec_model(), prompt(1), GREEDY, cache_implementation=implementation, assistant_strategy="suffix"
        )
    except SpecDecError:
        with refused(spec_model(), "cache_implementation"):
            call(spec_model(), prompt(1), GREEDY, cache_implementation=implementation, assistant_strategy="suffix")
    else:
        assert output.sequences[:, 24:].tolist() == expected


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@ways(("suffix", "oracle-0.3", "tree-0.3"), samples=(False,), also=OWN_WAYS)
def test_case_14_a_users_own_cache(way, kind):
    def own():
        return DynamicCache() if kind == "dynamic" else StaticCache(config=plain_model().config, max_cache_len=64)

    text = base_text(way)
    cache = own()
    options = {CACHE: cache, "assistant_strategy": strategy(way.strategy, text)}
    try:
        output = call(spec_model(), prompt(way.batch), way, **options)
    except SpecDecError:
        with refused(spec_model(), CACHE, "cache"):
            call(spec_model(), prompt(way.batch), way, **{**options, CACHE: own()})
    else:
        assert output.sequences[:, 24:].tolist() == text
        assert cache.get_seq_length() == output.sequences.shape[1] - 1, (
            "the user's object must be the one that is filled"
        )


@ways(SOME, samples=(True,), also=OWN_WAYS)
def test_case_12_num_return_sequences(way):
    pair = compare(way, num_return_sequences=3, replay=base_text(way, num_return_sequences=3))
    assert len(pair.text) == 3 * way.batch
    assert len({tuple(ids) for ids in pair.text}) > way.batch, "the rows of one prompt must differ"
    assert len(pair.spec.speculation.rows) == 3 * way.batch


@ways(STRATEGIES, also=OWN_WAYS)
def test_case_12_rows_of_a_ragged_batch(way):
    pair = compare(way)
    if not way.sample and way.batch == 3:
        for row in range(way.batch):
            alone = {name: tensor[row : row + 1] for name, tensor in prompt(3).items()}
            assert base_text(way._replace(batch=1), inputs=alone) == [pair.text[row]]


@pytest.mark.parametrize("length", [0, 1, 2])
@ways(SOME, also=FEW_OWN_WAYS)
def test_case_23_short_drafts(way, length):
    text = base_text(way)
    config = SpecDecConfig(strategy=strategy(way.strategy, text), max_draft_tokens=length)
    stats = compare(way, replay=text, assistant_strategy=config).spec.speculation
    assert stats.num_draft_tokens <= length * stats.num_spec_steps


@pytest.mark.parametrize("sizes", [(1, 1), (2, 2), (10, 1), (100, 3)])
@ways(("prompt_lookup",))
def test_case_23_ngram_sizes(way, sizes):
    compare(way, assistant_strategy=PromptLookup(max_ngram=sizes[0], min_ngram=sizes[1]))


@pytest.mark.parametrize("sizes", [(0, 0), (3, 0), (1, 2), (-1, -1)])
def test_case_23_impossible_ngram_sizes(sizes):
    with pytest.raises(SpecDecError, match="ngram"):
        PromptLookup(max_ngram=sizes[0], min_ngram=sizes[1])


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ("sufix", ("sufix", "'suffix'")),
        ("promptlookup", ("promptlookup", "'prompt_lookup'")),
        ({"strategy": "draftmodel"}, ("draftmodel", "'draft_model'")),
        ({"strategy": "suffix", "verifer": "exact"}, ("verifer", "verifier")),
        ({"strategy": "suffix", "verifier": "exat"}, ("exat", "'exact'")),
        ({"strategy": "suffix", "schedule": "constnt"}, ("constnt", "'constant'")),
        ({"strategy": "prompt_lookup", "strategy_options": {"max_ngrm": 3}}, ("max_ngrm", "'max_ngram'")),
        ({"strategy": "suffix", "max_draft_tokens": -1}, ("max_draft_tokens", "-1")),
        ({"strategy": "suffix", "max_draft_tokens": 2.5}, ("max_draft_tokens", "2.5")),
        ({"strategy": "suffix", "max_draft_tokens": "8"}, ("max_draft_tokens", "8")),
        (3, ("assistant_strategy", "3")),
        (["suffix"], ("assistant_strategy", "suffix")),
    ],
    ids=str,
)
def test_case_36_errors_name_what_was_asked_and_the_nearest_valid_one(asked, names):
    for name in names:
        with refused(spec_model(), name):
            spec_model().generate(**prompt(1), max_new_tokens=4, assistant_strategy=asked)


def test_case_36_a_config_is_checked_when_it_is_made():
    for wrong in ({"strategy": "sufix"}, {"verifier": "exat"}, {"schedule": "constnt"}, {"max_draft_tokens": -1}):
        with pytest.raises(SpecDecError):
            SpecDecConfig(**{"strategy": "suffix", **wrong})


def test_case_36_a_strategy_for_generate_without_enable():
    with pytest.raises(ValueError, match="assistant_strategy"):
        plain_model().generate(**prompt(1), max_new_tokens=4, assistant_strategy="suffix")


FORMS = {
    "name": lambda: "prompt_lookup",
    "strategy": lambda: PromptLookup(max_ngram=2, min_ngram=1),
    "model": draft_model,
    "draft_model_strategy": lambda: DraftModel(draft_model()),
    "suffix_with_memory": lambda: Suffix(memory=SuffixMemory()),
    "config": lambda: SpecDecConfig(strategy="prompt_lookup", strategy_options={"max_ngram": 2}, max_draft_tokens=5),
    "config_of_a_strategy": lambda: SpecDecConfig(strategy=DraftModel(draft_model()), verifier="exact"),
    "dict": lambda: {"strategy": "suffix", "max_draft_tokens": 6, "schedule": "constant"},
    "candidate_generator": lambda: lambda **_: PromptLookupCandidateGenerator(num_output_tokens=4, max_length=1000),
}


@pytest.mark.parametrize("form", list(FORMS))
@ways(("suffix",))
@pytest.mark.usefixtures("constant_schedule")
def test_every_form_of_a_strategy(way, form):
    pair = compare(way, assistant_strategy=FORMS[form]())
    assert pair.spec.speculation.num_draft_tokens > 0


@pytest.mark.parametrize("form", list(FORMS))
@pytest.mark.parametrize("batch", [1, 3])
def test_every_form_without_enable(form, batch):
    output = plain_model().generate(
        **prompt(batch), max_new_tokens=24, do_sample=False, custom_generate=hf_specdec.speculative_generate,
        assistant_strategy=FORMS[form](),
    )  # fmt: skip
    assert output[:, 24:].tolist() == base_text(Way("suffix", batch, False))


def test_stop_strings_without_enable_are_honoured_or_refused():
    text = base_text(GREEDY)[0]
    options = {"stop_strings": [tokenizer().decode(text[6:8])], "tokenizer": tokenizer(), "do_sample": False}
    expected = plain_model().generate(**prompt(1), max_new_tokens=24, **options)
    with suppress_refusal("tokenizer"):
        output = plain_model().generate(
            **prompt(1), max_new_tokens=24, **options, assistant_strategy="suffix",
            custom_generate=hf_specdec.speculative_generate,
        )  # fmt: skip
        assert torch.equal(output, expected)


@ways(("suffix",))
def test_no_strategy_is_plain_generate(way):
    expected = call(plain_model(), prompt(way.batch), way)
    output = call(spec_model(), prompt(way.batch), way, assistant_strategy=None)
    assert torch.equal(output.sequences, expected.sequences)
    assert type(output) is type(expected)
    assert not hasattr(output, "speculation")


@ways(("suffix",))
def test_a_tensor_comes_back_unless_a_dict_is_asked_for(way):
    pair = compare(way, return_dict_in_generate=True)
    output = call(spec_model(), prompt(way.batch), way, return_dict_in_generate=False, assistant_strategy="suffix")
    assert isinstance(output, torch.Tensor)
    assert torch.equal(output, pair.plain.sequences)


def test_pipeline_passes_the_strategy_through():
    texts = ["abcdeabcde", "Zeta9"]
    outputs = []
    for model, options in ((plain_model(), {}), (spec_model(), {"assistant_strategy": "suffix"})):
        pipe = pipeline("text-generation", model=model, tokenizer=tokenizer(), device="cpu")
        options = {"max_new_tokens": 12, "do_sample": False, **options}
        outputs.append([pipe(texts[0], **options), pipe(texts, batch_size=2, **options)])
    assert outputs[0] == outputs[1]
