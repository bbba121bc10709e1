"""How forwards over few tokens compute: in inference mode, and in bfloat16 on a CPU by the faster of torch's kernels.

In inference mode each operation costs the host less. In bfloat16, torch hands products to oneDNN, which is made for
blocks. For one vector or two, ATen's own kernel sums the same products, in float32 as well, and on some processors
reads a weight twice as fast. Both are timed on the model's largest weight, once in a process, and forwards over so few
tokens go the way that was clearly faster.

The switch is torch's and holds for the whole process. It is off during such a forward alone, and not touched while
calls of `generate` on enabled models run in other threads, whose prompts it would slow down.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn
from transformers import PreTrainedModel

from .capability import runs_in_inference_mode

MOST_VECTORS = 2
"""Blocks of more are not timed."""
LEAST_BYTES, SAMPLE_BYTES = 8 << 20, 64 << 20
"""Sizes of a weight that is timed: too large for the caches, and no more of it than tells."""
REPEATS = 3
CLEARLY = 0.85
"""Share of oneDNN's time that ATen's kernel must stay below."""

_lock = threading.Lock()
_calls: dict[object, int] = {}
_measured: dict[tuple[int, int, int], frozenset[int]] = {}
_lean: set[object] = set()
_before: list[bool] = []


@contextmanager
def calling() -> Iterator[None]:
    """A call of `generate` by this thread."""
    call = object()
    try:
        _calls[call] = threading.get_ident()
        yield
    finally:
        _calls.pop(call, None)


def others_are_calling() -> bool:
    """Is another thread in a call of `generate`?"""
    return bool(set(_calls.copy().values()) - {threading.get_ident()})


class ForwardMode:
    """What a model's forwards run in.

    Attributes:
        inference: inference mode.
        lean: numbers of tokens, all rows together, that run without oneDNN.
    """

    def __init__(self, model: PreTrainedModel):
        self.inference = runs_in_inference_mode(model)
        self.lean = lean_sizes(model)

    @contextmanager
    def __call__(self, tokens: int) -> Iterator[None]:
        """For a forward over this many tokens."""
        with torch.inference_mode() if self.inference else nullcontext(), lean_products(tokens in self.lean):
            yield


def lean_sizes(model: nn.Module) -> frozenset[int]:
    """Numbers of vectors that this model multiplies faster without oneDNN; none for most models and machines."""
    weights = [
        each.weight
        for each in model.modules()
        if isinstance(each, nn.Linear) and each.weight.dtype is torch.bfloat16 and each.weight.device.type == "cpu"
    ]
    largest = max(weights, key=lambda each: each.numel(), default=None)
    if largest is None or 2 * largest.numel() < LEAST_BYTES or not torch._C._get_mkldnn_enabled():
        return frozenset()
    key = (*largest.shape, torch.get_num_threads())
    found = _measured.get(key)
    if found is None:
        found = _measure(largest.detach())
        if not others_are_calling():
            _measured[key] = found
    return found


def _measure(weight: torch.Tensor) -> frozenset[int]:
    """Time both kernels in turn."""
    weight = weight[: max(1, SAMPLE_BYTES // (2 * weight.shape[1]))]
    found = []
    for vectors in range(1, MOST_VECTORS + 1):
        block = torch.ones(vectors, weight.shape[1], dtype=weight.dtype)
        best = {True: float("inf"), False: float("inf")}
        for _ in range(REPEATS):
            for lean in best:
                with torch.inference_mode(), lean_products(lean):
                    started = time.perf_counter()
                    nn.functional.linear(block, weight)
                    best[lean] = min(best[lean], time.perf_counter() - started)
        if best[True] < CLEARLY * best[False]:
            found.append(vectors)
    return frozenset(found)


@contextmanager
def lean_products(wanted: bool = True) -> Iterator[None]:
    """Products inside do without oneDNN, if that is wanted and no other thread is in a call."""
    if not wanted or others_are_calling():
        yield
        return
    forward = object()
    try:
        with _lock:
            _lean.add(forward)
            if not _before:
                _before.append(torch._C._get_mkldnn_enabled())
                torch._C._set_mkldnn_enabled(False)
        yield
    finally:
        with _lock:
            _lean.discard(forward)
            if _before and not _lean:
                torch._C._set_mkldnn_enabled(_before[0])
                _before.clear()
