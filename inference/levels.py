"""Fill a tree level by level, for heads that see the tokens on the way to a node (Hydra, Ankner et al. 2024).

Level d takes the nodes at depth d that have children, and head d guesses what follows each. B rows, N nodes, W nodes of
a level that have children, C their children, D hidden, V vocabulary, Vd draft vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from medusa.heads import MedusaHeads

from .layout import TreeLayout
from .propose import Candidates, Chance, Drawn, draw_siblings, drawable, over_vocabulary, perturb


@dataclass(frozen=True)
class Level:
    """The nodes of one depth that have children."""

    paths: Tensor
    """Nodes on the way from the root to each, itself included, [W, d+1]."""
    children: Tensor
    """Their children, one parent after the other, [C]."""
    parent: Tensor
    """Which of the W each child belongs to, [C]."""
    rank: Tensor
    """Rank of each child among its parent's guesses, [C]."""
    top_k: int
    """How many guesses are used at most."""
    counts: list[int]
    """How many children each of the W has."""


def levels_of(layout: TreeLayout) -> list[Level]:
    """The levels of a tree that all rows share, from the root down."""
    depths, ranks, device = layout.depths[0].tolist(), layout.ranks[0], layout.depths.device
    levels = []
    for depth in range(max(depths)):
        parents = [node for node, own in enumerate(depths) if own == depth and layout.children[0][node]]
        groups = [layout.children[0][node] for node in parents]
        children = torch.tensor([child for group in groups for child in group], device=device)
        paths = [layout.ancestors[0, node].nonzero()[:, 0] for node in parents]
        levels.append(
            Level(
                paths=torch.stack(paths),
                children=children,
                parent=torch.tensor([i for i, group in enumerate(groups) for _ in group], device=device),
                rank=ranks[children],
                top_k=int(ranks[children].max()) + 1,
                counts=[len(group) for group in groups],
            )
        )
    return levels


def level_logits(heads: MedusaHeads, depth: int, hidden: Tensor, tokens: Tensor, level: Level) -> Tensor:
    """What head `depth` says behind each node: hidden [B, D], tokens [B, N] filled down to there -> [B, W, Vd]."""
    path = tokens[:, level.paths]  # [B, W, d+1]
    rows, width = path.shape[:2]
    logits = heads.forward_one(depth, hidden.repeat_interleave(width, dim=0), path.flatten(0, 1))
    return logits.view(rows, width, -1)


def propose_by_level(
    heads: MedusaHeads, hidden: Tensor, root: Tensor, levels: list[Level], num_nodes: int
) -> tuple[Tensor, Tensor]:
    """Each node takes the guess of its rank behind its parent.

    Args:
        heads: sequential heads.
        hidden: hidden state that each root came from, [B, D].
        root: ids of the roots, [B].
        levels: of the tree.
        num_nodes: N.

    Returns:
        Tokens, and the log-probability that its head gave each (0 for the root), [B, N] each.
    """
    tokens = root[:, None].repeat(1, num_nodes)
    log_confidence = torch.zeros(tokens.shape, device=root.device)
    for depth, level in enumerate(levels):
        logits = level_logits(heads, depth, hidden, tokens, level)
        best = logits.topk(level.top_k, dim=-1)  # [B, W, top_k]
        tokens[:, level.children] = heads.to_vocab(best.indices)[:, level.parent, level.rank]
        value = best.values.float() - logits.float().logsumexp(dim=-1, keepdim=True)
        log_confidence[:, level.children] = value[:, level.parent, level.rank]
    return tokens, log_confidence


def propose_by_level_and_chance(
    heads: MedusaHeads, hidden: Tensor, root: Tensor, levels: list[Level], num_nodes: int, chance: Chance
) -> Candidates:
    """Like `propose_by_level`, but siblings are drawn, behind each parent anew."""
    tokens = root[:, None].repeat(1, num_nodes)
    q_of = torch.zeros(num_nodes, dtype=torch.long, device=root.device)
    qs: list[Tensor] = []
    for depth, level in enumerate(levels):
        # Behind an empty node nothing is accepted, whatever is drawn there.
        log_q = drawable(
            chance.warp(level_logits(heads, depth, hidden, tokens.clamp(min=0), level).float())
        )  # [B, W, Vd]
        perturbed = perturb(log_q, chance)
        first = 0
        for i, count in enumerate(level.counts):
            children = level.children[first : first + count]
            tokens[:, children] = draw_siblings(heads, log_q[:, i], perturbed[:, i], count, chance.mixed)
            first += count
        q_of[level.paths[:, -1]] = torch.arange(len(level.counts), device=root.device) + sum(q.shape[1] for q in qs)
        qs.append(over_vocabulary(heads, log_q.exp(), chance.vocab_size))
    return Candidates(tokens, Drawn(torch.cat(qs, dim=1), q_of, chance.mixed))
