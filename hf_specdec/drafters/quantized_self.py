"""The target drafts for itself with quantised weights, on its own K/V.

The copy has the target's layer shapes, so it reads the target's slot cache and needs no prefill and no catch-up. What
it writes there for drafted tokens lies beyond the committed slots, and the verify pass writes over it.
"""

import copy
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from ..attention import packed_attention
from ..capability import check_model, embedding_table
from ..errors import SpecDecError, unknown_name
from ..state import DecodeView
from ..target import SlotModel
from .base import DraftStrategy, register_strategy
from .draft_model import ModelDrafter
from .quantization import SCHEMES, quantized_copy

SAMPLE_TOKENS = 64
LAYER_SHAPES = (
    "model_type hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim vocab_size layer_types "
    "sliding_window rope_parameters"
).split()


@register_strategy("quantized_self")
@dataclass(frozen=True, eq=False)
class QuantizedSelf(DraftStrategy):
    """A quantised copy of the target drafts token by token and keeps no K/V of its own.

    Plain linear layers are quantised, those whose inputs are a multiple of 16; the rest stays the target's own, and
    the statistics' notes name it.

    Args:
        model: the target in quantised form, where you have one (bitsandbytes, GPTQ, AWQ, torchao, ...). None makes a
            copy, once per target, that shares with it all that is not quantised.
        scheme: how to make the copy: `int8_weight_only`, `int4_weight_only`, or `auto`, which tries both on the prompt
            and takes the one with the larger expected speed-up on this machine.
    """

    model: Any = None
    scheme: str = "auto"

    default_draft_tokens: ClassVar[int] = 4
    default_depth: ClassVar[int | None] = 4
    costs_by_token: ClassVar[bool] = True
    trees: ClassVar[bool] = True
    needs: ClassVar[str] = "nothing (memory for a quantised copy of the target)"
    sampled: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.scheme not in ("auto", *SCHEMES):
            raise unknown_name("scheme of quantized_self:", self.scheme, ("auto", *SCHEMES))
        if self.model is not None and not isinstance(self.model, PreTrainedModel):
            raise SpecDecError(
                f"QuantizedSelf(model={type(self.model).__name__}) is no PreTrainedModel; pass the target in "
                "quantised form, or leave it out to have a copy made."
            )
        if self.model is not None and self.scheme != "auto":
            raise SpecDecError(
                f"QuantizedSelf got a model, which is quantised already, and scheme={self.scheme!r}; give one of them."
            )

    def build(self, target: Any, request: Any) -> "QuantizedDrafter":
        """The drafter. Raises `SpecDecError` when the target cannot be quantised, or the user's model is another."""
        if request.extras.get("synced_gpus") and getattr(target.model, "_is_fsdp_managed_module", False):
            raise SpecDecError(
                "The weights of a model sharded over processes cannot be quantised, and a copy of it would need as "
                'many forwards on each of them; use assistant_strategy="suffix".'
            )
        if self.model is not None:
            check_twin(target.model, self.model)
            taken = memory_bytes(self.model, beside=target.model)
            request.stats.note(f"quantized_self: your model takes {taken / 1e6:.3g} MB beside the target")
            return QuantizedDrafter(self.model, target, request)
        made = quantized_copy(target.model, self.scheme, lambda: sample_ids(request, target.model.device))
        whole = memory_bytes(target.model)
        note = (
            f"quantized_self: {made.scheme}, {made.weights / 1e6:.3g} M weights in {made.memory_bytes / 1e6:.3g} MB "
            f"beside the target's {whole / 1e6:.3g} MB"
        )
        if made.overlap is not None and made.relative_cost is not None:
            note += (
                f"; tried on a prompt, one token took {made.relative_cost:.2f} of the target's time and the laws "
                f"overlapped by {made.overlap:.2f}"
            )
        if made.left:
            more = f" and {len(made.left) - 1} more" if len(made.left) > 1 else ""
            note += f"; not quantised: {made.left[0]}{more}"
        request.stats.note(note)
        return QuantizedDrafter(made.model, target, request)

    def to_dict(self) -> dict[str, Any]:
        """The settings; a model object becomes its name."""
        return {"model": None if self.model is None else self.model.config._name_or_path, "scheme": self.scheme}


class QuantizedDrafter(ModelDrafter):
    """Forwards of the quantised model on the target's cache; no state of its own."""

    on_target = True

    def __init__(self, model: PreTrainedModel, target: Any, request: Any):
        self._model = model
        self._target = target
        self._request = request
        self._slots = SlotModel(model, None)
        self._window = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        self._head = None
        self._run = None
        embeddings = embedding_table(model)
        self._device = embeddings.device
        self._readable = embeddings.shape[0]
        self._installed = ExitStack()

    def _borrow(self) -> None:
        """Put the quantised model behind the target's cache and inputs as they are now."""
        borrowed = copy.copy(self._target)
        borrowed.model, borrowed.mode = self._model, self._slots.mode
        borrowed.forwards, borrowed.forward_seconds = self.forwards, self.forward_seconds
        self._slots = borrowed

    def start(self, view: DecodeView) -> None:
        """Nothing is prefilled."""
        self._installed.enter_context(packed_attention(self._model))
        self._borrow()

    def _catch_up(self, view: DecodeView) -> torch.Tensor:
        """Run each row's root, the only committed token without K/V; the scores after it, shape `(B, 1, V)`."""
        roots = torch.tensor(view.roots(), device=self._device).unsqueeze(1)
        return self._forward(roots, torch.ones(view.rows, 1, 1, dtype=torch.bool, device=self._device), view.lengths())

    def observe(self, view: DecodeView, emitted: Sequence[Sequence[int]]) -> None:
        """Nothing: the verify pass has left the K/V of what it accepted."""

    def keep(self, rows: Sequence[int]) -> None:
        """The target's cache has dropped the other rows already."""
        self._borrow()

    def finish(self) -> None:
        """Put the attention function of a user's model back."""
        self._installed.close()
        super().finish()


def sample_ids(request: Any, device: torch.device) -> torch.Tensor:
    """The last tokens of the longest prompt of the call, shape `(L,)`; without a prompt the vocabulary's first."""
    ids, mask = request.input_ids, request.model_kwargs.get("attention_mask")
    if ids.shape[1]:
        real = torch.ones_like(ids) if mask is None or mask.shape != ids.shape else mask
        row = int(real.sum(1).argmax())
        ids = ids[row][real[row].bool()]
        ids = ids[(ids >= 0) & (ids < request.vocab_size) & ~torch.isin(ids, ids.new_tensor(request.unreadable))]
        if len(ids):
            return ids[-SAMPLE_TOKENS:].to(device)
    return torch.arange(min(SAMPLE_TOKENS, request.vocab_size), device=device)


def memory_bytes(model: PreTrainedModel, beside: PreTrainedModel | None = None) -> int:
    """Bytes of a model's parameters and buffers, without those that `beside` holds as well."""
    known = set() if beside is None else {each.data_ptr() for each in (*beside.parameters(), *beside.buffers())}
    held = {each.data_ptr(): each for each in (*model.parameters(), *model.buffers()) if each.data_ptr() not in known}
    return sum(each.numel() * each.element_size() for each in held.values())


def check_twin(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Raise `SpecDecError` unless `draft` can read and write the target's K/V."""
    check_model(draft, DynamicCache(config=draft.config.get_text_config(decoder=True)))
    own, other = (model.config.get_text_config(decoder=True) for model in (target, draft))
    facts = [(name, getattr(own, name, None), getattr(other, name, None)) for name in LAYER_SHAPES]
    facts += [
        ("attn_implementation", own._attn_implementation, other._attn_implementation),
        ("dtype", target.dtype, draft.dtype),
        ("device", target.device, draft.device),
    ]
    for name, wanted, given in facts:
        if wanted != given:
            raise SpecDecError(
                f"QuantizedSelf(model=...) reads the target's K/V, so it must be the target in quantised form, loaded "
                f"alike: its {name} is {given}, the target's {wanted}. Load it with the target's {name}, or pass "
                "DraftModel(...), which keeps K/V of its own."
            )
