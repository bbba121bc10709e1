"""Forwards of the loop run in inference mode; what a call leaves behind can be trained on all the same."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases import Way, call, spec_model
from conftest import prompt
from torch import nn
from transformers import LogitsProcessor, LogitsProcessorList

import hf_specdec
from hf_specdec import LayerSkip, Merge
from hf_specdec.capability import has_plain_weights

STRATEGIES = ["auto", "suffix", "quantized_self", LayerSkip(exit_layer=2), Merge(["suffix", "lookahead"])]


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested outputs, a cache included."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from tensors(each)
    elif isinstance(value, dict):
        yield from tensors(list(value.values()))
    elif hasattr(value, "layers"):
        for layer in value.layers:
            yield from tensors([layer.keys, layer.values])


class Banning(LogitsProcessor):
    """Writes into the scores that it is given."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, 7] = -float("inf")
        return scores


def modes(model: nn.Module, run: Any) -> list[tuple[int, bool]]:
    """Of each forward of the decoder: its tokens, and whether it ran in inference mode."""
    seen: list[tuple[int, bool]] = []
    hook = model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append((kwargs["input_ids"].shape[1], torch.is_inference_mode_enabled())),
        with_kwargs=True,
    )
    try:
        run()
    finally:
        hook.remove()
    return seen


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("sample", [False, True])
def test_what_a_call_leaves_can_be_trained_on(strategy, sample):
    model = hf_specdec.enable(copy.deepcopy(spec_model()))
    wanted = dict.fromkeys(("output_scores", "output_logits", "output_hidden_states"), True)
    out = call(
        model, prompt(3), Way("", 3, sample), assistant_strategy=strategy, **wanted,
        logits_processor=LogitsProcessorList([Banning()]),
    )  # fmt: skip
    left = [*tensors(dict(out)), *model.parameters(), *model.buffers()]
    assert len(left) > 50 and not any(each.is_inference() for each in left)
    loss = model(input_ids=out.sequences, labels=out.sequences).loss
    loss = loss + (model.lm_head(out.hidden_states[-1][-1]).mean() * out.logits[-1].mean())
    loss.backward()
    assert all(each.grad is not None for each in model.lm_head.parameters())


def test_the_rounds_run_in_inference_mode_and_the_prompt_does_not():
    model = spec_model()
    inputs = prompt(1)
    (length, of_prompt), *rounds = modes(
        model, lambda: call(model, inputs, Way("", 1, False), assistant_strategy="free")
    )
    assert length == inputs["input_ids"].shape[1] and not of_prompt
    assert rounds and all(mode for _, mode in rounds)


class Sharded(nn.Parameter):
    """Stands for the weights of a library."""


def test_weights_that_a_library_may_replace_are_run_as_before():
    model = hf_specdec.enable(copy.deepcopy(spec_model()))
    assert has_plain_weights(model)
    own = model.lm_head.weight
    model.lm_head.weight = Sharded(own.data)
    assert type(model.lm_head.weight) is Sharded and not has_plain_weights(model)
    seen = modes(model, lambda: call(model, prompt(1), Way("", 1, False), assistant_strategy="free"))
    assert len(seen) > 1 and not any(mode for _, mode in seen)
    model.lm_head.weight = own
    own.ds_id = 3
    assert not has_plain_weights(model)
    assert not has_plain_weights(copy.deepcopy(model).to("meta"))
