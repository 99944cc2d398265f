"""What a step of k guesses gains by the costs of its parts, also in batches. Times are in plain passes of one row."""

from dataclasses import dataclass
from math import inf

from .formulas import expected_tokens, speedup


@dataclass(frozen=True)
class CostModel:
    """Costs of drafting and verifying, in plain passes, and how passes grow with their tokens.

    A pass over M tokens takes 1 + s (M - 1): it reads the weights once, whatever M is, and multiplies for each token.
    """

    draft_cost: float
    """c: what one guess of a step takes."""
    verify_cost: float
    """v: what a pass over k+1 tokens takes, of one row."""
    k: int
    """Guesses of a step at which `verify_cost` holds."""

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"k is {self.k}; a step that drafts has 1 guess or more")
        if not (0 < self.draft_cost < inf and 0 < self.verify_cost < inf):
            raise ValueError(
                f"draft cost {self.draft_cost} and verify cost {self.verify_cost} must be above 0; they are times, in "
                "plain passes, such as 0.05 and 1.1"
            )

    @property
    def slope(self) -> float:
        """s: what one more token of a pass takes, from the one pass that is known."""
        return max(0.0, (self.verify_cost - 1) / self.k)

    def verify(self, k: int, batch: int = 1) -> float:
        """v_k: a pass over k+1 tokens of each of `batch` rows, against a pass over one token of each.

        Raises:
            ValueError: there is no row.
        """
        if batch < 1:
            raise ValueError(f"batch is {batch}; it has 1 row or more")
        growth = (1 + self.slope * (batch * (k + 1) - 1)) / (1 + self.slope * (batch - 1))
        return min(1.0, self.verify_cost) * growth

    def speedup(self, alpha: float, k: int, batch: int = 1, other: float = 0.0) -> float:
        """Tokens per second against plain decoding.

        Args:
            alpha: how likely a guess is accepted, given that those before it were.
            k: guesses of a step.
            batch: rows decoded together.
            other: share of the time of plain decoding that no guess makes shorter, such as prefill (Amdahl's law).

        Raises:
            ValueError: alpha is no probability, k or batch are too small, or `other` is no share.
        """
        if not 0 <= other < 1:
            raise ValueError(f"other is {other}; it is a share of time, from 0 to below 1")
        inner = speedup(alpha, k, self.draft_cost, self.verify(k, batch))
        return 1 / ((1 - other) / inner + other)

    def best_k(self, alpha: float, most: int, batch: int = 1) -> int:
        """How many guesses gain most, 1 to `most`."""
        return max(range(1, most + 1), key=lambda k: self.speedup(alpha, k, batch))


def tokens_per_step(alpha: float, k: int) -> float:
    """E[N] = (1 - alpha^(k+1)) / (1 - alpha), for a step that drafts.

    Raises:
        ValueError: alpha is no probability, or nothing is drafted.
    """
    if k < 1:
        raise ValueError(f"k is {k}; a step that drafts has 1 guess or more")
    return expected_tokens(alpha, k)
