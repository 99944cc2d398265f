"""Decide which candidates stay. Pure tensor functions. N nodes, V vocabulary, A accepted nodes."""

import torch
from torch import Tensor

from .layout import TreeLayout


def accept_greedy(tokens: Tensor, logits: Tensor, layout: TreeLayout) -> tuple[Tensor, Tensor]:
    """Keep the candidates that greedy decoding would have chosen.

    A node stays if it and all its ancestors are the argmax of their parents' logits. Siblings are distinct tokens, so
    at most one path does. This is exact acceptance (Cai et al. 2024; sample-and-match) at temperature 0.

    Args:
        tokens: candidate tokens, [N]; node 0 is the root, which always stays.
        logits: the backbone's logits after each node, [N, V].
        layout: the tree.

    Returns:
        The accepted nodes from the root on, [A], and the token that follows the last of them: the bonus token, which
        is the next root, a scalar.
    """
    chosen = logits.argmax(dim=-1)  # [N]
    matches = tokens == chosen[layout.parents]
    matches[0] = True
    accepted = (matches | ~layout.ancestors).all(dim=-1)  # [N]
    last = torch.where(accepted, layout.depths, -1).argmax()
    path = layout.ancestors[last].nonzero()[:, 0]  # parents stand before children, so this is in order
    return path, chosen[last]
