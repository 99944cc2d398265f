"""Trees of every row as tensors, against filling them in entry by entry."""

import random

import torch

from medusa.inference.layout import TreeLayout


def test_each_row_has_the_tree_of_its_parents() -> None:
    dice = random.Random(0)
    nodes = 12
    rows = [[dice.randrange(node) for node in range(1, count)] for count in (12, 7, 1)]
    layout = TreeLayout.of_parents(rows, nodes, torch.device("cpu"))
    for row, own in enumerate(rows):
        depths, ranks = [0] * nodes, [0] * nodes
        children: list[list[int]] = [[] for _ in range(nodes)]
        ancestors = [{node} for node in range(nodes)]  # nodes that fill up see themselves alone
        for node, parent in enumerate(own, start=1):
            depths[node], ranks[node] = depths[parent] + 1, len(children[parent])
            ancestors[node] |= ancestors[parent]
            children[parent].append(node)
        assert layout.depths[row].tolist() == depths
        assert layout.ranks[row].tolist() == ranks
        assert layout.children[row] == children
        seen = [set(line.nonzero()[:, 0].tolist()) for line in layout.ancestors[row]]
        assert seen == ancestors


def test_roots_alone() -> None:
    layout = TreeLayout.of_parents([[], []], 1, torch.device("cpu"))
    assert layout.ancestors.tolist() == [[[True]], [[True]]]
    assert layout.depths.tolist() == [[0], [0]]
