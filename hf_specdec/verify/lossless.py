"""The rules under which the text has the target's law. All are the same when greedy: the target's own choice decides.

p is the target's law after a node, q the law that the node's children were drawn from, or a point mass for a child
that was not drawn. Rejection and block verification draw from the framework's generator and must not be given drafts
that depend on those draws.
"""

import torch

from ..tree import DraftTree, siblings
from .acceptance import Acceptance, draft_probs, follow, leading_chain, likeliest, path_of, reached, sample_with


def exact(tree: DraftTree, scores: torch.Tensor, sampling: bool, noise: torch.Tensor | None) -> Acceptance:
    """Accept a draft token iff it is the token that plain `generate` would emit there.

    `argmax(scores)` when greedy, `argmax(softmax(scores) / noise)` when sampling (Daliri et al., arXiv:2408.07978,
    with the noise of `torch.multinomial`).
    """
    if not sampling:
        return follow(tree, likeliest(scores))
    assert noise is not None
    return follow(tree, sample_with(scores, noise))


def rejection(tree: DraftTree, scores: torch.Tensor, sampling: bool, noise: torch.Tensor | None) -> Acceptance:
    """Try the children of a node in node order: accept x with probability `min(1, p(x) / q(x))`, else refuse it.

    Refusing x makes p `norm(max(p - q, 0))` and, if x was drawn, q `norm(q without x)`: siblings are drawn without
    replacement. When all children are refused, the next token is drawn from what p has become.

    On a chain this is Leviathan et al., arXiv:2211.17192, algorithm 1, and Chen et al., arXiv:2302.01318; with
    siblings the recursive rejection of Sequoia, Chen et al., arXiv:2402.12374, algorithm 2.
    """
    if not sampling:
        return follow(tree, likeliest(scores))
    probs = torch.softmax(scores.float(), dim=-1)
    families = siblings(tree.parents)
    path, count, last = path_of(reached(tree, _taken(tree, probs, families)))
    each = torch.arange(len(probs), device=probs.device)
    law, left = probs[each, last], _draft_law(tree, each, last, probs)
    for rows, parents, nodes, _ in families:
        child = torch.zeros_like(last).index_add_(0, rows, torch.where(parents == last[rows], nodes, 0))
        refused = (child > 0).unsqueeze(1)
        fewer = refuse(law, left, tree.tokens[each, child], _drawn(tree)[each, child])
        law, left = torch.where(refused, fewer[0], law), torch.where(refused, fewer[1], left)
    return Acceptance(path, count, torch.multinomial(law, 1).squeeze(1))


Family = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _taken(tree: DraftTree, probs: torch.Tensor, families: list[Family]) -> torch.Tensor:
    """Which child of each node is accepted if the node is reached: `BoolTensor` of shape `(B, N)`, one per parent."""
    coins = torch.rand(len(probs), tree.size - 1, dtype=torch.float32, device=probs.device)
    taken, settled = torch.zeros_like(tree.sampled), torch.zeros_like(tree.sampled)
    law = left = probs
    for rank, (rows, parents, nodes, elder) in enumerate(families):
        token = tree.tokens[rows, nodes]
        if rank == 0:  # the whole laws of nodes with one child are never looked at
            own, told = probs[rows, parents, token], draft_probs(tree)[rows, nodes - 1]
        else:
            before = families[rank - 1][2][elder]
            if rank == 1:
                law, left = probs[rows, parents], _draft_law(tree, rows, parents, probs)
            else:
                law, left = law[elder], left[elder]
            law, left = refuse(law, left, tree.tokens[rows, before], _drawn(tree)[rows, before])
            own = law.gather(1, token.unsqueeze(1)).squeeze(1)
            told = torch.where(_drawn(tree)[rows, nodes], left.gather(1, token.unsqueeze(1)).squeeze(1), 1.0)
        accepted = (coins[rows, nodes - 1] * told < own) & ~settled[rows, parents]
        taken[rows, nodes] = accepted
        settled[rows, parents] |= accepted
    return taken


def refuse(
    law: torch.Tensor, left: torch.Tensor, token: torch.Tensor, drawn: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's law after a child was refused, and the law that the next child was drawn from.

    `norm(max(p - q, 0))` and `norm(q without x)`. A point mass leaves q as it is. Where rounding leaves nothing of
    `p - q`, p stays.

    Args:
        law: p, shape `(M, V)`.
        left: q, shape `(M, V)`.
        token: x, shape `(M,)`.
        drawn: shape `(M,)`; False is a point mass.
    """
    mass = torch.zeros_like(law).scatter_(1, token.unsqueeze(1), 1.0)
    soft = drawn.unsqueeze(1)
    rest = (law - torch.where(soft, left, mass)).clamp(min=0)
    total = rest.sum(1, keepdim=True)
    without = left * (1 - mass)
    without = without / without.sum(1, keepdim=True).clamp(min=torch.finfo(without.dtype).tiny)
    return torch.where(total > 0, rest / total, law), torch.where(soft, without, left)


def _drawn(tree: DraftTree) -> torch.Tensor:
    """The nodes that were drawn from a law that is known."""
    return tree.sampled if tree.probs is not None else torch.zeros_like(tree.sampled)


def _draft_law(tree: DraftTree, rows: torch.Tensor, nodes: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """q of these nodes, shape `(M, V)`; zeros where no law is known."""
    if tree.probs is None:
        return probs.new_zeros(len(nodes), probs.shape[2])
    return tree.probs[rows, nodes].to(probs.dtype)


def block(tree: DraftTree, scores: torch.Tensor, sampling: bool, noise: torch.Tensor | None) -> Acceptance:
    """Accept a length of the drafted chain jointly; never fewer tokens in expectation than `rejection`.

    With x_i the token at depth i, p_i and q_i the laws after it, and k tokens drafted:

        b_0 = 1,  b_i = min(1, b_(i-1) p_(i-1)(x_i) / q_(i-1)(x_i))
        r_i = sum(max(b_i p_i - q_i, 0)),  h_i = r_i / (r_i + 1 - b_i),  h_k = b_k
        accepted = the largest i with u_i < h_i, u_i uniform
        next token from p_k if all were accepted, else from norm(max(b_i p_i - q_i, 0))

    Sun et al., ICLR 2025, arXiv:2403.10444, algorithm 2. Of a tree it judges the leading chain.
    """
    if not sampling:
        return follow(tree, likeliest(scores))
    probs = torch.softmax(scores.float(), dim=-1)
    each = torch.arange(len(probs), device=probs.device)
    nodes = torch.arange(tree.size, device=probs.device)
    chain = leading_chain(tree)
    length = chain.sum(1) - 1
    own = probs[:, :-1].gather(2, tree.tokens[:, 1:].unsqueeze(2)).squeeze(2)
    told = draft_probs(tree)
    kept = [torch.ones_like(probs[:, 0, 0])]
    for depth in range(tree.size - 1):
        kept.append((kept[-1] * own[:, depth] / told[:, depth]).clamp(max=1).nan_to_num(0.0))
    joint = torch.stack(kept, 1)

    rest = joint[:, :-1] * (1 - own)  # for a point mass
    if tree.probs is not None:
        mass = (joint[:, :-1, None] * probs[:, :-1]).sub_(tree.probs[:, :-1]).clamp_(min=0).sum(-1)
        rest = torch.where(tree.sampled[:, 1:], mass, rest)
    below = rest[:, 1:] + 1 - joint[:, 1:-1]
    chance = joint.clone()
    chance[:, 1:-1] = torch.where(
        nodes[1:-1] < length.unsqueeze(1), torch.where(below > 0, rest[:, 1:] / below, 1.0), joint[:, 1:-1]
    )
    accepted = chain.clone()
    accepted[:, 1:] &= torch.rand(len(probs), tree.size - 1, dtype=torch.float32, device=probs.device) < chance[:, 1:]
    path, count, _ = path_of(nodes <= torch.where(accepted, nodes, 0).max(1, keepdim=True).values)

    law, child = probs[each, count], (count + 1).clamp(max=tree.size - 1)
    point = torch.zeros_like(law).scatter_(1, tree.tokens[each, child].unsqueeze(1), 1.0)
    drafted = torch.where(_drawn(tree)[each, child].unsqueeze(1), _draft_law(tree, each, count, probs), point)
    residual = (joint[each, count].unsqueeze(1) * law - drafted).clamp(min=0)
    usable = (count < length) & (residual.sum(1) > 0)
    law = torch.where(usable.unsqueeze(1), residual, law)
    return Acceptance(path, count, torch.multinomial(law, 1).squeeze(1))
