"""A small model drafts, with a slot cache of its own and one lean forward per level of the draft.

Each position goes through the draft model once: what was accepted is already in its cache, the rest is caught up in
the next round's first forward. Greedy, siblings are the most probable tokens. Sampling with the target's own noise e,
they are the largest of q / e. Under a verifier that reads draft probabilities they are drawn independently of it,
without replacement, and q goes along.
"""

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import DynamicCache

from ..capability import check_model, check_rotary, embedding_table, restore_buffers
from ..compat import CACHE_NAME
from ..errors import SpecDecError, no_directory
from ..state import DecodeView, Plan
from ..target import SlotModel
from ..tree import DraftTree
from ..verify import likeliest, most_likely
from .base import Drafter, DraftStrategy, register_strategy
from .draft_tree import LevelTree
from .vocabulary import other_tokenizers, trimmed_head

_LOADED: dict[tuple[str, torch.dtype, str], PreTrainedModel] = {}


@register_strategy("draft_model")
@dataclass(frozen=True, eq=False)
class DraftModel(DraftStrategy):
    """A smaller model drafts, a chain by default; with another tokenizer than the target's, over a bridge of strings.

    With `max_width` m above 1 it drafts a tree: m siblings per node, m nodes of a level that go on, a forward for each
    of up to `max_depth` levels, and the best `max_draft_tokens` nodes of what it found.

    Args:
        model: the draft model, or a name or path for `AutoModelForCausalLM.from_pretrained`.
        tokenizer: the draft model's tokenizer, to compare vocabularies by content and to bridge them.
        vocabulary: token ids that the draft may propose (a list, or a JSON file with one): its output layer is cut
            down to them. The text stays the same; a good list is `frequent_tokens` of text like yours. Not with
            another tokenizer.
    """

    model: Any
    tokenizer: Any = None
    vocabulary: Any = None

    default_draft_tokens: ClassVar[int] = 4
    default_depth: ClassVar[int | None] = 4
    costs_by_token: ClassVar[bool] = True
    needs: ClassVar[str] = "a draft model; with another tokenizer than the target's, both tokenizers"
    sampled: ClassVar[bool] = True
    trees: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.model, os.PathLike):
            object.__setattr__(self, "model", os.fspath(self.model))
        if not isinstance(self.model, (PreTrainedModel, str)):
            raise SpecDecError(
                f"DraftModel(model={type(self.model).__name__}) is neither a PreTrainedModel nor a name; pass one."
            )

    def load(self, like: PreTrainedModel) -> PreTrainedModel:
        """The model, loaded once per process in the target's dtype and onto its device when given by name.

        Raises:
            SpecDecError: it cannot be loaded.
        """
        if isinstance(self.model, PreTrainedModel):
            return self.model
        key = (self.model, like.dtype, str(like.device))
        if key not in _LOADED:
            try:
                draft = AutoModelForCausalLM.from_pretrained(self.model, dtype=like.dtype)
            except Exception as error:  # a damaged file: whatever the readers of weights and configurations raise
                raised = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                raise SpecDecError(
                    f"The draft model {self.model!r} cannot be loaded; give a name on the hub, a directory, or the "
                    f"model itself. {no_directory(self.model) or raised}"
                ) from error
            _LOADED[key] = draft.to(like.device).eval()
        return _LOADED[key]

    def build(self, target: Any, request: Any) -> "ModelDrafter":
        """The drafter. Raises `SpecDecError` when the draft model cannot serve this target or request."""
        from .bridged_model import BridgedDrafter  # it is made of what is here

        model = self.load(target.model)
        if (tokenizers := other_tokenizers(target.model, model, request, self.tokenizer)) is not None:
            return BridgedDrafter(model, self, target, request, tokenizers)
        return ModelDrafter(model, self, target, request)

    def to_dict(self) -> dict[str, Any]:
        """The settings; a model object becomes its name."""
        model = self.model if isinstance(self.model, str) else self.model.config._name_or_path
        vocabulary = (
            self.vocabulary if self.vocabulary is None or isinstance(self.vocabulary, str) else list(self.vocabulary)
        )
        return {"model": model, "vocabulary": vocabulary}


class ModelDrafter(Drafter):
    """The draft model's state in one call: its cache, and how much of each row is in it."""

    looks_up = False
    runs_model = True

    def __init__(self, model: PreTrainedModel, strategy: DraftModel, target: Any, request: Any):
        if request.extras.get("synced_gpus") and getattr(model, "_is_fsdp_managed_module", False):
            raise SpecDecError(
                "A draft model sharded over processes would need as many forwards on each of them; load it unsharded."
            )
        if request.input_ids.shape[1] == 0:
            raise SpecDecError(
                "A draft model needs the prompt's token ids, and the prompt is `inputs_embeds` alone. Pass `input_ids`"
                ' as well, or use assistant_strategy="suffix".'
            )
        mask = request.model_kwargs.get("attention_mask")
        if mask is not None and mask.dim() == 2 and not bool(mask.any()):
            raise SpecDecError(
                "A draft model needs a token to begin with, and `attention_mask` hides all of them. Leave the mask "
                'out, or use assistant_strategy="suffix".'
            )
        self._cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        check_model(model, self._cache)
        check_rotary(model, request.stopping.max_length, request.input_ids.shape[1])
        self._request = request
        self._slots = SlotModel(model, None)
        self._window: int | None = getattr(self._slots.config, "max_position_embeddings", None)
        self._device = next((each.device for each in model.parameters() if each.device.type != "meta"), target.device)
        self._readable = embedding_table(model).shape[0]
        self._head = None
        if strategy.vocabulary is not None:
            self._head = trimmed_head(model, load_vocabulary(strategy.vocabulary), request.vocab_size)
            if model.base_model is model:
                raise SpecDecError(
                    f"DraftModel(vocabulary=...) takes the hidden states before the output layer, and "
                    f"{type(model).__name__} does not show them; leave vocabulary out."
                )
            self._slots.model = model.base_model
        self._cached: list[int] = []
        self._run: torch.Tensor | None = None

    @property
    def forwards(self) -> int:  # type: ignore[override]
        """Forward passes of the draft model so far."""
        return self._slots.forwards

    @property
    def forward_seconds(self) -> float:  # type: ignore[override]
        """Time spent in them."""
        return self._slots.forward_seconds

    def _fits(self, view: DecodeView, row: int, depth: int) -> bool:
        return self._window is None or view.length(row) + depth <= self._window

    def start(self, view: DecodeView) -> None:
        """Run all but the last token of each row through the draft model."""
        self._cached = [view.length(row) - 1 for row in range(view.rows)]
        if not any(self._fits(view, row, 1) for row in range(view.rows)):
            return
        length = max(self._cached)
        ids = torch.zeros(view.rows, length, dtype=torch.long, device="cpu")
        mask = torch.zeros(view.rows, length, dtype=torch.long, device="cpu")
        for row, count in enumerate(self._cached):
            ids[row, length - count :] = torch.tensor(view.tokens(row)[:-1], device="cpu")
            mask[row, length - count :] = 1
        ids, mask = ids.clamp_(max=self._readable - 1).to(self._device), mask.to(self._device)
        positions = (mask.cumsum(1) - 1).clamp(min=0, max=None if self._window is None else self._window - 1)
        padded = not bool(mask.all())
        with self._slots.timed():
            outputs = self._slots.model(
                input_ids=ids,
                attention_mask=mask if padded else None,
                position_ids=positions,
                use_cache=True,
                **{CACHE_NAME: self._cache},
                **({} if self._head else {"logits_to_keep": 1}),
            )
        self._slots.prefill(outputs[CACHE_NAME], mask)

    def propose(self, view: DecodeView, plan: Plan) -> DraftTree:
        """A tree within the plan for each row within the draft model's window."""
        depth = min(plan.depth, plan.nodes - 1)
        within = [self._fits(view, row, depth) for row in range(view.rows)]
        self._run = None
        if not all(within):
            self._request.stats.note(
                f"drafting stopped where a row passed the draft model's window of {self._window} tokens"
            )
        if not any(within):
            return DraftTree.from_chains(view.roots(), [[]] * view.rows, view.device)
        tree, width = LevelTree(torch.tensor(view.roots(), device=self._device)), min(plan.width, plan.nodes - 1)
        scores = self._catch_up(view)
        noise = self._noise(view, depth, scores)
        drawn = self._request.sampling and self._request.verifier.uses_draft_probs
        for level in range(depth):
            if level:
                if plan.least > 0 and not drawn and tree.promise(plan.model_chances) < plan.least:
                    break
                tokens = tree.descend(width)
                scores = self._forward(tokens, tree.seen, [length + 1 for length in view.lengths()])
            scores = self._processed(scores, tree, view)
            if drawn:
                law = torch.softmax(scores.float(), -1)
                law = torch.where(law.isnan(), 1 / law.shape[2], law)
                tree.draw(law, width, -(-(plan.nodes - tree.size) // (depth - level)))
            else:
                if noise is not None:
                    scores = scores.float() - noise[:, level].log().unsqueeze(1)
                tree.widen(*self._likeliest(scores, width))
        fits = torch.tensor(within, device=self._device).unsqueeze(1)
        self._run = tree.run.masked_fill(~fits.unsqueeze(2), -1)
        best = tree.best(plan.nodes)
        return DraftTree(
            best.tokens.to(view.device),
            best.parents.masked_fill(~fits, -1).to(view.device),
            (best.sampled & fits).to(view.device),
            None if best.probs is None else best.probs.to(view.device),
            None if best.values is None else best.values.to(view.device),
        )

    def _noise(self, view: DecodeView, depth: int, scores: torch.Tensor) -> torch.Tensor | None:
        """What q is divided by at each level, shape `(B, depth, V)`; None where the most probable tokens are drafted
        or an independent draw."""
        if self._request.sampling and self._request.verifier.uses_noise:
            noise: torch.Tensor = self._request.noise_at(depth, scores)
            return noise.to(self._device)
        return None

    def _catch_up(self, view: DecodeView) -> torch.Tensor:
        """Run the tokens that are not in the cache yet; the scores after each row's last one, shape `(B, 1, V)`."""
        pending = [list(view.tokens(row)[count:]) for row, count in enumerate(self._cached)]
        counts = list(map(len, pending))
        width = max(counts)
        tokens = torch.tensor([own + [own[-1]] * (width - len(own)) for own in pending], device=self._device)
        node = torch.arange(width, device=self._device)
        ends = torch.tensor(counts, device=self._device)
        real = node < ends[:, None]
        seen = (node <= node[:, None]) & real.unsqueeze(2) & real.unsqueeze(1) | (node == node[:, None])
        even = min(counts) == width
        scores = self._forward(tokens, seen, [count + 1 for count in self._cached], keep_last=even)
        self._cached = view.lengths()
        return scores if even else scores[torch.arange(len(pending), device=self._device), ends - 1].unsqueeze(1)

    def _forward(
        self, tokens: torch.Tensor, seen: torch.Tensor, lengths: Sequence[int], keep_last: bool = False
    ) -> torch.Tensor:
        """Scores after each node of a block or after the last one, see `SlotModel.run`; with a trimmed output layer,
        of its ids."""
        tokens = tokens.clamp(max=self._readable - 1)
        if self._head is None:
            return self._slots.run(tokens, seen, lengths, keep_last, self._window).logits
        hidden = self._slots.run(tokens, seen, lengths, window=self._window).last_hidden_state
        hidden = hidden[:, -1:] if keep_last else hidden
        with self._slots.timed(forwards=0), self._slots.mode(hidden.shape[0] * hidden.shape[1]):
            return self._head.logits(hidden)

    def _likeliest(self, scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens with the largest scores and their probabilities, shapes `(B, n, count)`."""
        if self._head is not None and scores.shape[-1] == len(self._head.ids):
            places, probs = _likeliest(scores, count)
            return self._head.ids[places], probs
        return _likeliest(scores[..., : self._request.vocab_size], count)

    def _processed(self, scores: torch.Tensor, tree: LevelTree, view: DecodeView) -> torch.Tensor:
        """Scores after the nodes of the beam over the target's vocabulary, after the call's processors."""
        processors, unreadable = self._request.processors, self._request.unreadable
        if not self._request.sampling and not len(processors):
            return scores
        size = self._request.vocab_size
        if self._head is not None:
            full = scores.new_full((*scores.shape[:2], size), float("-inf"))
            scores = full.index_copy_(2, self._head.ids, scores)
        elif scores.shape[2] < size:
            scores = torch.nn.functional.pad(scores, (0, size - scores.shape[2]), value=float("-inf"))
        nowhere: list[list[int] | None] = [[]] * scores.shape[1]
        paths = tree.paths() if processors.reads_prefix else [nowhere] * view.rows
        scores = processors.process_nodes(scores[..., :size], paths, self._request.state)
        return (
            scores.index_fill(2, torch.tensor(unreadable, device=scores.device), float("-inf"))
            if unreadable
            else scores
        )

    def observe(self, view: DecodeView, emitted: Sequence[Sequence[int]]) -> None:
        """Emitted tokens that went through the draft model stay in its cache, each brought to its slot.

        They may have been drafted by another strategy beside this one.
        """
        run, self._run = self._run, None
        if run is None:
            return
        paths: list[tuple[int, int, list[int]]] = []
        for row, (tokens, nodes) in enumerate(zip(emitted, run.tolist(), strict=True)):
            numbers = {(parent, token): number for number, (token, parent) in enumerate(nodes, start=1)}
            path, node = [], 0
            for token in tokens[:-1]:
                if (node := numbers.get((node, token), -1)) < 0:
                    break
                path.append(node)
            paths.append((row, self._cached[row] - 1, path))
        self._slots.settle(paths)
        for row, _, path in paths:
            self._cached[row] += len(path)

    def keep(self, rows: Sequence[int]) -> None:
        """Only these rows stay."""
        self._cached = [self._cached[row] for row in rows]
        self._run = None if self._run is None else self._run[list(rows)]
        if self._slots.cache is not None:
            self._slots.keep(rows)

    def finish(self) -> None:
        """The draft model is left with ordinary tensors."""
        restore_buffers(self._slots.model)


def _likeliest(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The places of the largest scores, ties as in `argmax` for a count of 1, and their probabilities."""
    places = likeliest(scores).unsqueeze(-1) if count == 1 else most_likely(scores, count)[1]
    return places, torch.softmax(scores.float(), -1).gather(-1, places)


def load_vocabulary(source: Any) -> list[int]:
    """Token ids from a sequence, an array, or a JSON file that holds a list of them.

    Raises:
        SpecDecError: it holds something else.
    """
    if isinstance(source, (str, Path)):
        try:
            source = json.loads(Path(source).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:  # ValueError: no UTF-8, no JSON
            raise SpecDecError(
                f"vocabulary={str(source)!r} is not a readable JSON file with a list of ids: {error}"
            ) from None
    if hasattr(source, "tolist"):
        source = source.tolist()
    given = list(source) if isinstance(source, Iterable) and not isinstance(source, (str, Mapping)) else []
    ids = sorted({each for each in given if isinstance(each, int) and not isinstance(each, bool)})
    if not ids or len(ids) != len({repr(each) for each in given}) or ids[0] < 0:
        raise SpecDecError("A draft vocabulary is a non-empty list of token ids >= 0.")
    return ids


def frequent_tokens(texts: Iterable[str], tokenizer: Any, size: int) -> list[int]:
    """The `size` most frequent token ids of a text collection, for `DraftModel(vocabulary=...)`.

    Args:
        texts: for example a column of a data set.
        tokenizer: the target's.
        size: how many ids; special tokens are always among them.
    """
    if size <= 0:
        raise SpecDecError(f"frequent_tokens(size={size}) keeps no token; give a size above 0.")
    counts: Counter[int] = Counter()
    for text in texts:
        counts.update(tokenizer(text, add_special_tokens=False)["input_ids"])
    special = list(dict.fromkeys(tokenizer.all_special_ids))[:size]
    common = [token for token, _ in counts.most_common() if token not in set(special)]
    return sorted(special + common[: size - len(special)])
