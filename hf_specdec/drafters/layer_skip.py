"""The target drafts with a part of itself: its first layers, or all but some attention and MLP sub-layers.

There is no second model, no second cache and no prefill of a draft. A draft step is a forward of the part; after an
early exit, the verify pass runs only the layers that the draft did not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..errors import SpecDecError
from ..state import DecodeView, Plan
from ..tree import DraftTree
from .base import Drafter, DraftStrategy, register_strategy
from .drawing import ChainDraw


@register_strategy("layer_skip")
@dataclass(frozen=True)
class LayerSkip(DraftStrategy):
    """The target without some of its layers drafts token by token; give `exit_layer`, or what to skip.

    Early exit is LayerSkip (Elhoushi et al. 2024, arXiv:2404.16710), skipped sub-layers are "Draft & Verify" (Zhang et
    al. 2023, arXiv:2309.08168).

    Args:
        exit_layer: E: the first E layers draft, with the final norm and the output layer after them.
        skip_attention: layers, counted from 0, whose attention the draft leaves out.
        skip_mlp: layers whose MLP the draft leaves out.
    """

    exit_layer: int | None = None
    skip_attention: Sequence[int] = ()
    skip_mlp: Sequence[int] = ()

    default_draft_tokens: ClassVar[int] = 4
    costs_by_token: ClassVar[bool] = True
    needs: ClassVar[str] = "exit_layer, or skip_attention and skip_mlp (see `hf-specdec plan --layers`)"
    sampled: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("skip_attention", "skip_mlp"):
            given = getattr(self, name)
            listed = list(given) if isinstance(given, (list, tuple, range, set, frozenset)) else [None]
            if not all(_is_number(each) for each in listed):
                raise SpecDecError(f"layer_skip: {name}={given!r} is no list of layers; use one as in [4, 5, 6].")
            object.__setattr__(self, name, tuple(sorted(set(listed))))
        if self.exit_layer is not None and not (_is_number(self.exit_layer) and self.exit_layer):
            raise SpecDecError(
                f"layer_skip: exit_layer={self.exit_layer!r} is no number of layers; use a whole number of at least 1."
            )
        if (self.exit_layer is None) == (not self.skip_attention and not self.skip_mlp):
            raise SpecDecError(
                "layer_skip drafts with the target's first layers or without some of its sub-layers: use either "
                "LayerSkip(exit_layer=...) or LayerSkip(skip_attention=[...], skip_mlp=[...])."
            )

    def build(self, target: Any, request: Any) -> "LayerSkipDrafter":
        """The drafter. Raises `SpecDecError` when the target has no such layers, or they cannot be found."""
        return LayerSkipDrafter(self, target, request)

    def to_dict(self) -> dict[str, Any]:
        """The settings that were given."""
        if self.exit_layer is not None:
            return {"exit_layer": self.exit_layer}
        return {"skip_attention": list(self.skip_attention), "skip_mlp": list(self.skip_mlp)}


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


class LayerSkipDrafter(Drafter):
    """A part of the target in one call. Between rounds it keeps nothing."""

    looks_up = False
    runs_model = True
    on_target = True

    def __init__(self, strategy: LayerSkip, target: Any, request: Any):
        if request.extras.get("synced_gpus"):
            raise SpecDecError(
                "layer_skip drafts with the target, and processes that share a sharded target would need as many "
                'forwards on each of them; load it unsharded, or use assistant_strategy="suffix".'
            )
        states = request.outputs.hidden_states is not None or request.outputs.attentions is not None
        self._request = request
        self._part = target.partial(**strategy.to_dict(), keeps=not states)

    @property
    def forwards(self) -> int:  # type: ignore[override]
        """Forward passes of the part so far, those in verify passes included."""
        return int(self._part.forwards)

    @property
    def forward_seconds(self) -> float:  # type: ignore[override]
        """Time spent in them."""
        return float(self._part.forward_seconds)

    def propose(self, view: DecodeView, plan: Plan) -> DraftTree:
        """A chain of `plan.depth` tokens for each row."""
        chain = ChainDraw(self._request, view, plan)
        lengths = view.lengths()
        token = torch.tensor(view.roots(), device=view.device)
        for depth in range(plan.depth):
            token = chain.draw(self._part.step(token, lengths, depth))
        return chain.tree()
