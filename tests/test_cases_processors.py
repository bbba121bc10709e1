"""Cases 8, 9 and 27: logits processors act on each draft token by its own prefix, or are refused by name."""

import pytest
import torch
from cases import (
    FEW_OWN_WAYS,
    SOME,
    Way,
    base_text,
    call,
    compare,
    own_ways_in_turn,
    plain_model,
    refused,
    spec_model,
    strategy,
    suppress_refusal,
    ways,
)
from conftest import VOCABULARY, prompt
from transformers import LogitsProcessor, LogitsProcessorList, SynthIDTextWatermarkingConfig, WatermarkingConfig

import hf_specdec
from hf_specdec import SpecDecConfig
from hf_specdec.drafters import DraftModel

EOS = 95


class Hashing(LogitsProcessor):
    """Moves every score by an amount that depends on the whole prefix."""

    def __call__(self, input_ids, scores):
        columns = torch.arange(scores.shape[1])
        weights = torch.arange(1, input_ids.shape[1] + 1)
        return scores + ((input_ids * weights).sum(-1, keepdim=True) * (columns + 1) % 11).float()


class OncePerText(LogitsProcessor):
    """Forbids every token that the prefix already holds."""

    def __call__(self, input_ids, scores):
        return scores.scatter(1, input_ids, float("-inf"))


class InPlace(LogitsProcessor):
    """Changes the scores it is given, as some processors do."""

    def __call__(self, input_ids, scores):
        scores[:, 1::2] -= (input_ids.sum(1, keepdim=True) % 5).float()
        return scores.scatter_(1, input_ids[:, -2:], -50.0)


class OtherRows(LogitsProcessor):
    """Moves the scores of each row by the last token of the row before it."""

    def __call__(self, input_ids, scores):
        shift = input_ids[:, -1:].roll(1, dims=0) * torch.arange(scores.shape[1]) % 11
        return scores + (shift if input_ids.shape[0] > 1 else 0)


class ByRow(LogitsProcessor):
    """Settings per row of the caller's batch."""

    def __init__(self, tokens):
        self.tokens = torch.tensor(tokens)

    def __call__(self, input_ids, scores):
        assert scores.shape[0] == len(self.tokens), "a processor sees the caller's whole batch"
        return scores.scatter_add(1, self.tokens[:, None], torch.full((scores.shape[0], 1), 4.0))


class ByLength(LogitsProcessor):
    """Depends on the padded length."""

    def __call__(self, input_ids, scores):
        return scores.roll(input_ids.shape[1] % 5, dims=-1)


def allowed_tokens(row: int, ids: torch.Tensor) -> list[int]:
    """A `prefix_allowed_tokens_fn` that reads the row, the length and the last token."""
    return [3 + (7 * int(ids[-1]) + 5 * row + 3 * len(ids) + step * step) % 90 for step in range(12)]


def options_of(text: list[list[int]]) -> dict[str, dict]:
    """Every option of `generate` that makes a processor, with values that bite on this text."""
    first, last = text[0], text[-1]
    stop = {"eos_token_id": EOS}
    own = {
        name: {"logits_processor": LogitsProcessorList([each])}
        for name, each in {
            "hashing": Hashing(),
            "once_per_text": OncePerText(),
            "in_place": InPlace(),
            "by_row": ByRow([first[3], last[5], last[7]][: len(text)]),
            "by_length": ByLength(),
        }.items()
    }
    return {
        "repetition_penalty": {"repetition_penalty": 2.0},
        "repetition_reward": {"repetition_penalty": 0.6},
        "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
        "no_repeat_unigram": {"no_repeat_ngram_size": 1},
        "bad_words_ids": {"bad_words_ids": [[first[2]], [first[5], first[6]], [last[8], last[9], last[10]]]},
        "suppress_tokens": {"suppress_tokens": [first[1], last[4]]},
        "begin_suppress_tokens": {"begin_suppress_tokens": [first[0], first[1]]},
        "sequence_bias": {
            "sequence_bias": {(first[3],): -9.0, (first[5], first[6]): -20.0, (last[7], first[2]): 15.0}
        },
        "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (4, 1.6), **stop},
        "forced_eos_token_id": {"forced_eos_token_id": EOS},
        "forced_eos_and_eos": {"forced_eos_token_id": [EOS], **stop},
        "min_length": {"min_length": 24 + 9, "eos_token_id": [first[2], last[4]]},
        "min_new_tokens": {"min_new_tokens": 9, "eos_token_id": [first[2], last[4]]},
        "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.8},
        "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
        "remove_invalid_values": {"remove_invalid_values": True},
        "renormalize_logits": {"renormalize_logits": True},
        "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": allowed_tokens},
        "watermark": {"watermarking_config": WatermarkingConfig(bias=4.0, seeding_scheme="lefthash")},
        "watermark_selfhash": {
            "watermarking_config": WatermarkingConfig(bias=4.0, seeding_scheme="selfhash"),
            "max_new_tokens": 9,
        },
        "several": {
            "repetition_penalty": 1.5,
            "no_repeat_ngram_size": 3,
            "min_new_tokens": 12,
            "eos_token_id": first[4],
        },
        **own,
    }


SAMPLING_OPTIONS = {
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 1.7, "top_k": 0},
    "top_k": {"top_k": 3},
    "no_top_k": {"top_k": 0},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "typical_p": {"typical_p": 0.7},
    "top_h": {"top_h": 0.5},
    "epsilon_cutoff": {"epsilon_cutoff": 0.02},
    "eta_cutoff": {"eta_cutoff": 0.02},
    "several": {"temperature": 0.9, "top_k": 20, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.3},
}
NAMES = list(options_of([list(range(24))] * 3))


@pytest.mark.parametrize("name", NAMES)
@ways(SOME)
def test_case_08_processors(way, name):
    """Every processor-making option, over drafts that are right now and then."""
    options = options_of(base_text(way))[name]
    compare(way, **options)


@own_ways_in_turn("name", NAMES)
def test_case_08_processors_over_drafts_of_the_targets_own(way, name):
    test_case_08_processors(way, name)


@pytest.mark.parametrize("name", NAMES)
@ways(("oracle-0",), batches=(3,))
def test_case_08_processors_change_the_text_and_drafts_go_on(way, name):
    text = base_text(way)
    pair = compare(way, **options_of(text)[name])
    assert pair.spec.speculation.draft_acceptance_rate == 1.0
    rarely = ("remove_invalid_values", "renormalize_logits", "no_repeat_ngram_size")
    if name not in rarely:
        assert pair.text != [ids[: len(pair.text[0])] for ids in text], "the option must matter"
    compare(way, replay=text, **options_of(text)[name])


@pytest.mark.parametrize("name", list(SAMPLING_OPTIONS))
@ways(SOME, samples=(True,))
def test_case_08_sampling_options(way, name):
    compare(way, **SAMPLING_OPTIONS[name])


@own_ways_in_turn("name", list(SAMPLING_OPTIONS), sample=True)
def test_case_08_sampling_options_over_drafts_of_the_targets_own(way, name):
    test_case_08_sampling_options(way, name)


@ways(("oracle-0.3", "tree-0.3", "suffix"), batches=(1,))
def test_case_08_forced_bos(way):
    """`forced_bos_token_id` acts on a prompt of one token."""
    inputs = {"input_ids": torch.tensor([[5]]), "attention_mask": torch.tensor([[1]])}
    pair = compare(way, inputs=inputs, forced_bos_token_id=33, begin_suppress_tokens=[34])
    assert pair.text[0][0] == 33


def test_case_09_guidance_scale_is_refused():
    with refused(spec_model(), "guidance_scale", "UnbatchedClassifierFreeGuidance"):
        spec_model().generate(**prompt(1), guidance_scale=1.5, max_new_tokens=8, assistant_strategy="suffix")


def test_case_09_synthid_is_refused():
    config = SynthIDTextWatermarkingConfig(keys=[3, 1, 4, 1, 5], ngram_len=3)
    with refused(spec_model(), "SynthID"):
        spec_model().generate(
            **prompt(1), watermarking_config=config, do_sample=True, max_new_tokens=8, assistant_strategy="suffix"
        )


class Counting(LogitsProcessor):
    """Counts its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores.roll(self.calls, dims=-1)


class Grammar(LogitsProcessor):
    """Keeps a state that advances with the last token, in a tensor, in place."""

    def __init__(self):
        self.state = torch.zeros(VOCABULARY)

    def __call__(self, input_ids, scores):
        self.state.index_add_(0, input_ids[:, -1], torch.full((input_ids.shape[0],), 5.0))
        return scores - self.state


class Remembering(LogitsProcessor):
    """Keeps the prefixes it saw, in a list."""

    def __init__(self):
        self.history = []

    def __call__(self, input_ids, scores):
        self.history.append(int(input_ids[0, -1]))
        return scores.index_fill(1, torch.tensor(self.history) % VOCABULARY, -30.0)


class Nested(LogitsProcessor):
    """Keeps its state in another object."""

    class State:
        step = 0

    def __init__(self):
        self.inner = self.State()

    def __call__(self, input_ids, scores):
        self.inner.step += 3
        return scores.roll(self.inner.step, dims=-1)


class Random(LogitsProcessor):
    """Draws from the global generator."""

    def __call__(self, input_ids, scores):
        return scores + torch.rand_like(scores)


def closure():
    """A processor whose state hides in a closure."""
    seen = []

    def process(input_ids, scores):
        seen.append(1)
        return scores.roll(len(seen), dims=-1)

    return process


def default_argument():
    """A processor whose state is the default of an argument."""

    def process(input_ids, scores, seen=[]):  # noqa: B006
        seen.append(1)
        return scores.roll(len(seen), dims=-1)

    return process


CALLS: list[int] = []


def module_state():
    """A processor whose state is a global of its module."""
    CALLS.clear()

    def process(input_ids, scores):
        CALLS.append(1)
        return scores.roll(len(CALLS), dims=-1)

    return process


class Slots:
    """A stateful processor without `__dict__`."""

    __slots__ = ("calls",)

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores.roll(self.calls, dims=-1)


HIDING = [Counting, Grammar, Remembering, Nested, Random, OtherRows, Slots, closure, default_argument, module_state]


@pytest.mark.parametrize("make", HIDING, ids=lambda make: make.__name__)
@ways(("oracle-0.3", "tree-0.3", "prompt_lookup"))
def test_case_09_stateful_processors_are_refused_or_exact(way, make):
    text = base_text(way)
    with suppress_refusal(make.__name__, "function"):
        compare(way, replay=text, fresh=lambda: {"logits_processor": LogitsProcessorList([make()])})
        return
    with refused(spec_model(), make.__name__, "function"):
        call(
            spec_model(), prompt(way.batch), way, logits_processor=LogitsProcessorList([make()]),
            assistant_strategy=strategy(way.strategy, text),
        )  # fmt: skip


@own_ways_in_turn("make", HIDING)
def test_case_09_stateful_processors_over_drafts_of_the_targets_own(way, make):
    test_case_09_stateful_processors_are_refused_or_exact(way, make)


@pytest.mark.parametrize("make", [Counting, closure], ids=lambda make: make.__name__)
def test_case_09_a_refusal_leaves_the_users_processor_as_it_was(make):
    processor, untouched = make(), make()
    with pytest.raises(hf_specdec.SpecDecError):
        call(
            spec_model(), prompt(1), Way("suffix", 1, False), logits_processor=LogitsProcessorList([processor]),
            assistant_strategy="suffix",
        )  # fmt: skip
    ids, scores = prompt(1)["input_ids"], torch.arange(96.0).unsqueeze(0)
    assert torch.equal(processor(ids, scores), untouched(ids, scores))


@pytest.mark.parametrize("temperature", [1e-6, 0.01])
@ways(("oracle-0", "oracle-0.3", "tree-0.3", "draft_model"), samples=(True,), also=FEW_OWN_WAYS)
def test_case_27_low_temperatures(way, temperature):
    pair = compare(way, temperature=temperature, output_scores=True)
    for step in pair.spec.scores:
        assert not torch.isnan(step).any()
        assert not torch.isposinf(step).any()
    if temperature == 1e-6:
        assert pair.text == base_text(way._replace(sample=False))


@pytest.mark.parametrize("temperature", [1e-6, 0.01])
@ways(("draft_model", "oracle-0.3", "tree-0.3"), samples=(True,), also=FEW_OWN_WAYS)
def test_case_27_low_temperatures_under_rejection(way, temperature):
    greedy = base_text(way._replace(sample=False))
    chosen = DraftModel(plain_model()) if way.strategy == "draft_model" else strategy(way.strategy, greedy)
    config = SpecDecConfig(strategy=chosen, verifier="rejection")
    output = call(
        spec_model(), prompt(way.batch), way, temperature=temperature, assistant_strategy=config, output_scores=True
    )
    assert all(not torch.isnan(step).any() for step in output.scores)
    if temperature == 1e-6:
        assert output.sequences[:, 24:].tolist() == greedy
