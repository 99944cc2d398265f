"""Trees that are filled by the heads of a model."""

import torch
from torch import Tensor

from medusa.backbone import Backbone
from medusa.heads import MedusaHeads
from medusa.tree import CandidateTree

from .dynamic_tree import DynamicLayout, DynamicTree, propose_dynamic
from .layout import TreeLayout
from .levels import levels_of, propose_by_level, propose_by_level_and_chance
from .propose import Candidates, Chance, Proposal, propose, propose_by_chance
from .proposer import DecodingState
from .request import Row
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
        self.levels = levels_of(self.layout) if isinstance(self.layout, TreeLayout) else []

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many nodes a step may have."""
        return self.tree.sizes if isinstance(self.tree, DynamicTree) else (self.tree.num_nodes,)

    @property
    def depth(self) -> int:
        """How many heads the tree uses."""
        return self.tree.depth

    def for_target(self, target: Backbone, known_tokens: int) -> "HeadProposer":
        """The heads know their backbone and what is padding of its vocabulary."""
        return self

    def start(self, rows: list[Row]) -> "HeadProposer":
        """There is nothing to remember."""
        return self

    def propose(self, state: DecodingState) -> tuple[Candidates, TreeLayout]:
        """Fill the tree behind every row's root."""
        heads, hidden, root, layout = self.heads, state.hidden, state.root, self.layout
        if isinstance(layout, DynamicLayout):
            return propose_dynamic(heads, hidden, root, layout)
        sampling = torch.tensor([row.do_sample for row in state.rows], device=root.device)
        if self.proposal == "top_k" or layout.num_nodes == 1 or not bool(sampling.any()):
            if not heads.config.sequential:
                return propose(heads, hidden, root, layout), layout
            tokens, _ = propose_by_level(heads, hidden, root, self.levels, layout.num_nodes)
            return Candidates(tokens), layout

        def warp(logits: Tensor) -> Tensor:
            return draft_scores(state.rows, logits)

        chance = Chance(sampling, self.proposal == "mixed", warp, self.vocab_size, state.generator)
        if not heads.config.sequential:
            return propose_by_chance(heads, hidden, root, layout, chance), layout
        return propose_by_level_and_chance(heads, hidden, root, self.levels, layout.num_nodes, chance), layout

    def commit(self, paths: list[Path]) -> None:
        """There is nothing to remember."""

    def select(self, rows: list[int]) -> None:
        """There is nothing to remember."""
