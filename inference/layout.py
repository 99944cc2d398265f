"""A candidate tree as tensors on the backbone's device. R rows (1 where all share a tree), N nodes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from medusa.tree import CandidateTree


@dataclass(frozen=True)
class TreeLayout:
    """What one decoding step needs to know of a tree's topology."""

    depths: Tensor
    """Depth of each node, [R, N]; 0 for the root."""
    ranks: Tensor
    """Rank of each node among its head's guesses, [R, N]."""
    ancestors: Tensor
    """Bool [R, N, N]: (i, j) says whether j is i or lies on the way from the root to i."""
    children: list[list[list[int]]]
    """Children of each node of each row, best rank first; on the host, where acceptance walks."""
    top_k: int
    """How many guesses of a head the tree uses at most."""

    @classmethod
    def of(cls, tree: CandidateTree, device: torch.device) -> "TreeLayout":
        """Lay out `tree` on `device`, for all rows."""
        children: list[list[int]] = [[] for _ in range(tree.num_nodes)]
        for node, parent in enumerate(tree.parents().tolist()):
            if node > 0:
                children[parent].append(node)
        return cls(
            depths=tree.depths().to(device)[None],
            ranks=tree.ranks().to(device)[None],
            ancestors=tree.ancestors().to(device)[None],
            children=[children],
            top_k=tree.top_k,
        )

    @classmethod
    def of_parents(cls, parents: list[list[int]], num_nodes: int, device: torch.device) -> "TreeLayout":
        """Lay out a tree of its own for each row.

        Args:
            parents: parent of each node but the root, for each row; a parent comes before its children.
            num_nodes: N. Rows with fewer are filled up with nodes that no walk reaches; their tokens must be -1.
            device: where to.
        """
        children: list[list[list[int]]] = []
        ranks: list[list[int]] = []
        padded: list[list[int]] = []
        for own in parents:
            below: list[list[int]] = [[] for _ in range(num_nodes)]
            rank = [0] * num_nodes
            for node, parent in enumerate(own, start=1):
                rank[node] = len(below[parent])
                below[parent].append(node)
            children.append(below)
            ranks.append(rank)
            padded.append(
                [0, *own, *range(len(own) + 1, num_nodes)]
            )  # the root and what fills up are their own parents
        up = torch.tensor(padded)  # [R, N]
        ancestors = torch.eye(num_nodes, dtype=torch.bool).repeat(len(parents), 1, 1)
        reached, before = up, torch.full_like(up, -1)
        while not torch.equal(reached, before):  # one level a turn, all nodes at once
            ancestors.scatter_(2, reached[:, :, None], True)
            reached, before = up.gather(1, reached), reached
        depths = ancestors.sum(dim=2) - 1
        return cls(depths.to(device), torch.tensor(ranks).to(device), ancestors.to(device), children, top_k=0)

    @property
    def num_nodes(self) -> int:
        """N, the root included."""
        return self.depths.shape[1]

    def children_of(self, row: int, node: int) -> list[int]:
        """Children of `node` in the tree of `row`."""
        return self.children[row if len(self.children) > 1 else 0][node]
