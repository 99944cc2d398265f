"""Where chance comes in. Acceptance asks for it here, so that a test can go through every outcome instead."""

from typing import Protocol

import torch
from torch import Tensor


class Draws(Protocol):
    """Two kinds of dice."""

    def bernoulli(self, probability: Tensor) -> Tensor:
        """True with the given probability: [R] -> bool [R]."""

    def categorical(self, p: Tensor) -> Tensor:
        """An index drawn from each row of p: [R, V] -> [R]."""


class RandomDraws:
    """Dice that a generator throws."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        """Use `generator`, or torch's global one.

        A generator belongs to a device; it must be that of the probabilities.
        """
        self.generator = generator

    def bernoulli(self, probability: Tensor) -> Tensor:
        """[R] -> bool [R]."""
        uniform = torch.rand(probability.shape, generator=self.generator, device=probability.device)
        return uniform < probability  # uniform is below 1, so what is certain always happens

    def categorical(self, p: Tensor) -> Tensor:
        """[R, V] -> [R]."""
        return torch.multinomial(p, 1, generator=self.generator)[:, 0]


class CertainDraws:
    """For greedy decoding, where every probability is 0 or 1."""

    def bernoulli(self, probability: Tensor) -> Tensor:
        """[R] -> bool [R]."""
        return probability >= 1

    def categorical(self, p: Tensor) -> Tensor:
        """[R, V] -> [R]."""
        return p.argmax(dim=-1)


def dice(generator: torch.Generator | None, seed: int | None, device: torch.device) -> torch.Generator | None:
    """The generator that a caller gave or asked for by its seed; None for torch's global one.

    Raises:
        ValueError: both are given, or the generator is on another device.
    """
    if seed is not None:
        if generator is not None:
            raise ValueError(f"both a generator and seed={seed} are given; give one of them")
        return torch.Generator(device).manual_seed(seed)
    if generator is not None and generator.device.type != device.type:
        raise ValueError(
            f"the generator is on {generator.device}, the model on {device}: make it by torch.Generator('{device}')"
        )
    return generator
