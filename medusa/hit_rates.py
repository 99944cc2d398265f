"""How often a guess is accepted where decoding reaches it. P positions, K heads, G guesses each."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

RATES_FILE = "medusa_hit_rates.json"
CERTAINTY = 1.959964
"""Standard errors to either side of a rate that hold it with 95% probability."""


@dataclass(frozen=True)
class HitRates:
    """Of every head and rank, at one temperature, where all guesses before were accepted."""

    temperature: float
    reached: tuple[int, ...]
    """How many positions each head was judged at, [K]."""
    hits: tuple[tuple[float, ...], ...]
    """How often each rank was accepted there, [K][G]; above temperature 0 an expectation."""

    def rate(self, head: int, rank: int) -> float:
        """Share of the positions that `head` was judged at; 0 where there are none."""
        return self.hits[head][rank] / max(self.reached[head], 1)

    def interval(self, head: int, rank: int) -> tuple[float, float]:
        """What the rate lies between with 95% probability."""
        return wilson(self.hits[head][rank], self.reached[head])


def wilson(hits: float, count: float) -> tuple[float, float]:
    """The 95% interval of a share of which `hits` of `count` were seen (Wilson 1927); 0 to 1 where nothing was.

    Expected hits vary less than counted ones, so for them it is wider than it need be.
    """
    if count <= 0:
        return 0.0, 1.0
    share, squared = hits / count, CERTAINTY**2 / count
    middle = (share + squared / 2) / (1 + squared)
    half = CERTAINTY * math.sqrt(share * (1 - share) / count + squared / (4 * count)) / (1 + squared)
    return max(middle - half, 0.0), min(middle + half, 1.0)


def one_hot_ranks(ranks: Tensor, num_guesses: int) -> Tensor:
    """What is accepted at temperature 0: 1 for the guess that was right, [P, K] -> [P, K, G]."""
    missed = (ranks < 0) | (ranks >= num_guesses)
    return F.one_hot(ranks.masked_fill(missed, -1) + 1, num_guesses + 1)[..., 1:].double()


def count_hit_rates(ranks: Tensor, acceptance: Tensor, temperature: float) -> HitRates:
    """Count where decoding gets to: head k is judged where the heads before were right.

    Args:
        ranks: which guess was right, or a negative number, [P, K].
        acceptance: probability that each guess is accepted if those before are the text, [P, K, G].
        temperature: that these probabilities are of.
    """
    reached, hits = [], []
    for k in range(ranks.shape[1]):
        there = (ranks[:, :k] >= 0).all(dim=1)
        reached.append(int(there.sum()))
        hits.append(tuple(round(hit, 4) for hit in acceptance[there, k].sum(dim=0, dtype=torch.float64).tolist()))
    return HitRates(temperature, tuple(reached), tuple(hits))


def save_hit_rates(rates: list[HitRates], directory: Path) -> None:
    """Write the rates at several temperatures beside the heads."""
    (directory / RATES_FILE).write_text(json.dumps([asdict(one) for one in rates]) + "\n")


def load_hit_rates(directory: Path) -> list[HitRates]:
    """Read what `save_hit_rates` wrote.

    Raises:
        ValueError: there are none, or the file is damaged.
    """
    file = directory / RATES_FILE
    try:
        return [
            HitRates(
                float(stored["temperature"]),
                tuple(map(int, stored["reached"])),
                tuple(tuple(map(float, hits)) for hits in stored["hits"]),
            )
            for stored in json.loads(file.read_text())
        ]
    except FileNotFoundError:
        raise ValueError(f"{directory} holds no hit rates; count them: medusa tree {directory} --data FILE") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} does not hold hit rates ({error}); count them again: medusa tree") from error
