"""The draft tree and its algebra: tensors only, no model and no strategy.

B rows, N nodes with the root. Node 0 is the root: the last committed token, not yet in the target's cache. A parent
comes before its children. `parents == -1` at a node other than the root marks padding: such a node is forwarded only
to keep the block rectangular, and is never accepted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from .errors import SpecDecError


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
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    sampled: torch.Tensor
    probs: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.tokens.shape != self.parents.shape or self.tokens.shape != self.sampled.shape:
            raise SpecDecError(
                f"A draft tree has a token, a parent and a flag per node; got shapes {tuple(self.tokens.shape)}, "
                f"{tuple(self.parents.shape)} and {tuple(self.sampled.shape)}."
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


def ancestors(parents: torch.Tensor) -> torch.Tensor:
    """Which nodes each node sees: its ancestors and itself. `BoolTensor` of shape `(B, N, N)`, `[b, query, key]`.

    Transitive closure of "is the parent of" by squaring.
    """
    size = parents.shape[1]
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
    return DraftTree(tokens, parents, tree.sampled & kept, tree.probs)
