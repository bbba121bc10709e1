"""The draft tree and its algebra: tensors only, no model and no strategy.

B rows, N nodes with the root. Node 0 is the root: the last committed token, not yet in the target's cache. A parent
comes before its children. `parents == -1` at a node other than the root marks padding: such a node is forwarded only
to keep the block rectangular, and is never accepted.
"""

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

import torch

from .errors import SpecDecError

UNKNOWN = 0.5
"""Estimated acceptance of a draft token whose drafter gives none."""


class HostRow(NamedTuple):
    """One row of a `DraftTree` as lists; `values` is None where the tree has none."""

    tokens: list[int]
    parents: list[int]
    values: list[float] | None = None

    def padded(self, size: int) -> "HostRow":
        """The row with padding up to a size."""
        fill = size - len(self.tokens)
        values = None if self.values is None else self.values + [0.0] * fill
        return HostRow(self.tokens + self.tokens[:1] * fill, self.parents + [-1] * fill, values)


@dataclass(frozen=True)
class DraftTree:
    """Proposed continuations of each row. A chain is `parents = [-1, 0, 1, 2, ...]`; no draft at all is `N == 1`.

    Siblings hold different tokens. Those that were drawn were drawn without replacement, in node order: the first from
    the law of its parent's row, each later one from that law without the drawn ones before it. A point mass takes
    nothing from that law; let the row give its token no probability where drawn siblings must not repeat it. A drawn
    node may be left out only for reasons known before it was drawn, never for what it turned out to be.

    Args:
        tokens: `LongTensor` of shape `(B, N)`.
        parents: `LongTensor` of shape `(B, N)`, `parents[:, 0] == -1`, `0 <= parents[b, i] < i`, -1 for padding.
        sampled: `BoolTensor` of shape `(B, N)`; the node was drawn from `probs` at its parent. False is a point mass.
        probs: `FloatTensor` of shape `(B, N, V)` or None; row i is the law the children of node i were drawn from.
            Only for a verifier that asks for it.
        values: `FloatTensor` of shape `(B, N)` or None: the drafter's estimate of the probability that a node is
            accepted, 1 at the root, never above its parent's.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    sampled: torch.Tensor
    probs: torch.Tensor | None = None
    values: torch.Tensor | None = None

    def __post_init__(self) -> None:
        shapes = [tuple(getattr(each, "shape", ())) for each in (self.tokens, self.parents, self.sampled)]
        if len(set(shapes)) > 1:
            raise SpecDecError(
                f"A draft tree has a token, a parent and a flag per node; got shapes {shapes[0]}, {shapes[1]} and "
                f"{shapes[2]}."
            )

    @property
    def size(self) -> int:
        """N, the number of nodes with the root."""
        return self.tokens.shape[1]

    @cached_property
    def seen(self) -> torch.Tensor:
        """`ancestors` of this tree, `BoolTensor` of shape `(B, N, N)`."""
        return ancestors(self.parents)

    @cached_property
    def depths(self) -> torch.Tensor:
        """Edges between each node and the root; 0 for the root and for padding. `LongTensor` of shape `(B, N)`."""
        return self.seen.sum(-1) - 1

    @property
    def on_host(self) -> list[HostRow]:
        """Each row's nodes. Reads the device, unless the tree was made of lists or read before, and not written to
        since."""
        versions, known = self._versions, self.__dict__.get("_host")
        if versions is not None and known is not None and known[0] == versions:
            rows: list[HostRow] = known[1]
            return rows
        values = [None] * len(self.tokens) if self.values is None else self.values.tolist()
        rows = list(map(HostRow, self.tokens.tolist(), self.parents.tolist(), values))
        self.__dict__["_host"] = versions, rows
        return rows

    @property
    def _versions(self) -> tuple[int, ...] | None:
        """How often the tensors were written to; None where torch does not count."""
        parts = [self.tokens, self.parents, self.sampled, *([] if self.values is None else [self.values])]
        return None if any(part.is_inference() for part in parts) else tuple(part._version for part in parts)

    @property
    def made_of_lists(self) -> bool:
        """It was made of lists, of point masses that is, and nobody has written to its tensors since."""
        made = self.__dict__.get("_made")
        return made is not None and made == self._versions

    @classmethod
    def from_host(cls, rows: Sequence[HostRow], device: torch.device | str = "cpu") -> "DraftTree":
        """The tree of these rows of looked-up tokens, all of the same size."""
        tokens, parents = (torch.tensor([row[part] for row in rows], device="cpu") for part in (0, 1))
        values = [list(row.values) for row in rows if row.values is not None]
        own = list(map(HostRow, tokens.tolist(), parents.tolist(), *([values] if values else [])))
        tree = cls(
            tokens.to(device),
            parents.to(device),
            torch.zeros(parents.shape, dtype=torch.bool, device=device),
            values=torch.tensor(values, dtype=torch.float32, device=device) if values else None,
        )
        tree.__dict__["_made"] = tree._versions
        tree.__dict__["_host"] = tree._versions, own
        return tree

    @classmethod
    def from_chains(
        cls,
        roots: Sequence[int],
        chains: Sequence[Sequence[int]],
        device: torch.device | str = "cpu",
    ) -> "DraftTree":
        """One chain of looked-up tokens per row below its root; shorter rows are padded."""
        width = 1 + max(map(len, chains))
        rows = [HostRow([root, *chain], [*range(-1, len(chain))]) for root, chain in zip(roots, chains, strict=True)]
        return cls.from_host([row.padded(width) for row in rows], device)

    @classmethod
    def from_rows(cls, rows: Sequence["RowTree"], device: torch.device | str = "cpu") -> "DraftTree":
        """One tree of looked-up tokens per row; smaller rows are padded."""
        size = max(map(len, rows))
        return cls.from_host([row.padded(size) for row in rows], device)

    def copy_to(self, device: torch.device | str) -> "DraftTree":
        """The same tree, with tensors of its own but for `probs`, which may be large."""
        if self.made_of_lists:
            return DraftTree.from_host(self.on_host, device)
        tokens, parents, sampled = (part.to(device, copy=True) for part in (self.tokens, self.parents, self.sampled))
        probs = None if self.probs is None else self.probs.to(device)
        values = None if self.values is None else self.values.to(device, copy=True)
        return DraftTree(tokens, parents, sampled, probs, values)

    def first(self, nodes: int) -> "DraftTree":
        """The tree of its first `nodes` nodes."""
        if nodes >= self.size:
            return self
        probs, values = self.probs, self.values
        return DraftTree(
            self.tokens[:, :nodes],
            self.parents[:, :nodes],
            self.sampled[:, :nodes],
            None if probs is None else probs[:, :nodes],
            None if values is None else values[:, :nodes],
        )


class RowTree:
    """The tree of one row while it is put together on the host. Node 0 is the root; parents come before children.

    Attributes:
        tokens, parents: as in `DraftTree`.
        values: estimated probability that each node is accepted, never above its parent's.
    """

    def __init__(self, root: int):
        self.tokens, self.parents, self.values = [root], [-1], [1.0]
        self._children: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        """Nodes with the root."""
        return len(self.tokens)

    def holds(self, parent: int, token: int) -> bool:
        """Has `parent` a child with this token?"""
        return (parent, token) in self._children

    def add(self, parent: int, token: int, value: float) -> int:
        """The child of `parent` that holds `token`; its value is the largest it was added with."""
        value = min(value, self.values[parent])
        node = self._children.setdefault((parent, token), len(self.tokens))
        if node == len(self.tokens):
            self.tokens.append(token)
            self.parents.append(parent)
            self.values.append(value)
        else:
            self.values[node] = max(self.values[node], value)
        return node

    @classmethod
    def chain(cls, root: int, tokens: Sequence[int], values: Sequence[float]) -> "RowTree":
        """A chain of these tokens."""
        tree = cls(root)
        for node, (token, value) in enumerate(zip(tokens, values, strict=True)):
            tree.add(node, token, value)
        return tree

    def padded(self, size: int) -> HostRow:
        """The row with padding up to a size."""
        return HostRow(self.tokens, self.parents, self.values).padded(size)

    @classmethod
    def of(cls, tree: DraftTree, row: int) -> "RowTree":
        """One row of a tree. Where it gives no values, half of the drafts are taken to be right at each depth."""
        tokens, parents, values = tree.on_host[row]
        own, places = cls(tokens[0]), {0: 0}
        for node, parent in enumerate(parents):
            if parent in places:
                value = own.values[places[parent]] * UNKNOWN if values is None else values[node]
                places[node] = own.add(places[parent], tokens[node], value)
        return own

    def best(self, nodes: int, width: int) -> "RowTree":
        """The tree of the `nodes` most valuable nodes, with at most `width` children each."""
        order = sorted(range(1, len(self)), key=lambda node: -self.values[node])
        places, counts = {0: 0}, [0] * len(self)
        kept = RowTree(self.tokens[0])
        for node in order:  # stable, so that a parent comes before a child of equal value
            parent = self.parents[node]
            if len(kept) < nodes and parent in places and counts[parent] < width:
                counts[parent] += 1
                places[node] = kept.add(places[parent], self.tokens[node], self.values[node])
        return kept


def union(trees: Sequence[RowTree], width: int, nodes: int) -> RowTree:
    """Several trees below the same root in one, without duplicates, cut to its most valuable nodes.

    A node is refused only where all trees that hold it are wrong about it, each on its own (noisy or).
    """
    whole, wrong = RowTree(trees[0].tokens[0]), [0.0]
    for tree in trees:
        places, values = [0], tree.values
        for node, parent in enumerate(tree.parents[1:], 1):
            place = whole.add(places[parent], tree.tokens[node], 0.0)
            places.append(place)
            if place == len(wrong):
                wrong.append(1.0)
            if values[parent] > 0:
                wrong[place] *= 1 - values[node] / values[parent]
    for node, parent in enumerate(whole.parents[1:], 1):
        whole.values[node] = whole.values[parent] * (1 - wrong[node])
    return whole.best(nodes, width)


State = TypeVar("State")


def grow_best_first(
    root: int,
    start: State,
    expand: Callable[[State], Iterable[tuple[int, float, State]]],
    depth: int,
    width: int,
    nodes: int,
) -> RowTree:
    """The most probable nodes of a tree that is too large to be written out.

    Args:
        root: the last committed token.
        start: what `expand` is called with for the root.
        expand: the continuations of a node as `(token, probability, state)`, the probability given the node, the most
            probable first; called with the node's state, and asked for no more than are needed. A token that comes
            again is passed over.
        depth: longest path.
        width: most children of a node; its most probable ones.
        nodes: most nodes, the root included.
    """
    tree = RowTree(root)
    waiting: list[tuple[float, int, int, int, State, Iterator[tuple[int, float, State]]]] = []
    count = itertools.count()  # of equals the one that was found first
    level = [0]

    def push(parent: int, children: Iterator[tuple[int, float, State]]) -> None:
        """The next child waits; those after it are not better."""
        for token, probability, state in children:
            if tree.holds(parent, token):
                continue
            heapq.heappush(waiting, (-tree.values[parent] * probability, next(count), parent, token, state, children))
            return

    push(0, itertools.islice(expand(start), width))
    while waiting and len(tree) < nodes:
        value, _, parent, token, state, siblings = heapq.heappop(waiting)
        node = tree.add(parent, token, -value)
        level.append(level[parent] + 1)
        push(parent, siblings)
        if level[node] < depth:
            push(node, itertools.islice(expand(state), width))
    return tree


def ancestors(parents: torch.Tensor) -> torch.Tensor:
    """Which nodes each node sees: its ancestors and itself. `BoolTensor` of shape `(B, N, N)`, `[b, query, key]`.

    Transitive closure of "is the parent of" by squaring.
    """
    size = parents.shape[1]
    if size == 1:
        return parents.new_ones(len(parents), 1, 1, dtype=torch.bool)
    nodes = torch.arange(size, device=parents.device)
    reach = (parents.unsqueeze(2) == nodes) | (nodes.unsqueeze(1) == nodes)
    for _ in range((size - 1).bit_length()):
        counts = reach.float()
        reach = torch.bmm(counts, counts) > 0
    return reach


def siblings(parents: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """All first children, then all second ones, and so on, each as `(rows, parents, nodes, elder)` of shape `(M,)`.

    `elder` is the place of each node's elder sibling among the children of the rank before; -1 for first children.
    Reads the device once.

    Args:
        parents: shape `(B, N)`.
    """
    ranks: list[list[tuple[int, int, int, int]]] = []
    for row, own in enumerate(parents.tolist()):
        latest: dict[int, tuple[int, int]] = {}
        for node, parent in enumerate(own):
            if parent < 0:
                continue
            rank, elder = latest.get(parent, (-1, -1))
            if rank + 1 == len(ranks):
                ranks.append([])
            latest[parent] = (rank + 1, len(ranks[rank + 1]))
            ranks[rank + 1].append((row, parent, node, elder))
    columns = [torch.tensor(each, device=parents.device).unbind(1) for each in ranks]
    return [(rows, above, nodes, elder) for rows, above, nodes, elder in columns]


def select_nodes(tree: DraftTree, kept: Sequence[Sequence[int]]) -> DraftTree:
    """The tree of some nodes of each row, renumbered; rows with fewer are padded.

    Args:
        tree: of point masses.
        kept: nodes per row, ascending, the root and the parents of all of them included.
    """
    size = max(map(len, kept))
    rows = []
    for (tokens, parents, values), own in zip(tree.on_host, kept, strict=True):
        places = {node: place for place, node in enumerate(own)}
        row = HostRow(
            [tokens[node] for node in own],
            [places.get(parents[node], -1) for node in own],
            None if values is None else [values[node] for node in own],
        )
        rows.append(row.padded(size))
    return DraftTree.from_host(rows, tree.tokens.device)


def keep_nodes(tree: DraftTree, allowed: torch.Tensor) -> DraftTree:
    """The tree with every node that is not `allowed`, and everything below it, turned into padding.

    Args:
        allowed: `BoolTensor` of shape `(B, N)`; the root is always kept.
    """
    allowed = allowed & (tree.parents >= 0)
    allowed[:, 0] = True
    kept = ~(tree.seen & ~allowed.unsqueeze(1)).any(-1)
    parents = torch.where(kept, tree.parents, -1)
    tokens = torch.where(kept, tree.tokens, tree.tokens[:, :1])
    smaller = DraftTree(tokens, parents, tree.sampled & kept, tree.probs, tree.values)
    own = torch.eye(tree.size, dtype=torch.bool, device=kept.device)
    smaller.__dict__["seen"] = torch.where(kept.unsqueeze(2), tree.seen, own)  # padding sees itself
    return smaller
