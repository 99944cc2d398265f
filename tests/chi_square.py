"""Whether samples could come from a distribution."""

from collections.abc import Hashable, Mapping

import torch

ENOUGH = 5
"""Cells with a smaller expectation are counted as one."""


def p_value(found: Mapping[Hashable, int], expected: Mapping[Hashable, float]) -> float:
    """Pearson's chi-square: how likely counts at least as far from the expected probabilities are."""
    samples = sum(found.values())
    assert abs(sum(expected.values()) - 1) < 1e-4, "no distribution"
    if any(expected.get(outcome, 0) == 0 for outcome in found):
        return 0.0  # impossible
    cells = [(found.get(outcome, 0), chance * samples) for outcome, chance in expected.items() if chance > 0]
    rare = [cell for cell in cells if cell[1] < ENOUGH]
    cells = [cell for cell in cells if cell[1] >= ENOUGH]
    together = (sum(count for count, _ in rare), sum(mean for _, mean in rare))
    if together[1] >= ENOUGH:
        cells.append(together)
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells)
    half_freedom = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half_freedom, torch.tensor(statistic / 2, dtype=torch.float64)))
