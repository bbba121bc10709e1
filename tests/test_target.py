"""The verify forward and the compaction of what was accepted, against plain forwards of one text per node."""

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from conftest import FAMILIES, PAD, TEXT_IDS, randomise, tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tree import BRANCHING, parent_rows, walk
from transformers import PreTrainedModel

from hf_specdec import target as target_module
from hf_specdec.attention import packed_attention
from hf_specdec.target import Target
from hf_specdec.tree import DraftTree

KINDS = [("llama", "sdpa"), ("llama", "eager"), ("mistral", "sdpa"), ("gemma3", "sdpa"), ("gemma3", "eager")]
"""Full attention, a window of 8 in every layer, and layers of both kinds."""
EXACT = {"atol": 1e-5, "rtol": 0.0}


@functools.cache
def shared(family: str, attention: str = "sdpa") -> PreTrainedModel:
    """A model that no test changes, with weights small enough that fp32 rounding stays below `EXACT`."""
    return randomise(tiny(family, attention), 0.1, seed=1)


def begun(model: PreTrainedModel, prompts: Sequence[Sequence[int]]) -> Target:
    """A target whose cache holds these prompts, made as a call of `generate` makes it."""
    length = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (length - len(own)) + list(own) for own in prompts])
    mask = torch.tensor([[0] * (length - len(own)) + [1] * len(own) for own in prompts])

    def begin(model: Any, input_ids: Any, generation_config: Any, **kwargs: Any) -> Target:
        kwargs = {name: kwargs[name] for name in kwargs if name not in ("logits_processor", "stopping_criteria")}
        made = Target(model, kwargs, None, 12, min(map(len, prompts)), input_ids.device)
        assert made.start(input_ids, generation_config)[1] == list(map(len, prompts))
        return made

    return model.generate(ids, attention_mask=mask, max_new_tokens=1, custom_generate=begin)


def words(count: int, generator: torch.Generator) -> list[int]:
    """Tokens of a text."""
    return torch.randint(*TEXT_IDS, (count,), generator=generator).tolist()


def grown(texts: Sequence[Sequence[int]], parents: list[list[int]], generator: torch.Generator) -> DraftTree:
    """A tree of any tokens below the last token of each text."""
    tokens = torch.tensor([[text[-1], *words(len(own) - 1, generator)] for text, own in zip(texts, parents)])
    return DraftTree(tokens, torch.tensor(parents), torch.zeros_like(tokens, dtype=torch.bool))


def path_to(tree: DraftTree, row: int, node: int) -> list[int]:
    """Nodes below the root down to a node, the root side first."""
    return walk(tree.parents[row].tolist(), node)[-2::-1]


def verified(model: PreTrainedModel, target: Target, tree: DraftTree, texts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Logits of one verify pass, shape `(B, N, V)`."""
    with torch.no_grad(), packed_attention(model):
        return target.verify(tree, list(map(len, texts))).logits


def expected(model: PreTrainedModel, tree: DraftTree, texts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Reference: each node's own text through the plain model, no cache and no mask; shape `(B, N, V)`."""
    own = [
        [*text, *tree.tokens[row, path_to(tree, row, node)].tolist()]
        for row, text in enumerate(texts)
        for node in range(tree.size)
    ]
    width = max(map(len, own))
    with torch.no_grad():
        logits = model(torch.tensor([line + [PAD] * (width - len(line)) for line in own]), use_cache=False).logits
    last = torch.tensor([len(line) - 1 for line in own])
    return logits[torch.arange(len(own)), last].view(len(texts), tree.size, -1)


def assert_nodes_agree(found: torch.Tensor, wanted: torch.Tensor, tree: DraftTree) -> None:
    """Every node of the tree; padding may say anything that is a number."""
    real = (tree.parents >= 0) | (torch.arange(tree.size) == 0)
    torch.testing.assert_close(found[real], wanted[real], **EXACT)
    assert torch.isfinite(found).all()


def accept(target: Target, tree: DraftTree, texts: list[list[int]], ends: Sequence[int], more: Sequence[int]) -> None:
    """Commit the path down to a node of each row, and one more token."""
    for row, (text, end) in enumerate(zip(texts, ends)):
        path = path_to(tree, row, end)
        target.settle([(row, len(text) - 1, path)])
        text.extend([*tree.tokens[row, path].tolist(), more[row]])


@pytest.mark.parametrize(("family", "attention"), KINDS)
@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=3), st.integers(0, 10_000), st.data())
def test_every_node_has_the_logits_of_its_own_text_round_after_round(family, attention, lengths, seed, data):
    """Trees of up to 12 nodes over ragged rows; between two of them, a path is accepted in each row."""
    model, generator = shared(family, attention), torch.Generator().manual_seed(seed)
    texts = [words(length, generator) for length in lengths]
    target = begun(model, texts)
    for text in texts:
        text.extend(words(1, generator))
    for _ in range(3):
        tree = grown(texts, data.draw(parent_rows(len(texts), largest=12)), generator)
        assert_nodes_agree(verified(model, target, tree, texts), expected(model, tree, texts), tree)
        real = [[0, *(tree.parents[row] >= 0).nonzero().flatten().tolist()] for row in range(len(texts))]
        ends = [data.draw(st.sampled_from(nodes)) for nodes in real]
        accept(target, tree, texts, ends, words(len(texts), generator))


@pytest.mark.parametrize(("family", "attention"), KINDS)
def test_rows_that_stay_go_on_where_they_were(family, attention):
    model, generator = shared(family, attention), torch.Generator().manual_seed(3)
    texts = [words(length, generator) for length in (4, 17, 11)]
    target = begun(model, texts)
    for text in texts:
        text.extend(words(1, generator))
    tree = grown(texts, [BRANCHING, [-1, 0, 0, 2, -1, 3, -1], BRANCHING], generator)
    verified(model, target, tree, texts)
    accept(target, tree, texts, [6, 5, 5], words(3, generator))
    target.keep([1, 2])
    del texts[0]
    tree = grown(texts, [BRANCHING, BRANCHING], generator)
    assert_nodes_agree(verified(model, target, tree, texts), expected(model, tree, texts), tree)


def two_rounds(family: str) -> float:
    """The largest error of any node in a round over the hand-drawn tree, and in the one after its deepest path."""
    model, generator = shared(family), torch.Generator().manual_seed(1)
    texts = [words(length, generator) for length in (7, 12)]
    target = begun(model, texts)
    for text in texts:
        text.extend(words(1, generator))
    errors = []
    for _ in range(2):
        tree = grown(texts, [BRANCHING, BRANCHING], generator)
        errors.append((verified(model, target, tree, texts) - expected(model, tree, texts)).abs().max().item())
        accept(target, tree, texts, [6, 6], words(2, generator))
    return max(errors)


right = target_module._visible


def causal_nodes(lengths, seen, window, chunk, slots):
    """Each node sees all nodes before it, as in a chain."""
    return right(lengths, torch.ones_like(seen).tril(), window, chunk, slots)


def window_in_slots(lengths, seen, window, chunk, slots):
    """A window counts slots: a node deep in the tree loses its own ancestors."""
    mask = right(lengths, seen, None, chunk, slots)
    if window is None:
        return mask
    own = (lengths - 1)[:, None, None] + torch.arange(seen.shape[1])[:, None]
    return mask & (torch.arange(slots) > own - window)


def no_window(lengths, seen, window, chunk, slots):
    """A window is lost."""
    return right(lengths, seen, None, chunk, slots)


def window_everywhere(lengths, seen, window, chunk, slots):
    """Layers of full attention slide too."""
    return right(lengths, seen, 8, chunk, slots)


def one_slot_more(lengths, seen, window, chunk, slots):
    """Rejected K/V behind the block are seen where rows are ragged."""
    return right(lengths, seen, window, chunk, slots) | (torch.arange(slots) == slots - 1)


WRONG = [
    *((family, causal_nodes) for family in ("llama", "mistral", "gemma3")),
    *((family, mask) for mask in (window_in_slots, no_window) for family in ("mistral", "gemma3")),
    ("gemma3", window_everywhere),
    ("llama", one_slot_more),
]


@pytest.mark.parametrize(("family", "mask"), WRONG, ids=lambda value: getattr(value, "__name__", value))
def test_control_a_wrong_mask_is_felt(family, mask, monkeypatch):
    monkeypatch.setattr(target_module, "_visible", mask)
    assert two_rounds(family) > 1e-2


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_control_a_path_left_where_it_was_is_felt(family, monkeypatch):
    assert two_rounds(family) < 1e-5
    monkeypatch.setattr(Target, "settle", lambda *_: None)
    assert two_rounds(family) > 1e-2


@pytest.mark.parametrize(
    ("path", "moved"),
    [
        ([], {}),
        ([1], {}),
        ([1, 2, 3], {}),
        ([2], {5: 6}),
        ([2, 5], {5: 6, 6: 9}),
        ([1, 4, 6], {6: 8, 7: 10}),
        ([1, 2, 5], {7: 9}),
        ([2, 3, 4], {5: 6, 6: 7, 7: 8}),
    ],
    ids=str,
)
def test_an_accepted_path_moves_behind_its_root(path, moved):
    """The root of row 1 is at slot 4, node j at slot 4 + j; the d-th accepted node belongs at slot 4 + d."""
    target = begun(shared("llama"), [[5, 6, 7], [5, 6, 7, 8], [5]])
    for layer in target.cache.slot_layers():
        for buffer in (layer.keys, layer.values):
            buffer.copy_(torch.arange(buffer.shape[2])[:, None].expand_as(buffer))
    target.settle([(1, 4, path)])
    for layer in target.cache.slot_layers():
        for buffer in (layer.keys, layer.values):
            found = buffer[:, 0, :12, 0].long().tolist()
            assert found == [list(range(12)), [moved.get(slot, slot) for slot in range(12)], list(range(12))]


def test_windows_of_these_models_are_narrower_than_their_texts():
    """Control: what the tests above claim of the families."""
    assert [FAMILIES[family].window for family in ("llama", "mistral", "gemma3")] == [None, 8, 8]
    assert target_module.mask_types(shared("gemma3").config) == {
        "full_attention": (None, None),
        "sliding_attention": (8, None),
    }
