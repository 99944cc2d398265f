"""Trees that are filled by the heads of a model."""

import warnings
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from medusa.backbone import Backbone
from medusa.heads import MedusaHeads
from medusa.model import MedusaModel
from medusa.packed_linear import can_pack, pack_linears
from medusa.tree import CandidateTree

from .dynamic_tree import DynamicLayout, DynamicTree, propose_dynamic
from .layout import TreeLayout
from .propose import PROPOSALS, Candidates, Proposal, propose, propose_by_chance
from .proposer import DecodingState
from .request import Row
from .tree_choice import choose_dynamic_tree, choose_tree
from .verify import check_tree_attention
from .walk import Path
from .warp import draft_scores


class HeadProposer:
    """The heads see the last hidden state and the root, and nothing of a request needs to be remembered."""

    def __init__(
        self,
        heads: MedusaHeads,
        tree: CandidateTree | DynamicTree,
        vocab_size: int,
        device: torch.device,
        proposal: Proposal = "top_k",
    ) -> None:
        """Lay out `tree` for `heads`.

        Args:
            heads: the heads, compiled or not.
            tree: one for all steps, or one that is grown in every step.
            vocab_size: V, the backbone's.
            device: where the heads are.
            proposal: where siblings come from when sampling.

        Raises:
            ValueError: the tree does not fit the heads.
        """
        tree.check_heads(heads.config.num_heads, heads.draft_size)
        self.heads = heads
        self.tree = tree
        self.vocab_size = vocab_size
        self.proposal = proposal
        self.layout: TreeLayout | DynamicLayout = (
            DynamicLayout.of(tree, device) if isinstance(tree, DynamicTree) else TreeLayout.of(tree, device)
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many nodes a step may have."""
        return self.tree.sizes if isinstance(self.tree, DynamicTree) else (self.tree.num_nodes,)

    @property
    def depth(self) -> int:
        """How many heads the tree uses."""
        return self.tree.depth

    def start(self, rows: list[Row]) -> "HeadProposer":
        """There is nothing to remember."""
        return self

    def propose(self, state: DecodingState) -> tuple[Candidates, TreeLayout]:
        """Fill the tree behind every row's root."""
        layout = self.layout
        if isinstance(layout, DynamicLayout):
            return propose_dynamic(self.heads, state.hidden, state.root, layout)
        if self.proposal == "top_k" or layout.num_nodes == 1:
            return propose(self.heads, state.hidden, state.root, layout), layout

        def warp(logits: Tensor) -> Tensor:
            return draft_scores(state.rows, logits)

        mixed = self.proposal == "mixed"
        candidates = propose_by_chance(
            self.heads, state.hidden, state.root, layout, self.vocab_size, warp, mixed, state.generator
        )
        return candidates, layout

    def commit(self, paths: list[Path]) -> None:
        """There is nothing to remember."""

    def select(self, rows: list[int]) -> None:
        """There is nothing to remember."""


def propose_with_heads(
    model: MedusaModel,
    tree: str | CandidateTree | DynamicTree | Sequence[Sequence[int]],
    proposal: Proposal,
    pack_weights: bool | Literal["auto"],
    compiles: bool,
) -> tuple[Backbone, HeadProposer]:
    """Settle the tree, and which view of the backbone verifies it; arguments as for `MedusaDecoder`.

    Raises:
        ValueError: an argument is not allowed, the tree does not fit the heads, or the backbone cannot verify trees.
    """
    if proposal not in PROPOSALS:
        raise ValueError(f"proposal is {proposal!r}; allowed: {', '.join(map(repr, PROPOSALS))}")
    if proposal != "top_k" and (tree == "dynamic" or isinstance(tree, DynamicTree)):
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
