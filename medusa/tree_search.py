"""Find the best tree of every size for given heads, from how often each path of guesses was right.

P positions of held-out text, K heads.
"""

import json
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path as FilePath

import torch
from torch import Tensor

from .calibration import Calibration, fit_calibration
from .tree import CandidateTree, Path

MISS = -1
"""In a table of ranks: the true token is not among the guesses that were looked at, or the text has ended."""
TREE_FILE = "medusa_tree.json"
TYPICAL_NODES = 16
ROUNDS = 10


@dataclass(frozen=True)
class SearchedTree:
    """Nodes in the order in which a growing tree takes them, each with the share of steps that accept it."""

    paths: tuple[Path, ...]
    gains: tuple[float, ...]
    positions: int
    """How many held-out positions the gains were counted over."""
    calibration: Calibration | None = None
    """What the heads' confidence was worth there, for trees that change from step to step."""

    def best(self, num_nodes: int) -> CandidateTree:
        """The best tree of `num_nodes` nodes (root included), or the whole tree where it is smaller."""
        return CandidateTree.from_paths(self.paths[: max(num_nodes - 1, 0)])

    def tokens_per_step(self, num_nodes: int) -> float:
        """Expected tokens that a step emits with the best tree of `num_nodes` nodes."""
        return 1.0 + sum(self.gains[: max(num_nodes - 1, 0)])

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
            return cls(paths, gains, int(stored["positions"]), _calibration(stored.get("calibration")))
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


def search_tree(ranks: Tensor, max_nodes: int) -> SearchedTree:
    """Order nodes by how often the whole path to them is right.

    The frequency is counted jointly, so heads that fail together are not taken for independent. A path is never more
    frequent than its parent, so the first N-1 paths are the best tree of N nodes for every N.

    Args:
        ranks: [P, K], the rank of the true token among each head's guesses, or MISS.
        max_nodes: size of the largest tree, root included.

    Raises:
        ValueError: no positions, or fewer than one node.
    """
    if len(ranks) == 0:
        raise ValueError("the tree search needs held-out positions; the data supervises none")
    if max_nodes < 1:
        raise ValueError(f"a tree has at least its root: max_nodes is {max_nodes}, use 1 or more")
    hits: Counter[Path] = Counter()
    for row in ranks.tolist():
        path: Path = ()
        for rank in row:
            if rank == MISS:
                break
            path = (*path, rank)
            hits[path] += 1
    ordered = sorted(hits.items(), key=lambda item: (-item[1], len(item[0]), item[0]))[: max_nodes - 1]
    return SearchedTree(
        paths=tuple(path for path, _ in ordered),
        gains=tuple(count / len(ranks) for _, count in ordered),
        positions=len(ranks),
    )


def visited_positions(ranks: Tensor, ends: Tensor, tree: CandidateTree) -> Tensor:
    """Where greedy decoding with `tree` would run a verify pass, if it were to write this text.

    Args:
        ranks: [P, K], as for `search_tree`, in the order of the text.
        ends: bool [P], whether an answer ends with the root of this position, so that no step follows.
        tree: the tree.

    Returns:
        Bool [P].
    """
    nodes = set(tree.paths)
    visited = torch.zeros(len(ranks), dtype=torch.bool)
    rows, last = ranks.tolist(), ends.tolist()
    position = 0
    while position < len(rows):
        accepted = 0
        if not last[position]:
            visited[position] = True
            while accepted < len(rows[position]) and tuple(rows[position][: accepted + 1]) in nodes:
                accepted += 1
        position += accepted + 1
    return visited


def search_tree_for_decoding(
    ranks: Tensor, ends: Tensor, max_nodes: int, log_confidence: Tensor | None = None
) -> SearchedTree:
    """`search_tree` over the positions where decoding really takes a step.

    Steps fall on hard positions more often than on easy ones, which an accepted path skips; counted over all
    positions, a tree would promise more tokens per step than it gives. The positions depend on the tree and the tree
    on them, so both are found in turn, for trees of `TYPICAL_NODES` nodes. Where the log-probabilities of the guesses
    are given, [P, K, G], their calibration at these positions is found as well.
    """
    searched = search_tree(ranks[~ends], max_nodes)
    for _ in range(ROUNDS):
        tree = searched.best(TYPICAL_NODES)
        searched = search_tree(ranks[visited_positions(ranks, ends, tree)], max_nodes)
        if searched.best(TYPICAL_NODES) == tree:
            break
    if log_confidence is None:
        return searched
    visited = visited_positions(ranks, ends, searched.best(TYPICAL_NODES))
    return replace(searched, calibration=fit_calibration(log_confidence[visited], ranks[visited]))
