"""Choose the tree's size, and how the backbone multiplies: most expected tokens per second on this machine."""

import time
from dataclasses import dataclass, field

import torch

from medusa.backbone import Backbone
from medusa.model import MedusaModel
from medusa.tree import CandidateTree
from medusa.tree_search import SearchedTree

from .cache import TreeCache
from .dynamic_tree import DynamicLayout, DynamicTree, propose_dynamic
from .layout import TreeLayout
from .propose import propose
from .verify import prefill, verify

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
DYNAMIC_SIZES = (1, 2, 4, 8, 16, 32)
"""Few, since each is a graph of its own where the pass is compiled."""
CONTEXT = 128
ROUNDS = 6
WORTH_TIMING = 0.7
"""After a first look, trees that promise less than this share of the best are not timed again."""


@dataclass
class TreeChoice:
    """A tree on a backbone, and what a step with it takes."""

    backbone: Backbone
    tree: CandidateTree
    tokens_per_step: float
    """Expected, from the search."""
    times: list[float] = field(default_factory=list)
    """Measured seconds of one step."""

    @property
    def tokens_per_second(self) -> float:
        """Expected. The quickest time counts: whatever else the machine does only adds to it."""
        return self.tokens_per_step / min(self.times)


def choose_tree(model: MedusaModel, backbones: list[Backbone], searched: SearchedTree) -> TreeChoice:
    """Time whole steps with growing trees, in turns, and take what promises the most tokens per second.

    Args:
        model: whose heads fill the tree.
        backbones: what could verify it: the model's own, a packed view of it.
        searched: the best tree of every size.
    """
    largest = len(searched.paths) + 1
    choices = []
    timers = []
    for backbone in backbones:
        timer = StepTimer(model, backbone)
        timer.seconds(CandidateTree(()))  # warm up
        best = 0.0
        for size in (size for size in SIZES if size <= largest):
            choice = TreeChoice(backbone, searched.best(size), searched.tokens_per_step(size))
            choice.times.append(timer.seconds(choice.tree))
            choices.append(choice)
            timers.append(timer)
            best = max(best, choice.tokens_per_second)
            if searched.tokens_per_step(largest) / choice.times[0] < WORTH_TIMING * best:
                break  # larger trees cost more, and even the largest would not emit enough to make up for it
    limit = WORTH_TIMING * max(choice.tokens_per_second for choice in choices)
    for _ in range(ROUNDS):
        for choice, timer in zip(choices, timers, strict=True):
            if choice.tokens_per_second >= limit:
                choice.times.append(timer.seconds(choice.tree))
    return max(choices, key=lambda choice: choice.tokens_per_second)


def choose_dynamic_tree(model: MedusaModel, backbones: list[Backbone]) -> tuple[Backbone, DynamicTree]:
    """Time whole steps of every size, in turns, on each backbone, and take the backbone that promises most.

    Args:
        model: whose heads fill the tree; the tree searched for them is the superset.
        backbones: what could verify it, as for `choose_tree`.

    Raises:
        ValueError: no tree was searched for these heads.
    """
    searched = model.searched_tree
    if searched is None:
        raise ValueError(
            "tree='dynamic' chooses among the nodes of a searched tree, and none was searched for these heads; make "
            "one: medusa tree CHECKPOINT --data FILE"
        )
    superset = searched.best(len(searched.paths) + 1)
    trees = {
        size: DynamicTree(superset, (size,), calibration=searched.calibration)
        for size in DYNAMIC_SIZES
        if size <= superset.num_nodes
    }
    timers = [StepTimer(model, backbone) for backbone in backbones]
    times: list[dict[int, float]] = []
    for timer in timers:
        timer.seconds(trees[1])  # warm up
        own: dict[int, float] = {}
        for size, tree in trees.items():
            own[size] = timer.seconds(tree)
            if own[size] > (1 + tree.depth) * own[1]:
                break  # not even a step that accepts as much as it can would make up for larger trees
        times.append(own)
    for _ in range(ROUNDS):
        for timer, own in zip(timers, times, strict=True):
            for size in own:
                own[size] = min(own[size], timer.seconds(trees[size]))
    rates = [max(searched.tokens_per_step(size) / own[size] for size in own) for own in times]
    best = max(range(len(backbones)), key=rates.__getitem__)
    sizes, seconds = tuple(times[best]), tuple(times[best].values())
    return backbones[best], DynamicTree(superset, sizes, seconds, rates[best], searched.calibration)


class StepTimer:
    """Repeats one decoding step behind the same text."""

    @torch.inference_mode()
    def __init__(self, model: MedusaModel, backbone: Backbone) -> None:
        self.heads = model.heads
        self.backbone = backbone
        self.prompt = torch.arange(CONTEXT, device=backbone.lm_weight.device) % backbone.vocab_size
        if backbone.context_length is not None:
            self.prompt = self.prompt[: max(1, backbone.context_length - max(SIZES))]
        self.cache = TreeCache(backbone.num_layers, len(self.prompt) + max(SIZES))
        self.hidden, logits = prefill(backbone, [self.prompt], self.cache)
        self.root = logits.argmax(dim=-1)

    @torch.inference_mode()
    def seconds(self, tree: CandidateTree | DynamicTree) -> float:
        """Time of one step: proposal, verification, the backbone's choices. Nothing is kept of it."""
        if isinstance(tree, DynamicTree):
            dynamic = DynamicLayout.of(tree, self.prompt.device)
            started = time.perf_counter()
            candidates, layout = propose_dynamic(self.heads, self.hidden, self.root, dynamic)
        else:
            layout = TreeLayout.of(tree, self.prompt.device)
            started = time.perf_counter()
            candidates = propose(self.heads, self.hidden, self.root, layout)
        _, logits = verify(self.backbone, candidates.tokens, layout, self.cache)
        logits.argmax(dim=-1).tolist()
        return time.perf_counter() - started
