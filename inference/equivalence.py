"""Does the decoder say what `generate` says, and where it does not, is rounding the reason?

Greedy decoding takes the token with the highest score. The decoder computes the same scores as `generate`, but several
tokens in one pass, and floating-point sums depend on the order in which they are taken. Where the two best scores are
closer than that, either token is right. How far scores move is measured, not guessed: the plain model computes the same
text twice, token by token and in one pass, without heads, trees or the decoder's cache.

A choice is explained by rounding if its score falls short of the best one by at most `SLACK` times the larger of

- the largest difference, over the vocabulary, between the logits of those two plain passes at that place, and
- one unit in the last place of the best score, in the model's dtype (fp32 at the finest: scores are compared in it).

Both scores can move by that much, in opposite directions, hence 2. And every token of the decoder's answer is held
against this, not only the first that differs: from there on the two answers are different texts, and a decoder that
goes wrong later would hide behind an early tie.

T prompt length, n new tokens, V vocabulary.
"""

from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor
from transformers import DynamicCache

from medusa.backbone import Backbone

from .request import prepare

SLACK = 2.0


@dataclass(frozen=True)
class Choice:
    """How plain decoding ranks one token of an answer, after the same text."""

    margin: float
    """How far its score falls short of the best one; 0 for the best."""
    rounding: float
    """How far scores move here when they are computed in another order."""
    rank: int
    """1 for the best token, 2 for the runner-up."""

    @property
    def explained(self) -> bool:
        """Whether the token is as good as the best one, up to rounding."""
        return self.margin <= SLACK * self.rounding


@dataclass(frozen=True)
class Divergence:
    """Where an answer of the decoder parts from that of `generate`."""

    place: int
    """Index of the first new token that differs."""
    plain_token: int | None
    """What `generate` says there; None if its answer has ended."""
    medusa_token: int | None
    """What the decoder says there; None if its answer has ended."""
    choice: Choice | None
    """How plain decoding ranks the decoder's token; None where one answer goes on and the other has ended."""
    unexplained: int | None
    """Index of the first new token, here or later, that rounding does not explain."""

    @property
    def explained(self) -> bool:
        """Whether rounding explains the whole answer."""
        return self.unexplained is None


def explain(backbone: Backbone, prompt: Tensor, plain: list[int], medusa: list[int]) -> Divergence | None:
    """Compare two greedy answers to a prompt [1, T]; None if they are the same.

    Args:
        backbone: the plain model.
        prompt: what both answer.
        plain: new tokens of `generate`.
        medusa: new tokens of the decoder.
    """
    if plain == medusa:
        return None
    place, (one, other) = next((i, pair) for i, pair in enumerate(zip_longest(plain, medusa)) if pair[0] != pair[1])
    if one is None or other is None:  # the same tokens as far as they go: no choice between two tokens to explain
        return Divergence(place, one, other, None, place)
    ranked = choices(backbone, prompt, medusa)
    unexplained = next((i for i, choice in enumerate(ranked) if not choice.explained), None)
    return Divergence(place, one, other, ranked[place], unexplained)


@torch.inference_mode()
def choices(backbone: Backbone, prompt: Tensor, answer: list[int]) -> list[Choice]:
    """Rank every token of an answer to a prompt [1, T] as plain greedy decoding would, after the text before it."""
    (request,) = prepare(backbone, prompt, None, None, None, {"max_new_tokens": len(answer), "do_sample": False})
    processors = request.processors
    text = torch.cat([prompt, prompt.new_tensor([answer])], dim=1).to(backbone.lm_weight.device)
    length = prompt.shape[1]
    whole = backbone.logits(backbone.hidden(text[:, :-1])[0, length - 1 :])  # [n, V]
    eps = max(torch.finfo(whole.dtype).eps, torch.finfo(torch.float32).eps)
    cache = DynamicCache(config=backbone.model.config)
    ranked = []
    for i, token in enumerate(answer):
        start = 0 if i == 0 else length + i - 1
        logits = backbone.logits(backbone.extend(text[:, start : length + i], cache)[:, -1])  # [1, V]
        scores = processors(text[:, : length + i], logits.to(torch.float32, copy=True))[0]  # type: ignore[arg-type]
        best, own = float(scores.max()), float(scores[token])
        moved = float((logits[0] - whole[i]).abs().max())
        ranked.append(Choice(best - own, max(moved, eps * abs(best)), int((scores > own).sum()) + 1))
    return ranked
