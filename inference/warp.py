"""From the backbone's logits to the scores that plain decoding would choose from. R texts, V vocabulary."""

from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process

from .request import Row

WARPERS = (
    logits_process.TemperatureLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.TopHLogitsWarper,
    logits_process.MinPLogitsWarper,
    logits_process.TypicalLogitsWarper,
    logits_process.EpsilonLogitsWarper,
    logits_process.EtaLogitsWarper,
)
"""They look at the scores alone: not at the text, not at which token a score belongs to."""

CONTEXT_FREE = (
    *WARPERS,
    logits_process.InfNanRemoveLogitsProcessor,
    logits_process.LogitNormalization,
    logits_process.SuppressTokensLogitsProcessor,
)
"""Processors that do not look at the text, so texts of any length can go through them together."""


def processed_scores(rows: list[Row], contexts: list[Tensor], logits: Tensor) -> Tensor:
    """Apply each row's processors to its logits, with its own text as context.

    Args:
        rows: whose processors; the same row may stand several times.
        contexts: the text before each token to choose, [1, length] each.
        logits: the backbone's, [R, V].

    Returns:
        Scores [R, V] in fp32, as `generate` computes them; -inf where a token is forbidden.

    Raises:
        ValueError: a processor forbade every token or returned NaN.
    """
    scores = logits.to(dtype=torch.float32, copy=True)
    if all(not row.processors for row in rows):
        return scores
    together = all(_same(row.processors, rows[0].processors) for row in rows)
    if together:
        for processor in rows[0].processors:
            if isinstance(processor, CONTEXT_FREE):
                scores = _apply(processor, contexts[0], scores)
            else:
                scores = torch.cat(
                    [_apply(processor, context, scores[i : i + 1]) for i, context in enumerate(contexts)]
                )
    else:
        each = zip(rows, contexts, strict=True)
        scores = torch.cat(
            [_apply(row.processors, context, scores[i : i + 1]) for i, (row, context) in enumerate(each)]
        )
    best = scores.amax(dim=-1)
    if not bool(torch.isfinite(best).all()):
        bad = int(torch.isfinite(best).logical_not().nonzero()[0])
        what = "returned NaN" if bool(scores[bad].isnan().any()) else "forbade every token"
        if not bool(logits[bad].isfinite().all()):
            what = "were given logits that are not finite: the backbone itself overflows"
        names = ", ".join(type(processor).__name__ for processor in rows[bad].processors)
        raise ValueError(
            f"after {contexts[bad].shape[1]} tokens the logits processors ({names}) {what}; at least one token must "
            "keep a finite score"
        )
    return scores


def draft_scores(rows: list[Row], logits: Tensor) -> Tensor:
    """What the rows' temperature and truncation make of the heads' logits, so that heads draw as the backbone would.

    [B, K, Vd] -> [B, K, Vd]. Processors that look at the text or at token ids are left out: any proposal is exact.
    """
    scores = logits.clone()
    for i, row in enumerate(rows):
        for processor in row.processors:
            if isinstance(processor, WARPERS):
                scores[i] = _apply(processor, row.context, scores[i])
    return scores


def _apply(processor: Any, context: Tensor, scores: Tensor) -> Tensor:
    """transformers types its processors by tensor classes that nobody makes."""
    processed = processor(context, scores)
    assert isinstance(processed, Tensor)
    return processed


def _same(a: LogitsProcessorList, b: LogitsProcessorList) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def probabilities(rows: list[Row], scores: Tensor) -> Tensor:
    """What each row's next token is drawn from, [R, V]: all on the likeliest one where a row is greedy."""
    greedy = torch.tensor([not row.do_sample for row in rows], device=scores.device)
    if not bool(greedy.any()):
        return scores.softmax(dim=-1)
    best = torch.zeros_like(scores).scatter_(1, scores.argmax(dim=-1, keepdim=True), 1.0)
    return best if bool(greedy.all()) else torch.where(greedy[:, None], best, scores.softmax(dim=-1))
