"""How probable the backbone finds each guess: what decoding above temperature 0 accepts it with.

P positions, K heads, G guesses of each, S temperatures, D hidden, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from medusa.backbone import Backbone

from .supervision import IGNORE

CHUNK = 256
"""Positions whose logits are in memory at once."""


@dataclass(frozen=True)
class Target:
    """Whose probabilities, and at which temperatures."""

    backbone: Backbone
    temperatures: tuple[float, ...]

    def __post_init__(self) -> None:
        if not all(temperature > 0 for temperature in self.temperatures):
            raise ValueError(
                f"temperatures are {self.temperatures}; each must be above 0, where the text itself says what is right"
            )


def guess_probabilities(target: Target, hidden: Tensor, targets: Tensor, guesses: Tensor) -> Tensor:
    """Probability of each guess behind the text before it.

    The backbone's hidden state one place before the guess says it, and is that of another position of the same answer.
    So nothing but the LM head runs.

    Args:
        target: the backbone and S temperatures.
        hidden: the backbone's hidden states in the order of the text, [P, D].
        targets: what came, or IGNORE where there is no pair, [P, K].
        guesses: vocabulary ids, [P, K, G].

    Returns:
        [P, S, K, G]; 0 where there is no pair.
    """
    positions, heads, width = guesses.shape
    found = torch.zeros(positions, len(target.temperatures), heads, width)
    for start in range(0, positions if target.temperatures else 0, CHUNK):
        logits = target.backbone.logits(hidden[start : start + CHUNK].to(target.backbone.lm_weight)).float()
        log_probs = [(logits / temperature).log_softmax(dim=-1) for temperature in target.temperatures]  # S of [C, V]
        for k in range(heads):
            # Head k of position p guesses what comes behind position p + 1 + k.
            looked_from = torch.arange(start, start + len(logits)) - 1 - k
            looked_from = looked_from[looked_from >= 0]
            looked_from = looked_from[targets[looked_from, k].cpu() != IGNORE]
            rows = (looked_from + 1 + k - start).to(logits.device)
            tokens = guesses[looked_from.to(guesses.device), k]  # [C', G]
            for s, log_prob in enumerate(log_probs):
                found[looked_from, s, k] = log_prob[rows].gather(1, tokens).exp().cpu()
    return found
