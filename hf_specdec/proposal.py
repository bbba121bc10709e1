"""What becomes of a strategy's answer before it is verified: nothing in it is taken on trust.

B rows, N nodes. A tree that was made of lists is looked through on the host, and mostly passes as it is; any other one
is put right by tensors, so that the device is not waited for.
"""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch

from .state import Plan
from .tree import DraftTree, keep_nodes


class Limits(NamedTuple):
    """What a tree must keep to.

    Args:
        roots: the last committed token of each row.
        plan: what was granted.
        rooms: tokens that each row may still emit.
        vocabulary: the target's.
        unreadable: token ids within it that it cannot read.
    """

    roots: Sequence[int]
    plan: Plan
    rooms: Sequence[int]
    vocabulary: int
    unreadable: Collection[int]


def is_fit(tree: DraftTree, limits: Limits) -> bool:
    """Was the tree made of lists, and would `trimmed` leave it as it is?"""
    roots, plan, rooms, vocabulary, unreadable = limits
    if not tree.made_of_lists or tree.size > plan.nodes:
        return False
    for row, root, room in zip(tree.on_host, roots, rooms, strict=True):
        if row.tokens[0] != root or row.parents[0] != -1:
            return False
        room, depths, children = min(room, plan.depth + 1), [0], set[tuple[int, int]]()
        for node, (token, parent) in enumerate(zip(row.tokens[1:], row.parents[1:]), 1):
            if not 0 <= token < vocabulary or token in unreadable:
                return False
            if parent < 0:
                depths.append(room)  # nothing may be below padding
                continue
            if parent >= node or (plan.width == 1 and parent != node - 1):
                return False
            depths.append(depths[parent] + 1)
            if depths[node] >= room or (parent, token) in children:
                return False
            children.add((parent, token))
    return True


def trimmed(tree: DraftTree, limits: Limits) -> tuple[DraftTree, torch.Tensor]:
    """The tree below these roots, within the plan, with every node turned into padding that a row has no room for, or
    whose token cannot be read or an earlier sibling holds; and which of its nodes have a token of their own that can
    be read: `BoolTensor` of shape `(B, N)`.
    """
    roots, plan, rooms, vocabulary, unreadable = limits
    tree = fit(tree, roots, plan.width, plan.nodes)
    room = torch.tensor(rooms, device=tree.tokens.device).clamp(max=plan.depth + 1)
    readable = (tree.tokens >= 0) & (tree.tokens < vocabulary)
    for token in unreadable:
        readable &= tree.tokens != token
    readable &= ~repeated(tree)
    return keep_nodes(tree, readable & (tree.depths < room.unsqueeze(1))), readable


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
