"""A part of the target as its own draft model: same weights, same slot cache.

The part's forward is the target's, with layers or sub-layers passed over. It reads the K/V of the committed tokens and
writes its own at the slots where the verify pass will write the same nodes. A part that leaves after E layers keeps
what they computed, so that the verify pass runs the layers from E on alone.

Invariant: kept hidden states are used for a tree whose nodes are the tokens that they were computed from, or not at
all.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from .compat import is_passive_layer
from .errors import SpecDecError, UnsupportedModelError
from .layers import OutputForms, Replacement, attention_of, decoder_layers, mlp_of, recording, replaced
from .tree import DraftTree


class PartialTarget:
    """The first layers of the target with its final norm and output layer, or all of it without some sub-layers.

    Early exit with a shared cache is LayerSkip's (arXiv:2404.16710), skipping sub-layers is that of "Draft & Verify"
    (arXiv:2309.08168).

    Args:
        target: whose cache and forward are used.
        exit_layer: E, the layers that run; None for all, without those skipped.
        skip_attention, skip_mlp: layers whose attention or MLP adds nothing.
        keeps: the verify pass may go on from layer E.

    Attributes:
        forwards: forward passes of the part so far.
        forward_seconds: time spent in them.

    Raises:
        UnsupportedModelError: the model's layers or sub-layers cannot be found.
        SpecDecError: there is no layer of that number.
    """

    def __init__(
        self,
        target: Any,
        exit_layer: int | None,
        skip_attention: Sequence[int],
        skip_mlp: Sequence[int],
        keeps: bool,
    ):
        model: PreTrainedModel = target.model
        layers = decoder_layers(model)
        if layers is None:
            raise UnsupportedModelError(
                f"{type(model).__name__} cannot draft with a part of itself: its decoder shows no single list of "
                'layers with numbered attention modules. Use another strategy, as in assistant_strategy="suffix".'
            )
        shares = _layers_share_attention(model, len(layers))
        self._target = target
        self._forms: OutputForms = target.output_forms
        self._layers = layers
        self._exit = exit_layer
        self._output_layer = model.get_output_embeddings()
        self._dropped: dict[nn.Module, Replacement] = {}
        if exit_layer is not None:
            _check_numbers(model, "exit_layer", [exit_layer], range(1, len(layers) + 1))
            self._dropped = {layer: self._forms.identity(layer) for layer in layers[exit_layer:]}
            self.modules: list[nn.Module] = layers
        else:
            self.modules = _sublayers(model, layers, skip_attention, skip_mlp, shares)
            self._dropped = {module: self._forms.nothing(module) for module in self.modules}
        self.keeps = keeps and exit_layer is not None and not shares
        self._kept: list[torch.Tensor] = []
        self._tokens: list[torch.Tensor] = []
        self._lengths: list[int] = []
        self._writes = 0
        self.forwards = 0
        self.forward_seconds = 0.0

    def step(self, tokens: torch.Tensor, lengths: Sequence[int], depth: int) -> torch.Tensor:
        """Run one node of each row's chain; the logits after it, shape `(B, V)`.

        Args:
            tokens: shape `(B,)`.
            lengths: committed tokens of each row, root included.
            depth: of the nodes; 0 is the root. The nodes above have been run since the last commit.
        """
        if depth == 0 or self._target.drafted_with is not self:
            self._kept, self._tokens, self._lengths = [], [], list(lengths)
        self._target.drafted_with = self
        outputs = self._run(tokens, lengths, depth, {})
        assert self._target.cache is not None
        self._writes = self._target.cache.writes
        logits: torch.Tensor = outputs.logits[:, -1]
        return logits

    def _run(
        self, tokens: torch.Tensor, lengths: Sequence[int], depth: int, more: dict[nn.Module, Replacement]
    ) -> Any:
        replacements = {**self._dropped, **more}
        if self.keeps and len(self._kept) == depth:
            assert self._exit is not None
            replacements[self._layers[self._exit - 1]] = recording(self._kept)
            self._tokens.append(tokens)
        target = self._target
        before = target.forwards, target.forward_seconds
        seen = torch.ones(len(lengths), 1, 1, dtype=torch.bool, device=tokens.device)
        with replaced(replacements):
            outputs = target.run(
                tokens.unsqueeze(1), seen, [length + depth for length in lengths], window=target.columns
            )
        self.forwards += 1
        self.forward_seconds += target.forward_seconds - before[1]
        target.forwards, target.forward_seconds = before
        return outputs

    def continues(self, tree: DraftTree, lengths: Sequence[int]) -> bool:
        """May the verify pass of this tree go on from what was kept? Reads the device once."""
        size, cache = len(self._kept), self._target.cache
        if cache is None or cache.writes != self._writes:  # other forwards have written over what it left
            return False
        if not 0 < size <= tree.size or list(lengths) != self._lengths:
            return False
        nodes = torch.arange(tree.size, device=tree.parents.device)
        padding = (tree.parents < 0) & (nodes > 0)
        chain = padding | (tree.parents == nodes - 1)
        same = padding[:, :size] | (tree.tokens[:, :size] == torch.stack(self._tokens, 1))
        return bool(chain.all() & same.all())

    def verify(self, tree: DraftTree, lengths: Sequence[int]) -> Any:
        """The target's output for a tree that `continues`: layers from E on, in one forward over all nodes.

        The last drafted token has been proposed and not run, so the layers below E run it first, without the output
        layer.
        """
        assert self._exit is not None
        head = self._output_layer
        no_head = {} if head is None else {head: self._forms.identity(head)}
        for depth in range(len(self._kept), tree.size):
            self._run(tree.tokens[:, depth], lengths, depth, no_head)
        below, last = self._layers[: self._exit - 1], self._layers[self._exit - 1]
        replacements = {layer: self._forms.identity(layer) for layer in below}
        replacements[last] = self._forms.constant(last, torch.cat(self._kept, dim=-2))
        self._kept = []
        with replaced(replacements):
            return self._target.run(tree.tokens, tree.seen, lengths)


def _layers_share_attention(model: PreTrainedModel, count: int) -> bool:
    """Some layers read the K/V of others within a forward, so that a layer cannot run without those below it."""
    cached = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    return sum(not is_passive_layer(each) for each in cached) < count


def _sublayers(
    model: PreTrainedModel, layers: list[nn.Module], attention: Sequence[int], mlp: Sequence[int], shares: bool
) -> list[nn.Module]:
    """The attention and MLP modules of these layers."""
    _check_numbers(model, "skip_attention", attention, range(len(layers)))
    _check_numbers(model, "skip_mlp", mlp, range(len(layers)))
    if attention and shares:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot skip attention: some layers read the keys and values of others. Use "
            "LayerSkip(exit_layer=...) or LayerSkip(skip_mlp=...)."
        )
    found = [("attention", index, attention_of(layers[index], index)) for index in attention]
    found += [("MLP", index, mlp_of(layers[index])) for index in mlp]
    for kind, index, module in found:
        if module is None:
            raise UnsupportedModelError(
                f"{type(model).__name__} cannot skip the {kind} of layer {index}: it is not a module of its own. "
                "Leave it out, or use LayerSkip(exit_layer=...)."
            )
    return [module for _, _, module in found if module is not None]


def _check_numbers(model: PreTrainedModel, name: str, numbers: Sequence[int], allowed: range) -> None:
    for number in numbers:
        if number not in allowed:
            raise SpecDecError(
                f"LayerSkip({name}={number}): {type(model).__name__} has {len(allowed)} layers; give a number from "
                f"{allowed[0]} to {allowed[-1]}."
            )
