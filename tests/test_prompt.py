"""Prompts of a ragged batch run in groups: what plain `generate` writes, keeps and returns, from fewer columns."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from cases import CACHE
from conftest import TEXT_FAMILIES, plain, prompt, tiny
from transformers import DynamicCache, PreTrainedModel

import hf_specdec
from hf_specdec import prompt as prompts

LENGTHS = [[5], [5, 5, 5], [40, 41, 300], [1, 100, 101, 102, 400, 401], [64, 1], [66, 1], [7, 90, 8, 300, 91, 9, 302]]


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass costs nothing: every row that is shorter than the others runs on its own."""
    monkeypatch.setattr(prompts, "PASS_TOKENS", 0)


@contextmanager
def widths(model: PreTrainedModel) -> Iterator[list[int]]:
    """Columns of each forward pass inside."""
    seen: list[int] = []

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        given = kwargs.get("input_ids")
        seen.append((kwargs["inputs_embeds"] if given is None else given).shape[1])

    note.__module__ = "torch"  # no code of others
    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    yield seen
    handle.remove()


def partitions(rows: list[int]) -> Iterator[list[list[int]]]:
    """All ways to put rows into groups."""
    if not rows:
        yield []
        return
    for rest in partitions(rows[1:]):
        yield [[rows[0]], *rest]
        for index, group in enumerate(rest):
            yield [*rest[:index], [rows[0], *group], *rest[index + 1 :]]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_groups_have_the_fewest_columns(lengths):
    def columns(groups: list[list[int]]) -> int:
        return sum(prompts.PASS_TOKENS + len(group) * max(lengths[row] for row in group) for group in groups)

    groups = prompts.prompt_groups(lengths)
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    assert columns(groups) == min(map(columns, partitions(list(range(len(lengths))))))


def test_rows_of_one_length_stay_together():
    assert prompts.prompt_groups([9] * 8) == [list(range(8))]
    assert prompts.prompt_groups([30, 31, 28, 33]) == [[0, 1, 2, 3]]
    assert prompts.prompt_groups([900, 30, 31, 910]) == [[1, 2], [0, 3]]


@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sample"])
@pytest.mark.parametrize("family", TEXT_FAMILIES)
@pytest.mark.usefixtures("eager")
def test_the_text_and_the_cache_are_those_of_plain_generate(family, sample):
    model = hf_specdec.enable(tiny(family))
    inputs = prompt(3, family)
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": sample, "return_dict_in_generate": True}
    options |= {"output_logits": True}
    expected = plain(model, 3, **inputs, **options)
    with widths(model) as seen:
        got = plain(model, 3, **inputs, **options, assistant_strategy="suffix")
    assert torch.equal(got.sequences, expected.sequences)
    passes = 1 if family == "llama4" else 3  # chunks of attention are counted in columns
    assert got.speculation.prompt_groups == passes and len(seen) == got.speculation.target_forwards - 1 + passes
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(expected.logits), rtol=1e-4, atol=1e-4)
    real = inputs["attention_mask"].bool()
    for ours, own in zip(got[CACHE].layers, expected[CACHE].layers, strict=True):
        if ours.keys is None or ours.keys.shape != own.keys.shape or ours.keys.shape[2] < real.shape[1]:
            continue
        for mine, theirs in ((ours.keys, own.keys), (ours.values, own.values)):
            width = real.shape[1]
            mine, theirs = (each[:, :, :width].transpose(1, 2)[real] for each in (mine, theirs))
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("eager")
def test_each_row_runs_without_padding():
    model = hf_specdec.enable(tiny())
    inputs = prompt(3)
    lengths = sorted(inputs["attention_mask"].sum(1).tolist())
    assert len(set(lengths)) == 3
    with widths(model) as seen:
        out = plain(
            model, **inputs, max_new_tokens=4, assistant_strategy={"max_draft_tokens": 0},
            return_dict_in_generate=True,
        )  # fmt: skip
    assert seen[:3] == lengths and len(seen) == 3 + 3
    assert out.speculation.target_forwards == 1 + 3 and out.speculation.prompt_groups == 3


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("strategy", ["recycling", "auto"])
def test_what_is_learned_from_the_prompt_is_the_same(strategy, monkeypatch):
    model = hf_specdec.enable(tiny())
    learned: list[list[Any]] = []
    own = hf_specdec.target.Target.prompt_top

    def watched(self: Any, row: int, count: int) -> Any:
        top = own(self, row, count)
        learned[-1].append((row, top[0].tolist()))
        return top

    monkeypatch.setattr(hf_specdec.target.Target, "prompt_top", watched)
    for cost in (0, 10_000):
        monkeypatch.setattr(prompts, "PASS_TOKENS", cost)
        learned.append([])
        plain(model, **prompt(3), max_new_tokens=4, assistant_strategy=strategy)
    assert learned[0] == learned[1] and len(learned[0]) == 3


def holes(inputs: dict[str, Any]) -> dict[str, Any]:
    mask = inputs["attention_mask"].clone()
    mask[int(mask.sum(1).argmax()), 3] = 0
    return {**inputs, "attention_mask": mask}


def moved(inputs: dict[str, Any]) -> dict[str, Any]:
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    positions[1] += 7
    return {**inputs, "position_ids": positions}


KEPT_WHOLE = {
    "positions of the caller's": moved,
    "a mask with holes": holes,
    "padding on the right": lambda inputs: {
        "input_ids": inputs["input_ids"].flip(1), "attention_mask": inputs["attention_mask"].flip(1)
    },
    "hidden states": lambda inputs: {**inputs, "output_hidden_states": True, "return_dict_in_generate": True},
    "attentions": lambda inputs: {**inputs, "output_attentions": True, "return_dict_in_generate": True},
    "chunks": lambda inputs: {**inputs, "prefill_chunk_size": 4},
    "a cache of the caller's": lambda inputs: {**inputs, CACHE: DynamicCache()},
    "embeddings": lambda inputs: {**inputs, "inputs_embeds": tiny().get_input_embeddings()(inputs["input_ids"])},
}  # fmt: skip


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("why", KEPT_WHOLE)
def test_what_belongs_to_the_whole_batch_runs_as_one(why):
    model = hf_specdec.enable(tiny("llama", "eager" if why == "attentions" else None))
    made = KEPT_WHOLE[why]
    expected = plain(model, **made(prompt(3)), max_new_tokens=6)
    with widths(model) as seen:
        got = plain(model, **made(prompt(3)), max_new_tokens=6, assistant_strategy="suffix")
    ids = [each if isinstance(each, torch.Tensor) else each.sequences for each in (got, expected)]
    assert torch.equal(*ids)
    longest = prompt(3)["input_ids"].shape[1]
    assert seen[0] == (4 if why == "chunks" else longest)


@pytest.mark.usefixtures("eager")
def test_a_cache_with_the_models_layers_is_filled_and_returned():
    model = hf_specdec.enable(tiny("mistral"))
    cache = DynamicCache(config=model.config)
    options: dict[str, Any] = {"max_new_tokens": 6, "return_dict_in_generate": True}
    out = plain(model, **prompt(3), **options, **{CACHE: cache}, assistant_strategy="suffix")
    assert out[CACHE] is cache and cache.get_seq_length() == out.sequences.shape[1] - 1
    assert torch.equal(out.sequences, plain(model, **prompt(3), **options).sequences)


@pytest.mark.usefixtures("eager")
def test_an_error_in_a_later_group_leaves_the_callers_cache_empty():
    model = hf_specdec.enable(tiny())
    cache, calls = DynamicCache(config=model.config), []

    def fail(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    fail.__module__ = "torch"
    handle = model.register_forward_pre_hook(fail)
    try:
        with pytest.raises(KeyboardInterrupt):
            plain(model, **prompt(3), max_new_tokens=6, **{CACHE: cache}, assistant_strategy="suffix")
    finally:
        handle.remove()
    assert len(calls) == 2 and cache.get_seq_length() == 0


@pytest.mark.usefixtures("eager")
def test_hooks_of_the_user_see_the_whole_batch():
    """One that acts on the first forward alone, with an entry per row."""
    scales = torch.tensor([1.0, 1.5, 0.5])[:, None, None]
    texts = []
    for strategy in (None, "suffix"):
        model, calls = hf_specdec.enable(tiny()), []

        def once(module: Any, args: Any, output: Any, calls: list[int] = calls) -> Any:
            calls.append(1)
            return output * scales if len(calls) == 1 else output

        model.model.layers[0].register_forward_hook(once)
        texts.append(plain(model, **prompt(3), max_new_tokens=8, assistant_strategy=strategy))
    assert torch.equal(*texts)
