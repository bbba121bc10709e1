"""Forwards over few tokens in bfloat16 go without oneDNN where that is faster, and nothing else does."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import plain, prompt, tiny
from torch import nn
from transformers import PreTrainedModel

import hf_specdec
from hf_specdec import DraftModel, SpecDecConfig, kernels

pytestmark = pytest.mark.skipif(not torch._C._get_mkldnn_enabled(), reason="this torch has no oneDNN")


@pytest.fixture(autouse=True)
def _nothing_measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(kernels, "_measured", {})
    yield
    assert torch._C._get_mkldnn_enabled() and not kernels._lean and not kernels._calls and not kernels._before


def large(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """A layer of 8 MiB in bfloat16."""
    return nn.Sequential(nn.Linear(64, 16, dtype=dtype), nn.Linear(1024, 4096, bias=False, dtype=dtype))


def timed(monkeypatch: pytest.MonkeyPatch, seconds: Any) -> list[tuple[int, bool]]:
    """A clock by which a product takes `seconds(vectors, lean)`; what was multiplied, and whether without oneDNN."""
    now, seen = [0.0], []
    linear = nn.functional.linear

    def watched(block: torch.Tensor, *rest: Any) -> torch.Tensor:
        lean = not torch._C._get_mkldnn_enabled()
        seen.append((len(block), lean))
        now[0] += seconds(len(block), lean)
        return linear(block, *rest)

    monkeypatch.setattr(kernels.nn.functional, "linear", watched)
    monkeypatch.setattr(kernels.time, "perf_counter", lambda: now[0])
    return seen


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (lambda vectors, lean: 1.0 if lean else 2.0, {1, 2}),
        (lambda vectors, lean: vectors if lean else 1.5, {1}),
        (lambda vectors, lean: 0.9 if lean else 1.0, set()),
        (lambda vectors, lean: 2.0 if lean else 1.0, set()),
    ],
    ids=["both", "one", "hardly", "neither"],
)
def test_the_faster_kernel_is_taken_where_it_is_clearly_faster(seconds, expected, monkeypatch):
    seen = timed(monkeypatch, seconds)
    assert kernels.lean_sizes(large()) == expected
    assert len(seen) == 2 * kernels.REPEATS * kernels.MOST_VECTORS and set(seen) == {
        (vectors, lean) for vectors in (1, 2) for lean in (True, False)
    }
    assert kernels.lean_sizes(large()) == expected and len(seen) == 2 * kernels.REPEATS * kernels.MOST_VECTORS


def test_models_that_have_no_choice_are_not_timed(monkeypatch):
    seen = timed(monkeypatch, lambda *_: 1.0)
    assert not kernels.lean_sizes(large(torch.float32)) and not kernels.lean_sizes(large(torch.float16))
    assert not kernels.lean_sizes(tiny().to(torch.bfloat16)), "its weights lie in the caches"
    with torch.device("meta"):
        assert not kernels.lean_sizes(large())
    with monkeypatch.context() as patch:
        patch.setattr(torch._C, "_get_mkldnn_enabled", lambda: False)
        assert not kernels.lean_sizes(large())
    assert not seen


def test_what_is_timed_beside_other_calls_is_not_kept(monkeypatch):
    timed(monkeypatch, lambda vectors, lean: 1.0 if lean else 2.0)
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "others_are_calling", lambda: True)
        assert not kernels.lean_sizes(large())
    assert kernels.lean_sizes(large()) == {1, 2}


def test_both_kernels_compute_the_same():
    torch.manual_seed(1)
    weight = torch.randn(4096, 1024).bfloat16()
    for vectors in (1, 2):
        block = torch.randn(vectors, 1024).bfloat16()
        exact = block.double() @ weight.double().t()
        for lean in (False, True):
            with kernels.lean_products(lean):
                got = nn.functional.linear(block, weight).double()
            torch.testing.assert_close(got, exact, rtol=2**-8, atol=1e-2)


def test_the_switch_is_put_back_after_an_error_and_by_the_last_one_out():
    def fail() -> None:
        with kernels.lean_products():
            with kernels.lean_products():
                pass
            assert not torch._C._get_mkldnn_enabled()
            raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        fail()
    assert torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        with kernels.lean_products():
            pass
        assert not torch._C._get_mkldnn_enabled(), "who had turned it off finds it off"
    finally:
        torch._C._set_mkldnn_enabled(True)


def test_calls_in_other_threads_keep_their_kernels():
    inside, done = threading.Event(), threading.Event()

    def other() -> None:
        with kernels.calling():
            inside.set()
            done.wait()

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait()
    with kernels.calling(), kernels.lean_products():
        assert torch._C._get_mkldnn_enabled()
    done.set()
    thread.join()
    with kernels.calling(), kernels.calling(), kernels.lean_products():
        assert not torch._C._get_mkldnn_enabled()


def forwards(monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel, **options: Any) -> list[tuple[int, bool]]:
    """Of each forward of a call of one row: its tokens, and whether it ran without oneDNN."""
    seen: list[tuple[int, bool]] = []
    look_up = nn.Embedding.forward

    def watched(self: nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
        seen.append((ids.numel(), not torch._C._get_mkldnn_enabled()))
        return look_up(self, ids)

    watched.__module__ = look_up.__module__
    with monkeypatch.context() as patch:
        patch.setattr(nn.Embedding, "forward", watched)
        plain(model, **prompt(1), max_new_tokens=8, **options)
    return seen


@pytest.mark.parametrize("drafts", [0, 1, 4])
@pytest.mark.parametrize("drafter", ["oracle", "model"])
def test_forwards_of_few_tokens_alone_go_without(drafts, drafter, monkeypatch):
    monkeypatch.setattr(kernels, "lean_sizes", lambda model: frozenset({1, 2}))
    model = hf_specdec.enable(tiny())
    strategy: Any = "suffix" if drafter == "oracle" else DraftModel(tiny(), vocabulary=list(range(5, 40)))
    config = SpecDecConfig(strategy, max_draft_tokens=drafts, max_width=1, schedule="constant")
    seen = forwards(monkeypatch, model, assistant_strategy=config)
    assert any(lean for _, lean in seen) and all(lean == (tokens <= 2) for tokens, lean in seen)
    assert not any(lean for _, lean in forwards(monkeypatch, model)), "plain `generate` is untouched"


def test_plain_calls_of_enabled_models_count_as_calls(monkeypatch):
    model = hf_specdec.enable(tiny())
    counted: list[int] = []
    handle = model.register_forward_pre_hook(lambda *_: counted.append(len(kernels._calls)))
    try:
        plain(model, **prompt(1), max_new_tokens=2)
        plain(model, **prompt(1), max_new_tokens=2, assistant_strategy="suffix")
    finally:
        handle.remove()
    assert counted and set(counted) == {1}
