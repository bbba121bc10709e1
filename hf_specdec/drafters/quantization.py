"""Weight-only quantised layers, and a copy of a model that has them and shares all other tensors with it.

The copy's own memory is the quantised weights. It is made layer by layer, a few thousand rows at a time, kept per
model by a weak reference, and made anew when the model's weights have changed.
"""

import copy
import statistics
import threading
import time
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..errors import SpecDecError

GROUP = 32
"""Weights of a row that share a scale at 4 bits."""
ROWS = 4096
"""Rows of a weight that are quantised at a time."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class QuantizedLinear(nn.Module):
    """A linear layer with quantised weights; its input and output keep the model's dtype.

    `weight` and `bias` are the original's own, by reference: some models look at a layer's weight for its dtype.

    Args:
        layer: `nn.Linear`, or the transposed `Conv1D` of GPT-2.
    """

    bits: ClassVar[int]
    bias: torch.Tensor | None

    def __init__(self, layer: Any):
        super().__init__()
        self.__dict__["weight"] = layer.weight
        self.bias = layer.bias
        weight = plain_weight(layer)
        parts = [self.quantize(rows) for rows in weight.split(ROWS)]
        for name in parts[0]:
            axis = 1 if name == "scales_and_zeros" else 0
            self.register_buffer(name, torch.cat([part[name] for part in parts], axis))

    @staticmethod
    def fits(outputs: int, inputs: int) -> bool:
        """Can a weight of this shape be quantised?"""
        raise NotImplementedError

    @staticmethod
    def quantize(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """The buffers for some rows of the weight, shape `(n, inputs)`."""
        raise NotImplementedError

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        """`rows @ weight.T` for rows of shape `(n, inputs)`."""
        raise NotImplementedError

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The layer's output, shape `(..., outputs)`."""
        output = self.product(hidden.reshape(-1, hidden.shape[-1]).contiguous())
        if self.bias is not None:
            output = output + self.bias
        return output.view(*hidden.shape[:-1], output.shape[-1])


class Int8Linear(QuantizedLinear):
    """8 bits and one scale per output channel: `w = scale * q`, q in -127..127."""

    bits: ClassVar[int] = 8
    quantized: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def fits(outputs: int, inputs: int) -> bool:
        """Inputs in multiples of 16, the steps of the kernel: it reads past the end of a row otherwise."""
        return inputs % 16 == 0

    @staticmethod
    def quantize(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """`quantized`, shape `(n, inputs)`, and `scale`, shape `(n,)`, in the weight's dtype."""
        scale = (weight.abs().amax(1).float() / 127).to(weight.dtype)
        scale.masked_fill_(scale == 0, 1)
        codes = (weight.float() / scale.float().unsqueeze(1)).round_().clamp_(-127, 127)
        return {"quantized": codes.to(torch.int8), "scale": scale}

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        """`rows @ weight.T`."""
        return torch.ops.aten._weight_int8pack_mm(rows, self.quantized, self.scale)


class Int4Linear(QuantizedLinear):
    """4 bits, one scale and one offset per `GROUP` weights of a row: `w = scale * (q - 8) + zero`, q in 0..15."""

    bits: ClassVar[int] = 4
    packed: torch.Tensor
    scales_and_zeros: torch.Tensor

    @staticmethod
    def fits(outputs: int, inputs: int) -> bool:
        """Whole groups, and the blocks of the kernel."""
        return inputs % GROUP == 0 and outputs % 16 == 0

    @staticmethod
    def quantize(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """`packed`, in the kernel's own order, and `scales_and_zeros`, shape `(inputs / GROUP, n, 2)`."""
        groups = weight.float().unflatten(1, (-1, GROUP))
        low, high = groups.aminmax(dim=2, keepdim=True)
        scale = ((high - low) / 15).to(weight.dtype)
        scale.masked_fill_(scale == 0, 1)
        zero = (low + 8 * scale.float()).to(weight.dtype)
        codes = ((groups - zero.float()) / scale.float() + 8).round_().clamp_(0, 15).to(torch.int32).flatten(1)
        if codes.device.type == "cpu":
            packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        else:
            pairs = (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8)
            packed = torch.ops.aten._convert_weight_to_int4pack(pairs, 2)
        return {"packed": packed, "scales_and_zeros": torch.cat([scale, zero], 2).transpose(0, 1).contiguous()}

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        """`rows @ weight.T`."""
        kernel = "_weight_int4pack_mm_for_cpu" if rows.device.type == "cpu" else "_weight_int4pack_mm"
        return getattr(torch.ops.aten, kernel)(rows, self.packed, GROUP, self.scales_and_zeros)


SCHEMES: dict[str, tuple[type[QuantizedLinear], ...]] = {
    "int8_weight_only": (Int8Linear,),
    "int4_weight_only": (Int4Linear, Int8Linear),
}
"""Layer classes by scheme; each layer gets the first that fits its shape. The output layer always has 8 bits: at 4 it
costs more matches than all other layers together."""


@dataclass(frozen=True)
class QuantizedCopy:
    """A model's quantised copy.

    Args:
        model: the copy.
        scheme: a name in `SCHEMES`.
        weights: how many weights are quantised.
        memory_bytes: what the quantised weights take; nothing else is the copy's own.
        left: names of the decoder's weight matrices, embeddings left out, that stay the model's own.
        overlap: sum of `min(p, q)` over the vocabulary, averaged over the tokens it was tried on; None untried.
        relative_cost: seconds of one token over those of the model itself; None untried.
    """

    model: PreTrainedModel
    scheme: str
    weights: int
    memory_bytes: int
    left: tuple[str, ...]
    overlap: float | None = None
    relative_cost: float | None = None

    @property
    def expected_gain(self) -> float:
        """Speed-up of the best draft length up to 8 if a pass over a draft costs as much as one token.

        `(1 + a + ... + a^n) / (1 + n c)`, as in Leviathan et al. (arXiv:2211.17192), with the overlap for a.
        """
        assert self.overlap is not None and self.relative_cost is not None
        emitted = [sum(self.overlap**depth for depth in range(length + 1)) for length in range(9)]
        return max(count / (1 + length * self.relative_cost) for length, count in enumerate(emitted) if length)


_COPIES: WeakKeyDictionary[nn.Module, tuple[int, dict[str, QuantizedCopy]]] = WeakKeyDictionary()
_lock = threading.Lock()


def quantized_copy(model: PreTrainedModel, scheme: str, sample: Callable[[], torch.Tensor]) -> QuantizedCopy:
    """The model's copy under this scheme, kept from call to call while the model's weights stay the same.

    Args:
        scheme: a name in `SCHEMES`, or `auto`: the one with the largest expected gain on this machine and text.
        sample: called for `auto`; token ids of shape `(L,)` to try the copies on.

    Raises:
        SpecDecError: the model has no layer that the scheme's kernels can take.
    """
    with _lock:
        key = hash(tuple((each.data_ptr(), version(each)) for each in model.parameters()))
        if model not in _COPIES or _COPIES[model][0] != key:
            _COPIES[model] = (key, {})
        made = _COPIES[model][1]
        if scheme not in made:
            with torch.no_grad():
                made[scheme] = choose(model, sample()) if scheme == "auto" else make_copy(model, scheme)
        return made[scheme]


def version(weight: torch.Tensor) -> int:
    """How often a tensor was written to."""
    return 0 if weight.is_inference() else weight._version


def plain_weight(layer: Any) -> torch.Tensor:
    """A layer's weight as `(outputs, inputs)`."""
    return layer.weight.detach().t() if isinstance(layer, Conv1D) else layer.weight.detach()


def plain_layers(model: PreTrainedModel) -> list[Any]:
    """The linear layers of the decoder and the output layer, subclasses and sharded weights left out.

    Raises:
        SpecDecError: the model is offloaded or quantised, or has no such layer.
    """
    layers = [
        each
        for each in decoder_modules(model)
        if type(each) in (nn.Linear, Conv1D)
        and type(each.weight) is nn.Parameter
        and each.weight.dtype in DTYPES
        and each.weight.numel()
    ]
    offloaded = any(each.device.type == "meta" for each in model.parameters())
    if not layers or offloaded or getattr(model, "is_quantized", False):
        raise SpecDecError(
            f"{type(model).__name__} has no linear layer that can be quantised: they must lie in memory as plain "
            "float32, bfloat16 or float16 weights, not offloaded, sharded or quantised already. Give a model that is "
            'quantised, QuantizedSelf(model=...), or use assistant_strategy="suffix".'
        )
    return layers


def decoder_modules(model: PreTrainedModel) -> list[nn.Module]:
    """The modules of the decoder, and the output layer."""
    modules = dict.fromkeys(model.get_decoder().modules())
    if (output := model.get_output_embeddings()) is not None:
        modules[output] = None
    return list(modules)


def left_as_they_are(model: PreTrainedModel, quantized: Collection[nn.Module]) -> tuple[str, ...]:
    """Names of the decoder's weight matrices that belong to no quantised module and no embedding."""
    modules = set(decoder_modules(model))
    return tuple(
        f"{name}.{own}"
        for name, module in model.named_modules()
        if module in modules and module not in quantized and not isinstance(module, nn.Embedding)
        for own, weight in module.named_parameters(recurse=False)
        if weight.dim() > 1
    )


def make_copy(model: PreTrainedModel, scheme: str) -> QuantizedCopy:
    """A copy of the model under this scheme. A layer whose shape none of its kernels takes stays the model's own."""
    made: dict[Any, QuantizedLinear] = {}
    for layer in plain_layers(model):
        shape = plain_weight(layer).shape
        kinds = SCHEMES[scheme] if layer is not model.get_output_embeddings() else (Int8Linear,)
        kind = next((each for each in kinds if each.fits(*shape)), None)
        if kind is None:
            continue
        try:
            made[layer] = kind(layer)
            if len(made) == 1:
                made[layer].product(layer.weight.new_zeros(1, shape[1]))
        except (RuntimeError, AttributeError) as error:  # AttributeError: an operator that this torch lacks
            reason = " ".join(str(error).split())[:200]
            others = " or ".join(repr(each) for each in SCHEMES if each != scheme)
            raise SpecDecError(
                f"scheme={scheme!r}: this torch has no {kind.bits}-bit kernel for a {layer.weight.dtype} layer of "
                f"shape {tuple(shape)} on {layer.weight.device.type} ({reason}). Use scheme={others}, or "
                "QuantizedSelf(model=...) with a model that another library has quantised."
            ) from error
    if not any(isinstance(each, SCHEMES[scheme][0]) for each in made.values()):
        raise SpecDecError(
            f"scheme={scheme!r}: no layer of {type(model).__name__} has the shape that its kernel takes (inputs in "
            f"multiples of 16 at 8 bits; inputs in multiples of {GROUP} and outputs of 16 at 4 bits). Use another "
            'scheme, QuantizedSelf(model=...) with a quantised model, or assistant_strategy="suffix".'
        )
    own = [buffer for each in made.values() for buffer in each.buffers()]
    return QuantizedCopy(
        model=shared_copy(model, made),
        scheme=scheme,
        weights=sum(each.weight.numel() for each in made),
        memory_bytes=sum(each.numel() * each.element_size() for each in own),
        left=left_as_they_are(model, made),
    )


def shared_copy(model: PreTrainedModel, replaced: Mapping[nn.Module, nn.Module]) -> PreTrainedModel:
    """A copy in evaluation mode with these modules replaced, and every other tensor and configuration the model's own.

    Hooks stay behind, and so does a function that was put in place of a module's `forward`.
    """
    memo: dict[int, Any] = {id(each): each for each in (*model.parameters(), *model.buffers())}
    for module in model.modules():
        for name, value in vars(module).items():
            if name in ("config", "generation_config"):
                memo[id(value)] = value
            elif "_hooks" in name and isinstance(value, dict):
                memo[id(value)] = type(value)()
    memo |= {id(old): new for old, new in replaced.items()}
    try:
        copied: PreTrainedModel = copy.deepcopy(model, memo)
    except (TypeError, RuntimeError) as error:
        raise SpecDecError(
            f"{type(model).__name__} cannot be copied, since something that was attached to it cannot ({error}). Take "
            "that off, or give QuantizedSelf(model=...) a quantised model."
        ) from error
    for module in copied.modules():
        if isinstance(vars(module).get("forward"), types.FunctionType):
            del module.forward
    return copied.eval()


def choose(model: PreTrainedModel, ids: torch.Tensor) -> QuantizedCopy:
    """The copy with the largest expected gain, each tried against the model itself on these ids."""
    plain_layers(model)  # is there anything to choose for?
    plain = shared_copy(model, {})  # the model without its hooks
    law, seconds = try_out(plain, ids)
    best: QuantizedCopy | None = None
    reasons = []
    for scheme in SCHEMES:
        try:
            made = make_copy(model, scheme)
        except SpecDecError as error:
            reasons.append(error)
            continue
        own, cost = try_out(made.model, ids)
        overlap = torch.minimum(law, own).sum(-1).mean().item()
        made = replace(made, overlap=overlap, relative_cost=cost / seconds)
        if best is None or made.expected_gain > best.expected_gain:
            best = made
    if best is None:
        raise reasons[0]
    return best


def try_out(model: PreTrainedModel, ids: torch.Tensor) -> tuple[torch.Tensor, float]:
    """The model's laws after each of these ids, shape `(L, V)`, and the seconds of a forward of one token."""
    law = torch.softmax(model(input_ids=ids.unsqueeze(0)).logits[0].float(), -1)

    def once() -> float:
        started = time.perf_counter()
        model(input_ids=ids[None, -1:]).logits[0, -1, 0].item()  # read, so that an accelerator has done its work
        return time.perf_counter() - started

    once()
    return law, statistics.median(once() for _ in range(7))
