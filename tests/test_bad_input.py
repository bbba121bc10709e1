"""Input of the wrong type or shape: refused with what was asked, why not and what to do, never a raw error."""

import numpy as np
import pytest
import torch
from conftest import ForwardCounter, plain, prompt, tiny

import hf_specdec
from hf_specdec import (
    DraftModel,
    Lookahead,
    LookaheadMemory,
    RecyclingMemory,
    SpecDecConfig,
    SpecDecError,
    Suffix,
    SuffixMemory,
)
from hf_specdec.drafters.draft_model import load_vocabulary

OPTIONS = {"max_new_tokens": 4, "do_sample": False}


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"strategy_options": None}, "strategy_options=None"),
        ({"strategy_options": [1]}, "strategy_options=[1]"),
        ({"verifier": ["exact"]}, "Did you mean 'exact'"),
        ({"verifier": {}}, "Known: block, exact"),
        ({"schedule": {}}, "Known: adaptive, constant"),
        ({"schedule": ["constant"]}, "Did you mean 'constant'"),
        ({"strategy": torch.nn.Linear(2, 2)}, "PreTrainedModel"),
        ({"strategy": torch.nn.Linear}, "PreTrainedModel"),
    ],
    ids=str,
)
def test_a_config_names_what_is_wrong(values, says):
    with pytest.raises(SpecDecError) as caught:
        SpecDecConfig(**values)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        *({"min_probability": value} for value in ("a", None, True, 1j, float("nan"), torch.ones(2))),
        *({"max_tokens_factor": value} for value in ("x", None, True, float("nan"), [4.0])),
        *({"max_context": value} for value in ("16", None, 2.0, [1], True)),
    ],
    ids=str,
)
def test_suffix_names_what_is_wrong(options):
    name = next(iter(options))
    with pytest.raises(SpecDecError, match=f"suffix: {name}=.* use "):
        Suffix(**options)


def test_suffix_takes_any_real_number():
    Suffix(min_probability=1, max_tokens_factor=float("inf"))
    Suffix(min_probability=np.float32(0.5), max_tokens_factor=np.int64(2))


def _needs_more(model, temperature):
    """Asks for what is not offered."""


def _positional(input_ids, /):
    """Cannot be called by keyword."""


@pytest.mark.parametrize(
    "factory",
    [_needs_more, _positional, len, dict.fromkeys, type],
    ids=["more", "positional", "len", "fromkeys", "type"],
)
def test_a_factory_that_cannot_be_called_is_named(factory):
    model = hf_specdec.enable(tiny())
    with pytest.raises(SpecDecError, match=r"(?s)factory .* could not be called.*functools\.partial"):
        model.generate(**prompt(1), **OPTIONS, assistant_strategy=factory)


def test_a_factory_keeps_its_own_errors():
    def factory():
        raise ValueError("of its own")

    with pytest.raises(ValueError, match=r"^of its own$"):
        hf_specdec.enable(tiny()).generate(**prompt(1), **OPTIONS, assistant_strategy=factory)


def test_arguments_are_bound_as_by_plain_generate():
    model = hf_specdec.enable(tiny())
    ids, mask = prompt(1).values()
    expected = model.generate(ids, attention_mask=mask, **OPTIONS)
    got = model.generate(ids, None, attention_mask=mask, **OPTIONS, assistant_strategy="suffix")
    assert torch.equal(got, expected)
    for strategy in (None, "suffix"):
        with pytest.raises(TypeError, match="multiple values for argument 'inputs'"):
            model.generate(ids, inputs=ids, **OPTIONS, assistant_strategy=strategy)
        with pytest.raises(TypeError, match="positional arguments"):
            model.generate(ids, *[None] * 11, **OPTIONS, assistant_strategy=strategy)


def test_a_compiled_model_is_enabled_before_it_is_compiled():
    with pytest.raises(SpecDecError, match=r"compiled.*Enable .*first, then compile"):
        hf_specdec.enable(torch.compile(tiny()))


def test_a_deeply_nested_file_is_no_memory(tmp_path):
    path = tmp_path / "memory.json"
    path.write_text("[" * 200_000 + "]" * 200_000)
    with pytest.raises(SpecDecError, match=r"memory\.json.*delete it"):
        SuffixMemory.load(path)


@pytest.mark.parametrize(
    "tokens",
    [torch.tensor([5, 6, 7]), np.array([5, 6, 7]), list(torch.tensor([5, 6, 7])), (5, np.int64(6), 7), range(5, 8)],
    ids=["tensor", "array", "list of tensors", "tuple", "range"],
)
def test_a_memory_takes_token_ids_in_any_form(tmp_path, tokens):
    memory = SuffixMemory()
    memory.add(tokens)
    memory.save(tmp_path / "memory.json")
    assert SuffixMemory.load(tmp_path / "memory.json").__getstate__()["texts"] == [[5, 6, 7]]


@pytest.mark.parametrize(
    "tokens",
    [
        torch.tensor([[5, 6]]), torch.tensor(5), torch.tensor([0.5]), torch.tensor([True]),
        "text", ["a"], [1.0], [None], [True], [-1], 5, None, {5, 6},
    ],
    ids=str,
)  # fmt: skip
def test_a_memory_refuses_what_is_no_text(tokens):
    memory = SuffixMemory()
    with pytest.raises(SpecDecError, match=r"SuffixMemory\.add.*token ids"):
        memory.add(tokens)
    assert len(memory) == 0


@pytest.mark.parametrize("ids", [[3, 5, 3], (5, 3), np.array([3, 5]), torch.tensor([3, 5]), {3, 5}])
def test_a_vocabulary_is_any_collection_of_ids(ids):
    assert load_vocabulary(ids) == [3, 5]


@pytest.mark.parametrize("ids", [[], 7, None, [1.5], [True], [-1], [3, "x"], {"a": 1}, np.array([0.5]), [[1, 2]]])
def test_a_vocabulary_of_other_things_is_refused(ids):
    with pytest.raises(SpecDecError, match="non-empty list of token ids"):
        load_vocabulary(ids)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"not json", None])
def test_a_vocabulary_file_that_cannot_be_read_is_named(content, tmp_path):
    path = tmp_path / "ids.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SpecDecError, match=r"ids\.json"):
        load_vocabulary(str(path))


def test_a_draft_model_that_is_not_there_is_named(tmp_path):
    with pytest.raises(SpecDecError, match=r"draft model .*nothing.* cannot be loaded"):
        DraftModel(str(tmp_path / "nothing")).load(tiny())


def test_a_path_names_a_draft_model(tmp_path):
    assert DraftModel(tmp_path).model == str(tmp_path)
    with pytest.raises(SpecDecError, match=r"DraftModel\('"):
        SpecDecConfig(strategy=str(tmp_path))


@pytest.mark.parametrize("memory", [SuffixMemory, RecyclingMemory, LookaheadMemory])
def test_a_memory_that_cannot_be_written_leaves_nothing_behind(memory, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    for place in ("folder", "missing/memory.json", "file/memory.json"):
        made = memory()
        with pytest.raises(SpecDecError, match=rf"{place}.* cannot be written .*give the path of a file"):
            made.save(tmp_path / place)
        assert made.path is None
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "folder"]
    assert list((tmp_path / "folder").iterdir()) == []
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("broken", ["model.safetensors", "config.json"])
def test_a_damaged_draft_model_is_named(broken, tmp_path):
    tiny().save_pretrained(tmp_path)
    content = (tmp_path / broken).read_bytes()
    (tmp_path / broken).write_bytes(content[: len(content) // 2])
    with pytest.raises(SpecDecError, match=rf"draft model '{tmp_path}' cannot be loaded"):
        DraftModel(tmp_path).load(tiny())


@pytest.mark.parametrize("options", [{"window": -1}, {"window": 2.0}, {"ngram": 1}, {"ngram": "4"}, {"guesses": 0}])
def test_lookahead_names_what_is_wrong(options):
    (name,) = options
    with pytest.raises(SpecDecError, match=f"lookahead: {name}=.* is no count; use a whole number of at least"):
        Lookahead(**options)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_mask_of_zeros_is_no_prompt_for_a_draft_model(batch):
    model, inputs = hf_specdec.enable(tiny()), prompt(batch)
    inputs["attention_mask"][:] = 0
    with ForwardCounter(model) as counter, pytest.raises(SpecDecError, match="a token to begin with"):
        plain(model, **inputs, max_new_tokens=4, assistant_strategy=tiny())
    assert not counter.count
