"""Choose the size of the tree: most expected tokens per second on this machine."""

import time
from dataclasses import dataclass
from statistics import median

import torch

from medusa.backbone import Backbone
from medusa.model import MedusaModel
from medusa.tree import CandidateTree
from medusa.tree_search import SearchedTree

from .accept import accept_greedy
from .cache import TreeCache
from .layout import TreeLayout
from .propose import propose
from .verify import prefill, verify

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
CONTEXT = 128
REPEATS = 5


@dataclass(frozen=True)
class TreeChoice:
    """A tree and why it was chosen."""

    tree: CandidateTree
    seconds: dict[int, float]
    """Measured time of one step by number of nodes."""
    tokens_per_second: float
    """Expected: searched tokens per step / measured time."""


@torch.inference_mode()
def choose_tree(model: MedusaModel, backbone: Backbone, searched: SearchedTree) -> TreeChoice:
    """Time one whole step for growing trees and take the tree with the most expected tokens per second.

    Args:
        model: whose heads fill the tree.
        backbone: what verifies it (the model's own, or a packed view of it).
        searched: the best tree of every size.
    """
    prompt = torch.arange(CONTEXT, device=backbone.lm_weight.device) % backbone.vocab_size
    if backbone.context_length is not None:
        prompt = prompt[: max(1, backbone.context_length - max(SIZES))]
    cache = TreeCache(backbone.num_layers, len(prompt) + max(SIZES))
    hidden, logits = prefill(backbone, prompt, cache)
    root = logits.argmax()

    def step_seconds(tree: CandidateTree) -> float:
        layout = TreeLayout.of(tree, prompt.device)
        times = []
        for _ in range(REPEATS + 1):
            started = time.perf_counter()
            tokens = propose(model.heads, hidden, root, layout)
            _, node_logits = verify(backbone, tokens, layout, cache)
            _, bonus = accept_greedy(tokens, node_logits, layout)
            bonus.item()
            times.append(time.perf_counter() - started)
            cache.keep(len(prompt), layout.depths[:0])
        return median(times[1:])

    largest = len(searched.paths) + 1
    most = searched.tokens_per_step(largest)
    seconds: dict[int, float] = {}
    best, best_rate = CandidateTree(()), 0.0
    for size in (size for size in SIZES if size <= largest):
        tree = searched.best(size)
        seconds[size] = step_seconds(tree)
        rate = searched.tokens_per_step(size) / seconds[size]
        if rate > best_rate:
            best, best_rate = tree, rate
        if most / seconds[size] < 0.9 * best_rate:
            break  # larger trees cost more and even the largest would not emit enough to make up for it
    return TreeChoice(best, seconds, best_rate)
