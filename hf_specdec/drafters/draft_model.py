"""A small model drafts, with a slot cache of its own and one lean forward per token.

Each position goes through the draft model once: what was accepted is already in its cache, the rest is caught up in
the next round's first forward. Under `exact` the draft is drawn with the target's own noise, `argmax(q / e)`; under a
verifier that reads draft probabilities it is drawn independently, and q goes along.
"""

import itertools
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

from ..capability import check_model, check_rotary
from ..compat import CACHE_NAME
from ..errors import SpecDecError
from ..state import DecodeView, Plan
from ..target import SlotModel
from ..tree import DraftTree
from ..verify import likeliest, sample_with
from .base import Drafter, DraftStrategy, register_strategy
from .vocabulary import check_vocabularies, trimmed_head

_LOADED: dict[tuple[str, torch.dtype, str], PreTrainedModel] = {}


@register_strategy("draft_model")
@dataclass(frozen=True, eq=False)
class DraftModel(DraftStrategy):
    """A smaller model with the same tokenizer drafts token by token.

    Args:
        model: the draft model, or a name or path for `AutoModelForCausalLM.from_pretrained`.
        tokenizer: the draft model's tokenizer, to compare vocabularies by content.
        vocabulary: token ids that the draft may propose (a list, or a JSON file with one): its output layer is cut
            down to them. The text stays the same; a good list is `frequent_tokens` of text like yours.
    """

    model: Any
    tokenizer: Any = None
    vocabulary: Any = None

    default_draft_tokens: ClassVar[int] = 4
    needs: ClassVar[str] = "a draft model with the target's tokenizer"
    sampled: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.model, os.PathLike):
            object.__setattr__(self, "model", os.fspath(self.model))
        if not isinstance(self.model, (PreTrainedModel, str)):
            raise SpecDecError(
                f"DraftModel(model={type(self.model).__name__}) is neither a PreTrainedModel nor a name; pass one."
            )

    def load(self, like: PreTrainedModel) -> PreTrainedModel:
        """The model, loaded once per process in the target's dtype and onto its device when given by name."""
        if isinstance(self.model, PreTrainedModel):
            return self.model
        key = (self.model, like.dtype, str(like.device))
        if key not in _LOADED:
            try:
                draft = AutoModelForCausalLM.from_pretrained(self.model, dtype=like.dtype)
            except (OSError, ValueError) as error:
                reason = " ".join(str(error).split())
                raise SpecDecError(
                    f"The draft model {self.model!r} cannot be loaded; give a name on the hub, a directory, or the "
                    f"model itself. {reason}"
                ) from error
            _LOADED[key] = draft.to(like.device).eval()
        return _LOADED[key]

    def build(self, target: Any, request: Any) -> "ModelDrafter":
        """The drafter. Raises `SpecDecError` when the draft model cannot serve this target or request."""
        return ModelDrafter(self.load(target.model), self, target, request)

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
        self._cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        check_model(model, self._cache)
        check_rotary(model, request.stopping.max_length, request.input_ids.shape[1])
        check_vocabularies(target.model, model, request, strategy.tokenizer)
        self._request = request
        self._slots = SlotModel(model, None)
        self._window: int | None = getattr(self._slots.config, "max_position_embeddings", None)
        self._device = next((each.device for each in model.parameters() if each.device.type != "meta"), target.device)
        self._readable = model.get_input_embeddings().weight.shape[0]
        self._head = None
        if strategy.vocabulary is not None:
            self._head = trimmed_head(model, load_vocabulary(strategy.vocabulary), request.vocab_size)
            self._slots.model = model.base_model
        self._cached: list[int] = []
        self._drafted: torch.Tensor | None = None

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
        ids = torch.zeros(view.rows, length, dtype=torch.long)
        mask = torch.zeros(view.rows, length, dtype=torch.long)
        for row, count in enumerate(self._cached):
            ids[row, length - count :] = torch.tensor(view.tokens(row)[:-1])
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
        """A chain of `plan.depth` tokens for each row within the draft model's window."""
        within = [self._fits(view, row, plan.depth) for row in range(view.rows)]
        self._drafted = None
        if not all(within):
            self._request.stats.note(
                f"drafting stopped where a row passed the draft model's window of {self._window} tokens"
            )
        if not any(within):
            return DraftTree.from_chains(view.roots(), [[]] * view.rows, view.device)
        scores = self._catch_up(view)
        coupled = self._request.sampling and self._request.verifier.uses_noise
        noise = self._request.noise_at(view, plan.depth, scores).to(self._device) if coupled else None
        chosen: list[torch.Tensor] = []
        laws: list[torch.Tensor] = []
        for depth in range(plan.depth):
            if depth:
                scores = self._step(chosen[-1], view, depth)
            scores = self._processed(scores, chosen, view)
            if self._request.sampling and noise is None:
                law = torch.softmax(scores.float(), -1)
                laws.append(torch.where(law.isnan(), 1 / law.shape[1], law))
                chosen.append(torch.multinomial(laws[-1], 1).squeeze(1))
            elif noise is not None:
                chosen.append(sample_with(scores, noise[:, depth]).clamp(min=0))
            else:
                chosen.append(self._argmax(scores))
        self._drafted = torch.stack(chosen, 1)
        return self._tree(view, chosen, laws, within)

    def _tree(
        self, view: DecodeView, chosen: list[torch.Tensor], laws: list[torch.Tensor], within: Sequence[bool]
    ) -> DraftTree:
        roots = torch.tensor(view.roots(), device=view.device).unsqueeze(1)
        tokens = torch.cat([roots, torch.stack(chosen, 1).to(view.device)], 1)
        parents = torch.arange(-1, len(chosen), device=view.device).repeat(view.rows, 1)
        if not all(within):
            parents[~torch.tensor(within, device=view.device)] = -1
        drawn = (parents >= 0) & bool(laws)
        probs = torch.stack([*laws, torch.zeros_like(laws[0])], 1).to(view.device) if laws else None
        return DraftTree(tokens, parents, drawn, probs)

    def _catch_up(self, view: DecodeView) -> torch.Tensor:
        """Run the tokens that are not in the cache yet; the scores after each row's last one, shape `(B, V)`."""
        pending = [list(view.tokens(row)[count:]) for row, count in enumerate(self._cached)]
        width = max(map(len, pending))
        tokens = torch.tensor([own + [own[-1]] * (width - len(own)) for own in pending], device=self._device)
        node = torch.arange(width, device=self._device)
        counts = torch.tensor(list(map(len, pending)), device=self._device)
        real = node < counts[:, None]
        seen = (node <= node[:, None]) & real.unsqueeze(2) & real.unsqueeze(1) | (node == node[:, None])
        hidden = self._run(tokens, seen, [count + 1 for count in self._cached])
        self._cached = view.lengths()
        if hidden.shape[1] == 1:
            return hidden[:, 0]
        return hidden[torch.arange(len(pending), device=self._device), counts - 1]

    def _step(self, token: torch.Tensor, view: DecodeView, depth: int) -> torch.Tensor:
        """Run the token at `depth` of each row's chain; the scores after it, shape `(B, V)`."""
        seen = torch.ones(view.rows, 1, 1, dtype=torch.bool, device=self._device)
        return self._run(token.unsqueeze(1), seen, [length + depth for length in view.lengths()])[:, 0]

    def _run(self, tokens: torch.Tensor, seen: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        tokens = tokens.clamp(max=self._readable - 1)
        last = tokens.shape[1] == 1 or (len(set(lengths)) == 1 and bool(seen[:, -1, 0].all()))
        if self._head is None:
            return self._slots.run(tokens, seen, lengths, keep_last=last, window=self._window).logits
        hidden = self._slots.run(tokens, seen, lengths, window=self._window).last_hidden_state
        with self._slots.timed(forwards=0):
            return self._head.logits(hidden[:, -1:] if last else hidden)

    def _argmax(self, scores: torch.Tensor) -> torch.Tensor:
        if self._head is not None and scores.shape[-1] == len(self._head.ids):
            return self._head.ids[likeliest(scores)]
        return likeliest(scores[..., : self._request.vocab_size])

    def _processed(self, scores: torch.Tensor, chosen: list[torch.Tensor], view: DecodeView) -> torch.Tensor:
        """Scores over the target's vocabulary, after the call's processors."""
        processors, unreadable = self._request.processors, self._request.unreadable
        if not self._request.sampling and not len(processors):
            return scores
        size = self._request.vocab_size
        if self._head is not None:
            full = scores.new_full((scores.shape[0], size), float("-inf"))
            scores = full.index_copy_(1, self._head.ids, scores)
        elif scores.shape[1] < size:
            scores = torch.nn.functional.pad(scores, (0, size - scores.shape[1]), value=float("-inf"))
        paths = torch.stack(chosen, 1).tolist() if chosen and processors.reads_prefix else [[]] * view.rows
        scores = processors.process_paths(scores[:, :size], paths, view)
        return (
            scores.index_fill(1, torch.tensor(unreadable, device=scores.device), float("-inf"))
            if unreadable
            else scores
        )

    def observe(self, view: DecodeView, emitted: Sequence[Sequence[int]]) -> None:
        """Emitted tokens that went through the draft model in this round stay in its cache."""
        if self._drafted is None:
            return
        for row, (tokens, chain) in enumerate(zip(emitted, self._drafted[:, :-1].tolist(), strict=True)):
            agreed = (token == drafted for token, drafted in zip(tokens[:-1], chain))
            self._cached[row] += sum(1 for _ in itertools.takewhile(bool, agreed))
        self._drafted = None

    def keep(self, rows: Sequence[int]) -> None:
        """Only these rows stay."""
        self._cached = [self._cached[row] for row in rows]
        if self._drafted is not None:
            self._drafted = self._drafted[list(rows)]
        if self._slots.cache is not None:
            self._slots.keep(rows)


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
