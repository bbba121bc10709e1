"""Trees that a model drafts, grown level by level for all rows at once. A chain is the tree of width 1.

B rows, n nodes of the beam (those whose children come next, the root at first), m children of each, V ids. Point
masses are found in abundance, and only the most valuable ones stay (EAGLE-2, Li et al., arXiv:2406.16858). Nodes that
are drawn all stay: how many children a node gets is settled before any of them is drawn.
"""

from collections.abc import Sequence

import torch

from ..state import Chances
from ..tree import UNKNOWN, DraftTree


class LevelTree:
    """The trees of one round while they grow. Node 0 is the root; parents come before children.

    Args:
        roots: `LongTensor` of shape `(B,)`.

    Attributes:
        tokens, parents, values: as in `DraftTree`, of every node found so far; a value of 0 is padding.
        beam: `LongTensor` of shape `(B, n)`, nodes.
        seen: `BoolTensor` of shape `(B, n, M)`: which of the M nodes that were ever in the beam, without the root,
            each node of the beam sees.
    """

    def __init__(self, roots: torch.Tensor):
        self.tokens = roots.unsqueeze(1)
        self.parents = torch.full_like(self.tokens, -1)
        self.values = torch.ones(self.tokens.shape, dtype=torch.float32, device=roots.device)
        self.beam = torch.zeros_like(self.tokens)
        self.seen = torch.zeros(len(roots), 1, 0, dtype=torch.bool, device=roots.device)
        self._numbers = self.beam
        self._run = self.tokens.new_zeros(len(roots), 0, 2)
        self._above = self.beam
        self._laws: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def size(self) -> int:
        """Nodes found so far, with the root."""
        return self.tokens.shape[1]

    def widen(self, tokens: torch.Tensor, shares: torch.Tensor) -> None:
        """Add point masses below the beam: shapes `(B, n, m)`; the share is the child's part of its parent's value."""
        above = torch.arange(tokens.shape[1], device=tokens.device).repeat_interleave(tokens.shape[2])
        values = self.values.gather(1, self.beam).unsqueeze(2) * shares.clamp(max=1)
        self._add(above.expand(len(tokens), -1), tokens.flatten(1), values.flatten(1))

    def draw(self, law: torch.Tensor, width: int, most: int) -> None:
        """Draw children of the beam without replacement: at most `width` of each node and `most` in all.

        The first child of a node whose law has the largest probability x is taken to be accepted with probability
        `s = 1 - (1 - x) / 2`, each further one likewise once those before it are refused. The most valuable places are
        filled, whatever is then drawn.

        Args:
            law: shape `(B, n, V)`.
        """
        width = min(width, law.shape[2])
        sure = 1 - UNKNOWN * (1 - law.amax(2, keepdim=True))
        ranks = torch.arange(width, device=law.device)
        worth = (self.values.gather(1, self.beam).unsqueeze(2) * sure * (1 - sure) ** ranks).flatten(1)
        places = worth.argsort(dim=1, descending=True, stable=True)[:, :most].sort(1).values
        worth = worth.gather(1, places)
        ratios, drawn = (law / torch.empty_like(law).exponential_()).topk(width, 2)  # in the order of drawing
        possible = ratios.flatten(1).gather(1, places) > 0
        self._laws.append((self.beam, law))
        self._add(places // width, drawn.flatten(1).gather(1, places), torch.where(possible, worth, 0.0))

    def _add(self, above: torch.Tensor, tokens: torch.Tensor, values: torch.Tensor) -> None:
        """Add a level: places of the parents in the beam, tokens and values, shapes `(B, K)`."""
        values = values.nan_to_num(0.0)
        parents = torch.where(values > 0, self.beam.gather(1, above), -1)
        self._above = above
        self.tokens = torch.cat([self.tokens, tokens], 1)
        self.parents = torch.cat([self.parents, parents], 1)
        self.values = torch.cat([self.values, values], 1)

    def promise(self, chances: Chances | None) -> float:
        """The chance of the best node of the last level, averaged over the rows. Reads the device."""
        first = self.size - self._above.shape[1]
        if chances is None:
            return float(self.values[:, first:].amax(1).mean())
        rows = list(zip(self.parents.tolist(), self.values.tolist()))
        return sum(max(chances(*row)[first:]) for row in rows) / len(rows)

    def descend(self, width: int) -> torch.Tensor:
        """Make the `width` most valuable nodes of the last level the beam. Their tokens, shape `(B, n)`."""
        first = self.size - self._above.shape[1]
        best = self.values[:, first:].argsort(dim=1, descending=True, stable=True)[:, :width].sort(1).values
        above, (rows, count) = self._above.gather(1, best), best.shape
        self.beam = best + first
        own = torch.eye(count, dtype=torch.bool, device=best.device).expand(rows, -1, -1)
        seen = self.seen.gather(1, above.unsqueeze(2).expand(-1, -1, self.seen.shape[2]))
        self.seen = torch.cat([seen, own], 2)
        tokens = self.tokens.gather(1, self.beam)
        parents = torch.where(self.parents.gather(1, self.beam) >= 0, self._numbers.gather(1, above), -1)
        numbers = torch.arange(1, count + 1, device=best.device) + self._run.shape[1]
        self._numbers = numbers.expand(rows, -1)
        self._run = torch.cat([self._run, torch.stack([tokens, parents], 2)], 1)
        return tokens

    @property
    def run(self) -> torch.Tensor:
        """`(token, parent)` of the nodes that were ever in the beam, in the order of `seen`: shape `(B, M, 2)`.

        Parents count from 1 in that order; 0 is the root, -1 padding.
        """
        return self._run

    def paths(self) -> list[list[list[int] | None]]:
        """Tokens below the root down to each node of the beam, per row; None for padding."""
        told = zip(self.beam.tolist(), self.tokens.tolist(), self.parents.tolist())
        return [[_path(node, tokens, parents) for node in beam] for beam, tokens, parents in told]

    def best(self, nodes: int) -> DraftTree:
        """The tree of the `nodes` most valuable nodes, the root included; where nodes were drawn, of all of them."""
        drawn = bool(self._laws)
        count = self.size - 1 if drawn else min(nodes, self.size) - 1
        order = self.values[:, 1:].argsort(dim=1, descending=True, stable=True)  # of equals the one found first
        kept = torch.cat([self.beam.new_zeros(len(order), 1), order[:, :count].sort(1).values + 1], 1)
        places = torch.zeros_like(self.tokens)
        places.scatter_(1, kept, torch.arange(count + 1, device=kept.device).expand_as(kept))
        above = self.parents.gather(1, kept)
        parents = torch.where(above >= 0, places.gather(1, above.clamp(min=0)), -1)
        probs = None
        if drawn:
            probs = self._laws[0][1].new_zeros(len(kept), count + 1, self._laws[0][1].shape[2])
            for nodes_of_law, law in self._laws:
                probs.scatter_(1, nodes_of_law.unsqueeze(2).expand_as(law), law)
        return DraftTree(
            self.tokens.gather(1, kept), parents, (parents >= 0) & drawn, probs, self.values.gather(1, kept)
        )


def _path(node: int, tokens: Sequence[int], parents: Sequence[int]) -> list[int] | None:
    if node and parents[node] < 0:
        return None
    path = []
    while node:
        path.append(tokens[node])
        node = parents[node]
    return path[::-1]
