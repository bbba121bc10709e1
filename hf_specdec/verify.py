"""Acceptance rules: pure functions of a draft tree and the target's scores, and the table of them.

A rule gets `scores` of shape `(B, N, V)`: row i is the target's processed logits after node i. It answers with the
accepted path of each row and the target's own token after it. All rules are greedy when `sampling` is False.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .tree import DraftTree


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


@dataclass(frozen=True)
class Verifier:
    """A rule and the facts that are checked before the first forward pass.

    Args:
        rule: called as `rule(tree, scores, sampling, noise)`.
        lossless: the output law is the target's.
        uses_draft_probs: reads `tree.probs`; drafts must be drawn independently of the target's noise.
        uses_noise: reads the `(B, N, V)` draws of plain sampling.
        trees: accepts more than chains.
    """

    rule: Rule
    lossless: bool
    uses_draft_probs: bool
    uses_noise: bool
    trees: bool


def follow(tree: DraftTree, choices: torch.Tensor) -> Acceptance:
    """From the root, go to the child that holds the target's choice; stop where there is none.

    Args:
        choices: `LongTensor` of shape `(B, N)`, the target's own token after each node.
    """
    above = tree.parents.clamp(min=0)
    matched = (tree.parents >= 0) & (tree.tokens == choices.gather(1, above))
    matched[:, 0] = True
    accepted = ~(tree.seen & ~matched.unsqueeze(1)).any(-1)
    nodes = torch.arange(tree.size, device=choices.device).expand_as(choices)
    count = accepted.sum(-1) - 1
    path = torch.where(accepted, nodes, tree.size).sort(-1).values[:, 1:]
    path = torch.where(path < tree.size, path, -1)
    last = torch.where(accepted, nodes, 0).max(-1, keepdim=True).values
    return Acceptance(path, count, choices.gather(1, last).squeeze(1))


CHUNK = 512


def likeliest(scores: torch.Tensor) -> torch.Tensor:
    """`scores.argmax(-1)`, the first index where several are largest.

    On CPU in two levels, the chunk with the maximum and then the place in it: `argmax` over a long row is not
    vectorised there, `amax` is.

    Args:
        scores: shape `(..., V)`.
    """
    size = scores.shape[-1]
    if scores.device.type != "cpu" or size <= 2 * CHUNK:
        return scores.argmax(-1)
    whole = size // CHUNK * CHUNK
    largest = scores[..., :whole].unflatten(-1, (-1, CHUNK)).amax(-1)
    if whole < size:
        largest = torch.cat([largest, scores[..., whole:].amax(-1, keepdim=True)], dim=-1)
    start = largest.argmax(-1, keepdim=True) * CHUNK
    places = (start + torch.arange(CHUNK)).clamp(max=size - 1)
    return places.gather(-1, scores.gather(-1, places).argmax(-1, keepdim=True)).squeeze(-1)


def exact(tree: DraftTree, scores: torch.Tensor, sampling: bool, noise: torch.Tensor | None) -> Acceptance:
    """Accept a draft token iff it is the token that plain `generate` would emit there.

    `argmax(scores)` when greedy, `argmax(softmax(scores) / noise)` when sampling (Daliri et al., arXiv:2408.07978,
    with the noise of `torch.multinomial`).
    """
    if not sampling:
        return follow(tree, likeliest(scores))
    assert noise is not None
    return follow(tree, sample_with(scores, noise))


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


def rejection(tree: DraftTree, scores: torch.Tensor, sampling: bool, noise: torch.Tensor | None) -> Acceptance:
    """Accept draft token x with probability `min(1, p(x) / q(x))`, else draw from `norm(max(p - q, 0))`.

    Chains only. q is `tree.probs` at the parent, or a point mass where the token was not sampled. Leviathan et al.,
    arXiv:2211.17192, algorithm 1; Chen et al., arXiv:2302.01318.
    """
    if not sampling:
        return follow(tree, likeliest(scores))
    probs = torch.softmax(scores.float(), dim=-1)
    rows, size, _ = probs.shape
    drafted = tree.tokens[:, 1:]
    target_prob = probs[:, :-1].gather(2, drafted.unsqueeze(2)).squeeze(2)
    draft_prob = torch.ones_like(target_prob)
    if tree.probs is not None:
        drawn = tree.probs[:, :-1].gather(2, drafted.unsqueeze(2)).squeeze(2)
        draft_prob = torch.where(tree.sampled[:, 1:], drawn, draft_prob)
    coins = torch.rand(rows, size - 1, device=probs.device)
    accepted = (coins * draft_prob < target_prob) & (tree.parents[:, 1:] >= 0)
    count = accepted.long().cumprod(1).sum(1)
    real = (tree.parents[:, 1:] >= 0).sum(1)

    each = torch.arange(rows, device=probs.device)
    law = probs[each, count]
    refused = count < real
    refused_node = (count + 1).clamp(max=size - 1)
    token = tree.tokens[each, refused_node]
    point_mass = torch.zeros_like(law).scatter_(1, token.unsqueeze(1), 1.0)
    if tree.probs is not None:
        soft = tree.sampled[each, refused_node].unsqueeze(1)
        point_mass = torch.where(soft, tree.probs[each, count], point_mass)
    residual = (law - point_mass).clamp(min=0)
    usable = refused & (residual.sum(1) > 0)
    law = torch.where(usable.unsqueeze(1), residual, law)

    nodes = torch.arange(1, size, device=probs.device).expand(rows, -1)
    path = torch.where(nodes <= count.unsqueeze(1), nodes, -1)
    return Acceptance(path, count, torch.multinomial(law, 1).squeeze(1))


VERIFIERS: dict[str, Verifier] = {
    "exact": Verifier(exact, lossless=True, uses_draft_probs=False, uses_noise=True, trees=True),
    "rejection": Verifier(rejection, lossless=True, uses_draft_probs=True, uses_noise=False, trees=False),
}
