"""Greedy answers to many prompts at once, with the hidden states they come from.

Matrix products with many rows are what a machine does best, so a batch should be large and nothing in it should be
idle: what all prompts begin with is read once, prompts of equal length are read together, without padding, and a row
leaves the batch when its answer ends.

B prompts, n rows whose answer goes on, T tokens, D hidden, V vocabulary.
"""

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin

from medusa.backbone import Backbone

from .batch_cache import BatchCache

LOGITS = 2**22
"""At most so many logits (16 MB in fp32) are made at a time: larger buffers go back to the system when they are freed,
and to get new ones takes a CPU about as long as to fill them."""


@torch.inference_mode()
def answer(
    backbone: Backbone, prompts: list[list[int]], max_new_tokens: int, ends: set[int], advance: Callable[[int], None]
) -> tuple[list[list[int]], list[Tensor]]:
    """Answer a batch of prompts greedily, each as `generate` would answer it alone.

    Args:
        backbone: who answers.
        prompts: their token ids.
        max_new_tokens: longest answer; none reaches beyond the backbone's context either.
        ends: tokens that end an answer.
        advance: called with the number of answers that have just ended.

    Returns:
        The answers' ids, end token included, and for each the hidden states that its tokens came from, [T, D].
    """
    device = backbone.lm_weight.device
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    limits = torch.full_like(lengths, max_new_tokens)
    if backbone.context_length is not None:
        limits = limits.minimum(backbone.context_length - lengths)
    width = int(lengths.max()) + max_new_tokens
    cache, hidden = read(backbone, prompts, width)
    visible = torch.arange(width, device=device) >= (lengths.max() - lengths)[:, None]  # [B, width]
    stop = torch.tensor(sorted(ends), dtype=torch.long, device=device)
    tokens = torch.zeros(len(prompts), max_new_tokens, dtype=torch.long, device=device)
    states = hidden.new_empty(len(prompts), max_new_tokens, hidden.shape[-1])
    counts = torch.zeros_like(lengths)
    rows = torch.arange(len(prompts), device=device)  # [n], which prompt each row of the batch belongs to
    while True:
        token = likeliest(backbone, hidden)  # [n]
        tokens[rows, counts[rows]], states[rows, counts[rows]] = token, hidden
        counts[rows] += 1
        order = drop_rows(cache, ~torch.isin(token, stop) & (counts[rows] < limits[rows]))
        advance(len(rows) - len(order))
        rows, token, visible = rows[order], token[order], visible[order]
        if len(rows) == 0:
            break
        position = lengths[rows] + counts[rows] - 1
        seen = visible[:, : cache.get_seq_length() + 1]
        hidden = backbone.extend(token[:, None], cache, position[:, None], seen)[:, -1]
    answers = [tokens[i, :count].tolist() for i, count in enumerate(counts.tolist())]
    return answers, [states[i, : len(ids)].cpu().clone() for i, ids in enumerate(answers)]


def likeliest(backbone: Backbone, hidden: Tensor) -> Tensor:
    """The backbone's greedy tokens, from slices of the vocabulary: [n, D] -> [n]."""
    width = max(1, LOGITS // len(hidden))
    scores, tokens = [], []
    for start in range(0, len(backbone.lm_weight), width):
        part = slice(start, start + width)
        bias = None if backbone.lm_bias is None else backbone.lm_bias[part]
        score, token = backbone.transform(F.linear(hidden, backbone.lm_weight[part], bias)).max(dim=-1)
        scores.append(score)
        tokens.append(token + start)
    best = torch.stack(scores).argmax(dim=0, keepdim=True)  # [1, n]
    return torch.stack(tokens).gather(0, best)[0]


def read(backbone: Backbone, prompts: list[list[int]], width: int) -> tuple[BatchCache, Tensor]:
    """Read the prompts; returns a cache in which all end at the same column, and their last hidden states [B, D]."""
    device = backbone.lm_weight.device
    longest, shortest = (choose(len(prompt) for prompt in prompts) for choose in (max, min))
    cache = BatchCache(backbone.num_layers, len(prompts), width, longest)
    hidden = torch.empty(len(prompts), backbone.hidden_size, dtype=backbone.lm_weight.dtype, device=device)
    # Chats begin alike, with a system message or at least a few special tokens.
    differing = (i for i in range(shortest - 1) if any(prompt[i] != prompts[0][i] for prompt in prompts))
    beginning = next(differing, shortest - 1)
    begun = DynamicCache()
    if beginning:
        backbone.extend(torch.tensor([prompts[0][:beginning]], device=device), begun)
    by_length: dict[int, list[int]] = defaultdict(list)
    for i, prompt in enumerate(prompts):
        by_length[len(prompt)].append(i)
    for same in by_length.values():
        rest = torch.tensor([prompts[i][beginning:] for i in same], device=device)
        part = repeated(begun, len(same))
        rows = torch.tensor(same, device=device)
        hidden[rows] = backbone.extend(rest, part)[:, -1]
        cache.write(rows, part)
    return cache, hidden


def repeated(cache: DynamicCache, rows: int) -> DynamicCache:
    """A cache that holds the one text of another `rows` times."""
    result = DynamicCache()
    for i, layer in enumerate(cache.layers):
        assert isinstance(layer, CacheLayerMixin)
        assert layer.keys is not None
        assert layer.values is not None
        result.update(layer.keys.expand(rows, -1, -1, -1), layer.values.expand(rows, -1, -1, -1), i)
    return result


def drop_rows(cache: BatchCache, keep: Tensor) -> Tensor:
    """Drop rows from a batch by moving its last rows into their places.

    Returns:
        Which row now stands where, so that the caller can reorder what goes along with the rows.
    """
    count = int(keep.sum())
    order = torch.arange(count, device=keep.device)
    holes = order[~keep[:count]]
    if len(holes):
        last = count + keep[count:].nonzero()[:, 0]
        cache.move(last, holes)
        order[holes] = last
    return order
