"""What draft-then-verify gains, by formula (Leviathan et al. 2023, sections 3.1-3.3). V vocabulary, k drafts a step."""

import torch
from torch import Tensor


def overlap(p: Tensor, q: Tensor) -> Tensor:
    """alpha: how likely a token drawn from q [..., V] is accepted by p [..., V], the sum over tokens of min(p, q)."""
    return torch.minimum(p, q).sum(dim=-1)


def acceptance(p: Tensor, q: Tensor) -> Tensor:
    """How likely each drafted token stays, min(1, p/q), where p and q are its own probabilities. Any shape."""
    return (p / q).clamp(max=1.0)


def expected_tokens(alpha: float, k: int) -> float:
    """E[N]: tokens that a step of k drafts emits, root included, where each draft stays with probability alpha.

    Raises:
        ValueError: alpha is no probability, or k is negative.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha is {alpha}; it is a probability, between 0 and 1")
    if k < 0:
        raise ValueError(f"k is {k}; a step has 0 drafts or more")
    return float(k + 1) if alpha == 1 else (1 - alpha ** (k + 1)) / (1 - alpha)


def speedup(alpha: float, k: int, draft_cost: float, verify_cost: float = 1.0) -> float:
    """Tokens per second against plain decoding, which is E[N] / (k c + v).

    Args:
        alpha: how likely a draft is accepted.
        k: drafts a step.
        draft_cost: c, the time of one pass of the draft / one plain pass of the target.
        verify_cost: v, the time of a pass over k+1 tokens / one plain pass of the target.

    Raises:
        ValueError: alpha is no probability, k is negative, or a cost is.
    """
    if draft_cost < 0 or verify_cost <= 0:
        raise ValueError(f"the costs are {draft_cost} and {verify_cost}; they are times, against one plain pass")
    return expected_tokens(alpha, k) / (k * draft_cost + verify_cost)
