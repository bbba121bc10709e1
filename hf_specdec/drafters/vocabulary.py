"""Do target and draft model mean the same by a token id? And an output layer cut down to some of them."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import AutoTokenizer, PreTrainedModel

from ..errors import SpecDecError

MOST_PADDING = 1024
"""Output layers of one tokenizer differ by padding up to this many rows."""


def other_tokenizers(
    target: PreTrainedModel, draft: PreTrainedModel, request: Any, draft_tokenizer: Any
) -> tuple[Any, Any] | None:
    """Both tokenizers (the target's, the draft model's) where they have different vocabularies, else None.

    Compared by content where both tokenizers are at hand (from the call, from the strategy, or beside the models on
    disk), else by size, which the statistics then say.

    Raises:
        SpecDecError: the sizes say that the vocabularies differ and a tokenizer is missing, or they differ and a
            tokenizer is not one that can be bridged.
    """
    own = request.extras.get("tokenizer") or beside(target)
    other = draft_tokenizer or request.extras.get("assistant_tokenizer") or beside(draft)
    if own is not None and other is not None:
        if own is other or same_vocabulary(own, other):
            return None
        for each in (own, other):
            if not hasattr(each, "backend_tokenizer"):
                raise SpecDecError(
                    "The draft model has another tokenizer than the target: the same id means different text. "
                    f"{type(each).__name__} has no `backend_tokenizer` to bridge them with. Use a fast tokenizer, a "
                    'draft model of the same family, or assistant_strategy="suffix".'
                )
        return own, other
    sizes = [model.config.get_text_config(decoder=True).vocab_size for model in (target, draft)]
    if abs(sizes[0] - sizes[1]) > MOST_PADDING:
        raise SpecDecError(
            f"The target has {sizes[0]} token ids and the draft model {sizes[1]}: that is not one tokenizer. Pass "
            "`tokenizer` and `assistant_tokenizer` to `generate`, which then bridges them, or use a draft model of "
            "the same family."
        )
    request.stats.note(
        "vocabularies were compared by size only; pass `tokenizer` and `assistant_tokenizer` to compare them"
    )
    return None


def same_vocabulary(own: Any, other: Any) -> bool:
    """Both have the same text tokens under the same ids. Added and special tokens may differ, and padding has no
    token."""
    return _same_text_tokens(own, other, len(own), len(other))


@lru_cache(maxsize=8)
def _same_text_tokens(own: Any, other: Any, *sizes: int) -> bool:
    """`same_vocabulary`, kept from call to call while the tokenizers have these many tokens."""
    beside_text = {*own.all_special_ids, *other.all_special_ids}
    beside_text |= {*own.get_added_vocab().values(), *other.get_added_vocab().values()}
    texts = [
        {index: token for token, index in each.get_vocab().items() if index not in beside_text}
        for each in (own, other)
    ]
    return texts[0] == texts[1]


def beside(model: PreTrainedModel) -> Any:
    """The tokenizer that lies where the model was loaded from, or None."""
    name = getattr(model.config, "_name_or_path", "")
    return _load_tokenizer(name) if name else None


@lru_cache(maxsize=8)
def _load_tokenizer(name: str) -> Any:
    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=True)
    except Exception:
        return None


@dataclass(frozen=True)
class TrimmedHead:
    """An output layer with the rows of some token ids.

    Args:
        ids: `LongTensor` of shape `(Vd,)`, ascending.
        weight: shape `(Vd, H)`.
        bias: shape `(Vd,)` or None.
    """

    ids: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of the kept ids, shape `(..., Vd)`."""
        return torch.nn.functional.linear(hidden, self.weight, self.bias)


_HEADS: WeakKeyDictionary[torch.nn.Module, tuple[Any, TrimmedHead]] = WeakKeyDictionary()


def trimmed_head(model: PreTrainedModel, ids: list[int], target_vocabulary: int) -> TrimmedHead:
    """The output layer of `model` for these ids; kept from call to call while weights and ids stay the same."""
    layer = model.get_output_embeddings()
    if layer is None or not hasattr(layer, "weight"):
        raise SpecDecError(f"{type(model).__name__} shows no output layer to cut down; leave `vocabulary` out.")
    kept = [each for each in ids if each < min(layer.weight.shape[0], target_vocabulary)]
    if not kept:
        raise SpecDecError("No id of the draft vocabulary exists in the target; give ids of the target's tokenizer.")
    key = (layer.weight.data_ptr(), layer.weight._version, layer.weight.dtype, hash(tuple(kept)))
    if (found := _HEADS.get(layer)) is not None and found[0] == key:
        return found[1]
    index = torch.tensor(kept, device=layer.weight.device)
    with torch.no_grad():
        bias = getattr(layer, "bias", None)
        head = TrimmedHead(index, layer.weight[index], None if bias is None else bias[index])
    _HEADS[layer] = (key, head)
    return head
