"""Which rows make which optimizer step, and the learning rate of each."""

import math

import torch

from .config import OptimizationSection


class Schedule:
    """Which rows make which step, and how fast it learns. The same rows for any split into ranks and passes."""

    def __init__(
        self,
        num_rows: int,
        options: OptimizationSection,
        ranks: int,
        epochs: int,
        max_steps: int | None,
        warmup_steps: int,
        seed: int,
    ) -> None:
        self.num_rows, self.ranks, self.warmup_steps, self.seed = num_rows, ranks, warmup_steps, seed
        self.batch_size, self.accumulation = options.batch_size, options.accumulation
        self.window = self.batch_size * self.accumulation * ranks
        self.per_epoch = math.ceil(num_rows / self.window)
        self.steps = self.per_epoch * epochs
        if max_steps is not None:
            self.steps = min(self.steps, max_steps)

    def parts(self, step: int, rank: int) -> list[list[int]]:
        """Row numbers of each forward pass of `rank` in `step`; some are empty where an epoch runs out."""
        epoch, index = divmod(step, self.per_epoch)
        order = torch.randperm(self.num_rows, generator=torch.Generator().manual_seed(self.seed + epoch)).tolist()
        window = order[index * self.window : (index + 1) * self.window]
        starts = [(i * self.ranks + rank) * self.batch_size for i in range(self.accumulation)]
        return [window[start : start + self.batch_size] for start in starts]

    def rate(self, step: int) -> float:
        """Factor of the learning rate: linear warm-up, then a cosine that reaches 0 right after the last step."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        return 0.5 * (1 + math.cos(math.pi * (step - self.warmup_steps) / max(self.steps - self.warmup_steps, 1)))

    def heads_weight(self, step: int, kind: str) -> float:
        """Factor of the heads' share in the joint loss: 1, or from 0 at the first step to 1 at the last."""
        progress = step / max(self.steps - 1, 1)
        return {"constant": 1.0, "linear": progress, "sine": math.sin(math.pi / 2 * progress)}[kind]
