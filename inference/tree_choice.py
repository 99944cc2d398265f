"""Choose the tree's size, and how the backbone multiplies: most expected tokens per second on this machine."""

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from medusa.backbone import Backbone
from medusa.heads import MedusaHeads
from medusa.model import MedusaModel
from medusa.packed_linear import can_pack, pack_linears
from medusa.tree import CandidateTree
from medusa.tree_search import SearchedTree

from .cache import TreeCache
from .draws import CertainDraws
from .dynamic_tree import DynamicTree
from .head_proposer import HeadProposer
from .propose import PROPOSALS, Proposal
from .proposer import DecodingState
from .request import Row
from .verify import check_tree_attention, prefill, verify

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
DYNAMIC_SIZES = (1, 2, 4, 8, 16, 32)
"""Few, since each is a graph of its own where the pass is compiled."""
CONTEXT = 128
ROUNDS = 6
WORTH_TIMING = 0.7
"""After a first look, trees that promise less than this share of the best are not timed again."""


def propose_with_heads(
    model: MedusaModel,
    tree: str | CandidateTree | DynamicTree | Sequence[Sequence[int]],
    proposal: Proposal | Literal["auto"],
    pack_weights: bool | Literal["auto"],
    compiles: bool,
) -> tuple[Backbone, HeadProposer]:
    """Settle the tree, and which view of the backbone verifies it; arguments as for `MedusaDecoder`.

    Raises:
        ValueError: an argument is not allowed, the tree does not fit the heads, or the backbone cannot verify trees.
    """
    dynamic = tree == "dynamic" or isinstance(tree, DynamicTree)
    if proposal == "auto":
        proposal = "top_k" if dynamic else "sampled"
    if proposal not in PROPOSALS:
        raise ValueError(f"proposal is {proposal!r}; allowed: 'auto', {', '.join(map(repr, PROPOSALS))}")
    if proposal != "top_k" and dynamic:
        raise ValueError(
            f"proposal={proposal!r} draws siblings, and a dynamic tree would choose among them by what was drawn, "
            "which is not exact; a dynamic tree takes 'top_k'"
        )
    may_pack = pack_weights == "auto" and tree in ("auto", "dynamic") and can_pack(model.model) is None
    backbones = [] if pack_weights is True else [model.backbone]
    backbones += [Backbone(pack_linears(model.model))] if pack_weights is True or may_pack else []
    for backbone in backbones:
        check_tree_attention(backbone)
    backbone, settled = _settle(model, tree, backbones)
    device = backbone.lm_weight.device
    heads: MedusaHeads = torch.compile(model.heads) if compiles else model.heads  # type: ignore[assignment]
    return backbone, HeadProposer(heads, settled, backbone.vocab_size, device, proposal)


def _settle(
    model: MedusaModel,
    tree: str | CandidateTree | DynamicTree | Sequence[Sequence[int]],
    backbones: list[Backbone],
) -> tuple[Backbone, CandidateTree | DynamicTree]:
    """The backbone and the tree; measured where that is asked for, else the first backbone."""
    if isinstance(tree, CandidateTree | DynamicTree):
        return backbones[0], tree
    if not isinstance(tree, str):
        return backbones[0], CandidateTree.from_paths(tree)
    if tree == "dynamic":
        return choose_dynamic_tree(model, backbones)
    if tree != "auto":
        raise ValueError(
            f"tree is {tree!r}; allowed: 'auto', 'dynamic', a CandidateTree, a DynamicTree, or a list of rank paths"
        )
    if model.searched_tree is None:
        warnings.warn(
            "no tree was searched for these heads, so the decoder checks one chain of best guesses; "
            "`medusa tree CHECKPOINT --data FILE` finds a better one",
            stacklevel=4,
        )
        return backbones[0], CandidateTree.chain(model.config.num_heads)
    choice = choose_tree(model, backbones, model.searched_tree)
    return choice.backbone, choice.tree


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
        prompt = torch.arange(CONTEXT, device=backbone.lm_weight.device) % backbone.vocab_size
        if backbone.context_length is not None:
            prompt = prompt[: max(1, backbone.context_length - max(SIZES))]
        cache = TreeCache(backbone.num_layers, len(prompt) + max(SIZES))
        hidden, logits = prefill(backbone, [prompt], cache)
        rows, root = [Row.greedy(prompt, 1)], logits.argmax(dim=-1)
        proposer = HeadProposer(model.heads, CandidateTree(()), backbone.vocab_size, prompt.device)
        self.state = DecodingState(rows, cache, hidden, root, None, CertainDraws(), proposer)

    @torch.inference_mode()
    def seconds(self, tree: CandidateTree | DynamicTree) -> float:
        """Time of one step: proposal, verification, the backbone's choices. Nothing is kept of it."""
        proposer = HeadProposer(self.heads, tree, self.backbone.vocab_size, self.state.root.device)
        started = time.perf_counter()
        candidates, layout = proposer.propose(self.state)
        _, logits = verify(self.backbone, candidates.tokens, layout, self.state.cache)
        logits.argmax(dim=-1).tolist()
        return time.perf_counter() - started
