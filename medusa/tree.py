"""The candidate tree: which guesses of which head are checked together.

N nodes; node 0 is the root, a node's parent stands before it.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Path = tuple[int, ...]


@dataclass(frozen=True)
class CandidateTree:
    """A topology, without tokens.

    A node is the path of ranks that leads to it: (0,) is the first head's best guess, (0, 2) the second head's third
    best guess after it. The root is implied: `paths` holds the other N-1 nodes, parents first.
    """

    paths: tuple[Path, ...]

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[int]]) -> "CandidateTree":
        """Build a tree from rank paths in any order.

        Raises:
            ValueError: a path is empty, repeated, has a negative rank, or its parent is missing.
        """
        counts = Counter(tuple(int(rank) for rank in path) for path in paths)
        for path, count in counts.items():
            if not path or min(path) < 0:
                raise ValueError(f"tree path {path} must hold at least one rank, and ranks start at 0")
            if len(path) > 1 and path[:-1] not in counts:
                raise ValueError(f"tree path {path} has no parent: add {path[:-1]}")
            if count > 1:
                raise ValueError(f"tree path {path} stands twice; every node must be there once")
        return cls(tuple(sorted(counts, key=lambda path: (len(path), path))))

    @classmethod
    def chain(cls, depth: int) -> "CandidateTree":
        """The best guess of each of the first `depth` heads, one after the other."""
        return cls.from_paths([(0,) * length for length in range(1, depth + 1)])

    def cut(self, depth: int) -> "CandidateTree":
        """Without the nodes below `depth`."""
        return CandidateTree(tuple(path for path in self.paths if len(path) <= depth))

    @property
    def num_nodes(self) -> int:
        """N, the root included."""
        return len(self.paths) + 1

    @property
    def depth(self) -> int:
        """How many heads the tree uses."""
        return max((len(path) for path in self.paths), default=0)

    @property
    def top_k(self) -> int:
        """How many guesses of a head the tree uses at most."""
        return max((rank + 1 for path in self.paths for rank in path), default=0)

    def parents(self) -> Tensor:
        """Index of each node's parent, [N]; the root's is 0."""
        index = {path: node for node, path in enumerate(((), *self.paths))}
        return torch.tensor([0, *(index[path[:-1]] for path in self.paths)])

    def depths(self) -> Tensor:
        """Depth of each node, [N]; the root's is 0."""
        return torch.tensor([0, *(len(path) for path in self.paths)])

    def ranks(self) -> Tensor:
        """Rank of each node among its head's guesses, [N]; the root's is 0."""
        return torch.tensor([0, *(path[-1] for path in self.paths)])

    def ancestors(self) -> Tensor:
        """Bool [N, N]: entry (i, j) says whether j is i or lies on the way from the root to i."""
        mask = torch.eye(self.num_nodes, dtype=torch.bool)
        for node, parent in enumerate(self.parents().tolist()):
            mask[node] |= mask[parent]
        return mask

    def check_heads(self, num_heads: int, vocab_size: int) -> None:
        """Refuse a tree that the heads cannot fill.

        Raises:
            ValueError: it is deeper than there are heads, or ranks more guesses than there are tokens.
        """
        if self.depth > num_heads:
            raise ValueError(
                f"the tree is {self.depth} levels deep but the model has {num_heads} heads: "
                f"keep paths of at most {num_heads} ranks"
            )
        if self.top_k > vocab_size:
            raise ValueError(f"the tree uses rank {self.top_k - 1}, but the heads choose from {vocab_size} tokens only")
