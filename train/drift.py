"""How far Medusa-2 moved the backbone from what it was. P positions of a row, D hidden, V vocabulary."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from medusa.backbone import Backbone
from medusa.checkpoint import DRIFT_FILE

from .hidden_states import LiveHiddenStates
from .loss import divergence
from .pairs import root_positions
from .supervision import TrainingRow

ROWS = 64
"""Measured on so many rows at most."""


@dataclass(frozen=True)
class Drift:
    """Figures over the assistant's tokens of some rows, each predicted from the true text before it."""

    perplexity_before: float
    perplexity_after: float
    kl: float
    """Mean KL(original || now) of the next token's distribution, in nats."""
    greedy_agreement: float
    """Share of tokens at which both find the same token likeliest."""
    positions: int

    def save(self, directory: Path) -> None:
        """Write the figures beside the heads."""
        (directory / DRIFT_FILE).write_text(json.dumps(asdict(self), indent=2) + "\n")


class Original:
    """What a backbone says of some rows before it learns: its hidden states there, and its LM head."""

    def __init__(self, backbone: Backbone, rows: list[TrainingRow]) -> None:
        """Run the backbone over the first rows. Its LM head's weight must not change; adapters do not change it."""
        self.rows = rows[:ROWS]
        self.weight, self.bias, self.transform = backbone.lm_weight, backbone.lm_bias, backbone.transform
        live = LiveHiddenStates(backbone)
        self.hidden = [live.of([row])[0].cpu() for row in self.rows]

    @torch.no_grad()
    def drift(self, backbone: Backbone) -> Drift:
        """Compare the backbone as it is now with what it was."""
        live = LiveHiddenStates(backbone)
        sums = torch.zeros(4, dtype=torch.float64)
        positions = 0
        for row, stored in zip(self.rows, self.hidden, strict=True):
            now = backbone.logits(live.of([row])[0]).float()  # [P, V]
            then = self.logits(stored.to(now.device))
            target = torch.tensor([row.input_ids[t + 1] for t in root_positions(row.labels)], device=now.device)
            sums += torch.stack(
                [
                    F.cross_entropy(then, target, reduction="sum"),
                    F.cross_entropy(now, target, reduction="sum"),
                    divergence(now, then.log_softmax(dim=-1)),
                    (now.argmax(dim=-1) == then.argmax(dim=-1)).sum().float(),
                ]
            ).cpu()
            positions += len(target)
        before, after, kl, agreement = (sums / max(positions, 1)).tolist()
        return Drift(math.exp(before), math.exp(after), kl, agreement, positions)

    def logits(self, hidden: Tensor) -> Tensor:
        """The original's logits, [P, D] -> [P, V]."""
        # Layers that learn made the LM head fp32, which changes no value.
        return self.transform(F.linear(hidden.to(self.weight.dtype), self.weight, self.bias)).float()
