"""Forwards of the loop run in inference mode; what a call leaves behind can be trained on all the same."""

import copy
import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import Way, call, spec_model
from conftest import prompt
from torch import nn
from transformers import LogitsProcessor, LogitsProcessorList

import hf_specdec
from hf_specdec import DraftModel, LayerSkip, Merge, SpecDecError
from hf_specdec.capability import restore_buffers, runs_in_inference_mode

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


def modes(monkeypatch: pytest.MonkeyPatch, run: Any) -> list[tuple[int, bool]]:
    """Of each lookup of embeddings: its tokens, and whether it ran in inference mode."""
    seen: list[tuple[int, bool]] = []
    look_up = nn.Embedding.forward

    @functools.wraps(look_up)
    def watched(self: nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
        seen.append((ids.shape[1], torch.is_inference_mode_enabled()))
        return look_up(self, ids)

    with monkeypatch.context() as patch:
        patch.setattr(nn.Embedding, "forward", watched)
        run()
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


def test_the_rounds_run_in_inference_mode_and_the_prompt_does_not(monkeypatch):
    model = spec_model()
    call(model, prompt(1), Way("", 1, False), output_hidden_states=True)  # transformers leaves hooks of its own
    first, *rounds = modes(monkeypatch, lambda: call(model, prompt(1), Way("", 1, False), assistant_strategy="free"))
    assert first == (prompt(1)["input_ids"].shape[1], False)
    assert rounds and all(mode for _, mode in rounds)


class Sharded(nn.Parameter):
    """Stands for the weights of a library."""


class Growing(nn.Module):
    """Rotary positions that are kept between forwards, as models of other packages do."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.kept = self.inner(x, position_ids)
        return self.kept


def shard(model: Any) -> None:
    model.lm_head.weight = Sharded(model.lm_head.weight.data)


def mark(model: Any) -> None:
    model.lm_head.weight.ds_id = 3


def manage(model: Any) -> None:
    """As FSDP marks the modules whose parameters it shards."""
    model.model.layers[0]._is_fsdp_managed_module = True


def hook(model: Any) -> None:
    model.model.layers[0].register_forward_hook(lambda module, args, output: None)


def steer(model: Any) -> None:
    """A hook that differentiates inside the forward."""
    probe = nn.Linear(model.config.hidden_size, 1)

    def steered(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            own = output.detach().clone().requires_grad_(True)
            (gradient,) = torch.autograd.grad(probe(own).pow(2).sum(), own)
        return output - 0.01 * gradient

    model.model.norm.register_forward_hook(steered)


def replace_module(model: Any) -> None:
    model.model.rotary_emb = Growing(model.model.rotary_emb)


def replace_forward(model: Any) -> None:
    own = model.model.norm.forward
    model.model.norm.forward = lambda states: own(states)


@pytest.mark.parametrize("change", [shard, mark, manage, hook, steer, replace_module, replace_forward])
def test_what_others_may_keep_or_replace_is_run_as_before(monkeypatch, change):
    model = hf_specdec.enable(copy.deepcopy(spec_model()))
    assert runs_in_inference_mode(model)
    change(model)
    assert not runs_in_inference_mode(model)
    seen = modes(monkeypatch, lambda: call(model, prompt(1), Way("", 1, False), assistant_strategy="free"))
    assert len(seen) > 1 and not any(mode for _, mode in seen)
    ids = prompt(1)["input_ids"]
    model(input_ids=ids, labels=ids).loss.backward()


def test_weights_elsewhere_are_not_run_in_inference_mode():
    assert not runs_in_inference_mode(copy.deepcopy(spec_model()).to("meta"))


def test_buffers_that_a_model_replaces_are_ordinary_tensors_again():
    module = nn.Sequential(nn.BatchNorm1d(2))
    with torch.inference_mode():
        module[0].running_mean = torch.ones(2)
    restore_buffers(module)
    assert not module[0].running_mean.is_inference() and module[0].running_mean.tolist() == [1, 1]


@pytest.mark.parametrize("strategy", ["quantized_self", "model"])
def test_a_draft_whose_embeddings_are_no_table_is_refused(strategy):
    model = hf_specdec.enable(copy.deepcopy(spec_model()))
    draft = copy.deepcopy(model)
    broken = model if strategy == "quantized_self" else draft
    broken.get_input_embeddings = lambda: SimpleNamespace()
    given = "quantized_self" if strategy == "quantized_self" else DraftModel(draft)
    with pytest.raises(SpecDecError, match="no table"):
        call(model, prompt(1), Way("", 1, False), assistant_strategy=given)
