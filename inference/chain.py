"""One guess of each head, one after the other: the only tree that serving engines check. P positions, D hidden."""

import torch
from torch import Tensor

from medusa.heads import MedusaHeads
from medusa.tree import CandidateTree

from .layout import TreeLayout
from .levels import levels_of, propose_by_level
from .propose import propose


class Chain:
    """The best guesses of the first heads, whatever these see."""

    def __init__(self, heads: MedusaHeads, depth: int, device: torch.device) -> None:
        """Use the first `depth` heads, which are on `device`.

        Raises:
            ValueError: there are not so many.
        """
        tree = CandidateTree.chain(depth)
        tree.check_heads(heads.config.num_heads, heads.draft_size)
        self.heads = heads
        self.layout = TreeLayout.of(tree, device)
        self.levels = levels_of(self.layout) if heads.config.sequential else []

    def guesses(self, hidden: Tensor, root: Tensor) -> Tensor:
        """What follows each root: hidden states that the roots came from [P, D], roots [P] -> tokens [P, depth]."""
        if self.levels:
            tokens, _ = propose_by_level(self.heads, hidden, root, self.levels, self.layout.num_nodes)
        else:
            tokens = propose(self.heads, hidden, root, self.layout).tokens
        return tokens[:, 1:]
