"""Faults that were found by trying to break the package, one test each."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from conftest import prompt, tiny
from oracle import Oracle
from transformers import DynamicCache, LogitsProcessorList, StoppingCriteriaList, set_seed

import hf_specdec
from hf_specdec import (
    Drafter,
    DraftModel,
    DraftStrategy,
    DraftTree,
    SpecDecConfig,
    SpecDecError,
    UnsupportedModelError,
    UnsupportedOptionError,
)
from hf_specdec.compat import CACHE_NAME

LENGTH = {"max_new_tokens": 16, "do_sample": False}
DICT = {**LENGTH, "return_dict_in_generate": True}


def caches_agree(one, other, mask):
    """K/V agree in the columns where `mask` is set."""
    for mine, plain in zip(one.layers, other.layers):
        for left, right in ((mine.keys, plain.keys), (mine.values, plain.values)):
            real = mask[:, -left.shape[2] :].bool()[:, None, :, None]
            torch.testing.assert_close(left * real, right * real, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_the_last_token_of_a_row_that_ended_early_is_in_the_returned_cache(family):
    model, inputs = hf_specdec.enable(tiny(family)), prompt(3)
    text = model.generate(**inputs, **LENGTH)
    width = inputs["input_ids"].shape[1]
    ends = [int(text[row, width + step]) for row, step in ((0, 3), (1, 8))]
    options = {**DICT, "eos_token_id": ends, "pad_token_id": 0}
    expected = model.generate(**inputs, **options)
    got = model.generate(**inputs, **options, assistant_strategy=Oracle.of(text[:, width:], 0.3))
    assert torch.equal(got.sequences, expected.sequences)
    mask = torch.cat([inputs["attention_mask"], torch.ones_like(expected.sequences[:, width:-1])], 1)
    for row in range(3):
        stop = next((i for i, token in enumerate(expected.sequences[row, width:].tolist()) if token in ends), 99)
        mask[row, width + stop + 1 :] = 0
    caches_agree(got[CACHE_NAME], expected[CACHE_NAME], mask)


def test_a_mask_with_holes_keeps_text_cache_and_attentions():
    model, inputs = hf_specdec.enable(tiny("llama", "eager")), prompt(1)
    inputs["attention_mask"][0, 3:5] = 0
    options = {**DICT, "output_attentions": True}
    expected = model.generate(**inputs, **options)
    got = model.generate(**inputs, **options, assistant_strategy="suffix")
    assert torch.equal(got.sequences, expected.sequences)
    ones = torch.ones_like(expected.sequences[:, :-1])
    ones[:, : inputs["input_ids"].shape[1]] = inputs["attention_mask"]
    caches_agree(got[CACHE_NAME], expected[CACHE_NAME], ones)
    for mine, plain in zip(got.attentions, expected.attentions, strict=True):
        torch.testing.assert_close(mine[0][..., -1, :], plain[0][..., -1, :], atol=1e-4, rtol=1e-4)


def test_a_mask_with_holes_is_refused_where_a_window_counts_columns():
    model, inputs = hf_specdec.enable(tiny("mistral")), prompt(1)
    inputs["attention_mask"][0, 3:5] = 0
    with pytest.raises(UnsupportedModelError, match="Pad on the left"):
        model.generate(**inputs, **LENGTH, assistant_strategy="suffix")


def test_token_types_go_on_after_the_prompt():
    model, inputs = hf_specdec.enable(tiny("gpt2")), prompt(3)
    inputs["token_type_ids"] = torch.full_like(inputs["input_ids"], 7)
    expected = model.generate(**inputs, **LENGTH)
    new = expected[:, inputs["input_ids"].shape[1] :]
    assert torch.equal(model.generate(**inputs, **LENGTH, assistant_strategy=Oracle.of(new, 0.3)), expected)


@dataclass(frozen=True)
class Misbehaving(DraftStrategy):
    """Drafts whatever `propose` says, in every round."""

    propose: object

    default_schedule: ClassVar[str | None] = "constant"

    def build(self, target, request):
        return MisbehavingDrafter(self.propose)


class MisbehavingDrafter(Drafter):
    def __init__(self, propose):
        self._propose = propose

    def propose(self, view, plan):
        return self._propose(view, plan)


def drawing(view, plan):
    torch.manual_seed(1)
    tokens = torch.randint(0, 90, (view.rows, 3))
    return DraftTree.from_chains(view.roots(), tokens.tolist(), view.device)


@pytest.mark.parametrize("sample", [False, True])
def test_a_strategy_that_draws_changes_nothing(sample):
    model = hf_specdec.enable(tiny())
    options = {"max_new_tokens": 16, "do_sample": sample}
    set_seed(5)
    expected, state = model.generate(**prompt(3), **options), torch.get_rng_state()
    set_seed(5)
    assert torch.equal(model.generate(**prompt(3), **options, assistant_strategy=Misbehaving(drawing)), expected)
    assert torch.equal(torch.get_rng_state(), state)


def wrong_roots(view, plan):
    return DraftTree.from_chains([(root + 1) % 90 for root in view.roots()], [[1, 2]] * view.rows)


def negative(view, plan):
    return DraftTree.from_chains(view.roots(), [[-5, 3]] * view.rows)


def forward_parents(view, plan):
    tree = DraftTree.from_chains(view.roots(), [[1, 2, 3]] * view.rows)
    return DraftTree(tree.tokens, torch.tensor([[0, 3, 1, 0]]).repeat(view.rows, 1), tree.sampled)


@pytest.mark.parametrize("propose", [wrong_roots, negative, forward_parents])
def test_a_malformed_tree_never_reaches_the_text(propose):
    model = hf_specdec.enable(tiny())
    expected = model.generate(**prompt(3), **LENGTH)
    assert torch.equal(model.generate(**prompt(3), **LENGTH, assistant_strategy=Misbehaving(propose)), expected)


def one_row(view, plan):
    return DraftTree.from_chains(view.roots()[:1], [[1, 2]])


@pytest.mark.parametrize("propose", [one_row, lambda view, plan: None])
def test_an_answer_that_is_no_tree_of_the_rows_is_an_error(propose):
    with pytest.raises(SpecDecError, match="must answer with a DraftTree of 3 rows"):
        hf_specdec.enable(tiny()).generate(**prompt(3), **LENGTH, assistant_strategy=Misbehaving(propose))


def reads_row_zero(ids, scores):
    scores = scores.clone()
    scores[:, (ids[0, -1] * 7) % 90] += 30
    return scores


def mixes_scores(ids, scores):
    return scores - scores.mean(0, keepdim=True) * 0.5


@pytest.mark.parametrize("processor", [reads_row_zero, mixes_scores])
def test_processors_that_mix_rows_are_refused_in_a_batch(processor):
    options = {**LENGTH, "logits_processor": LogitsProcessorList([processor])}
    with pytest.raises(UnsupportedOptionError, match="other rows"):
        hf_specdec.enable(tiny()).generate(**prompt(3), **options, assistant_strategy="suffix")


def lower_precision(ids, scores):
    return (scores * 2).to(torch.bfloat16)


def wants_scores(ids, scores):
    assert bool((scores.abs().sum(-1) > 0).all())
    return scores.roll(int(ids.shape[1] % 3), -1)


@pytest.mark.parametrize("processor", [lower_precision, wants_scores])
def test_odd_processors_work(processor):
    model = hf_specdec.enable(tiny())
    options = {**LENGTH, "logits_processor": LogitsProcessorList([processor])}
    expected = model.generate(**prompt(3), **options)
    new = expected[:, prompt(3)["input_ids"].shape[1] :]
    assert torch.equal(model.generate(**prompt(3), **options, assistant_strategy=Oracle.of(new, 0.3)), expected)


def test_a_failing_call_gives_the_cache_back():
    model = hf_specdec.enable(tiny())
    cache = DynamicCache(config=model.config)
    name = CACHE_NAME
    text = model.generate(**prompt(1), **LENGTH, **{name: cache})
    before = cache.get_seq_length()

    def fails(ids, scores, **kwargs):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.generate(
            text,
            **LENGTH,
            **{name: cache},
            stopping_criteria=StoppingCriteriaList([fails]),
            assistant_strategy="suffix",
        )
    assert cache.get_seq_length() >= before


def test_a_float_mask_and_a_bare_cache():
    model, inputs = hf_specdec.enable(tiny("mistral", "eager")), prompt(3)
    inputs["attention_mask"] = inputs["attention_mask"].float()
    expected = model.generate(**inputs, **DICT, output_attentions=True)
    got = model.generate(**inputs, **DICT, output_attentions=True, assistant_strategy="prompt_lookup")
    assert torch.equal(got.sequences, expected.sequences)


@pytest.mark.parametrize("options", [{"suppress_tokens": [1, 2, 3]}, {"bad_words_ids": [[1], [2], [3]]}])
def test_a_draft_vocabulary_that_is_all_forbidden(options):
    draft = DraftModel(tiny("gpt2"), vocabulary=[1, 2, 3])
    config = SpecDecConfig(strategy=draft, verifier="rejection")
    out = hf_specdec.enable(tiny()).generate(
        **prompt(1), max_new_tokens=12, do_sample=True, **options, assistant_strategy=config
    )
    assert out.shape[1] == prompt(1)["input_ids"].shape[1] + 12


def test_gradient_checkpointing_in_training_mode_is_refused():
    model = hf_specdec.enable(tiny("gpt2"))
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    model.train()
    with pytest.raises(UnsupportedModelError, match="eval"):
        model.generate(**prompt(1), **LENGTH, assistant_strategy="suffix")


def test_ids_of_another_type_come_back_as_plain_generate_gives_them():
    model, inputs = hf_specdec.enable(tiny()), prompt(1)
    inputs["input_ids"] = inputs["input_ids"].int()
    expected = model.generate(**inputs, **LENGTH)
    got = model.generate(**inputs, **LENGTH, assistant_strategy="suffix")
    assert got.dtype == expected.dtype and torch.equal(got, expected)
