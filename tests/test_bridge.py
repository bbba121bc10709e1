"""Draft models with another tokenizer: the bridge itself, and texts, laws and objects across it."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from bridged import (
    OTHER_SENTENCES,
    PROMPTS,
    TOKENIZERS,
    Induction,
    byte_level_tokenizer,
    draft,
    inputs,
    letters,
    sentencepiece_tokenizer,
    target,
    target_tokenizer,
)
from cases import Way, call, refused, snapshot, spec_model, ways
from cases import tokenizer as words
from conftest import PAD, prompt, without_special_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cases_law import small
from text_models import SENTENCES, make_model
from transformers import LlamaConfig, LlamaForCausalLM

import hf_specdec
from hf_specdec import DecodeView, Plan, SpecDecConfig, SpecDecError
from hf_specdec.drafters import DraftModel
from hf_specdec.drafters.bridge import Bridge, Lexicon, RowText, common_prefix, lexicon
from hf_specdec.drafters.vocabulary import same_vocabulary

PAGE = Path(__file__).parent.parent / "docs" / "strategies" / "draft_model.md"
NAMES = tuple(TOKENIZERS)
TEXTS = [*PROMPTS, *SENTENCES[:6], *OTHER_SENTENCES[:3], "日本語 🙂\n\n  two  spaces", "x"]
DRAFTS = pytest.mark.parametrize("name", NAMES)


def bridge(name: str, target_name: str | None = None) -> Bridge:
    own = target_tokenizer() if target_name is None else TOKENIZERS[target_name]()
    return Bridge(lexicon(own), lexicon(TOKENIZERS[name]()), 10_000, 10_000)


@pytest.mark.parametrize("make", [target_tokenizer, *TOKENIZERS.values()], ids=["target", *NAMES])
def test_pieces_spell_the_text(make):
    tokenizer = make()
    own = lexicon(tokenizer)
    for text in TEXTS:
        assert own.spelled(own.encode(text.encode())) == text.encode()
        as_given = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert own.spelled(as_given) == b" " * own.prefixed + text.encode()
    for byte in range(256):
        assert own.pieces[own.ids[bytes([byte])]] == bytes([byte])


@pytest.mark.parametrize("make", [target_tokenizer, *TOKENIZERS.values()], ids=["target", *NAMES])
@settings(max_examples=50, deadline=None)
@given(text=st.binary(max_size=40))
def test_any_bytes_are_encoded_and_spelled(make, text):
    own = lexicon(make())
    assert own.spelled(own.encode(text)) == text


@DRAFTS
def test_a_tokenizer_is_as_before(name):
    tokenizer = TOKENIZERS[name]()
    tokenizer(["the cat", "x"], padding=True, truncation=True, max_length=5)
    before = tokenizer.backend_tokenizer.to_str()
    assert '"max_length":5' in before, "it cuts and pads"
    long = b"the cat sat on the mat and the cat sat"
    own = Lexicon(tokenizer)
    assert own.spelled(own.encode(long)) == long, "which is not done here"
    assert tokenizer.backend_tokenizer.to_str() == before


def test_an_added_token_is_seen():
    tokenizer = letters("ab")
    assert b"new" not in lexicon(tokenizer).ids
    tokenizer.add_tokens(["new"])
    assert lexicon(tokenizer).ids[b"new"] == 3
    assert lexicon(byte_level_tokenizer()).ids[b"the cat"] == len(byte_level_tokenizer()) - 1


def test_conventions_meet_in_bytes():
    both = bridge("sentencepiece")
    pairs = {both.draft.spelled([own]): other for own, other in both.to_target.items() if own in both.draft.pieces}
    assert both.target.spelled([pairs[b" the"]]) == b" the", "`▁the` is `Ġthe`"
    assert both.target.spelled([pairs[b"\n"]]) == b"\n", "`<0x0A>` is `Ċ`"
    assert both.draft.ids[b"a"] > 258, "a letter is rather itself than a byte"
    assert len(set(both.to_target.values())) == len(both.to_target)


def test_special_tokens_of_both():
    own, other = target_tokenizer(), sentencepiece_tokenizer()
    both = bridge("sentencepiece")
    assert both.to_target[other.eos_token_id] == own.eos_token_id, "the end is the end, by whatever name"
    assert both.context[own.eos_token_id] == other.eos_token_id
    assert other.bos_token_id not in both.to_target and other.unk_token_id not in both.to_target
    text = RowText(both)
    ids = [*own("the cat")["input_ids"], own.eos_token_id, *own(" sat")["input_ids"]]
    assert other.decode(text.read(ids), skip_special_tokens=False).replace(" ", "") == "<s>thecat</s>sat"
    assert both.target_ids([], [other.eos_token_id, *other(" sat")["input_ids"]])[:1] == [own.eos_token_id]


@pytest.mark.parametrize("target_name", [None, *NAMES])
@DRAFTS
def test_a_row_reads_as_the_drafts_tokenizer_would_have_it(name, target_name):
    both = bridge(name, target_name)
    own = target_tokenizer() if target_name is None else TOKENIZERS[target_name]()
    for text in TEXTS:
        if name == "byte_level" and "the cat" in text:
            continue  # an added token is found in the middle of words
        row = RowText(both)
        ids = own(text)["input_ids"]
        for count in range(1, len(ids) + 1):
            read = row.read(ids[:count])
        assert read == TOKENIZERS[name]()(text)["input_ids"]


@DRAFTS
def test_a_long_row_is_settled_and_stays_the_same(name):
    both, own = bridge(name), target_tokenizer()
    ids = own(" ".join(SENTENCES) * 3)["input_ids"]
    row, grown, settled = RowText(both), [], 0
    for count in range(1, len(ids), 3):
        before, grown = grown, row.read(ids[:count])
        assert common_prefix(before, grown) >= settled
        assert both.draft.spelled(grown).strip() == both.target.spelled(ids[:count]).strip()
        settled = row.settled
        assert len(grown) - settled < 400
    assert settled > len(grown) / 2
    whole = TOKENIZERS[name]()(own.decode(ids[:count]))["input_ids"]
    assert sum(left != right for left, right in zip(grown, whole)) == 0


def test_text_without_end_of_word_is_settled_too():
    row = RowText(bridge("byte_level"))
    ids = target_tokenizer()("=" * 5000)["input_ids"]
    row.read(ids)
    assert row.settled > 0


@DRAFTS
@pytest.mark.parametrize("cut", [1, 3, 7, 12, 20])
def test_drafted_ids_come_back_as_the_target_would_encode_them(name, cut):
    both, own = bridge(name), target_tokenizer()
    for text in TEXTS:
        ids = own(text)["input_ids"]
        head, tail = ids[:cut], own.decode(ids[cut:])
        said = both.draft.encode(both.target.spelled(ids[cut:]))
        back = both.target_ids(head, said)
        assert both.target.spelled(back) == both.target.spelled(ids[cut:])
        assert back == ids[cut:] or "\ufffd" in tail


def test_what_the_target_cannot_say_ends_a_draft():
    both = Bridge(lexicon(letters("abc")), lexicon(letters("xbca", ("<end>",))), 10, 10)
    assert both.words == 3
    assert both.target_ids([1], [4, 2, 1, 2]) == [1, 2], "a b, and then x, which the target has not"
    assert both.target_ids([1], [0, 4]) == [0, 1]


def test_same_vocabulary_by_content():
    own = letters("abc")
    assert same_vocabulary(own, letters("abc"))
    assert same_vocabulary(own, letters("abc", ("<end>",))), "special tokens may differ"
    longer = letters("abc")
    longer.add_special_tokens({"additional_special_tokens": ["<more>"]})
    assert same_vocabulary(own, longer) and same_vocabulary(longer, own)
    assert not same_vocabulary(own, letters("acb")), "as many, in another order"
    assert not same_vocabulary(own, letters("abcd")), "more text than the other can read"


def options(name: str) -> dict[str, Any]:
    return {"tokenizer": target_tokenizer(), "assistant_tokenizer": TOKENIZERS[name]()}


@DRAFTS
@ways(("draft_model",))
def test_the_text_is_the_targets(name, way, each_schedule):
    expected = call(target(), inputs(way.batch), way)
    state = torch.get_rng_state()
    model = hf_specdec.enable(make_model(len(target_tokenizer()), seed=1, layers=2).eval())
    before = (snapshot(draft(name)), [each.backend_tokenizer.to_str() for each in options(name).values()])
    output = call(model, inputs(way.batch), way, assistant_strategy=draft(name), **options(name))
    assert output.sequences.tolist() == expected.sequences.tolist()
    assert torch.equal(torch.get_rng_state(), state)
    assert output.speculation.num_draft_tokens > 0 or each_schedule == "adaptive"
    assert any("another tokenizer" in note for note in output.speculation.notes)
    assert (snapshot(draft(name)), [each.backend_tokenizer.to_str() for each in options(name).values()]) == before


@DRAFTS
def test_greedy_under_rejection_and_with_processors(name):
    model = hf_specdec.enable(make_model(len(target_tokenizer()), seed=1, layers=2).eval())
    config = SpecDecConfig(strategy=DraftModel(draft(name), tokenizer=TOKENIZERS[name]()), verifier="rejection")
    way = Way("draft_model", 3, False)
    more = {"repetition_penalty": 1.3, "tokenizer": target_tokenizer()}
    expected = call(target(), inputs(3), way, repetition_penalty=1.3)
    output = call(model, inputs(3), way, assistant_strategy=config, **more)
    assert output.sequences.tolist() == expected.sequences.tolist()


@ways(("draft_model",))
@pytest.mark.usefixtures("constant_schedule")
def test_case_19_a_permuted_vocabulary_of_equal_size_is_bridged(way):
    """The target's own weights under other ids: understood across the bridge, so that every draft is accepted."""
    signs = "".join(map(chr, range(0x4E00, 0x4E00 + 95)))
    own = {"tokenizer": letters(signs), "assistant_tokenizer": letters(signs[::-1])}
    permuted = LlamaForCausalLM(LlamaConfig(**spec_model().config.to_dict()))
    weights = {name: weight.clone() for name, weight in spec_model().state_dict().items()}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = weights[name][[0, *range(95, 0, -1)]]
    permuted.load_state_dict(weights)
    without_special_tokens(permuted)
    expected = call(spec_model(), prompt(way.batch), way)
    output = call(spec_model(), prompt(way.batch), way, assistant_strategy=permuted, **own)
    assert output.sequences.tolist() == expected.sequences.tolist()
    stats = output.speculation
    assert stats.num_accepted_draft_tokens == stats.num_draft_tokens > 0


@DRAFTS
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.usefixtures("constant_schedule")
def test_a_draft_that_repeats_the_context_is_accepted(name, batch):
    """More than half of the acceptance that it has with the target's own tokenizer."""
    own, other = target_tokenizer(), TOKENIZERS[name]()
    model = hf_specdec.enable(Induction.of(len(own)))
    passage = "The quick dog sat on the naïve mat; 1234 cats returned {word: 5}.\n"
    starts = ["The quick dog", "The", "The quick dog sat on the naïve"][:batch]
    ids = own([passage * 2 + start for start in starts], return_tensors="pt", padding=True)
    way = Way("draft_model", batch, False)
    given = {"input_ids": ids["input_ids"], "attention_mask": ids["attention_mask"]}
    expected = call(model, given, way, max_new_tokens=40)
    lengths = []
    for tokenizer, vocabulary in ((own, len(own)), (other, len(other))):
        strategy = DraftModel(Induction.of(vocabulary), tokenizer=tokenizer)
        output = call(model, given, way, assistant_strategy=strategy, tokenizer=own, max_new_tokens=40)
        assert output.sequences.tolist() == expected.sequences.tolist()
        stats = output.speculation
        lengths.append(stats.num_accepted_draft_tokens / stats.num_spec_steps)
    assert lengths[0] > 2
    assert lengths[1] > lengths[0] / 2, lengths


class Seen:
    """`(position, id)` of all that a model forwards, batch 1."""

    def __init__(self, model: torch.nn.Module):
        self.places: list[int] = []
        model.register_forward_pre_hook(self.hook, with_kwargs=True)

    def hook(self, _: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.places += kwargs["position_ids"][0].tolist()


@DRAFTS
@pytest.mark.usefixtures("constant_schedule")
def test_each_position_goes_through_the_draft_model_about_once(name):
    own, other = target_tokenizer(), TOKENIZERS[name]()
    model, draft_model = hf_specdec.enable(Induction.of(len(own))), Induction.of(len(other))
    seen = Seen(draft_model)
    text = "The quick dog sat on the mat; cats returned.\n" * 4
    given = dict(own([text], return_tensors="pt", return_token_type_ids=False))
    output = model.generate(
        **given, max_new_tokens=60, do_sample=False, tokenizer=own, assistant_tokenizer=other,
        assistant_strategy=draft_model, return_dict_in_generate=True,
    )  # fmt: skip
    ids = other(own.decode(output.sequences[0]))["input_ids"]
    assert output.speculation.num_accepted_draft_tokens > 30
    assert len(seen.places) < len(ids) * 1.35


@pytest.mark.usefixtures("constant_schedule")
def test_a_row_whose_text_is_one_draft_token():
    both = {"tokenizer": letters("ab"), "assistant_tokenizer": letters("ba")}
    model, other = (without_special_tokens(make_model(3, seed, layers=1)) for seed in (1, 2))
    given = {"input_ids": torch.tensor([[0]]), "attention_mask": torch.ones(1, 1, dtype=torch.long)}
    way = Way("draft_model", 1, False)
    expected = call(model, given, way)
    output = call(hf_specdec.enable(model), given, way, assistant_strategy=other, **both)
    assert output.sequences.tolist() == expected.sequences.tolist()
    assert output.speculation.num_draft_tokens > 0


@DRAFTS
@pytest.mark.usefixtures("constant_schedule")
def test_the_drafts_window_counts_its_own_tokens(name):
    narrow = make_model(len(TOKENIZERS[name]()), seed=2, layers=1).eval()
    narrow.config.max_position_embeddings = 40
    model = hf_specdec.enable(make_model(len(target_tokenizer()), seed=1, layers=2).eval())
    way = Way("draft_model", 3, False)
    expected = call(target(), inputs(3), way, max_new_tokens=50)
    output = call(model, inputs(3), way, assistant_strategy=narrow, max_new_tokens=50, **options(name))
    assert output.sequences.tolist() == expected.sequences.tolist()
    assert any("window of 40" in note for note in output.speculation.notes)


def test_rows_that_end_leave(each_schedule):
    way = Way("draft_model", 3, True)
    eos = [int(call(target(), inputs(3), way).sequences[1, -15])]
    expected = call(target(), inputs(3), way, eos_token_id=eos, pad_token_id=PAD)
    model = hf_specdec.enable(make_model(len(target_tokenizer()), seed=1, layers=2).eval())
    more = {"eos_token_id": eos, "pad_token_id": PAD, **options("sentencepiece")}
    output = call(model, inputs(3), way, assistant_strategy=draft("sentencepiece"), **more)
    assert output.sequences.tolist() == expected.sequences.tolist()


def test_stock_interface_drafts_across_the_bridge():
    """`get_candidates` reads a text that grows between its calls."""
    own = target_tokenizer()
    model = hf_specdec.enable(Induction.of(len(own)))
    strategy = DraftModel(Induction.of(len(byte_level_tokenizer())), tokenizer=byte_level_tokenizer())
    drafters = []
    build = strategy.build
    object.__setattr__(strategy, "build", lambda *args: drafters.append(build(*args)) or drafters[-1])
    ids = own("the dog sat, the dog", return_tensors="pt")["input_ids"]
    model.generate(ids, max_new_tokens=2, do_sample=False, assistant_strategy=strategy, tokenizer=own)
    fresh = DecodeView.of_sequences([own(" the dog ran to the dog")["input_ids"]])
    drafters[0].start(fresh)
    tree = drafters[0].propose(fresh, Plan.chain(3))
    assert own.decode(tree.tokens[0, 1:]).startswith(" ran"[: len(own.decode(tree.tokens[0, 1:]))])


def test_the_page_of_the_strategy_runs_across_a_bridge(capsys):
    """The example that needs no model from elsewhere."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (code,) = (each for each in blocks if "PreTrainedTokenizerFast" in each)
    exec(compile(code, PAGE.name, "exec"), {"__name__": "example"})
    printed = capsys.readouterr().out
    assert printed.startswith("same text: True\nthe draft model has another tokenizer"), printed


def test_no_overlap_is_refused():
    model = hf_specdec.enable(small(0))
    for sample in (False, True):
        with refused(model, "in common"):
            model.generate(
                torch.tensor([[1, 2]]), max_new_tokens=4, do_sample=sample, assistant_strategy=small(1),
                tokenizer=letters("abcd", ()), assistant_tokenizer=letters("жзик", ()),
            )  # fmt: skip


def test_a_draft_vocabulary_is_refused_across_a_bridge():
    strategy = DraftModel(small(1), vocabulary=[1, 2], tokenizer=letters("bacd", ()))
    with refused(spec_model(), "vocabulary"):
        spec_model().generate(**prompt(1), max_new_tokens=4, assistant_strategy=strategy, tokenizer=words())


def test_a_tokenizer_without_a_backend_is_refused():
    class Slow:
        all_special_ids = ()

        def __len__(self) -> int:
            return 1

        def get_vocab(self) -> dict[str, int]:
            return {"a": 0}

        def get_added_vocab(self) -> dict[str, int]:
            return {}

    strategy = DraftModel(small(1), tokenizer=Slow())
    with refused(spec_model(), "backend_tokenizer", error=SpecDecError):
        spec_model().generate(**prompt(1), max_new_tokens=4, assistant_strategy=strategy, tokenizer=words())
