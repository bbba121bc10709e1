"""Any stock `CandidateGenerator` of transformers as a draft strategy."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers.generation import CandidateGenerator

from ..errors import SpecDecError
from ..state import DecodeView, Plan
from ..tree import DraftTree
from .base import Drafter, DraftStrategy

OFFERED = ("model", "input_ids", "generation_config", "logits_processor", "tokenizer", "assistant_tokenizer")


@dataclass(frozen=True)
class CandidateAdapter(DraftStrategy):
    """Drafts come from a transformers `CandidateGenerator`, one per row.

    Args:
        factory: called once per row with those of `model`, `input_ids` of shape `(1, L)`, `generation_config`,
            `logits_processor`, `tokenizer` and `assistant_tokenizer` that its signature names; returns the generator.
            For batch size 1 a generator object will do.
    """

    factory: Any

    name: ClassVar[str] = "candidate_generator"
    needs: ClassVar[str] = "a CandidateGenerator or a factory of one"
    default_draft_tokens: ClassVar[int] = 20
    knows_law: ClassVar[bool] = False

    def build(self, target: Any, request: Any) -> "CandidateDrafter":
        """One generator per row. Raises `SpecDecError` for a generator that reads the target's own outputs."""
        offered = dict(
            zip(
                OFFERED,
                (target.model, None, request.generation_config, request.processors.stock, None, None),
                strict=True,
            )
        )
        offered |= {name: request.extras.get(name) for name in ("tokenizer", "assistant_tokenizer")}
        generators = []
        for row in range(request.input_ids.shape[0]):
            if isinstance(self.factory, CandidateGenerator):
                generator = self.factory
            else:
                offered["input_ids"] = request.input_ids[row : row + 1].clone()
                generator = self._call_factory(offered)
            if not isinstance(generator, CandidateGenerator):
                raise SpecDecError(
                    f"The candidate generator factory returned {type(generator).__name__}, not a CandidateGenerator."
                )
            if generator.requires_model_outputs:
                raise SpecDecError(
                    f"{type(generator).__name__} reads the target's outputs, which the adapter does not hand on. Use "
                    "the assisted decoding of transformers for it."
                )
            generators.append(generator)
        if len(generators) > 1 and len({id(each) for each in generators}) == 1:
            raise SpecDecError(
                "One CandidateGenerator object cannot serve several rows; pass a factory that makes one per row."
            )
        return CandidateDrafter(generators)

    def _call_factory(self, offered: dict[str, Any]) -> Any:
        """What the factory returns, called with those of `offered` that its signature names."""
        try:
            wanted = set(inspect.signature(self.factory).parameters)
        except (TypeError, ValueError):  # some builtins have no signature
            wanted = set()
        try:
            return self.factory(**{name: value for name, value in offered.items() if name in wanted})
        except TypeError as error:
            raise SpecDecError(
                f"The candidate generator factory {self._factory_name()} could not be called ({error}). It gets by "
                f"keyword what its signature names of {', '.join(OFFERED)}; bind other arguments with "
                "`functools.partial`."
            ) from error

    def _factory_name(self) -> str:
        return getattr(self.factory, "__qualname__", type(self.factory).__qualname__)

    def to_dict(self) -> dict[str, Any]:
        """The factory's name."""
        return {"factory": self._factory_name()}


class CandidateDrafter(Drafter):
    """Asks each row's generator for candidates, and tells it what was accepted."""

    def __init__(self, generators: list[CandidateGenerator]):
        self._generators = generators

    def start(self, view: DecodeView) -> None:
        """Rows that ended with their first token have left."""
        self._generators = [self._generators[row] for row in view.row_ids]

    def propose(self, view: DecodeView, plan: Plan) -> DraftTree:
        """What each generator proposes, cut to `plan.depth` tokens."""
        chains = []
        for row, generator in enumerate(self._generators):
            ids = torch.tensor([list(view.tokens(row))], device=view.device)
            candidates, _ = generator.get_candidates(ids)
            chains.append(candidates[0, ids.shape[1] :].tolist()[: plan.depth])
        return DraftTree.from_chains(view.roots(), chains, view.device)

    def observe(self, view: DecodeView, emitted: Sequence[Sequence[int]]) -> None:
        """Tell each generator how many of its candidates were accepted; it gets no scores."""
        for row, (generator, tokens) in enumerate(zip(self._generators, emitted, strict=True)):
            ids = torch.tensor([list(view.tokens(row))], device=view.device)
            generator.update_candidate_strategy(ids, None, len(tokens) - 1)

    def keep(self, rows: Sequence[int]) -> None:
        """Only these rows stay."""
        self._generators = [self._generators[row] for row in rows]
