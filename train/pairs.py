"""Which (position, head) pairs of a row are learned. T tokens, P positions, K heads, D hidden.

At position t the backbone has read id[0..t]; the root is id[t+1] and head k guesses id[t+2+k]. A pair counts when every
token from the root to the guess was written by the assistant: those are the paths that a decoder walks. So no head
reaches over the end of a turn or of a row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .supervision import IGNORE, TrainingRow


@dataclass(frozen=True)
class HeadBatch:
    """What the heads see and should say."""

    hidden: Tensor
    """The backbone's final hidden states, [P, D]."""
    root: Tensor
    """Ids of the roots, [P]."""
    targets: Tensor
    """Vocabulary ids or IGNORE, [P, K]."""


def root_positions(labels: list[int]) -> list[int]:
    """Positions t whose root id[t+1] was written by the assistant, in order."""
    return [t for t in range(len(labels) - 1) if labels[t + 1] != IGNORE]


def head_targets(labels: list[int], num_heads: int) -> Tensor:
    """Targets of every head at every root position, [P, K]; IGNORE where the pair does not count."""
    padded = torch.tensor([*labels, *[IGNORE] * num_heads])
    positions = torch.tensor(root_positions(labels), dtype=torch.long)
    ahead = positions[:, None] + 2 + torch.arange(num_heads)  # [P, K]
    targets = padded[ahead]
    counts = (targets != IGNORE).cumprod(dim=1).bool()
    return torch.where(counts, targets, IGNORE)


def following(targets: Tensor) -> Tensor:
    """What sequential heads see behind the root while they learn: the true tokens, [P, K] -> [P, K-1].

    Where there is none, some token stands; no pair behind it counts.
    """
    return targets[:, :-1].clamp(min=0)


def make_batch(rows: list[TrainingRow], hidden: list[Tensor], num_heads: int, device: torch.device) -> HeadBatch:
    """Join rows. `hidden` holds each row's states at its root positions, [P_row, D]."""
    roots = [torch.tensor([row.input_ids[t + 1] for t in root_positions(row.labels)]) for row in rows]
    targets = [head_targets(row.labels, num_heads) for row in rows]
    return HeadBatch(
        hidden=torch.cat(hidden).to(device),
        root=torch.cat(roots).long().to(device),
        targets=torch.cat(targets).to(device),
    )
