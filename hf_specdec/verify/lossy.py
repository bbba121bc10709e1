"""The rules under which the text may be another than the target's. They must be named by the user.

p is the target's law after a node. Each accepts what the target finds plausible, be it its own choice or not.
"""

import math

import torch

from ..tree import DraftTree
from .acceptance import Acceptance, draft_probs, follow, leading_chain, likeliest, path_of, reached, sample_with


def typical(
    tree: DraftTree,
    scores: torch.Tensor,
    sampling: bool,
    noise: torch.Tensor | None,
    posterior_threshold: float = 0.09,
    posterior_alpha: float = 0.3,
) -> Acceptance:
    """Accept x if `p(x) > min(posterior_threshold, posterior_alpha * exp(-entropy(p)))`.

    Of several accepted paths the longest, then the one that is likeliest under p. The next token is the one that plain
    `generate` would sample there. Greedy decoding is the limit of temperature 0, where p is a point mass: x must be
    the target's own choice, so the text is plain `generate`'s.

    Cai et al., Medusa, arXiv:2401.10774, section 2.3.1. Deviations: the entropy is exact where Medusa adds 1e-5 to p,
    and the next token is sampled where Medusa takes the likeliest.
    """
    if not sampling:
        return follow(tree, likeliest(scores))
    assert noise is not None
    each = torch.arange(len(scores), device=scores.device)
    logs, above = torch.log_softmax(scores.float(), dim=-1), tree.parents.clamp(min=0)
    entropy = torch.special.entr(logs.exp()).sum(-1)
    cutoff = (posterior_alpha * (-entropy).exp()).clamp(max=posterior_threshold)
    own = torch.zeros_like(cutoff)
    own[:, 1:] = logs[each.unsqueeze(1), above[:, 1:], tree.tokens[:, 1:]]
    possible = reached(tree, own.exp() > cutoff.gather(1, above))
    depths = torch.where(possible, tree.depths, -1)
    along = torch.where(tree.seen & possible.unsqueeze(1), own.unsqueeze(1), 0.0).sum(-1)
    along = along.masked_fill(depths < depths.max(1, keepdim=True).values, -math.inf)
    path, count, last = path_of(tree.seen[each, along.argmax(1)])
    return Acceptance(path, count, sample_with(scores[each, last], noise[each, last]))


def relative(
    tree: DraftTree,
    scores: torch.Tensor,
    sampling: bool,
    noise: torch.Tensor | None,
    threshold: float = 0.3,
) -> Acceptance:
    """Accept x if `p(x) > threshold * q(x)`, up to the first token that fails; then the target's own token.

    q is the law that x was drawn from, 1 for a looked-up token or one chosen greedily. 0 accepts every token that the
    logits processors leave possible; a threshold above `1 / min(q)` accepts none, and from 1 on no point mass. The
    next token is drawn from p, or its likeliest when greedy; greedy decoding judges by the same rule, with p the
    softmax of the scores.

    Chains; of a tree it judges the leading chain.
    """
    each = torch.arange(len(scores), device=scores.device)
    logs = torch.log_softmax(scores[:, :-1].float(), dim=-1)
    own = logs.gather(2, tree.tokens[:, 1:].unsqueeze(2)).squeeze(2)
    least = math.log(threshold) if threshold else -math.inf
    accepted = leading_chain(tree)
    accepted[:, 1:] &= own > least + draft_probs(tree).log()
    path, count, _ = path_of(accepted.long().cumprod(1).bool())
    after = scores[each, count]
    if not sampling:
        return Acceptance(path, count, likeliest(after))
    return Acceptance(path, count, torch.multinomial(torch.softmax(after.float(), dim=-1), 1).squeeze(1))
