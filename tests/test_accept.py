"""Greedy acceptance, against a walk down the tree."""

import pytest
import torch
from tiny import random_tree
from torch import Tensor

from medusa import CandidateTree
from medusa.inference.accept import accept_greedy
from medusa.inference.layout import TreeLayout

WIDTH = 3
VOCAB = 4


def slow_walk(tree: CandidateTree, tokens: list[int], logits: Tensor) -> tuple[list[int], int]:
    """From the root, step to the child that is the backbone's choice as long as there is one."""
    nodes = [(), *tree.paths]
    here, path = 0, [0]
    while True:
        choice = int(logits[here].argmax())
        children = [node for node in range(1, len(nodes)) if nodes[node][:-1] == nodes[here] and nodes[node]]
        following = [node for node in children if tokens[node] == choice]
        if not following:
            return path, choice
        here = following[0]
        path.append(here)


@pytest.mark.parametrize("seed", range(30))
def test_random_trees_match_a_walk(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tree = random_tree(seed, nodes=20, depth=4, width=WIDTH)
    layout = TreeLayout.of(tree, torch.device("cpu"))
    lengths = set()
    for _ in range(20):
        # Each head ranks the vocabulary in its own order, so siblings differ; with 4 tokens hits are frequent.
        ranking = torch.stack([torch.randperm(VOCAB, generator=generator) for _ in range(tree.depth)])
        tokens = ranking[layout.depths.sub(1).clamp(min=0), layout.ranks]
        tokens[0] = torch.randint(VOCAB, (), generator=generator)
        logits = torch.randn(tree.num_nodes, VOCAB, generator=generator)
        path, bonus = accept_greedy(tokens, logits, layout)
        expected, expected_bonus = slow_walk(tree, tokens.tolist(), logits)
        assert path.tolist() == expected
        assert int(bonus) == expected_bonus
        lengths.add(len(expected))
    assert len(lengths) > 1


def accept(paths: list[tuple[int, ...]], tokens: list[int], choices: list[int]) -> tuple[list[int], int]:
    tree = CandidateTree.from_paths(paths)
    logits = torch.nn.functional.one_hot(torch.tensor(choices), num_classes=10).double()
    path, bonus = accept_greedy(torch.tensor(tokens), logits, TreeLayout.of(tree, torch.device("cpu")))
    return path.tolist(), int(bonus)


def test_root_always_stays() -> None:
    """Its own token is no guess, whatever the logits after it say."""
    assert accept([(0,)], tokens=[5, 6], choices=[7, 7]) == ([0], 7)
    assert accept([], tokens=[5], choices=[5]) == ([0], 5)


def test_token_zero_is_a_token() -> None:
    """No id stands for 'nothing': 0 is accepted where it is chosen, and not where it is not."""
    assert accept([(0,), (0, 0)], tokens=[0, 0, 0], choices=[0, 0, 0]) == ([0, 1, 2], 0)
    assert accept([(0,), (0, 0)], tokens=[3, 0, 4], choices=[0, 4, 5]) == ([0, 1, 2], 5)
    assert accept([(0,), (0, 0)], tokens=[3, 0, 4], choices=[1, 4, 5]) == ([0], 1)
    assert accept([(0,), (0, 0)], tokens=[3, 0, 0], choices=[0, 4, 5]) == ([0, 1], 4)


def test_right_child_of_a_wrong_parent_is_rejected() -> None:
    # Node 1 is wrong; its child is what the backbone would say after it.
    assert accept([(0,), (0, 0)], tokens=[1, 2, 3], choices=[9, 3, 4]) == ([0], 9)


def test_path_through_a_later_branch() -> None:
    # Nodes: 1 = (0,), 2 = (1,), 3 = (0, 0), 4 = (1, 0), 5 = (1, 1)
    paths = [(0,), (1,), (0, 0), (1, 0), (1, 1)]
    assert accept(paths, tokens=[1, 2, 3, 6, 6, 7], choices=[3, 0, 7, 0, 0, 8]) == ([0, 2, 5], 8)
    assert accept(paths, tokens=[1, 2, 3, 6, 6, 7], choices=[2, 6, 7, 5, 0, 8]) == ([0, 1, 3], 5)
