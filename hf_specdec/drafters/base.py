"""The two objects of a draft strategy, and the registry of names.

`DraftStrategy` is settings: frozen, reusable, picklable, safe to share between threads. `Drafter` is the state of one
`generate` call. What outlives a call is a separate memory object that the strategy holds.
"""

import contextlib
import dataclasses
import math
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from transformers.generation import CandidateGenerator

from ..errors import SpecDecError, unknown_name
from ..state import DecodeView, Plan
from ..tree import DraftTree


class Drafter(CandidateGenerator, ABC):
    """What proposes tokens during one `generate` call. Life: `start`, then (`propose`, `observe`) per round.

    A drafter reads `DecodeView` and never writes to it. Rows that finish leave between rounds: `keep` says which stay,
    and is called before `observe`.

    Class attributes:
        stock_draft_tokens: draft length inside stock assisted decoding.
        looks_up: it drafts from text or tables, without a model: asking costs little.
        runs_model: it drafts by forward passes of a model; a plan of depth 0 spares them.
        on_target: it drafts on the target's own K/V, so it serves no other loop.
        top_tokens: how many of the target's likeliest next tokens `learn` is given; 0: `learn` is not called.
        usual_gain: with `top_tokens`, tokens per doubling of its tree's nodes that its drafts bring on average over
            texts. Where blocks are too dear for that, and other members draft from the text alone, a plan may leave it
            out and untaught; infinite for never.
        drafts_untaught: it has members that draft without `learn`, and those that need it may be left out.
        forwards: forward passes of a draft model so far.
        forward_seconds: time spent in them.
    """

    stock_draft_tokens: int = 10
    looks_up: bool = True
    runs_model: bool = False
    on_target: bool = False
    top_tokens: int = 0
    usual_gain: float = math.inf
    drafts_untaught: bool = False
    forwards: int = 0
    forward_seconds: float = 0.0

    def start(self, view: DecodeView) -> None:
        """Called once after prefill; `view` holds the prompt and the first emitted token of each row."""

    @abstractmethod
    def propose(self, view: DecodeView, plan: Plan) -> DraftTree:
        """A tree within the plan below each row's root. `DraftTree` with `view.rows` rows."""

    def learn(self, view: DecodeView, tree: DraftTree, tokens: torch.Tensor, probs: torch.Tensor) -> None:
        """What the target expects after each node of a forward, accepted or not.

        Called after each forward of a round whose plan is `taught`, before rows leave and before `observe`; after
        `start` for the prompt, which is a chain there.

        Args:
            view: the text down to node 0, which is its last token.
            tree: the nodes; those with parent -1 other than node 0 are padding.
            tokens: `LongTensor` of shape `(B, N, K)`: the likeliest next tokens, best first, K up to `top_tokens`.
            probs: `FloatTensor` of shape `(B, N, K)`: their probabilities among these K, before logits processors.
        """

    def observe(self, view: DecodeView, emitted: Sequence[Sequence[int]]) -> None:
        """Called after each commit with the tokens that each row emitted; `view` already holds them."""

    def keep(self, rows: Sequence[int]) -> None:
        """Only these rows (indices into the current ones, ascending) stay."""

    def finish(self) -> None:
        """Called once when the call ends, also when it ends with an exception."""

    def get_candidates(self, input_ids: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
        """The interface of stock assisted decoding: `input_ids` of shape `(1, L)` with the draft appended.

        Raises:
            SpecDecError: the strategy drafts on the target's K/V, which stock assisted decoding keeps to itself.
        """
        if self.on_target:
            raise SpecDecError(
                f"{type(self).__name__} drafts on the target's own K/V, which stock assisted decoding does not share. "
                "Call `hf_specdec.enable(model)` and give the strategy as assistant_strategy=..."
            )
        history = input_ids[0].tolist()
        view = DecodeView.of_sequences([history], input_ids.device, prompt_lengths=[len(history)])
        if (known := getattr(self, "_stock_view", None)) is None:
            self.start(view)
        elif len(history) > known.length(0):
            self.observe(view, [history[known.length(0) :]])
        self._stock_view = view
        tree = self.propose(view, Plan.chain(self.stock_draft_tokens))
        drafted = [token for token, parent in zip(tree.tokens[0].tolist(), tree.parents[0].tolist()) if parent >= 0]
        draft = torch.tensor([drafted], dtype=input_ids.dtype, device=input_ids.device)
        return torch.cat([input_ids, draft], dim=1), None

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int) -> None:
        """Nothing to do: `get_candidates` sees what was accepted at its next call."""


NEW_MEMORY = "new"
"""As a strategy's `memory`: an empty one that all calls with the strategy object share."""


def check_count(owner: str, name: str, value: Any, least: int = 1) -> None:
    """Raise `SpecDecError` unless the setting is a whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise SpecDecError(f"{owner}: {name}={value!r} is no count; use a whole number of at least {least}.")


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Write a file, replacing what was there in one step. Raises `SpecDecError` where that cannot be, and leaves
    nothing behind."""
    partial = Path(f"{os.fspath(path)}.{os.getpid()}.{threading.get_ident()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise SpecDecError(
            f"{os.fspath(path)!r} cannot be written ({error.strerror or error}); give the path of a file in a "
            "directory that exists and can be written."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


@dataclasses.dataclass(frozen=True)
class DraftStrategy(ABC):
    """Settings of a strategy and the facts that the loop checks before the first forward pass.

    Class attributes:
        name: the registered name.
        default_draft_tokens: draft tokens per round when the user gives no number.
        default_depth: longest path of a tree by default; None, as for chains, for as many as there are draft tokens.
        default_width: draft tokens at the same place by default.
        default_schedule: policy for the size of drafts by default; None for that of `SpecDecConfig`.
        costs_by_token: a draft takes a forward of a model for each further token.
        needs: one phrase for `hf-specdec strategies`.
        sampled: drafts may be drawn from a law (with a verifier that reads draft probabilities).
        knows_law: says truly what law its drafts came from; a token that is looked up is a point mass.
        trees: it can propose more than a chain, where the plan's width grants that.
    """

    name: ClassVar[str] = ""
    default_draft_tokens: ClassVar[int] = 10
    default_depth: ClassVar[int | None] = None
    default_width: ClassVar[int] = 1
    default_schedule: ClassVar[str | None] = None
    costs_by_token: ClassVar[bool] = False
    needs: ClassVar[str] = "nothing"
    sampled: ClassVar[bool] = False
    knows_law: ClassVar[bool] = True
    trees: ClassVar[bool] = False

    @abstractmethod
    def build(self, target: Any, request: Any) -> Drafter:
        """The drafter of one call. Raises `SpecDecError` when the strategy does not fit the target or the request."""

    def to_dict(self) -> dict[str, Any]:
        """The settings by field name, for YAML and command lines."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


STRATEGIES: dict[str, type[DraftStrategy]] = {}
ENTRY_POINT_GROUP = "hf_specdec.strategies"
StrategyClass = TypeVar("StrategyClass", bound=type[DraftStrategy])


def register_strategy(name: str) -> Callable[[StrategyClass], StrategyClass]:
    """Class decorator that makes a strategy known by `name`. Raises `SpecDecError` when the name is taken."""

    def register(cls: StrategyClass) -> StrategyClass:
        if STRATEGIES.get(name, cls) is not cls:
            raise SpecDecError(
                f"A strategy named {name!r} is already registered ({STRATEGIES[name].__qualname__}); choose another."
            )
        cls.name = name
        STRATEGIES[name] = cls
        return cls

    return register


def known_strategies() -> dict[str, type[DraftStrategy]]:
    """All strategies by name, those of installed packages (entry point group `hf_specdec.strategies`) included."""
    for entry in metadata.entry_points(group=ENTRY_POINT_GROUP):
        if entry.name not in STRATEGIES:
            register_strategy(entry.name)(entry.load())
    return dict(STRATEGIES)


def build_strategy(name: str, options: dict[str, Any]) -> DraftStrategy:
    """The strategy called `name` with these settings. Unknown names and settings get the nearest valid one."""
    known = known_strategies()
    if name not in known and os.path.isdir(name):
        raise SpecDecError(
            f"{name!r} is a directory, not a strategy; for the draft model in it give DraftModel({name!r})."
        )
    if name not in known:
        raise unknown_name("draft strategy", name, known)
    fields = {field.name for field in dataclasses.fields(known[name]) if field.init}
    for option in options:
        if option not in fields:
            raise unknown_name(f"option of strategy {name!r}:", option, fields or {"(it takes none)"})
    needed = [
        field.name
        for field in dataclasses.fields(known[name])
        if field.init and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    if missing := [each for each in needed if each not in options]:
        raise SpecDecError(
            f"Strategy {name!r} needs {', '.join(missing)}: give SpecDecConfig(strategy={name!r}, "
            f"strategy_options={{{missing[0]!r}: ...}}), or a strategy object."
        )
    return known[name](**options)
