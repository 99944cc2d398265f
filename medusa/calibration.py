"""What a head's confidence is worth: the probability that a guess is right. P positions, K heads, G guesses each."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

CERTAIN = -1e-6
IMPOSSIBLE = -60.0
"""Log-confidences beyond these are cut, since the odds of a certain event are infinite."""


@dataclass(frozen=True)
class Calibration:
    """For each head: odds(right) = exp(offset) * odds(confidence) ** power.

    Heads are trained to be right about the text, and decoding looks at them at hard places, where they are surer than
    they should be. Of the two-parameter maps that keep the order of guesses, this one is never above 1, and its fit is
    a concave problem (Platt 1999).
    """

    powers: tuple[float, ...]
    offsets: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.powers) != len(self.offsets):
            raise ValueError(f"a calibration has powers {self.powers} but offsets {self.offsets}; give as many of both")
        if not all(map(math.isfinite, (*self.powers, *self.offsets))):
            raise ValueError(f"powers {self.powers} and offsets {self.offsets} of a calibration must be finite")

    @classmethod
    def identity(cls, num_heads: int) -> "Calibration":
        """Take confidences as they are."""
        return cls((1.0,) * num_heads, (0.0,) * num_heads)

    @property
    def num_heads(self) -> int:
        """K."""
        return len(self.powers)

    def hits(self, log_confidence: Tensor) -> Tensor:
        """Probability that each guess is right, [P, K, G], from the log-probabilities that the heads give them."""
        powers, offsets = (log_confidence.new_tensor(values) for values in (self.powers, self.offsets))
        return log_hit(log_confidence, powers, offsets).exp()


def log_odds(log_confidence: Tensor) -> Tensor:
    """log(c / (1 - c)) from log c, any shape."""
    cut = log_confidence.clamp(IMPOSSIBLE, CERTAIN)
    return cut - torch.expm1(cut).neg().log()


def log_hit(log_confidence: Tensor, powers: Tensor, offsets: Tensor) -> Tensor:
    """Calibrated log-probability that each guess is right; never above 0.

    Args:
        log_confidence: log-probabilities that the heads give their guesses, [..., K, G].
        powers: [K].
        offsets: [K].

    Returns:
        [..., K, G].
    """
    return F.logsigmoid(powers[:, None] * log_odds(log_confidence) + offsets[:, None])


def fit_calibration(log_confidence: Tensor, ranks: Tensor) -> Calibration:
    """The likeliest calibration, with a prior worth about one observation that keeps heads without data as they are.

    A node is reached only through right guesses of the heads before, so head k is judged where those were right.

    Args:
        log_confidence: log-probabilities of the guesses, best first, [P, K, G].
        ranks: which of them was right, or a negative number, [P, K].
    """
    guesses = torch.arange(log_confidence.shape[2])
    powers, offsets = [], []
    for k in range(ranks.shape[1]):
        reached = (ranks[:, :k] >= 0).all(dim=1)
        odds = log_odds(log_confidence[reached, k].double())  # [P', G]
        hit = (ranks[reached, k, None] == guesses).double()
        power, offset = _fit(odds.flatten(), hit.flatten())
        powers.append(power)
        offsets.append(offset)
    return Calibration(tuple(powers), tuple(offsets))


def _fit(odds: Tensor, hit: Tensor) -> tuple[float, float]:
    """Logistic regression of `hit` on `odds`, both [n], with a standard normal prior around power 1 and offset 0."""
    start = torch.tensor([1.0, 0.0], dtype=torch.float64)
    found = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([found], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        score = found[0] * odds + found[1]
        value = F.binary_cross_entropy_with_logits(score, hit, reduction="sum") + (found - start).square().sum() / 2
        value = value / (len(hit) + 1)
        value.backward()  # type: ignore[no-untyped-call]
        return value

    with torch.enable_grad():
        optimizer.step(loss)  # type: ignore[no-untyped-call]
    power, offset = found.tolist()
    return round(power, 6), round(offset, 6)
