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
from typing import Any, TypeVar

import torch

from .errors import SpecDecError

UNKNOWN = 0.5
"""Estimated acceptance of a draft token whose drafter gives none."""


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

    def on_host(self) -> list[tuple[list[int], list[float] | None]]:
        """Parents and values of each row; None where the tree has no values. Reads the device."""
        parents = self.parents.tolist()
        return list(zip(parents, [None] * len(parents) if self.values is None else self.values.tolist()))

    @classmethod
    def from_chains(
        cls,
        roots: Sequence[int],
        chains: Sequence[Sequence[int]],
        device: torch.device | str = "cpu",
    ) -> "DraftTree":
        """One chain of looked-up tokens per row below its root; shorter rows are padded."""
        width = 1 + max(map(len, chains))
        tokens = [
            [root, *chain] + [root] * (width - 1 - len(chain)) for root, chain in zip(roots, chains, strict=True)
        ]
        parents = [list(range(-1, len(chain))) + [-1] * (width - 1 - len(chain)) for chain in chains]
        parent_tensor = torch.tensor(parents, device=device)
        return cls(
            torch.tensor(tokens, device=device), parent_tensor, torch.zeros_like(parent_tensor, dtype=torch.bool)
        )

    @classmethod
    def from_rows(cls, rows: Sequence["RowTree"], device: torch.device | str = "cpu") -> "DraftTree":
        """One tree of looked-up tokens per row; smaller rows are padded."""
        size = max(map(len, rows))
        fill = [size - len(row) for row in rows]
        tokens = [row.tokens + row.tokens[:1] * count for row, count in zip(rows, fill)]
        parents = torch.tensor([row.parents + [-1] * count for row, count in zip(rows, fill)], device=device)
        values = [row.values + [0.0] * count for row, count in zip(rows, fill)]
        return cls(
            torch.tensor(tokens, device=device),
            parents,
            torch.zeros_like(parents, dtype=torch.bool),
            values=torch.tensor(values, device=device),
        )

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
    def of(cls, tree: DraftTree, row: int) -> "RowTree":
        """One row of a tree. Where it gives no values, half of the drafts are taken to be right at each depth."""
        tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
        values = (UNKNOWN ** tree.depths[row] if tree.values is None else tree.values[row]).tolist()
        own, places = cls(tokens[0]), {0: 0}
        for node, parent in enumerate(parents):
            if parent in places:
                places[node] = own.add(places[parent], tokens[node], values[node])
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
            probable first; called with the node's state, and asked for no more than are needed.
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


def select_nodes(tree: DraftTree, kept: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]) -> DraftTree:
    """The tree of some nodes of each row, renumbered; rows with fewer are padded.

    Args:
        tree: without `probs`, whose rows would have to follow.
        kept: nodes per row, ascending, the root and the parents of all of them included.
        parents: those of the tree, on the host.
    """
    size = max(map(len, kept))
    places = [{node: place for place, node in enumerate(own)} for own in kept]
    above = [
        [place.get(row[node], -1) for node in own] + [-1] * (size - len(own))
        for own, row, place in zip(kept, parents, places, strict=True)
    ]
    index = torch.tensor([[*own, *[0] * (size - len(own))] for own in kept], device=tree.tokens.device)
    values = None if tree.values is None else tree.values.gather(1, index)
    return DraftTree(
        tree.tokens.gather(1, index),
        torch.tensor(above, device=tree.tokens.device),
        tree.sampled.gather(1, index),
        values=values,
    )


def fit(tree: DraftTree, roots: Sequence[int], width: int, size: int) -> DraftTree:
    """The first `size` nodes of a tree below these roots; a node whose parent does not come before it is padding.

    Args:
        width: 1 for a chain: there the parent comes right before.
    """
    root = torch.tensor(roots, device=tree.tokens.device).unsqueeze(1)
    nodes = torch.arange(tree.size, device=root.device)
    parents = torch.where(tree.parents < nodes, tree.parents, -1).index_fill(1, nodes[:1], -1)
    if width == 1:
        parents = torch.where(parents == nodes - 1, parents, -1)
    tokens = torch.cat([root, tree.tokens[:, 1:].long()], 1)
    return DraftTree(tokens, parents.long(), tree.sampled, tree.probs, tree.values).first(size)


def fault_of(tree: Any, rows: int, vocabulary: int | None = None) -> str | None:
    """What is wrong with the answer of a draft strategy, or None. Looks at types and shapes alone.

    Args:
        rows: that the tree must have.
        vocabulary: V of its `probs`, where that is known.
    """
    if not isinstance(tree, DraftTree):
        return f"it answered with {type(tree).__name__}"
    parts = {name: getattr(tree, name) for name in ("tokens", "parents", "sampled", "probs", "values")}
    for name, part in parts.items():
        if not isinstance(part, torch.Tensor) and (part is not None or name not in ("probs", "values")):
            return f"its {name} are a {type(part).__name__}, no tensor"
    shape = tuple(tree.tokens.shape)
    if len(shape) != 2 or shape[0] != rows or not shape[1]:
        return f"its tokens have shape {shape}"
    for name, part in parts.items():
        law = (vocabulary or part.shape[-1],) if name == "probs" and part is not None else ()
        if part is not None and tuple(part.shape) != (*shape, *law):
            return f"its {name} have shape {tuple(part.shape)}, not {(*shape, *law)}"
    if tree.tokens.is_floating_point() or tree.parents.is_floating_point() or tree.sampled.dtype != torch.bool:
        return "its tokens or parents are no whole numbers, or its sampled no booleans"
    return None


def repeated(tree: DraftTree) -> torch.Tensor:
    """The nodes whose token an earlier sibling holds: `BoolTensor` of shape `(B, N)`."""
    tokens, parents = tree.tokens, tree.parents
    same = (tokens.unsqueeze(2) == tokens.unsqueeze(1)) & (parents.unsqueeze(2) == parents.unsqueeze(1))
    return (same.tril(-1)).any(2) & (parents >= 0)


def told(tree: DraftTree) -> torch.Tensor:
    """The nodes to which the law of their parent's children gives some probability: `BoolTensor` of shape `(B, N)`."""
    if tree.probs is None:
        return torch.zeros_like(tree.sampled)
    rows = torch.arange(len(tree.tokens), device=tree.tokens.device).unsqueeze(1)
    tokens = tree.tokens.clamp(0, tree.probs.shape[2] - 1)
    return tree.probs[rows, tree.parents.clamp(min=0), tokens] > 0


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
