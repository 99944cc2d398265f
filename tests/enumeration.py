"""Every way the dice can fall, with its probability: exactness is proved by adding up what acceptance itself computes.

Draws are replayed: a run follows a script of outcomes, and notes every other outcome that was possible beyond its end.
"""

from collections.abc import Callable, Hashable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from medusa.inference.accept import NO_TOKEN
from medusa.inference.draws import Draws

Outcome = TypeVar("Outcome", bound=Hashable)
ROUNDING = 1e-10


class ScriptedDraws:
    """Dice that fall as the script says, and behind its end as they first can."""

    def __init__(self, script: list[int]) -> None:
        self.script = script
        self.thrown = 0
        self.probability = 1.0
        self.others: list[list[int]] = []
        """Scripts of the runs that part from this one behind the end of its script."""

    def bernoulli(self, probability: Tensor) -> Tensor:
        return torch.tensor([bool(self._throw([1 - chance, chance])) for chance in probability.tolist()])

    def categorical(self, p: Tensor) -> Tensor:
        return torch.tensor([self._throw(row) for row in (p / p.sum(dim=-1, keepdim=True)).tolist()])

    def _throw(self, chances: list[float]) -> int:
        assert all(0 <= chance <= 1 + ROUNDING for chance in chances), f"{chances} are no probabilities"
        possible = [outcome for outcome, chance in enumerate(chances) if chance > 0]
        if self.thrown == len(self.script):
            self.others += [[*self.script, outcome] for outcome in possible[1:]]
            self.script.append(possible[0])
        outcome = self.script[self.thrown]
        self.thrown += 1
        self.probability *= chances[outcome]
        return outcome


def outcomes(run: Callable[[Draws], Outcome]) -> Iterator[tuple[Outcome, float]]:
    """Everything that `run` can come to, once for each way to get there, and how likely that way is."""
    scripts: list[list[int]] = [[]]
    while scripts:
        draws = ScriptedDraws(scripts.pop())
        yield run(draws), draws.probability
        scripts += draws.others


def law(run: Callable[[Draws], Outcome]) -> dict[Outcome, float]:
    """How `run`'s outcome is distributed."""
    total: dict[Outcome, float] = {}
    for outcome, probability in outcomes(run):
        total[outcome] = total.get(outcome, 0.0) + probability
    return total


def assert_same_law(found: dict[Outcome, float], expected: dict[Outcome, float], tolerance: float = ROUNDING) -> None:
    for outcome in found.keys() | expected.keys():
        chance, right = found.get(outcome, 0.0), expected.get(outcome, 0.0)
        assert abs(chance - right) < tolerance, f"{outcome} has probability {chance:.6f} instead of {right:.6f}"


def siblings(q: Tensor, count: int, draws: Draws, replacement: bool = False) -> list[int]:
    """Tokens drawn from q [V] one after the other; -1 once nothing is left of it."""
    drawn: list[int] = []
    for _ in range(count):
        if q.sum() == 0:
            drawn.append(NO_TOKEN)
            continue
        drawn.append(int(draws.categorical(q[None])))
        if not replacement:
            q = q.index_fill(0, torch.tensor(drawn[-1]), 0.0)
    return drawn


def likeliest(q: Tensor, count: int) -> list[int]:
    """The best tokens of q [V]; -1 where they have no probability."""
    best = q.topk(count)
    return [token if chance > 0 else NO_TOKEN for token, chance in zip(*map(Tensor.tolist, best[::-1]), strict=True)]


def mixed_siblings(q: Tensor, count: int, draws: Draws) -> list[int]:
    """The best tokens of q [V] and, last, one drawn from the others."""
    fixed = likeliest(q, count - 1)
    rest = q.index_fill(0, torch.tensor([token for token in fixed if token != NO_TOKEN], dtype=torch.long), 0.0)
    return [*fixed, *siblings(rest, 1, draws)]
