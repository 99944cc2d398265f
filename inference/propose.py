"""Fill a candidate tree with the heads' guesses.

B rows, N nodes, K heads, D hidden, V vocabulary, Vd draft vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from medusa.heads import MedusaHeads

from .accept import NO_TOKEN
from .layout import TreeLayout

Proposal = Literal["top_k", "sampled", "mixed"]
"""How siblings come about: the head's likeliest tokens; drawn from the head without replacement, in draw order; or the
likeliest ones and, last, one drawn from the rest."""
PROPOSALS: tuple[Proposal, ...] = get_args(Proposal)


@dataclass(frozen=True)
class Drawn:
    """How siblings were drawn: what acceptance must know to stay exact."""

    q: Tensor
    """The distributions, [B, Q, V]."""
    q_of: Tensor
    """Which of them the children of each node were drawn from, [N]."""
    mixed: bool = False
    """Whether only the last sibling was drawn, and the others chosen. Else all were, without replacement."""


@dataclass(frozen=True)
class Candidates:
    """A filled tree."""

    tokens: Tensor
    """[B, N]; -1 where a node stays empty, as where its head had nothing left to draw."""
    drawn: Drawn | None = None
    """None where nothing was drawn: candidates follow from the text."""


def propose(heads: MedusaHeads, hidden: Tensor, root: Tensor, layout: TreeLayout) -> Candidates:
    """One parallel pass of the heads, then each node takes the guess of its depth and rank.

    Args:
        heads: the heads.
        hidden: hidden state that each root came from, [B, D].
        root: ids of the roots, [B].
        layout: the tree.
    """
    if layout.num_nodes == 1:
        return Candidates(root[:, None])
    logits = heads(hidden, root).transpose(0, 1)  # [B, K, Vd]
    return fill(heads.to_vocab(logits.topk(layout.top_k, dim=-1).indices), root, layout)


def fill(guesses: Tensor, root: Tensor, layout: TreeLayout) -> Candidates:
    """Each node takes the guess of its depth and rank: guesses [B, K, top_k], root [B]."""
    place = layout.depths.sub(1).clamp(min=0) * layout.top_k + layout.ranks  # [R, N]
    tokens = guesses.flatten(1).gather(1, place.expand(len(root), -1))
    return Candidates(torch.where(layout.depths == 0, root[:, None], tokens))


@dataclass(frozen=True)
class Chance:
    """How siblings are drawn from the heads."""

    rows: Tensor
    """Bool [B]; other rows, which are greedy, take the likeliest tokens."""
    mixed: bool
    """Whether the likeliest tokens come first and only the last sibling is drawn."""
    warp: Callable[[Tensor], Tensor]
    """What is done to the heads' logits [B, .., Vd] before drawing: the temperature, for one."""
    vocab_size: int
    """V."""
    generator: torch.Generator | None = None
    """The dice."""


def propose_by_chance(
    heads: MedusaHeads, hidden: Tensor, root: Tensor, layout: TreeLayout, chance: Chance
) -> Candidates:
    """Like `propose`, but siblings are drawn from the heads; a node's rank only says how many siblings it has.

    All parents at one depth see the same draws. Acceptance walks one path and so looks at each depth once; the draws
    it sees there are independent of everything that was decided before.

    Args:
        heads: the heads.
        hidden: [B, D].
        root: [B].
        layout: one tree for all rows.
        chance: how siblings are drawn.
    """
    log_q = drawable(chance.warp(heads(hidden, root).transpose(0, 1).float()))  # [B, K, Vd]
    perturbed = perturb(log_q, chance)
    tokens = torch.full((len(root), layout.num_nodes), NO_TOKEN, device=root.device)
    tokens[:, 0] = root
    depths = layout.depths[0].tolist()
    for node, children in enumerate(layout.children[0]):
        if children:
            k = depths[node]
            tokens[:, children] = draw_siblings(heads, log_q[:, k], perturbed[:, k], len(children), chance.mixed)
    # Children of a node at depth k were drawn from head k.
    return Candidates(
        tokens, Drawn(over_vocabulary(heads, log_q.exp(), chance.vocab_size), layout.depths[0], chance.mixed)
    )


def drawable(scores: Tensor) -> Tensor:
    """Log-probabilities of what may be drawn, [..., Vd]; acceptance must know each of them, so none that underflows."""
    log_q = scores.log_softmax(dim=-1)
    return log_q.masked_fill(log_q.exp() < torch.finfo(log_q.dtype).tiny, -torch.inf)


def perturb(log_q: Tensor, chance: Chance) -> Tensor:
    """log q [B, .., Vd] + Gumbel noise: the largest is a draw from q, the next ones are draws without replacement.

    Greedy rows get no noise. Exponential noise is finer near 0 than uniform noise near 1, whose 24 bits would
    draw tokens with q < 1e-6 too rarely.
    """
    noise = torch.empty_like(log_q).exponential_(generator=chance.generator).log()
    return log_q - noise * chance.rows[:, None, None]


def draw_siblings(heads: MedusaHeads, log_q: Tensor, perturbed: Tensor, count: int, mixed: bool) -> Tensor:
    """`count` siblings from log q [B, Vd] and what `perturb` made of it: tokens [B, count], -1 where none is left."""
    if mixed:
        fixed = log_q.topk(count - 1, dim=-1).indices
        best = perturbed.scatter(1, fixed, -torch.inf).max(dim=-1, keepdim=True)
        index = torch.cat([fixed, best.indices], dim=1)
        value = torch.cat([log_q.gather(1, fixed), best.values], dim=1)
    else:
        value, index = perturbed.topk(count, dim=-1)
    return torch.where(value > -torch.inf, heads.to_vocab(index), NO_TOKEN)


def over_vocabulary(heads: MedusaHeads, q: Tensor, vocab_size: int) -> Tensor:
    """Distributions over the draft vocabulary [B, K, Vd] -> over the whole one [B, K, V]."""
    ids = heads.to_vocab(torch.arange(q.shape[-1], device=q.device))
    return q.new_zeros((*q.shape[:-1], vocab_size)).index_copy_(-1, ids, q)
