"""A tree that is grown anew in every step: the nodes that the heads are surest of, and as many as pay.

B rows, K heads, G guesses of each, M nodes of the superset, N nodes of a step, S sizes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from medusa.calibration import Calibration, log_hit
from medusa.heads import MedusaHeads
from medusa.tree import CandidateTree

from .layout import TreeLayout
from .levels import Level, levels_of, propose_by_level
from .propose import Candidates, fill


@dataclass(frozen=True)
class DynamicTree:
    """What a step may choose from, and what it needs to choose."""

    superset: CandidateTree
    """Every node that may be checked."""
    sizes: tuple[int, ...]
    """How many nodes a step may check, root included, ascending. One graph is compiled for each."""
    seconds: tuple[float, ...] | None = None
    """What a step of each size takes. None: every step has the last size."""
    tokens_per_second: float | None = None
    """With `seconds`: about what decoding reaches. A node is worth its time if it earns tokens at this rate."""
    calibration: Calibration | None = None
    """What the heads' confidence is worth. None: what it says."""

    def __post_init__(self) -> None:
        if self.superset.num_nodes == 1:
            raise ValueError("the superset of a dynamic tree is the root alone; give it nodes to choose from")
        if not self.sizes or list(self.sizes) != sorted(set(self.sizes)) or self.sizes[0] < 1:
            raise ValueError(f"sizes of a dynamic tree are {self.sizes}; give at least one, ascending, each 1 or more")
        if self.num_nodes > self.superset.num_nodes:
            raise ValueError(
                f"a dynamic tree cannot choose {self.num_nodes} nodes out of {self.superset.num_nodes}; give a larger "
                "superset or smaller sizes"
            )
        if (self.seconds is None) != (self.tokens_per_second is None):
            raise ValueError(
                f"seconds is {self.seconds} and tokens_per_second {self.tokens_per_second}; give both, or neither for "
                "steps of one size"
            )
        if self.seconds is not None and (len(self.seconds) != len(self.sizes) or min(self.seconds) <= 0):
            raise ValueError(f"seconds {self.seconds} must be positive, one for each of the {len(self.sizes)} sizes")
        if self.tokens_per_second is not None and self.tokens_per_second <= 0:
            raise ValueError(f"tokens_per_second is {self.tokens_per_second}; it must be positive")

    @property
    def num_nodes(self) -> int:
        """The most nodes that a step checks, root included."""
        return self.sizes[-1]

    @property
    def depth(self) -> int:
        """How many heads a step uses at most."""
        return self.superset.depth

    def check_heads(self, num_heads: int, vocab_size: int) -> None:
        """Refuse a tree that the heads cannot fill.

        Raises:
            ValueError: it is deeper than there are heads, ranks more guesses than there are tokens, or its
                calibration is of other heads.
        """
        self.superset.check_heads(num_heads, vocab_size)
        if self.calibration is not None and self.calibration.num_heads != num_heads:
            raise ValueError(
                f"the calibration is of {self.calibration.num_heads} heads but the model has {num_heads}; make it "
                "again: medusa tree"
            )


@dataclass(frozen=True)
class DynamicLayout:
    """A `DynamicTree` as tensors on the backbone's device."""

    tree: DynamicTree
    superset: TreeLayout
    """Of one row."""
    parents: Tensor
    """[M]; the root's is the root."""
    powers: Tensor
    """Of the calibration, [depth]."""
    offsets: Tensor
    """Of the calibration, [depth]."""
    levels: list[Level]
    """Of the superset, for sequential heads."""

    @classmethod
    def of(cls, tree: DynamicTree, device: torch.device) -> "DynamicLayout":
        """Lay out `tree` on `device`."""
        calibration = tree.calibration or Calibration.identity(tree.depth)
        superset = TreeLayout.of(tree.superset, device)
        return cls(
            tree,
            superset,
            tree.superset.parents().to(device),
            torch.tensor(calibration.powers[: tree.depth], device=device),
            torch.tensor(calibration.offsets[: tree.depth], device=device),
            levels_of(superset),
        )

    def grow(self, log_confidence: Tensor) -> tuple[TreeLayout, Tensor]:
        """Choose the nodes of one step.

        Args:
            log_confidence: log-probability that the heads give the guess of each node, [B, M]; the root's is not
                looked at.

        Returns:
            A tree of N nodes for each of B rows, and which nodes of the superset these are, [B, N], ascending.
        """
        joint = self.joint(log_confidence)
        # Equals stay in order, so that parents come before children that are as sure as they are.
        value, order = joint.sort(dim=1, descending=True, stable=True)
        size = self.choose_size(value)
        nodes = order[:, :size].sort(dim=1).values
        return self.cut_out(nodes), nodes

    def joint(self, log_confidence: Tensor) -> Tensor:
        """Log-probability that all guesses on the way to each node are right: [B, M] -> [B, M].

        A child's is never above its parent's, not even by rounding: it is the parent's plus something not positive.
        """
        own = self.hits(log_confidence)
        joint = own
        for _ in range(1, len(self.powers)):
            joint = own + joint[:, self.parents]
        return joint

    def hits(self, log_confidence: Tensor) -> Tensor:
        """Log-probability that the guess of each node is right if its parent is: [B, M] -> [B, M]; 0 for the root."""
        head = self.superset.depths[0].sub(1).clamp(min=0)  # [M]; that of the root is not used
        own = log_hit(log_confidence[..., None], self.powers[head], self.offsets[head])[..., 0]
        return own.masked_fill(self.superset.depths == 0, 0.0)

    def choose_size(self, joint: Tensor) -> int:
        """The size that gains most on decoding at the usual rate; joint [B, M], descending in each row.

        Expected tokens minus the tokens that the step's time is worth. The size with the most tokens per second of its
        own would be another: it spends more on hopeless steps than those few tokens are worth in easy ones.
        """
        tree = self.tree
        if tree.seconds is None or tree.tokens_per_second is None:
            return tree.num_nodes
        expected = joint.exp().cumsum(dim=1).mean(dim=0)  # [M]; the root's 1 is the bonus token
        cost = expected.new_tensor(tree.seconds) * tree.tokens_per_second  # [S]
        gain = expected[[size - 1 for size in tree.sizes]] - cost
        return tree.sizes[int(gain.argmax())]

    def cut_out(self, nodes: Tensor) -> TreeLayout:
        """The part of the superset that consists of `nodes` [B, N], ascending in each row, with every node's parent."""
        rows, columns = nodes[:, :, None], nodes[:, None, :]
        parents = torch.searchsorted(nodes, self.parents[nodes[:, 1:]])  # [B, N-1]; a node's place in its row
        return TreeLayout(
            depths=self.superset.depths[0, nodes],
            ranks=self.superset.ranks[0, nodes],
            ancestors=self.superset.ancestors[0, rows, columns],
            children=[_children(row) for row in parents.tolist()],
            top_k=self.superset.top_k,
        )


def _children(parents: list[int]) -> list[list[int]]:
    """Children of each node, from the parents of all but the root."""
    children: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for node, parent in enumerate(parents, start=1):
        children[parent].append(node)
    return children


def guess_superset(heads: MedusaHeads, hidden: Tensor, root: Tensor, tree: DynamicLayout) -> tuple[Tensor, Tensor]:
    """What the heads say at every node of the superset, and how sure they are.

    Args:
        heads: the heads.
        hidden: hidden state that each root came from, [B, D].
        root: ids of the roots, [B].
        tree: what to choose from.

    Returns:
        Tokens and log-probabilities, [B, M] each.
    """
    superset = tree.superset
    if heads.config.sequential:
        return propose_by_level(heads, hidden, root, tree.levels, superset.num_nodes)
    logits = heads(hidden, root).transpose(0, 1)  # [B, K, Vd]
    best = logits.topk(superset.top_k, dim=-1)  # [B, K, G]
    log_confidence = best.values.float() - logits.float().logsumexp(dim=-1, keepdim=True)
    place = superset.depths.sub(1).clamp(min=0) * superset.top_k + superset.ranks  # [1, M]
    tokens = fill(heads.to_vocab(best.indices), root, superset).tokens
    return tokens, log_confidence.flatten(1).gather(1, place.expand(len(root), -1))


def propose_dynamic(
    heads: MedusaHeads, hidden: Tensor, root: Tensor, tree: DynamicLayout
) -> tuple[Candidates, TreeLayout]:
    """The tree that the heads' confidence suggests, and its tokens; arguments as for `guess_superset`.

    Nothing here depends on what the backbone will say, so acceptance stays exact.
    """
    tokens, log_confidence = guess_superset(heads, hidden, root, tree)
    layout, nodes = tree.grow(log_confidence)
    return Candidates(tokens.gather(1, nodes)), layout
