"""Compare the decoder with plain `generate`, in one process, prompt by prompt."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel

from .decoder import MedusaDecoder


@dataclass
class Comparison:
    """One prompt decoded both ways, token by token the same number."""

    prompt: Tensor
    """[1, T]"""
    plain: list[int]
    """New tokens of `generate`."""
    medusa: list[int]
    """New tokens of the decoder."""
    plain_seconds: float
    medusa_seconds: float
    steps: int

    @property
    def identical(self) -> bool:
        """Whether both say the same."""
        return self.plain == self.medusa

    @property
    def first_difference(self) -> int:
        """Index of the first new token that differs, or the length of the shorter answer."""
        pairs = zip(self.plain, self.medusa, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(self.plain), len(self.medusa)))


@dataclass
class Summary:
    """Many comparisons."""

    comparisons: list[Comparison] = field(default_factory=list)

    @property
    def tokens_per_step(self) -> float:
        """Tokens emitted by verify passes / verify passes, over all prompts."""
        return sum(len(c.medusa) - 1 for c in self.comparisons) / max(sum(c.steps for c in self.comparisons), 1)

    @property
    def tokens_per_second(self) -> float:
        """Of the decoder, prefill included."""
        return sum(len(c.medusa) for c in self.comparisons) / sum(c.medusa_seconds for c in self.comparisons)

    @property
    def plain_tokens_per_second(self) -> float:
        """Of `generate`, prefill included."""
        return sum(len(c.plain) for c in self.comparisons) / sum(c.plain_seconds for c in self.comparisons)

    @property
    def ratio(self) -> float:
        """Median over the prompts of how many times more tokens per second the decoder gives."""
        return median((len(c.medusa) / c.medusa_seconds) / (len(c.plain) / c.plain_seconds) for c in self.comparisons)

    @property
    def identical(self) -> int:
        """How many prompts came out the same."""
        return sum(c.identical for c in self.comparisons)


def compare(
    decoder: MedusaDecoder, prompts: list[Tensor], max_new_tokens: int, advance: Callable[[int], None]
) -> Summary:
    """Decode every prompt [1, T] greedily both ways, in turns, so that a slow moment of the machine hits both.

    The first prompt is decoded once before, to warm up.
    """
    model, context = decoder.model.model, decoder.backbone.context_length
    plain_generate(model, prompts[0], 8)
    decoder.generate(prompts[0], max_new_tokens=8, do_sample=False)
    summary = Summary()
    for prompt in prompts:
        # `generate` writes on past the end of the context, the decoder does not.
        room = max_new_tokens if context is None else min(max_new_tokens, context - prompt.shape[1])
        started = time.perf_counter()
        plain = plain_generate(model, prompt, room)
        between = time.perf_counter()
        result = decoder.generate(prompt, max_new_tokens=room, do_sample=False)
        ended = time.perf_counter()
        new = result.sequences[0, prompt.shape[1] :].tolist()
        summary.comparisons.append(
            Comparison(prompt, plain, new, between - started, ended - between, result.stats.steps)
        )
        advance(1)
    return summary


def plain_generate(model: PreTrainedModel, prompt: Tensor, max_new_tokens: int) -> list[int]:
    """New tokens of `generate` as people run it: greedy, eager, dynamic cache."""
    assert isinstance(model, GenerationMixin)
    prompt = prompt.to(model.device)
    output = model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=max_new_tokens,
        do_sample=False,
    )
    assert isinstance(output, Tensor)
    return [int(token) for token in output[0, prompt.shape[1] :]]
