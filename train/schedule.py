"""Which rows make which optimizer step, and the learning rate of each."""

import math

import torch

from .config import OptimizationSection


class Schedule:
    """Which rows make which step, and how fast it learns. The same rows for any split into ranks and passes."""

    def __init__(self, num_rows: int, options: OptimizationSection, ranks: int) -> None:
        self.num_rows, self.ranks = num_rows, ranks
        self.batch_size, self.accumulation = options.batch_size, options.accumulation
        self.window = self.batch_size * self.accumulation * ranks
        self.per_epoch = math.ceil(num_rows / self.window)
        self.steps = self.per_epoch * options.epochs
        if options.max_steps is not None:
            self.steps = min(self.steps, options.max_steps)

    def parts(self, step: int, rank: int, seed: int) -> list[list[int]]:
        """Row numbers of each forward pass of `rank` in `step`; some are empty where an epoch runs out."""
        epoch, index = divmod(step, self.per_epoch)
        order = torch.randperm(self.num_rows, generator=torch.Generator().manual_seed(seed + epoch)).tolist()
        window = order[index * self.window : (index + 1) * self.window]
        starts = [(i * self.ranks + rank) * self.batch_size for i in range(self.accumulation)]
        return [window[start : start + self.batch_size] for start in starts]

    def rate(self, step: int, warmup: int) -> float:
        """Factor of the learning rate: linear warm-up, then a cosine that reaches 0 right after the last step."""
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(self.steps - warmup, 1)))
