"""Cases 10 and 15: what `generate` returns besides ids, and a cache that serves the next turn."""

import pytest
import torch
from cases import (
    CACHE,
    FEW_OWN_WAYS,
    ORACLES,
    OWN_WAYS,
    Way,
    base_text,
    call,
    compare,
    plain_model,
    row_length,
    spec_model,
    strategy,
    ways,
)
from conftest import plain, prompt, tiny
from transformers.generation import GenerateDecoderOnlyOutput

import hf_specdec

TOLERANCE = {"atol": 2e-4, "rtol": 1e-4}  # fp32 rounding of hidden states of size 60
EVERYTHING = {
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
    "output_attentions": True,
}


def assert_entries_close(ours, plain, lengths, real_columns):
    """One entry per emitted token. A row counts up to its own end, and a prefill's padding queries do not count."""
    assert len(ours) == len(plain) == max(lengths)
    for step, (our_entry, plain_entry) in enumerate(zip(ours, plain)):
        rows = [row for row, length in enumerate(lengths) if step < length]
        if isinstance(our_entry, torch.Tensor):
            our_entry, plain_entry = (our_entry,), (plain_entry,)
        assert len(our_entry) == len(plain_entry)
        for our_tensor, plain_tensor in zip(our_entry, plain_entry):
            assert our_tensor.shape == plain_tensor.shape
            assert our_tensor.dtype == plain_tensor.dtype
            for row in rows:
                skip = real_columns[row] if step == 0 and our_tensor.dim() > 2 else 0
                torch.testing.assert_close(
                    our_tensor[row].narrow(-2, skip, our_tensor.shape[-2] - skip) if skip else our_tensor[row],
                    plain_tensor[row].narrow(-2, skip, our_tensor.shape[-2] - skip) if skip else plain_tensor[row],
                    **TOLERANCE,
                )


@pytest.mark.parametrize("stop", ["length", "eos"])
@ways(ORACLES + ("tree-0.3", "pruned-0.3", "prompt_lookup", "draft_model"), also=OWN_WAYS)
def test_case_10_one_entry_per_emitted_token(way, stop):
    text = base_text(way)
    eos = [text[0][13], text[-1][6]] if stop == "eos" else []
    options = {"eos_token_id": eos} if eos else {}
    models = (plain_model("llama", "eager"), spec_model("llama", "eager"))
    pair = compare(way, replay=text, models=models, **EVERYTHING, **options)
    lengths = [row_length(ids, eos) for ids in pair.text]
    padding = (prompt(way.batch)["attention_mask"] == 0).sum(-1).tolist()
    for name in ("scores", "logits", "hidden_states", "attentions"):
        assert_entries_close(getattr(pair.spec, name), getattr(pair.plain, name), lengths, padding)


@pytest.mark.parametrize("name", list(EVERYTHING))
@ways(("oracle-0.3", "tree-0.3"), samples=(False,))
def test_case_10_each_output_alone(way, name):
    pair = compare(way, **{name: True}, models=(plain_model("llama", "eager"), spec_model("llama", "eager")))
    assert isinstance(pair.spec, GenerateDecoderOnlyOutput)
    assert [key for key in pair.plain if pair.spec.get(key) is None] == []
    assert [key for key in pair.spec if key not in pair.plain and key != "speculation"] == []


@ways(("oracle-0.3", "tree-0.3", "draft_model"), samples=(True,))
def test_case_10_scores_after_processors(way):
    options = {"repetition_penalty": 1.5, "top_k": 7, "no_repeat_ngram_size": 2}
    pair = compare(way, output_scores=True, output_logits=True, **options)
    for ours, theirs in zip(pair.spec.scores + pair.spec.logits, pair.plain.scores + pair.plain.logits, strict=True):
        torch.testing.assert_close(ours, theirs, **TOLERANCE)


@ways(("oracle-0.3", "tree-0.3"))
def test_case_10_transition_scores(way):
    pair = compare(way, output_scores=True)
    values = [
        model.compute_transition_scores(output.sequences, output.scores, normalize_logits=True)
        for model, output in ((plain_model(), pair.plain), (spec_model(), pair.spec))
    ]
    torch.testing.assert_close(values[1], values[0], **TOLERANCE)


@pytest.mark.parametrize("stop", ["length", "eos"])
@ways(ORACLES + ("tree-0.3", "pruned-0.3", "suffix", "draft_model"), also=OWN_WAYS)
def test_case_15_the_returned_cache_holds_what_plain_generate_holds(way, stop):
    text = base_text(way)
    eos = [text[0][13]] if stop == "eos" else []
    pair = compare(way, replay=text, **({"eos_token_id": eos} if eos else {}))
    assert pair.spec.cache.get_seq_length() == pair.spec.sequences.shape[1] - 1
    padding = (prompt(way.batch)["attention_mask"] == 0).sum(-1).tolist()
    for ours, theirs in zip(pair.spec.cache.layers, pair.plain.cache.layers, strict=True):
        assert type(ours) is type(theirs)
        assert ours.keys.shape == theirs.keys.shape
        for row, ids in enumerate(pair.text):
            end = pair.prompt_length + row_length(ids, eos) - 1
            for name in ("keys", "values"):
                both = (getattr(layer, name)[row, :, padding[row] : end] for layer in (ours, theirs))
                torch.testing.assert_close(*both, **TOLERANCE)


def second_turn(inputs, first, cache, more: int = 5) -> dict:
    """The inputs of a next turn: everything so far, some new ids, and the cache."""
    new = torch.arange(10, 10 + more).expand(first.shape[0], more)
    ids = torch.cat([first, new], dim=1)
    mask = torch.cat([inputs["attention_mask"], torch.ones_like(ids[:, inputs["attention_mask"].shape[1] :])], dim=1)
    return {"input_ids": ids, "attention_mask": mask, CACHE: cache}


@pytest.mark.parametrize("next_by", ["plain", "speculative"])
@pytest.mark.parametrize("first_by", ["plain", "speculative"])
@ways(("oracle-0", "oracle-0.3", "tree-0.3", "draft_model"), also=FEW_OWN_WAYS)
def test_case_15_next_turn_with_the_cache(way, first_by, next_by):
    inputs = prompt(way.batch)
    text = base_text(way)

    def turn(model, by, inputs, replay):
        options = {"assistant_strategy": strategy(way.strategy, replay)} if by == "speculative" else {}
        return call(model, inputs, way, max_new_tokens=14, **options)

    expected_first = turn(plain_model(), "plain", inputs, None)
    expected = turn(
        plain_model(), "plain", second_turn(inputs, expected_first.sequences, expected_first.cache), None
    ).sequences
    first = turn(spec_model(), first_by, inputs, text)
    last = turn(
        spec_model(), next_by, second_turn(inputs, first.sequences, first.cache), expected[:, 24 + 14 + 5 :].tolist()
    )
    assert last.sequences.tolist() == expected.tolist()
    assert last.cache.get_seq_length() == expected.shape[1] - 1


@ways(("oracle-0", "tree-0", "suffix"), batches=(1,), samples=(False,))
def test_case_15_only_the_last_id_is_new(way):
    """Continue a finished call from its own ids: one id is not in the cache yet."""
    inputs = prompt(1)
    long = base_text(way)[0]
    first = call(spec_model(), inputs, way, max_new_tokens=10, assistant_strategy=strategy(way.strategy, [long]))
    again = {"input_ids": first.sequences, "attention_mask": torch.ones_like(first.sequences), CACHE: first.cache}
    last = call(spec_model(), again, way, max_new_tokens=14, assistant_strategy=strategy(way.strategy, [long[10:]]))
    assert last.sequences[0, 24:].tolist() == long


def test_statistics_come_with_a_dict():
    output = call(spec_model(), prompt(1), Way("suffix", 1, False), assistant_strategy="suffix")
    assert output.speculation.num_emitted_tokens == 24
    assert output["speculation"] is output.speculation


@pytest.mark.parametrize("batch", [1, 3])
def test_hidden_states_with_an_axis_before_the_rows(batch):
    """Gemma 3n's first states have four parts for each row."""
    model = hf_specdec.enable(tiny("gemma3n"))
    options = {"max_new_tokens": 5, "output_hidden_states": True, "return_dict_in_generate": True}
    expected = plain(model, **prompt(batch, "gemma3n"), **options)
    got = plain(model, **prompt(batch, "gemma3n"), **options, assistant_strategy="suffix")
    for ours, own in zip(got.hidden_states[1:], expected.hidden_states[1:], strict=True):
        for mine, theirs in zip(ours, own, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
