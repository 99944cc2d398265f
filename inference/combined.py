"""Heads and look-up fill one tree: heads say what is likely, the text says what was said before.

B rows, K heads, G guesses of each, M nodes of the heads' tree, N nodes of a step.
"""

import copy
import itertools

from torch import Tensor

from medusa.backbone import Backbone
from medusa.heads import MedusaHeads
from medusa.model import MedusaModel
from medusa.tree import CandidateTree
from medusa.tree_search import SearchedTree

from .dynamic_tree import DynamicLayout, DynamicTree, guess_superset
from .layout import TreeLayout
from .lookup import Lookup, LookupDrafting
from .propose import Candidates
from .proposer import DecodingState
from .request import Row
from .token_tree import Continuations, Tokens, TokenTree, grow, lay_out
from .walk import Path


class HeadsAndLookup:
    """Proposes the likeliest nodes of both, under one budget of nodes; what both propose is one node.

    Nothing here depends on what the backbone will say, so acceptance is exact.
    """

    def __init__(self, model: MedusaModel, lookup: Lookup, tree: SearchedTree | None = None) -> None:
        """Lay out what the heads may propose: twice as many nodes as a step may have.

        Args:
            model: whose heads; sequential ones run once for each level.
            lookup: the other source; its sizes and its `min_chance` are those of the combined tree.
            tree: what the heads are good at, and what their confidence is worth. None: what was found for these heads.

        Raises:
            ValueError: no tree is given and none was searched for these heads, or it does not fit them.
        """
        searched = model.searched_tree if tree is None else tree
        if searched is None:
            raise ValueError(
                "HeadsAndLookup weighs the nodes of a searched tree against what is looked up, and none was searched "
                "for these heads; make one: medusa tree CHECKPOINT --data FILE"
            )
        superset = searched.best(2 * max(lookup.sizes))
        if superset.num_nodes == 1:  # heads that were never right where the tree was searched still have first guesses
            superset = CandidateTree.chain(model.config.num_heads)
        nodes = DynamicTree(superset, (superset.num_nodes,), calibration=searched.calibration)
        nodes.check_heads(model.config.num_heads, model.heads.draft_size)
        self.backbone = model.backbone
        self.heads = model.heads
        self.lookup = lookup
        self.layout = DynamicLayout.of(nodes, model.backbone.lm_weight.device)

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many nodes a step may have."""
        return self.lookup.sizes

    @property
    def depth(self) -> int:
        """The most tokens that a step can accept."""
        return self.lookup.depth

    def for_target(self, target: Backbone, known_tokens: int) -> "HeadsAndLookup":
        """The same, with the look-up for this target.

        Raises:
            ValueError: the heads are those of another model.
        """
        if target.model is not self.backbone.model:
            raise ValueError(
                f"these heads belong to another model than the {type(target.model).__name__} that verifies; give the "
                "MedusaModel that HeadsAndLookup was made with"
            )
        fitted = copy.copy(self)
        fitted.lookup = self.lookup.for_target(target, known_tokens)
        return fitted

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
        own = self.proposer
        guesses = guess_with_heads(own.heads, state.hidden, state.root, own.layout)
        sizes = own.lookup.step_sizes
        trees = [self._merged(row, guessed) for row, guessed in enumerate(guesses)]
        return lay_out(trees, state.root, sizes.choose(trees))

    def _merged(self, row: int, guessed: dict[Tokens, Continuations]) -> TokenTree:
        """The best of both for one row."""
        text, lookup = self.looking_up.texts[row], self.proposer.lookup
        text.catch_up()
        return grow(
            lambda path: merge(guessed.get(path, {}), text.continuations(path)),
            lookup.step_sizes.largest,
            lookup.min_chance,
        )

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
    tokens, log_confidence = guess_superset(heads, hidden, root, layout)  # [B, M] each
    share = layout.hits(log_confidence).exp()
    parents = layout.parents.tolist()
    return [by_path(*row, parents) for row in zip(tokens.tolist(), share.tolist(), strict=True)]


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
