"""Fill a candidate tree with the heads' guesses. N nodes, K heads, D hidden."""

import torch
from torch import Tensor

from medusa.heads import MedusaHeads

from .layout import TreeLayout


def propose(heads: MedusaHeads, hidden: Tensor, root: Tensor, layout: TreeLayout) -> Tensor:
    """One parallel pass of the heads, then each node takes the guess of its depth and rank.

    Args:
        heads: the heads.
        hidden: hidden state that the root came from, [D].
        root: id of the root, a scalar.
        layout: the tree.

    Returns:
        Candidate tokens, [N].
    """
    if len(layout.depths) == 1:
        return root[None]
    logits = heads(hidden[None], root[None])[:, 0]  # [K, Vd]
    guesses = heads.to_vocab(logits.topk(layout.top_k, dim=-1).indices)  # [K, top_k]
    tokens = guesses[layout.depths.sub(1).clamp(min=0), layout.ranks]
    return torch.where(layout.depths == 0, root, tokens)
