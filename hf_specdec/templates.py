"""Shapes of draft trees that are fixed before the text is known: listed by hand, or the best for an acceptance.

A template says of each node which parent it hangs below and which of its parent's candidates it takes: rank 0 is the
likeliest, or the first drawn. Pure: no model, no tensors, no clock.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from .errors import SpecDecError

ROUNDING = 1e-6


@dataclass(frozen=True)
class TreeTemplate:
    """A tree without tokens. Node 0 is the root; parents come before children, elder siblings before younger ones.

    Args:
        parents: the parent of each node, -1 at the root.
        ranks: which candidate of its parent each node takes, 0 first; -1 at the root.
    """

    parents: tuple[int, ...] = (-1,)
    ranks: tuple[int, ...] = (-1,)

    def __len__(self) -> int:
        """Nodes with the root."""
        return len(self.parents)

    @property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that lead to each node, `()` at the root. `template` takes them back."""
        paths: list[tuple[int, ...]] = [()]
        for parent, rank in zip(self.parents[1:], self.ranks[1:]):
            paths.append((*paths[parent], rank))
        return tuple(paths)

    @property
    def depth(self) -> int:
        """Edges of the longest path."""
        return max(map(len, self.paths))

    @property
    def width(self) -> int:
        """Most children of a node."""
        return max(map(self.parents.count, range(len(self))))

    def values(self, acceptance_by_rank: Sequence[float]) -> list[float]:
        """Probability that each node is accepted: the product of what its path's ranks are accepted with.

        Args:
            acceptance_by_rank: probability that the child of this rank is the accepted one, wherever its parent lies;
                0 beyond its end.
        """
        acceptance = _checked(acceptance_by_rank)
        values = [1.0]
        for parent, rank in zip(self.parents[1:], self.ranks[1:]):
            values.append(values[parent] * (acceptance[rank] if rank < len(acceptance) else 0.0))
        return values

    def expected_tokens(self, acceptance_by_rank: Sequence[float]) -> float:
        """Tokens that a round brings, the target's own included: the sum of `values`."""
        return sum(self.values(acceptance_by_rank))


def template(paths: Iterable[Sequence[int]]) -> TreeTemplate:
    """The tree with these paths of ranks, as Medusa lists its choices: `[(0,), (1,), (0, 0)]` (arXiv:2401.10774).

    Args:
        paths: one per node below the root, in any order; the root's own, `()`, may be among them.

    Raises:
        SpecDecError: a path is given twice or is none, or the path to its parent is missing.
    """
    given = [tuple(path) for path in paths]
    for path in given:
        if any(isinstance(rank, bool) or not isinstance(rank, int) or rank < 0 for rank in path):
            raise SpecDecError(f"{path!r} is no path of ranks; give whole numbers of at least 0, as in (0, 2).")
    ordered = sorted(set(given) | {()}, key=lambda path: (len(path), path))
    if len(ordered) < len(given) + (() not in given):
        twice = next(path for path in given if given.count(path) > 1)
        raise SpecDecError(f"The path {twice!r} is given twice; each node has one path.")
    places = {path: node for node, path in enumerate(ordered)}
    for path in ordered[1:]:
        if path[:-1] not in places:
            raise SpecDecError(f"The path {path!r} hangs below {path[:-1]!r}, which is missing; add it.")
    return TreeTemplate(
        tuple(places[path[:-1]] if path else -1 for path in ordered),
        tuple(path[-1] if path else -1 for path in ordered),
    )


def optimal_template(acceptance_by_rank: Sequence[float], nodes: int, depth: int) -> TreeTemplate:
    """The tree of at most this size that brings the most tokens per round (Sequoia, arXiv:2402.12374, section 3.1).

    Nodes that bring nothing are left out, except elder siblings, which are always there before a younger one.

    Args:
        acceptance_by_rank: as in `TreeTemplate.values`; a sum of at most 1.
        nodes: most nodes, the root included.
        depth: longest path.

    Raises:
        SpecDecError: for what is no probability or no number of nodes.
    """
    return _Optimum(acceptance_by_rank, nodes, depth).tree(nodes, depth)


def fastest_template(
    acceptance_by_rank: Sequence[float],
    draft_seconds: float,
    verify_seconds: Callable[[int], float],
    nodes: int,
    depth: int,
) -> TreeTemplate:
    """The optimal tree of the size and depth that take the least time per token (Sequoia, section 3.3).

    It minimises `(depth * draft_seconds + verify_seconds(size)) / expected tokens`. All sizes are tried, the root
    alone among them: times have steps.

    Args:
        acceptance_by_rank, nodes, depth: as in `optimal_template`.
        draft_seconds: per level of the tree.
        verify_seconds: of a round without its drafting, by its nodes.
    """
    optimum = _Optimum(acceptance_by_rank, nodes, depth)
    times = {size: verify_seconds(size) for size in range(1, nodes + 1)}
    sizes = [(size, levels) for size in times for levels in range(min(depth, size - 1) + 1)]
    best = min(sizes, key=lambda each: (each[1] * draft_seconds + times[each[0]]) / optimum.tokens(*each))
    return optimum.tree(*best)


class _Optimum:
    """Sequoia's dynamic programme over trees of at most m nodes and l levels below the root.

    With b children, `T[m, l, b] = max over y of T[m - y, l, b - 1] + a[b] * max over c of T[y, l - 1, c]`: the last
    child gets a tree of y nodes, the root and the elder children share the others; `T[m, l, 0] = 1`.
    """

    def __init__(self, acceptance_by_rank: Sequence[float], nodes: int, depth: int):
        self._acceptance = _checked(acceptance_by_rank)
        for name, value, least in (("nodes", nodes, 1), ("depth", depth, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise SpecDecError(f"{name}={value!r}, but it must be a whole number of at least {least}.")
        self._values = [[1.0] * (nodes + 1)]
        self._children = [[0] * (nodes + 1)]
        self._last_sizes: list[list[list[int]]] = [[]]
        for _ in range(min(depth, nodes - 1)):
            self._add_level(nodes)

    def _add_level(self, nodes: int) -> None:
        below = self._values[-1]
        grown = [1.0] * (nodes + 1)
        values, children, last_sizes = list(grown), [0] * (nodes + 1), []
        for count, chance in enumerate(self._acceptance[: nodes - 1], 1):
            elder, grown, sizes = grown, [0.0] * (nodes + 1), [0] * (nodes + 1)
            for size in range(count + 1, nodes + 1):
                for last in range(1, size - count + 1):
                    value = elder[size - last] + chance * below[last]
                    if value > grown[size]:
                        grown[size], sizes[size] = value, last
                if grown[size] > values[size]:
                    values[size], children[size] = grown[size], count
            last_sizes.append(sizes)
        self._values.append(values)
        self._children.append(children)
        self._last_sizes.append(last_sizes)

    def tokens(self, nodes: int, depth: int) -> float:
        """What the best tree of this size brings."""
        return self._values[min(depth, len(self._values) - 1)][nodes]

    def tree(self, nodes: int, depth: int) -> TreeTemplate:
        """The best tree of this size."""
        return template(self._paths(nodes, min(depth, len(self._values) - 1), ()))

    def _paths(self, nodes: int, depth: int, above: tuple[int, ...]) -> list[tuple[int, ...]]:
        paths = [above]
        for count in range(self._children[depth][nodes], 0, -1):
            last = self._last_sizes[depth][count - 1][nodes]
            paths += self._paths(last, depth - 1, (*above, count - 1))
            nodes -= last
        return paths


def _checked(acceptance_by_rank: Sequence[float]) -> Sequence[float]:
    """The acceptance; raises `SpecDecError` unless it is a list of probabilities that exclude each other."""
    for each in acceptance_by_rank:
        if isinstance(each, bool) or not isinstance(each, (int, float)) or not 0 <= each <= 1:
            raise SpecDecError(f"Acceptance {each!r} is no probability; give a number from 0 to 1 per rank.")
    if sum(acceptance_by_rank) > 1 + ROUNDING:
        raise SpecDecError(
            f"Acceptance by rank {list(acceptance_by_rank)!r} has a sum above 1, but at most one child of a node is "
            "accepted; give the probability that each is the one."
        )
    return acceptance_by_rank
