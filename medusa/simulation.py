"""Decode recorded text again with another tree, without the backbone. P positions, K heads, N nodes.

Where the text is what the backbone says, the guesses that it accepts are those that come next in the text. So the ranks
of the right guesses, which heads alone give from recorded hidden states, tell every step that decoding would take.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .tree import CandidateTree, Path


@dataclass(frozen=True)
class Simulation:
    """What decoding the text takes."""

    steps: int
    """Verify passes."""
    tokens: int
    """Tokens that they emit. The first token of an answer is the prompt's, and comes from no verify pass."""
    accepted: tuple[int, ...]
    """How many steps accept so many guesses, from 0 on."""

    @property
    def tokens_per_step(self) -> float:
        """Tokens emitted by verify passes / verify passes, roots included."""
        return self.tokens / max(self.steps, 1)


def simulate(ranks: Tensor, ends: Tensor, tree: CandidateTree, kept: Tensor | None = None) -> Simulation:
    """Decode the text with `tree`.

    Args:
        ranks: rank of the right token among each head's guesses, or a negative number, [P, K], in the order of the
            text; no head reaches over the end of an answer.
        ends: bool [P], whether an answer ends with the root of this position, so that no step follows.
        tree: the tree.
        kept: bool [P, N], which of its nodes the tree of each position has; unsaid: all.
    """
    accepted = accepted_lengths(ranks, tree, kept)
    visited = walk(accepted, ends)
    counts = torch.bincount(accepted[visited], minlength=tree.depth + 1)
    return Simulation(int(visited.sum()), len(ranks) - int(ends.sum()), tuple(counts.tolist()))


def accepted_lengths(ranks: Tensor, tree: CandidateTree, kept: Tensor | None = None) -> Tensor:
    """How many guesses a step from each position would accept, [P]; arguments as for `simulate`."""
    index: dict[Path, int] = {path: node for node, path in enumerate(((), *tree.paths))}
    lengths = []
    for position, row in enumerate(ranks.tolist()):
        length = 0
        while length < len(row):
            node = index.get(tuple(row[: length + 1]))
            if node is None or (kept is not None and not kept[position, node]):
                break
            length += 1
        lengths.append(length)
    return torch.tensor(lengths, dtype=torch.long)


def walk(accepted: Tensor, ends: Tensor) -> Tensor:
    """Where the text is decoded from: steps of `accepted` + 1 tokens, one after the other; [P] each, returns bool."""
    lengths, last = accepted.tolist(), ends.tolist()
    visited = torch.zeros(len(lengths), dtype=torch.bool)
    position = 0
    while position < len(lengths):
        visited[position] = not last[position]
        position += 1 if last[position] else lengths[position] + 1
    return visited
