"""Decide what follows a node: one of its children, or another token. Pure tensor functions.

R nodes decided at once, C children of each (padded with -1), V vocabulary. p is the backbone's distribution after the
node, warpers included; q is what the children were drawn from. Every rule returns the next token [R] and which child
carries it [R], -1 for none; over all outcomes the token is distributed as p. `Typical` is not exact, nor is `Blockwise`
unless its criterion is.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from .draws import Draws

NO_TOKEN = -1
Criterion = Literal["exact", "top_k", "distance"]


def accept_fixed(p: Tensor, children: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
    """Children that do not depend on chance: draw from p, and follow the child that carries the drawn token.

    This is rejection sampling with q a point mass at each child, and no exact rule accepts more of a fixed tree. At
    temperature 0, where p is a point mass, it is greedy matching.

    Args:
        p: [R, V].
        children: [R, C].
        draws: the dice.
    """
    token = draws.categorical(p)
    return token, _child_with(token, children)


def accept_sampled(
    p: Tensor, q: Tensor, children: Tensor, draws: Draws, replacement: bool = False
) -> tuple[Tensor, Tensor]:
    """Children drawn from q one after the other: test each, in draw order, against what the others left of p.

    Accept x with min(1, p(x)/q(x)); on rejection p becomes norm((p-q)+) and, without replacement, q loses x
    (Leviathan et al. 2023; Miao et al. 2024 with, Chen et al. 2024, *Sequoia*, without replacement).

    Args:
        p: [R, V].
        q: what the first child was drawn from, [R, V].
        children: in draw order, [R, C].
        draws: the dice.
        replacement: whether every child was drawn from the same q.
    """
    child = torch.full(children.shape[:1], NO_TOKEN, device=children.device)
    for i in range(children.shape[1]):
        x = children[:, i]
        tested = (child == NO_TOKEN) & (x != NO_TOKEN)
        if not bool(tested.any()):
            break
        index = x.clamp(min=0)[:, None]
        ratio = (p.gather(1, index) / q.gather(1, index))[:, 0].nan_to_num(nan=0.0)
        accepted = tested & draws.bernoulli(torch.where(tested, ratio.clamp(max=1.0), 0.0))
        child = torch.where(accepted, i, child)
        rejected = (tested & ~accepted)[:, None]
        p = torch.where(rejected, _residual(p, q), p)
        if not replacement:
            q = torch.where(rejected, _normalised(q.scatter(1, index, 0.0)), q)
    return _token_or_draw(child, children, p, draws), child


def accept_mixed(p: Tensor, q: Tensor, fixed: Tensor, sampled: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
    """Fixed children F and one more, drawn from q outside F, which is tested first.

    Accept it with min(1, p/q_r), where q_r is q without F; on rejection draw from norm((p-q_r)+) and follow the fixed
    child with that token (Hu et al. 2025). Best of the three rules at high temperature.

    Args:
        p: [R, V].
        q: [R, V].
        fixed: [R, C-1].
        sampled: [R].
        draws: the dice.

    Returns:
        The token, and the child: an index into `fixed`, C-1 for the sampled one, -1 for none.
    """
    in_fixed = torch.zeros_like(q, dtype=torch.bool)
    for i in range(fixed.shape[1]):
        token = fixed[:, i, None]
        in_fixed.scatter_(1, token.clamp(min=0), in_fixed.gather(1, token.clamp(min=0)) | (token != NO_TOKEN))
    rest = _normalised(q.masked_fill(in_fixed, 0.0))
    token, child = accept_sampled(p, rest, sampled[:, None], draws)
    return token, torch.where(child == 0, fixed.shape[1], _child_with(token, fixed))


@dataclass(frozen=True)
class Typical:
    """Typical acceptance: faster than exact at temperature > 0, but the text is not distributed as the backbone's.

    Cai et al. 2024, section 3.3.2. A candidate x stays if p(x) > min(epsilon, delta * exp(-H(p))), with H the entropy
    of p in nats.
    """

    epsilon: float = 0.09
    delta: float | None = None
    """sqrt(epsilon) if None, as in the paper."""
    greedy_root: bool = False
    """Take the likeliest token as the next root instead of drawing it. Output is then the same every time."""

    def __post_init__(self) -> None:
        if not 0 < self.epsilon < 1:
            raise ValueError(f"epsilon is {self.epsilon}; it must lie between 0 and 1, such as 0.09")
        if self.delta is not None and self.delta <= 0:
            raise ValueError(f"delta is {self.delta}; it must be positive, or None for sqrt(epsilon)")

    def accepts(self, p: Tensor, tokens: Tensor) -> Tensor:
        """Which tokens [R, C] stay after p [R, V] (-1 never does): bool [R, C]."""
        p = p.float() if p.dtype != torch.float64 else p
        entropy = -torch.special.xlogy(p, p).sum(dim=-1, keepdim=True)
        delta = self.epsilon**0.5 if self.delta is None else self.delta
        threshold = torch.clamp(delta * torch.exp(-entropy), max=self.epsilon)
        return (p.gather(1, tokens.clamp(min=0)) > threshold) & (tokens != NO_TOKEN)


@dataclass(frozen=True)
class Blockwise:
    """Blockwise parallel decoding: keep the longest beginning of a block that meets a criterion.

    Stern et al. 2018. The block is the root and the candidates behind it; y is what the backbone itself chooses after
    the tokens before x (its likeliest token when greedy, as in the paper, else one drawn from p). "exact" with
    `min_block` 1 keeps the backbone's distribution. All else is lossy: the text is another one than the backbone's.
    """

    criterion: Criterion = "exact"
    """A candidate x stays if: "exact": x is y. "top_k" (lossy): x is among the backbone's `top_k` likeliest tokens.
    "distance" (lossy): the ids of x and y differ by `epsilon` at most, for vocabularies in which near ids mean nearly
    the same, such as grey levels."""
    top_k: int | None = None
    """Needed for "top_k"; 1 is "exact" when greedy."""
    epsilon: int | None = None
    """Needed for "distance"; 0 is "exact"."""
    min_block: int = 1
    """More than 1 is lossy: every step emits at least so many tokens, as far as there are candidates that no processor
    forbids, whatever the backbone says of them. The bonus token counts, so `min_block` - 1 candidates are kept."""

    def __post_init__(self) -> None:
        if self.criterion not in get_args(Criterion):
            allowed = ", ".join(map(repr, get_args(Criterion)))
            raise ValueError(f"criterion is {self.criterion!r}; allowed: {allowed}")
        for name, value, least in (("top_k", self.top_k, 1), ("epsilon", self.epsilon, 0)):
            belongs = self.criterion == {"top_k": "top_k", "epsilon": "distance"}[name]
            if belongs and (value is None or value < least):
                raise ValueError(f"{name} is {value}; criterion {self.criterion!r} needs an integer from {least} on")
            if not belongs and value is not None:
                raise ValueError(f"{name}={value} does not go with criterion {self.criterion!r}; leave it out")
        if self.min_block < 1:
            raise ValueError(f"min_block is {self.min_block}; a step emits at least one token, so give 1 or more")

    def accepts(self, scores: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        """Which tokens [R, C] meet the criterion (-1 never does): bool [R, C].

        Args:
            scores: processed scores after each node, [R, V]; -inf is never accepted, nor are equals beyond `top_k`.
            y: what the backbone chooses there, [R].
            tokens: the candidates, [R, C].
        """
        if self.top_k is not None:
            best = scores.topk(min(self.top_k, scores.shape[1]), dim=-1).indices  # [R, top_k]
            near = (tokens[:, :, None] == best[:, None]).any(dim=-1)
        else:
            near = (tokens - y[:, None]).abs() <= (self.epsilon or 0)
        return near & possible(scores, tokens)


def possible(scores: Tensor, tokens: Tensor) -> Tensor:
    """Which tokens [R, C] no processor forbids by its score [R, V]; -1 is none: bool [R, C]."""
    return (tokens != NO_TOKEN) & (scores.gather(1, tokens.clamp(min=0)) > -torch.inf)


def _child_with(token: Tensor, children: Tensor) -> Tensor:
    """First child that carries the token: [R], [R, C] -> [R]."""
    if children.shape[1] == 0:
        return torch.full_like(token, NO_TOKEN)
    match = children == token[:, None]
    return torch.where(match.any(dim=1), match.int().argmax(dim=1), NO_TOKEN)


def _token_or_draw(child: Tensor, children: Tensor, p: Tensor, draws: Draws) -> Tensor:
    """The accepted child's token, or one drawn from what is left of p."""
    if children.shape[1] and bool((child != NO_TOKEN).all()):
        return children.gather(1, child[:, None])[:, 0]
    drawn = draws.categorical(p)
    if children.shape[1] == 0:
        return drawn
    return torch.where(child == NO_TOKEN, drawn, children.gather(1, child.clamp(min=0)[:, None])[:, 0])


def _residual(p: Tensor, q: Tensor) -> Tensor:
    """norm((p-q)+); p itself where nothing is left, which only rounding can bring about."""
    left = (p - q).clamp(min=0.0)
    return torch.where(left.sum(dim=-1, keepdim=True) > 0, _normalised(left), p)


def _normalised(p: Tensor) -> Tensor:
    """Rows that sum to 1, or stay 0."""
    return p / p.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)
