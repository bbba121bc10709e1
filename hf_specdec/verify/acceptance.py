"""What every acceptance rule is made of: its answer, walks along a tree, and the target's own choice.

A rule gets `scores` of shape `(B, N, V)`: row i is the target's processed logits after node i. It answers with the
accepted path of each row and the target's own token after it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..tree import DraftTree


class Decided(NamedTuple):
    """What came of one row, on the host.

    Args:
        path: accepted nodes below the root, root side first.
        tokens: theirs, and the target's own after them.
        drafted: draft tokens of the row.
        deepest: depth of the deepest one.
    """

    path: list[int]
    tokens: list[int]
    drafted: int
    deepest: int


@dataclass(frozen=True)
class Acceptance:
    """What a rule decided. A round emits `count + 1` tokens.

    Args:
        path: `LongTensor` of shape `(B, D)`: accepted nodes below the root, root side first, padded with -1.
        count: `LongTensor` of shape `(B,)`: accepted draft tokens.
        next_token: `LongTensor` of shape `(B,)`: the target's own token after them; -1 where its law is not finite.
    """

    path: torch.Tensor
    count: torch.Tensor
    next_token: torch.Tensor

    def on_host(self, tree: DraftTree) -> list[Decided]:
        """What came of each row of the tree. Reads the device once."""
        if tree.size == 1:
            return [Decided([], [token], 0, 0) for token in self.next_token.tolist()]
        parts = [
            self.path,
            tree.tokens.gather(1, self.path.clamp(min=0)),
            self.count.unsqueeze(1),
            self.next_token.unsqueeze(1),
            (tree.parents >= 0).sum(1, keepdim=True),
            tree.depths.max(1, keepdim=True).values,
        ]
        width, decided = self.path.shape[1], []
        for row in torch.cat(parts, dim=1).tolist():
            count, following, drafted, deepest = row[2 * width :]
            decided.append(Decided(row[:count], [*row[width : width + count], following], drafted, deepest))
        return decided


Rule = Callable[[DraftTree, torch.Tensor, bool, torch.Tensor | None], Acceptance]


def reached(tree: DraftTree, allowed: torch.Tensor) -> torch.Tensor:
    """The nodes that are allowed together with all nodes above them. The root always is, padding never.

    Args:
        allowed: `BoolTensor` of shape `(B, N)`, and so is what comes back.
    """
    allowed = allowed & (tree.parents >= 0)
    allowed[:, 0] = True
    return ~(tree.seen & ~allowed.unsqueeze(1)).any(-1)


def path_of(kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`path` and `count` of an `Acceptance`, and the last node of the path: shapes `(B, N - 1)`, `(B,)`, `(B,)`.

    Args:
        kept: `BoolTensor` of shape `(B, N)`: the nodes of one path per row, root included.
    """
    size = kept.shape[1]
    nodes = torch.arange(size, device=kept.device).expand_as(kept)
    path = torch.where(kept, nodes, size).sort(-1).values[:, 1:]
    path = torch.where(path < size, path, -1)
    return path, kept.sum(-1) - 1, torch.where(kept, nodes, 0).max(-1).values


def follow(tree: DraftTree, choices: torch.Tensor) -> Acceptance:
    """From the root, go to the child that holds the target's choice; stop where there is none.

    Args:
        choices: `LongTensor` of shape `(B, N)`, the target's own token after each node.
    """
    if tree.size == 1:
        return Acceptance(choices[:, :0], choices.new_zeros(len(choices)), choices[:, 0])
    matched = tree.tokens == choices.gather(1, tree.parents.clamp(min=0))
    path, count, last = path_of(reached(tree, matched))
    return Acceptance(path, count, choices.gather(1, last.unsqueeze(1)).squeeze(1))


CHUNK = 512
FEW = 4
"""Rows up to which one pass over the scores takes less time than two levels do, whose operations are small."""


def likeliest(scores: torch.Tensor) -> torch.Tensor:
    """`scores.argmax(-1)`, the first index where several are largest.

    On CPU in two levels, the chunk with the maximum and then the place in it: `argmax` over a long row is not
    vectorised there, `amax` is. For few rows a plain `max`, which finds the first one as well, is one call.

    Args:
        scores: shape `(..., V)`.
    """
    size = scores.shape[-1]
    if scores.device.type != "cpu" or size <= 2 * CHUNK:
        return scores.argmax(-1)
    if scores.numel() <= FEW * size:
        return scores.max(-1).indices
    return _first_of_largest(scores, _chunk_maxima(scores))


def most_likely(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`likeliest(scores)`, the places of the `count` largest scores, best first, and the softmax of these.

    On CPU all in one pass over the scores, in two levels as in `likeliest`: the chunks with the largest maxima hold
    the largest scores.

    Args:
        scores: shape `(..., V)`.

    Returns:
        Shapes `(...)`, `(..., count)`, `(..., count)`.
    """
    size = scores.shape[-1]
    count = min(count, size)
    if scores.device.type != "cpu" or size <= 2 * count * CHUNK or scores.numel() <= FEW * size:
        best, places = scores.topk(count, -1)
        return likeliest(scores), places, best.float().softmax(-1)
    maxima = _chunk_maxima(scores)
    chunks = maxima.topk(count, -1).indices
    held = _chunks_of(scores, chunks)
    best, order = held.topk(count, -1)
    places = chunks.gather(-1, order // CHUNK) * CHUNK + order % CHUNK
    return _first_of_largest(scores, maxima), places, best.float().softmax(-1)


def _chunk_maxima(scores: torch.Tensor) -> torch.Tensor:
    """The largest score of each chunk; the last one may be shorter."""
    whole = scores.shape[-1] // CHUNK * CHUNK
    largest = scores[..., :whole].unflatten(-1, (-1, CHUNK)).amax(-1)
    if whole < scores.shape[-1]:
        largest = torch.cat([largest, scores[..., whole:].amax(-1, keepdim=True)], dim=-1)
    return largest


def _chunks_of(scores: torch.Tensor, chunks: torch.Tensor) -> torch.Tensor:
    """The scores of some chunks, `-inf` beyond the end: shape `(..., k * CHUNK)` for chunks of shape `(..., k)`."""
    size = scores.shape[-1]
    if size % CHUNK == 0:  # whole chunks are copied faster than single scores are gathered
        rows = torch.arange(0, scores.numel() // CHUNK, size // CHUNK, device=chunks.device)
        rows = rows.view(*scores.shape[:-1], 1)
        return scores.reshape(-1, CHUNK).index_select(0, (rows + chunks).flatten()).view(*chunks.shape[:-1], -1)
    places = (chunks.unsqueeze(-1) * CHUNK + torch.arange(CHUNK, device=chunks.device)).flatten(-2)
    return scores.gather(-1, places.clamp(max=size - 1)).masked_fill_(places >= size, -torch.inf)


def _first_of_largest(scores: torch.Tensor, chunk_maxima: torch.Tensor) -> torch.Tensor:
    chunk = chunk_maxima.argmax(-1, keepdim=True)
    return (chunk * CHUNK + _chunks_of(scores, chunk).argmax(-1, keepdim=True)).squeeze(-1)


def sample_with(scores: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """What `torch.multinomial(softmax(scores), 1)` returns when it draws `noise`; -1 where the law is not finite.

    Args:
        scores: `FloatTensor` of shape `(..., V)`.
        noise: `FloatTensor` of the same shape, Exp(1).
    """
    probs = torch.softmax(scores.float(), dim=-1)
    choice = likeliest(probs / noise)
    chosen = probs.gather(-1, choice.unsqueeze(-1)).squeeze(-1)
    return torch.where(torch.isfinite(chosen), choice, -1)


def leading_chain(tree: DraftTree) -> torch.Tensor:
    """The root and the nodes that follow it one below the other in node order: `BoolTensor` of shape `(B, N)`."""
    below = tree.parents == torch.arange(-1, tree.size - 1, device=tree.parents.device)
    return below.long().cumprod(1).bool()


def draft_probs(tree: DraftTree) -> torch.Tensor:
    """What each node below the root had as its chance to be drafted as an only child: shape `(B, N - 1)`.

    `tree.probs` at the parent, 1 for a point mass.
    """
    drafted = tree.tokens[:, 1:]
    if tree.probs is None:
        return torch.ones(drafted.shape, dtype=torch.float32, device=drafted.device)
    rows = torch.arange(len(drafted), device=drafted.device).unsqueeze(1)
    drawn = tree.probs[rows, tree.parents[:, 1:].clamp(min=0), drafted]
    return torch.where(tree.sampled[:, 1:], drawn, 1.0)
