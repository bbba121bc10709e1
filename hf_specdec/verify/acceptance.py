"""What every acceptance rule is made of: its answer, walks along a tree, and the target's own choice.

A rule gets `scores` of shape `(B, N, V)`: row i is the target's processed logits after node i. It answers with the
accepted path of each row and the target's own token after it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..tree import DraftTree


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


def likeliest(scores: torch.Tensor) -> torch.Tensor:
    """`scores.argmax(-1)`, the first index where several are largest.

    On CPU in two levels, the chunk with the maximum and then the place in it: `argmax` over a long row is not
    vectorised there, `amax` is. For a row or two a plain `max`, which finds the first one as well, is one call.

    Args:
        scores: shape `(..., V)`.
    """
    size = scores.shape[-1]
    if scores.device.type != "cpu" or size <= 2 * CHUNK:
        return scores.argmax(-1)
    if scores.numel() <= 2 * size:
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
    if scores.device.type != "cpu" or size <= 2 * count * CHUNK:
        best, places = scores.float().topk(count, -1)
        return likeliest(scores), places, best.softmax(-1)
    maxima = _chunk_maxima(scores)
    chunks = maxima.float().topk(count, -1).indices
    if size % CHUNK == 0:  # whole chunks are copied faster than single scores are gathered
        first = torch.arange(0, maxima.numel(), maxima.shape[-1]).view(*maxima.shape[:-1], 1)
        held = scores.reshape(-1, CHUNK).index_select(0, (first + chunks).flatten()).view(*chunks.shape[:-1], -1)
        best, order = held.float().topk(count, -1)
        places = chunks.gather(-1, order // CHUNK) * CHUNK + order % CHUNK
        return _first_of_largest(scores, maxima), places, best.softmax(-1)
    candidates = (chunks.unsqueeze(-1) * CHUNK + torch.arange(CHUNK)).flatten(-2)
    inside = candidates < size
    held = scores.gather(-1, candidates.clamp(max=size - 1)).float()
    best, order = held.masked_fill_(~inside, -torch.inf).topk(count, -1)
    return _first_of_largest(scores, maxima), candidates.gather(-1, order), best.softmax(-1)


def _chunk_maxima(scores: torch.Tensor) -> torch.Tensor:
    """On CPU, maxima in float32 take half the time of those over 16-bit scores, the conversion included."""
    size = scores.shape[-1]
    whole = size // CHUNK * CHUNK
    scores = scores.float() if scores.element_size() < 4 else scores
    largest = scores[..., :whole].unflatten(-1, (-1, CHUNK)).amax(-1)
    if whole < size:
        largest = torch.cat([largest, scores[..., whole:].amax(-1, keepdim=True)], dim=-1)
    return largest


def _first_of_largest(scores: torch.Tensor, chunk_maxima: torch.Tensor) -> torch.Tensor:
    start = chunk_maxima.argmax(-1, keepdim=True) * CHUNK
    places = (start + torch.arange(CHUNK)).clamp(max=scores.shape[-1] - 1)
    return places.gather(-1, scores.gather(-1, places).argmax(-1, keepdim=True)).squeeze(-1)


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
        return torch.ones(drafted.shape, device=drafted.device)
    rows = torch.arange(len(drafted), device=drafted.device).unsqueeze(1)
    drawn = tree.probs[rows, tree.parents[:, 1:].clamp(min=0), drafted]
    return torch.where(tree.sampled[:, 1:], drawn, 1.0)
