"""What vLLM should count: chains of guesses, checked greedily. T tokens, K heads, D hidden."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from medusa import MedusaModel
from medusa.inference.chain import Chain


@dataclass(frozen=True)
class Counts:
    """What checking drafts gave."""

    drafts: int
    """Drafts that were checked."""
    accepted: list[int]
    """Of these, how often the guess of each position was accepted, [K]."""

    def __add__(self, other: "Counts") -> "Counts":
        """Over both."""
        accepted = [a + b for a, b in zip(self.accepted, other.accepted, strict=True)]
        return Counts(self.drafts + other.drafts, accepted)


def greedy(model: MedusaModel, prompt: Sequence[int], new_tokens: int) -> list[int]:
    """What HF `generate` says, whatever ends a text."""
    ids = torch.tensor([prompt])
    sequences = model.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        pad_token_id=0,
        eos_token_id=None,
    )
    assert isinstance(sequences, Tensor)
    tokens: list[int] = sequences[0, len(prompt) :].tolist()
    return tokens


@torch.no_grad()
def simulate(model: MedusaModel, prompt: Sequence[int], new_tokens: int, depth: int) -> tuple[list[int], Counts]:
    """Decode by chains.

    The prompt gives the first token. Every draft is then checked whole, so the last one counts guesses behind the end
    of the answer, as vLLM counts them: it cuts the answer afterwards.

    Returns:
        The answer, and what was counted.
    """
    answer = greedy(model, prompt, new_tokens + depth)
    hidden = model.backbone.hidden(torch.tensor([[*prompt, *answer]]))[0, len(prompt) - 1 :]  # [T, D]
    guesses = Chain(model.heads, depth, hidden.device).guesses(hidden[: len(answer)], torch.tensor(answer)).tolist()
    counts = Counts(0, [0] * depth)
    emitted = 1
    while emitted < new_tokens:
        right = 0
        while right < depth and guesses[emitted - 1][right] == answer[emitted + right]:
            right += 1
        counts += Counts(1, [int(position < right) for position in range(depth)])
        emitted += right + 1
    return answer[:new_tokens], counts
