"""A candidate tree as tensors on the backbone's device. N nodes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from medusa.tree import CandidateTree


@dataclass(frozen=True)
class TreeLayout:
    """What one decoding step needs to know of a tree's topology."""

    parents: Tensor
    """Index of each node's parent, [N]."""
    depths: Tensor
    """Depth of each node, [N]; 0 for the root."""
    ranks: Tensor
    """Rank of each node among its head's guesses, [N]."""
    ancestors: Tensor
    """Bool [N, N]: (i, j) says whether j is i or lies on the way from the root to i."""
    top_k: int
    """How many guesses of a head the tree uses."""

    @classmethod
    def of(cls, tree: CandidateTree, device: torch.device) -> "TreeLayout":
        """Lay out `tree` on `device`."""
        return cls(
            parents=tree.parents().to(device),
            depths=tree.depths().to(device),
            ranks=tree.ranks().to(device),
            ancestors=tree.ancestors().to(device),
            top_k=tree.top_k,
        )
