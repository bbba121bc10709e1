"""Lookahead decoding: what the target predicts beside the text, in a window of Jacobi iterations, becomes drafts.

Fu et al. 2024, arXiv:2402.02057. Window and guesses are branches of one draft tree, whose mask rule gives each token
of the window the position and the view that it has in the paper. Deviations: a window begins as stretches of the
prompt on all levels, where the paper fills it level by level from random tokens; the pool also takes the n-grams of
the text itself.
"""

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..state import DecodeView, Plan
from ..tree import UNKNOWN, DraftTree, RowTree
from .base import Drafter, DraftStrategy, check_count, register_strategy
from .memory import Memory, as_memory, is_token, memory_setting

DEFAULT_GUESSES = 5
WINDOW_VALUE = 0.01
"""Estimated acceptance of a token of the window: it is there to be continued, and is right by accident."""


class LookaheadMemory(Memory):
    """The latest n-grams by their first token. Safe to share between threads; bounded.

    Token ids mean something only under one tokenizer: keep one memory per tokenizer.

    Args:
        per_token: n-grams that are remembered with the same first token; of more, those seen longest ago leave.
        max_tokens: first tokens that are remembered, at about 0.5 kB each; of more, those seen longest ago leave.
    """

    kind = "lookahead"

    def __init__(self, per_token: int = DEFAULT_GUESSES, max_tokens: int = 50_000):
        check_count("LookaheadMemory", "per_token", per_token)
        check_count("LookaheadMemory", "max_tokens", max_tokens)
        super().__init__()
        self.per_token = per_token
        self.max_tokens = max_tokens
        self._followers: OrderedDict[int, list[tuple[int, ...]]] = OrderedDict()

    def __len__(self) -> int:
        """First tokens remembered."""
        return len(self._followers)

    def __repr__(self) -> str:
        return f"LookaheadMemory({len(self)} of {self.max_tokens} tokens, {self.per_token} n-grams each)"

    def add(self, gram: Sequence[int]) -> None:
        """Remember an n-gram as the latest of those with its first token."""
        if not gram:
            return
        first, rest = gram[0], tuple(gram[1:])
        with self._lock:
            known = [each for each in self._followers.pop(first, []) if each != rest]
            self._followers[first] = [*known, rest][-self.per_token :]
            while len(self._followers) > self.max_tokens:
                self._followers.popitem(last=False)

    def after(self, token: int) -> list[tuple[int, ...]]:
        """What follows a token in the n-grams that begin with it, the latest first."""
        with self._lock:
            return self._followers.get(token, [])[::-1]

    @classmethod
    def _restored(cls, content: Mapping[str, Any]) -> "LookaheadMemory":
        memory = cls(content["per_token"], content["max_tokens"])
        for first, followers in content["grams"]:
            for rest in followers:
                if not all(map(is_token, (first, *rest))):
                    raise ValueError("it holds something that is no n-gram of token ids")
                memory.add([first, *rest])
        return memory

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            grams = [(first, list(followers)) for first, followers in self._followers.items()]
        return {"per_token": self.per_token, "max_tokens": self.max_tokens, "path": self.path, "grams": grams}

    def __setstate__(self, state: dict[str, Any]) -> None:
        LookaheadMemory.__init__(self, state["per_token"], state["max_tokens"])
        self._followers.update(state["grams"])
        self.path = state["path"]


@register_strategy("lookahead")
@dataclass(frozen=True)
class Lookahead(DraftStrategy):
    """Verifies n-grams that the target predicted in a window beside the text (lookahead decoding, arXiv:2402.02057).

    A round has up to `guesses * (ngram - 1)` nodes of guesses and `window * (ngram - 1) - 1` of the window: 29 by
    default, which fits the 32 tokens of a default round of one row. The authors' example of 7, 5 and 7 makes 55.
    Guesses go first: where the round is smaller, the window runs with fewer columns or not at all.

    Args:
        window: columns of the window, the paper's W; 0 learns n-grams from the text alone.
        ngram: tokens of an n-gram, the one that is already there included; the paper's N, 2 or more.
        guesses: n-grams that are verified in a round, the paper's G.
        memory: n-grams that outlive the call: a `LookaheadMemory`, the path of a saved one, or "new" for one that all
            calls with this object share; None forgets after each call.
    """

    needs: ClassVar[str] = (
        "nothing; pays where a forward pass of 30 tokens costs little more than one of a single token"
    )
    trees: ClassVar[bool] = True

    window: int = 5
    ngram: int = 4
    guesses: int = DEFAULT_GUESSES
    memory: LookaheadMemory | str | None = None

    def __post_init__(self) -> None:
        check_count("lookahead", "guesses", self.guesses)
        check_count("lookahead", "window", self.window, least=0)
        check_count("lookahead", "ngram", self.ngram, least=2)
        made = as_memory("lookahead", self.memory, LookaheadMemory, lambda: LookaheadMemory(self.guesses))
        object.__setattr__(self, "memory", made)

    default_schedule: ClassVar[str | None] = "constant"  # nodes of the window pay in later rounds

    @property
    def default_draft_tokens(self) -> int:  # type: ignore[override]
        """All guesses and the whole window."""
        return self.guesses * (self.ngram - 1) + max(self.window * (self.ngram - 1) - 1, 0)

    @property
    def default_depth(self) -> int:  # type: ignore[override]
        """Down to the end of a guess, and of the last column."""
        return max(self.ngram - 1, self.window + self.ngram - 3)

    @property
    def default_width(self) -> int:  # type: ignore[override]
        """At the root: the guesses, and two tokens of the window."""
        return self.guesses + (2 if self.window else 0)

    def build(self, target: Any, request: Any) -> "LookaheadDrafter":
        """The drafter of one call; it fits every target."""
        return LookaheadDrafter(self, set() if request is None else unusable_tokens(request))

    def to_dict(self) -> dict[str, Any]:
        """The settings by field name; a memory by its path, or "new" if it was never saved."""
        return {
            "window": self.window,
            "ngram": self.ngram,
            "guesses": self.guesses,
            "memory": memory_setting(self.memory),
        }


def unusable_tokens(request: Any) -> set[int]:
    """Tokens that cannot stand inside a window: ends of text, and those that the target cannot read."""
    ends = getattr(request.generation_config, "_eos_token_tensor", None)
    return {*request.unreadable, *([] if ends is None else ends.reshape(-1).tolist())}


class JacobiWindow:
    """The window of one row: columns of `ngram - 1` tokens, the trajectories of positions beside the text.

    Level 0, the first tokens of the columns, is a chain below the root, which itself is that of column 0. The other
    levels of a column hang below its level 0: level l of column i lies `i + l` tokens behind the root and sees the
    text, the first tokens of columns 0 to i, and its own column above it.

    Args:
        text: what fills it.
        count: columns.
        length: tokens per column.
        generator: draws where in the text a column begins.

    Attributes:
        columns: tokens by column and level.
        proposed: columns that take part in the current round; always the first ones.
    """

    def __init__(self, text: Sequence[int], count: int, length: int, generator: torch.Generator):
        self._text = text
        self._generator = generator
        starts = [self._draw() for _ in range(count)]
        self.columns = [[text[(start + level) % len(text)] for level in range(length)] for start in starts]
        self.proposed = 0

    def _draw(self) -> int:
        return int(torch.randint(len(self._text), (), generator=self._generator, device="cpu"))

    def path(self, column: int) -> list[int]:
        """Tokens below the root down to the last level of a column."""
        return [each[0] for each in self.columns[1 : column + 1]] + self.columns[column][1:]

    def plant(self, tree: RowTree, plan: Plan) -> None:
        """Add as many columns to a tree as the plan leaves room for."""
        self.columns[0][0] = tree.tokens[0]
        self.proposed = 0
        while self.proposed < len(self.columns) and graft(tree, self.path(self.proposed), plan):
            self.proposed += 1

    def shift(self, tokens: Sequence[int], parents: Sequence[int], predicted: Sequence[int]) -> list[list[int]]:
        """One Jacobi step of the columns that took part: each goes on by what the target predicted after it.

        Args:
            tokens, parents: the tree of the round.
            predicted: the target's likeliest token after each node.

        Returns:
            the n-grams that the columns and their predictions make.
        """
        children = {place: node for node, place in enumerate(zip(parents, tokens))}
        ends = [find(children, self.path(column)) for column in range(self.proposed)]
        self.proposed = 0
        grams = []
        for column, end in enumerate(ends):
            if end is not None:
                grams.append([*self.columns[column], predicted[end]])
                self.columns[column] = grams[-1][1:]
        return grams

    def replace(self, unusable: Collection[int]) -> None:
        """Put tokens of the text in place of those that cannot be continued."""
        for column in self.columns:
            if column[-1] in unusable:
                column[-1] = self._text[self._draw()]


def find(children: dict[tuple[int, int], int], path: Sequence[int]) -> int | None:
    """The node at the end of a path below the root; None where the tree lacks it."""
    node: int | None = 0
    for token in path:
        node = None if node is None else children.get((node, token))
    return node


def graft(tree: RowTree, path: Sequence[int], plan: Plan) -> bool:
    """Add a path of the window below the root, if all of it stays within the plan. Did it?"""
    children = {place: node for node, place in enumerate(zip(tree.parents, tree.tokens))}
    node = known = 0
    while known < len(path) and (node, path[known]) in children:
        node = children[node, path[known]]
        known += 1
    added = path[known:]
    full = bool(added) and tree.parents.count(node) >= plan.width
    if full or len(path) > plan.depth or len(tree) + len(added) > plan.nodes:
        return False
    for token in added:
        node = tree.add(node, token, WINDOW_VALUE)
    return True


class LookaheadDrafter(Drafter):
    """One window per row, and one pool of n-grams for all rows of the call, or the strategy's memory."""

    def __init__(self, strategy: Lookahead, unusable: Collection[int]):
        self.top_tokens = 1 if strategy.window else 0
        self.stock_draft_tokens = strategy.ngram - 1
        self._strategy = strategy
        self._unusable = unusable
        self._pool = (
            strategy.memory if isinstance(strategy.memory, LookaheadMemory) else LookaheadMemory(strategy.guesses)
        )
        self._generator = torch.Generator().manual_seed(0)
        self._windows: list[JacobiWindow] = []

    def start(self, view: DecodeView) -> None:
        """Read the prompts, and fill the windows with stretches of them."""
        strategy = self._strategy
        for row in range(view.rows):
            text = view.tokens(row)
            self._read(text, 0)
            usable = [token for token in text if token not in self._unusable] or text[-1:]
            self._windows.append(JacobiWindow(usable, strategy.window, strategy.ngram - 1, self._generator))

    def _read(self, text: Sequence[int], start: int) -> None:
        """Remember the n-grams of a text that end at `start` or later."""
        before = self._strategy.ngram - 1
        for end in range(max(start, before), len(text)):
            self._pool.add(text[end - before : end + 1])

    def propose(self, view: DecodeView, plan: Plan) -> DraftTree:
        """The latest n-grams that begin with the last token, and the window; in a chain, the latest n-gram alone."""
        trees = [self._grow(view.root(row), window, plan) for row, window in enumerate(self._windows)]
        return DraftTree.from_rows(trees, view.device)

    def _grow(self, root: int, window: JacobiWindow, plan: Plan) -> RowTree:
        guessed = RowTree(root)
        for rank, guess in enumerate(self._pool.after(root)[: self._strategy.guesses]):
            node = 0
            for depth, token in enumerate(guess[: plan.depth]):
                node = guessed.add(node, token, UNKNOWN ** (1 + rank + depth))
        tree = guessed.best(plan.nodes, plan.width)
        if window.columns and plan.width > 1:
            window.plant(tree, plan)
        return tree

    def learn(self, view: DecodeView, tree: DraftTree, tokens: torch.Tensor, probs: torch.Tensor) -> None:
        """Move the windows on, and remember the n-grams that come out of them."""
        told = zip(tree.tokens.tolist(), tree.parents.tolist(), tokens[..., 0].tolist())
        for window, (nodes, parents, predicted) in zip(self._windows, told, strict=True):
            for gram in window.shift(nodes, parents, predicted):
                self._pool.add(gram)
            window.replace(self._unusable)

    def observe(self, view: DecodeView, emitted: Sequence[Sequence[int]]) -> None:
        """Remember the n-grams of what was emitted."""
        for row, new in enumerate(emitted):
            text = view.tokens(row)
            self._read(text, len(text) - len(new))

    def keep(self, rows: Sequence[int]) -> None:
        """Only these rows stay."""
        if self._windows:  # rows may leave before `start`
            self._windows = [self._windows[row] for row in rows]
