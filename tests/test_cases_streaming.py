"""Case 13: what a streamer gets is the final text, in order, each token once, and one end."""

import pytest
import torch
from cases import (
    ORACLES,
    OWN_WAYS,
    SOME,
    Recorder,
    base_text,
    call,
    compare,
    forward_widths,
    plain_model,
    spec_model,
    strategy,
    suppress_refusal,
    tokenizer,
    ways,
)
from conftest import prompt
from transformers import TextIteratorStreamer, TextStreamer

import hf_specdec


@pytest.mark.parametrize("stop", ["length", "eos"])
@ways(batches=(1,), also=OWN_WAYS)
def test_case_13_stream_equals_the_text(way, stop):
    text = base_text(way)
    options = {"max_new_tokens": 13} if stop == "length" else {"eos_token_id": text[0][10]}
    pair = compare(way, replay=text, fresh=lambda: {"streamer": Recorder()}, **options)
    streamer = pair.spec_options["streamer"]
    assert torch.equal(streamer.puts[0], prompt(1)["input_ids"]), "the prompt comes first, as it was given"
    streamed = [token for put in streamer.puts[1:] for token in put.flatten().tolist()]
    assert streamed == pair.text[0]
    assert streamer.ends == 1


@ways(SOME, batches=(3,), also=OWN_WAYS)
def test_case_13_stream_of_a_batch(way):
    text = base_text(way)
    pair = compare(way, replay=text, fresh=lambda: {"streamer": Recorder()}, eos_token_id=[text[0][10], text[1][4]])
    ours, plain = (options["streamer"] for options in (pair.spec_options, pair.plain_options))
    assert [put.tolist() for put in ours.puts] == [put.tolist() for put in plain.puts]
    assert ours.ends == plain.ends == 1


@pytest.mark.parametrize("skip_prompt", [False, True])
@ways(("oracle-0.3", "tree-0.3", "suffix"), batches=(1,))
def test_case_13_text_streamer(way, skip_prompt, capsys):
    text = base_text(way)
    printed = []
    for chosen in (None, strategy(way.strategy, text)):
        call(
            spec_model(), prompt(1), way, streamer=TextStreamer(tokenizer(), skip_prompt=skip_prompt),
            assistant_strategy=chosen,
        )  # fmt: skip
        printed.append(capsys.readouterr().out)
    assert printed[1] == printed[0] != ""


def test_case_13_iterator_streamer():
    streamer = TextIteratorStreamer(tokenizer(), skip_prompt=True)
    output = spec_model().generate(
        **prompt(1), max_new_tokens=12, do_sample=False, streamer=streamer, assistant_strategy="suffix"
    )
    assert "".join(streamer) == tokenizer().decode(output[0, 24:])


@ways((*ORACLES, "tree-0.3"), batches=(1,), samples=(False,))
def test_case_13_stream_is_timely(way):
    """Tokens reach the streamer round by round, not all at the end."""
    rounds_seen = []

    class Watch(Recorder):
        def put(self, value):
            super().put(value)
            rounds_seen.append(len(widths))

    with forward_widths(spec_model()) as widths:
        call(spec_model(), prompt(1), way, streamer=Watch(), assistant_strategy=strategy(way.strategy, base_text(way)))
    assert len(set(rounds_seen)) >= 3


def test_streamer_without_enable():
    """A callable does not get the streamer from `generate`: it streams or is refused, never silent."""
    streamer = Recorder()

    with suppress_refusal("enable"):
        output = plain_model().generate(
            **prompt(1), max_new_tokens=8, do_sample=False, streamer=streamer,
            custom_generate=hf_specdec.speculative_generate, assistant_strategy="suffix",
        )  # fmt: skip
        assert [token for put in streamer.puts[1:] for token in put.flatten().tolist()] == output[0, 24:].tolist()
        assert streamer.ends == 1
