"""Every family of the table with drafts of the target's own (its first layers, its layers without some sub-layers, its
quantised form in chains and in trees), and with a draft model of another tokenizer.

The text is plain `generate`'s, token for token, and the generator, the target and the draft are as they were. Which
attention runs turns with the batch and the way of choosing tokens, so that each meets both. The last layer of each
target adds little, so that most drafts are right and some are not.
"""

import copy
import functools
from typing import Any

import pytest
import torch
from bridged import letters
from cases import quieten, refused, snapshot
from conftest import FAMILIES, TEXT_FAMILIES, VOCABULARY, ForwardCounter, plain, prompt, tiny
from test_equivalence import REFUSED, refused_model, tiny_copy
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import hf_specdec
from hf_specdec import DraftModel, LayerSkip, QuantizedSelf, SpecDecConfig, UnsupportedModelError

SEED = 11
NEW_TOKENS = 10
INT8, INT4 = "int8_weight_only", "int4_weight_only"
SIGNS = "".join(map(chr, range(0x4E00, 0x4E00 + VOCABULARY - 1)))
NO_MLP, NO_OWN_KV = ("opt",), ("gemma3n",)
"""Families without a module for the MLP, and whose layers read the K/V of others."""
WAYS = [pytest.param(False, id="greedy"), pytest.param(True, id="sample")]
BATCHES = [pytest.param(1, id="one"), pytest.param(3, id="ragged")]


@functools.cache
def tokenizer(turned: bool) -> PreTrainedTokenizerFast:
    """A sign per id: of the targets, and in reverse of the draft models."""
    return letters(SIGNS[::-1] if turned else SIGNS)


@functools.cache
def target(family: str, attention: str | None = None) -> PreTrainedModel:
    """An enabled model. Not to be changed."""
    model = tiny(family, attention)
    return hf_specdec.enable(quieten(model, layer_count(model) - 1))


def layer_count(model: PreTrainedModel) -> int:
    return int(model.config.get_text_config(decoder=True).num_hidden_layers)


@functools.cache
def draft(family: str) -> PreTrainedModel:
    """The target with some noise, which reads the turned tokenizer; a Llama where the family wants images too."""
    model = copy.deepcopy(target(family if family in TEXT_FAMILIES else "llama"))
    generator = torch.Generator().manual_seed(3)
    tables = [
        each for each in model.modules() if isinstance(each, torch.nn.Embedding) and each.num_embeddings == VOCABULARY
    ]
    order = [0, *range(VOCABULARY - 1, 0, -1)]
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05 * weight.std(correction=0) * torch.randn(weight.shape, generator=generator))
        for table in (*tables, model.get_output_embeddings()):
            for weight in table.parameters():
                weight.copy_(weight[order])
    return model


@functools.cache
def before(family: str, attention: str, kind: str) -> dict[str, Any]:
    """The target after a plain call, which may leave hooks of transformers in a vision tower; or the draft model."""
    return snapshot(target(family, attention) if kind == "target" else draft(family))


@functools.cache
def written(family: str, attention: str, batch: int, sample: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and generator state of plain `generate`."""
    ids = plain(target(family, attention), SEED, **prompt(batch, family), do_sample=sample, max_new_tokens=NEW_TOKENS)
    state = torch.get_rng_state()
    before(family, attention, "target")
    return ids, state


def skip_set(family: str) -> LayerSkip:
    last = [layer_count(target(family)) - 1]
    return LayerSkip(skip_attention=[] if family in NO_OWN_KV else last, skip_mlp=[] if family in NO_MLP else last)


def quantized_tree(family: str) -> SpecDecConfig:
    scheme = INT8 if family == "falcon" else INT4  # of Falcon, the output layer is all there is to quantise
    return SpecDecConfig(QuantizedSelf(scheme=scheme), max_draft_tokens=6, max_depth=3, max_width=2)


DRAFTS = {
    "exit_layer": lambda family: LayerSkip(exit_layer=layer_count(target(family)) - 1),
    "skip_set": skip_set,
    "quantized_self": lambda family: QuantizedSelf(scheme=INT8),
    "quantized_tree": quantized_tree,
    "bridge": lambda family: DraftModel(draft(family), tokenizer=tokenizer(turned=True)),
}


@pytest.mark.parametrize("sample", WAYS)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.usefixtures("constant_schedule")
def test_the_text_is_plain_generates_and_nothing_has_changed(name, family, batch, sample):
    kinds = FAMILIES[family].attention
    attention = kinds[-1] if (batch == 1) == sample else kinds[0]
    expected, state = written(family, attention, batch, sample)
    chosen, model = DRAFTS[name](family), target(family, attention)
    if name == "bridge":
        before(family, attention, "draft")
    found = plain(
        model, SEED, **prompt(batch, family), do_sample=sample, max_new_tokens=NEW_TOKENS, assistant_strategy=chosen,
        tokenizer=tokenizer(turned=False), return_dict_in_generate=True,
    )  # fmt: skip
    assert found.sequences.tolist() == expected.tolist()
    assert torch.equal(torch.get_rng_state(), state), "the generator is not where plain `generate` leaves it"
    stats = found.speculation
    assert stats.num_draft_tokens > 0
    assert stats.num_accepted_draft_tokens > 0 or (name == "bridge" and family not in TEXT_FAMILIES)
    assert any("another tokenizer" in note for note in stats.notes) == (name == "bridge")
    assert snapshot(model) == before(family, attention, "target")
    if name == "bridge":
        assert snapshot(draft(family)) == before(family, attention, "draft")


@pytest.mark.parametrize(
    ("family", "chosen", "reason"),
    [
        ("opt", LayerSkip(skip_mlp=[1]), "cannot skip the MLP of layer 1"),
        ("gemma3n", LayerSkip(skip_attention=[1]), "keys and values of others"),
        ("falcon", QuantizedSelf(scheme=INT4), "no layer of FalconForCausalLM has the shape"),
    ],
    ids=["opt", "gemma3n", "falcon"],
)
def test_what_a_family_cannot_do_is_refused(family, chosen, reason):
    with refused(target(family), reason):
        plain(target(family), **prompt(1, family), assistant_strategy=chosen)


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_that_cannot_verify_is_refused_whatever_drafts(kind):
    model = hf_specdec.enable(tiny_copy(refused_model(kind)))
    bridge = DraftModel(draft("llama"), tokenizer=tokenizer(turned=True))
    for chosen in (LayerSkip(exit_layer=1), LayerSkip(skip_mlp=[0]), QuantizedSelf(), bridge):
        with ForwardCounter(model, parts=True) as forwards, pytest.raises(UnsupportedModelError, match="cannot"):
            plain(
                model, input_ids=prompt(1)["input_ids"], tokenizer=tokenizer(turned=False), assistant_strategy=chosen
            )
        assert forwards.count == 0


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_that_cannot_take_drafts_back_does_not_draft_across_a_bridge(kind):
    other = refused_model(kind)
    chosen = DraftModel(other, tokenizer=tokenizer(turned=True))
    with refused(target("llama"), type(other).__name__, error=UnsupportedModelError):
        plain(target("llama"), **prompt(1), tokenizer=tokenizer(turned=False), assistant_strategy=chosen)
