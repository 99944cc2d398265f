"""Find the best tree of every size for given heads, from how often each path of guesses was right.

P positions of held-out text, K heads, G guesses each.
"""

import heapq
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path as FilePath

import torch
from torch import Tensor

from .calibration import Calibration, fit_calibration
from .hit_rates import CERTAINTY, one_hot_ranks
from .simulation import accepted_lengths, walk
from .tree import CandidateTree, Path

MISS = -1
"""In a table of ranks: the true token is not among the guesses that were looked at, or the text has ended."""
TREE_FILE = "medusa_tree.json"
TYPICAL_NODES = 16
ROUNDS = 10
FEW_STEPS = 500
"""With fewer, a path that was right once or twice may have been so by chance."""
SURE_HITS = 3
DIGITS = 12
"""Gains are rounded to so many, so that paths that were right equally often are equal."""


@dataclass(frozen=True)
class SearchedTree:
    """Nodes in the order in which a growing tree takes them, each with the share of steps that accept it."""

    paths: tuple[Path, ...]
    gains: tuple[float, ...]
    positions: int
    """How many held-out positions the gains were counted over."""
    calibration: Calibration | None = None
    """What the heads' confidence was worth there, for trees that change from step to step."""
    temperature: float = 0.0
    """That the gains hold at."""

    def best(self, num_nodes: int) -> CandidateTree:
        """The best tree of `num_nodes` nodes (root included), or the whole tree where it is smaller."""
        return CandidateTree.from_paths(self.paths[: max(num_nodes - 1, 0)])

    def tokens_per_step(self, num_nodes: int) -> float:
        """Expected tokens that a step emits with the best tree of `num_nodes` nodes."""
        return 1.0 + sum(self.gains[: max(num_nodes - 1, 0)])

    def uncertainty(self, num_nodes: int) -> float:
        """What `tokens_per_step` may be off by to either side, with 95% probability, as if steps were independent."""
        nodes = list(zip(self.paths, self.gains, strict=True))[: max(num_nodes - 1, 0)]
        mean = sum(gain for _, gain in nodes)
        # A step that accepts d guesses accepts one node of each depth 1..d, and 1 + 3 + ... + (2d-1) is d squared.
        square = sum(gain * (2 * len(path) - 1) for path, gain in nodes)
        return CERTAINTY * math.sqrt(max(square - mean**2, 0.0) / max(self.positions, 1))

    def cautious(self) -> "SearchedTree":
        """Without the nodes that too few steps speak for; the same tree where there were `FEW_STEPS` or more."""
        if self.positions >= FEW_STEPS:
            return self
        nodes = zip(self.paths, self.gains, strict=True)
        sure = [(path, gain) for path, gain in nodes if gain * self.positions >= SURE_HITS - 0.5]
        return replace(self, paths=tuple(path for path, _ in sure), gains=tuple(gain for _, gain in sure))

    def save(self, directory: FilePath) -> None:
        """Write the tree beside the heads."""
        (directory / TREE_FILE).write_text(json.dumps(asdict(self)) + "\n")

    @classmethod
    def load(cls, directory: FilePath) -> "SearchedTree":
        """Read what `save` wrote.

        Raises:
            ValueError: there is no searched tree, or the file is not one.
        """
        file = directory / TREE_FILE
        try:
            stored = json.loads(file.read_text())
            paths = tuple(tuple(path) for path in stored["paths"])
            gains = tuple(float(gain) for gain in stored["gains"])
            CandidateTree.from_paths(paths)
            if any(path[:-1] and path[:-1] not in paths[:node] for node, path in enumerate(paths)):
                raise ValueError("a path stands before its parent")
            if len(gains) != len(paths):
                raise ValueError(f"{len(paths)} paths but {len(gains)} gains")
            calibration = _calibration(stored.get("calibration"))
            return cls(paths, gains, int(stored["positions"]), calibration, float(stored.get("temperature", 0.0)))
        except FileNotFoundError:
            raise ValueError(
                f"{directory} holds no searched tree; make one: medusa tree {directory} --data FILE"
            ) from None
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file} is not a searched tree ({error}); make it again: medusa tree") from error


def _calibration(stored: dict[str, list[float]] | None) -> Calibration | None:
    """What `SearchedTree.save` wrote of a calibration."""
    if stored is None:
        return None
    return Calibration(tuple(map(float, stored["powers"])), tuple(map(float, stored["offsets"])))


def search_tree(ranks: Tensor, max_nodes: int, acceptance: Tensor | None = None) -> SearchedTree:
    """Order nodes by the probability that the whole path to them is accepted, the best first.

    It is the product of each guess's rate where the whole path before was right, so heads that fail together are not
    taken for independent; at temperature 0 that is how often the path was right. A path is never more probable than its
    parent, so the first N-1 paths are the best tree of N nodes for every N.

    Args:
        ranks: [P, K], the rank of the true token among each head's guesses, or MISS.
        max_nodes: size of the largest tree, root included.
        acceptance: above temperature 0, the probability that each guess is accepted where those before are the text,
            [P, K, G].

    Raises:
        ValueError: no positions, or fewer than one node.
    """
    if len(ranks) == 0:
        raise ValueError("the tree search needs held-out positions; the data supervises none")
    if max_nodes < 1:
        raise ValueError(f"a tree has at least its root: max_nodes is {max_nodes}, use 1 or more")
    if acceptance is None:
        acceptance = one_hot_ranks(ranks, int(ranks.max()) + 1)
    paths: list[Path] = []
    gains: list[float] = []
    # The boundary of the tree, most probable first, then shortest. Each with where its parent's path was right.
    waiting: list[tuple[float, int, Path, Tensor]] = []
    path: Path = ()
    gain, there = 1.0, torch.arange(len(ranks))
    while len(paths) < max_nodes - 1:
        if len(path) < ranks.shape[1] and len(there):
            rates = acceptance[there, len(path)].mean(dim=0, dtype=torch.float64)  # [G]
            for rank, rate in enumerate(rates.tolist()):
                child = round(gain * rate, DIGITS)
                if child > 0:
                    heapq.heappush(waiting, (-child, len(path) + 1, (*path, rank), there))
        if not waiting:
            break
        negative, _, path, parent = heapq.heappop(waiting)
        gain, there = -negative, parent[ranks[parent, len(path) - 1] == path[-1]]
        paths.append(path)
        gains.append(gain)
    return SearchedTree(tuple(paths), tuple(gains), len(ranks))


def count_gains(paths: Sequence[Path], ranks: Tensor, acceptance: Tensor | None = None) -> tuple[float, ...]:
    """How probably the whole path to each node is accepted; 0 where its parent was never reached.

    Args:
        paths: parents first.
        ranks: as for `search_tree`.
        acceptance: as for `search_tree`.
    """
    if acceptance is None:
        acceptance = one_hot_ranks(ranks, 1 + max((path[-1] for path in paths), default=0))
    gains: dict[Path, float] = {(): 1.0}
    there: dict[Path, Tensor] = {(): torch.arange(len(ranks))}
    for path in paths:
        reached, head, rank = there[path[:-1]], len(path) - 1, path[-1]
        seen = len(reached) > 0 and rank < acceptance.shape[2]
        rate = float(acceptance[reached, head, rank].mean(dtype=torch.float64)) if seen else 0.0
        gains[path] = round(gains[path[:-1]] * rate, DIGITS)
        there[path] = reached[ranks[reached, head] == rank]
    return tuple(gains[path] for path in paths)


def rate_tree(tree: CandidateTree, ranks: Tensor, ends: Tensor, acceptance: Tensor | None = None) -> SearchedTree:
    """The nodes of a given tree, the most accepted first, counted where decoding with it takes a step.

    Arguments as for `search_tree_for_decoding`.
    """
    visited = visited_positions(ranks, ends, tree)
    gains = count_gains(tree.paths, ranks[visited], _at(visited, acceptance))
    ordered = sorted(zip(gains, tree.paths, strict=True), key=lambda node: (-node[0], len(node[1]), node[1]))
    return SearchedTree(tuple(path for _, path in ordered), tuple(gain for gain, _ in ordered), int(visited.sum()))


def visited_positions(ranks: Tensor, ends: Tensor, tree: CandidateTree) -> Tensor:
    """Where decoding with `tree` would run a verify pass, if it were to write this text: bool [P].

    Args:
        ranks: [P, K], as for `search_tree`, in the order of the text.
        ends: bool [P], whether an answer ends with the root of this position, so that no step follows.
        tree: the tree.
    """
    return walk(accepted_lengths(ranks, tree), ends)


def search_tree_for_decoding(
    ranks: Tensor,
    ends: Tensor,
    max_nodes: int,
    log_confidence: Tensor | None = None,
    acceptance: Tensor | None = None,
) -> SearchedTree:
    """`search_tree` over the positions where decoding really takes a step.

    Steps fall on hard positions more often than on easy ones, which an accepted path skips; counted over all
    positions, a tree would promise more tokens per step than it gives. The positions depend on the tree and the tree
    on them, so both are found in turn, for trees of `TYPICAL_NODES` nodes.

    Where the log-probabilities of the guesses are given, [P, K, G], they are calibrated at these positions, and nodes
    are chosen by the mean of what they say instead of by counts. Deep nodes are right a few times in a thousand steps:
    counts choose those that were lucky, confidence is known in every step. What nodes gain is counted all the same.
    """

    def search(visited: Tensor) -> SearchedTree:
        counted, accepted = ranks[visited], _at(visited, acceptance)
        if log_confidence is None:
            return search_tree(counted, max_nodes, accepted)
        calibration = fit_calibration(log_confidence[visited], counted)
        found = search_tree(counted, max_nodes, calibration.hits(log_confidence[visited]))
        return replace(found, gains=count_gains(found.paths, counted, accepted), calibration=calibration)

    searched = search(~ends)
    for _ in range(ROUNDS):
        tree = searched.best(TYPICAL_NODES)
        searched = search(visited_positions(ranks, ends, tree))
        if searched.best(TYPICAL_NODES) == tree:
            break
    return searched


def _at(positions: Tensor, acceptance: Tensor | None) -> Tensor | None:
    return None if acceptance is None else acceptance[positions]
