"""Trees of tokens that grow by their likeliest node. N nodes, S sizes."""

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .accept import NO_TOKEN
from .layout import TreeLayout
from .propose import Candidates

Tokens = tuple[int, ...]
Continuations = dict[int, float]
"""How likely each token comes next if all before it is right, likeliest first; together at most 1."""


@dataclass(frozen=True)
class TokenTree:
    """A filled tree of one row, likeliest nodes first, so that every beginning of it is the best tree of that size."""

    tokens: list[int]
    """Of each node but the root."""
    parents: list[int]
    """Of each node but the root; a parent stands before its children."""
    chances: list[float]
    """How likely each node but the root is reached; never above its parent's."""

    def cut(self, num_nodes: int) -> "TokenTree":
        """The best `num_nodes` nodes, root included."""
        size = num_nodes - 1
        return TokenTree(self.tokens[:size], self.parents[:size], self.chances[:size])


def grow(continue_: Callable[[Tokens], Continuations], num_nodes: int, min_chance: float) -> TokenTree:
    """Take the likeliest token path whose parent is taken, again and again.

    Args:
        continue_: what may follow the root and the tokens behind it.
        num_nodes: stop at so many nodes, root included.
        min_chance: leave out what is reached less often than this.
    """
    tree = TokenTree([], [], [])
    heap: list[tuple[float, int, Tokens, int]] = []  # -chance, order of discovery, tokens behind the root, parent

    order = itertools.count()

    def look_behind(path: Tokens, node: int, chance: float) -> None:
        for token, share in continue_(path).items():
            reached = chance * min(share, 1.0)
            if reached >= min_chance:
                heapq.heappush(heap, (-reached, next(order), (*path, token), node))

    if num_nodes > 1:
        look_behind((), 0, 1.0)
    while heap and len(tree.tokens) + 1 < num_nodes:
        cost, _, path, parent = heapq.heappop(heap)
        tree.tokens.append(path[-1])
        tree.parents.append(parent)
        tree.chances.append(-cost)
        if len(tree.tokens) + 1 < num_nodes:
            look_behind(path, len(tree.tokens), -cost)
    return tree


def lay_out(trees: list[TokenTree], root: Tensor, num_nodes: int) -> tuple[Candidates, TreeLayout]:
    """Trees of B rows as tensors on the device of `root` [B]; each is cut, or filled up with -1, to `num_nodes`."""
    cut = [tree.cut(num_nodes) for tree in trees]
    tokens = torch.tensor([[*tree.tokens, *[NO_TOKEN] * (num_nodes - 1 - len(tree.tokens))] for tree in cut])
    tokens = torch.cat([root[:, None], tokens.to(root).reshape(len(root), -1)], dim=1)  # [B, N]
    return Candidates(tokens), TreeLayout.of_parents([tree.parents for tree in cut], num_nodes, root.device)
