"""Heads and look-up fill one tree: heads say what is likely, the text says what was said before.

B rows, K heads, G guesses of each, M nodes of the heads' tree, N nodes of a step.
"""

import itertools

from torch import Tensor

from medusa.heads import MedusaHeads
from medusa.model import MedusaModel

from .dynamic_tree import DynamicLayout, DynamicTree
from .layout import TreeLayout
from .lookup import Lookup, LookupDrafting
from .propose import Candidates, fill
from .proposer import DecodingState
from .request import Row
from .token_tree import Continuations, Tokens, grow, lay_out
from .walk import Path

HEAD_NODES = 64
"""Of the tree that was searched for the heads, so many nodes are looked at."""


class HeadsAndLookup:
    """Proposes the likeliest nodes of both, under one budget of nodes; what both propose is one node.

    Nothing here depends on what the backbone will say, so acceptance is exact.
    """

    def __init__(self, model: MedusaModel, lookup: Lookup, tree: DynamicTree | None = None) -> None:
        """Lay out what the heads may propose.

        Args:
            model: whose heads.
            lookup: the other source; its sizes and its `min_chance` are those of the combined tree.
            tree: the heads' nodes, and what their confidence is worth; its sizes are not looked at. None: the first
                nodes of the tree that was searched for these heads, with its calibration.

        Raises:
            ValueError: no tree is given and none was searched for these heads, or it does not fit them.
        """
        tree = _searched(model) if tree is None else tree
        tree.check_heads(model.config.num_heads, model.heads.draft_size)
        self.heads = model.heads
        self.lookup = lookup
        self.layout = DynamicLayout.of(tree, model.backbone.lm_weight.device)

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many nodes a step may have."""
        return self.lookup.sizes

    @property
    def depth(self) -> int:
        """The most tokens that a step can accept."""
        return self.lookup.depth

    def start(self, rows: list[Row]) -> "CombinedDrafting":
        """Index the prompts."""
        return CombinedDrafting(self, self.lookup.start(rows))


class CombinedDrafting:
    """A tree for each row, all of one size."""

    def __init__(self, proposer: HeadsAndLookup, looking_up: LookupDrafting) -> None:
        """Merge what the heads propose into what `looking_up` finds."""
        self.proposer = proposer
        self.looking_up = looking_up

    def propose(self, state: DecodingState) -> tuple[Candidates, TreeLayout]:
        """Fill a tree behind every row's root."""
        lookup, trees = self.proposer.lookup, []
        sizes = lookup.step_sizes
        guesses = guess_with_heads(self.proposer.heads, state.hidden, state.root, self.proposer.layout)
        for text, guessed in zip(self.looking_up.texts, guesses, strict=True):
            text.catch_up()

            def both(path: Tokens, text=text, guessed=guessed) -> Continuations:
                return merge(guessed.get(path, {}), text.continuations(path))

            trees.append(grow(both, sizes.largest, lookup.min_chance))
        return lay_out(trees, state.root, sizes.choose(trees))

    def commit(self, paths: list[Path]) -> None:
        """What was accepted is read from the rows."""

    def select(self, rows: list[int]) -> None:
        """Go on with these rows alone."""
        self.looking_up.select(rows)


def guess_with_heads(
    heads: MedusaHeads, hidden: Tensor, root: Tensor, layout: DynamicLayout
) -> list[dict[Tokens, Continuations]]:
    """What the heads propose behind every token path of their tree, for each row.

    Args:
        heads: the heads.
        hidden: hidden state that each root came from, [B, D].
        root: ids of the roots, [B].
        layout: the heads' nodes.
    """
    logits = heads(hidden, root).transpose(0, 1)  # [B, K, Vd]
    best = logits.topk(layout.superset.top_k, dim=-1)  # [B, K, G]
    tokens = fill(heads.to_vocab(best.indices), root, layout.superset).tokens  # [B, M]
    joint = layout.joint(best.values.float() - logits.float().logsumexp(dim=-1, keepdim=True))  # [B, M]
    share = (joint - joint[:, layout.parents]).exp()  # of a node, if its parent is right
    return [
        by_path(row, chances, layout.parents.tolist())
        for row, chances in zip(tokens.tolist(), share.tolist(), strict=True)
    ]


def by_path(tokens: list[int], shares: list[float], parents: list[int]) -> dict[Tokens, Continuations]:
    """Children of each node of a tree of M nodes, by the tokens on the way to it."""
    paths: list[Tokens] = [()]
    continuations: dict[Tokens, Continuations] = {}
    for token, share, parent in itertools.islice(zip(tokens, shares, parents, strict=True), 1, None):
        continuations.setdefault(paths[parent], {})[token] = share
        paths.append((*paths[parent], token))
    return continuations


def merge(guessed: Continuations, found: Continuations) -> Continuations:
    """One continuation of both: where both name a token it is wrong only if both are, as if they erred independently.

    Likelier ones first, and together at most 1.
    """
    if not guessed or not found:
        return guessed or found
    both = {token: 1 - (1 - guessed.get(token, 0.0)) * (1 - found.get(token, 0.0)) for token in guessed | found}
    total = max(sum(both.values()), 1.0)
    return {token: chance / total for token, chance in sorted(both.items(), key=lambda one: -one[1])}


def _searched(model: MedusaModel) -> DynamicTree:
    """The beginning of the searched tree."""
    searched = model.searched_tree
    if searched is None:
        raise ValueError(
            "HeadsAndLookup weighs the nodes of a searched tree against what is looked up, and none was searched for "
            "these heads; make one: medusa tree CHECKPOINT --data FILE, or give tree=DynamicTree(...)"
        )
    superset = searched.best(HEAD_NODES)
    return DynamicTree(superset, (superset.num_nodes,), calibration=searched.calibration)
