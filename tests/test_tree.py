"""Candidate trees, against a slow walk along the paths."""

import random

import pytest
from tiny import random_tree

from medusa import CandidateTree


@pytest.mark.parametrize("seed", range(10))
def test_buffers_match_the_paths(seed: int) -> None:
    tree = random_tree(seed)
    nodes = [(), *tree.paths]
    assert tree.num_nodes == len(nodes)
    assert tree.depth == max(len(node) for node in nodes)
    assert tree.top_k == 1 + max(rank for node in nodes for rank in node)
    assert tree.depths().tolist() == [len(node) for node in nodes]
    assert tree.ranks().tolist() == [node[-1] if node else 0 for node in nodes]
    assert tree.parents().tolist() == [nodes.index(node[:-1]) for node in nodes]
    assert tree.ancestors().tolist() == [[node[: len(other)] == other for other in nodes] for node in nodes]
    assert all(parent < node for node, parent in enumerate(tree.parents().tolist()) if node), "parents stand first"


def test_order_of_the_paths_does_not_matter() -> None:
    tree = random_tree(0)
    paths = list(tree.paths)
    random.Random(0).shuffle(paths)
    assert paths != list(tree.paths)
    assert CandidateTree.from_paths(paths) == tree
    assert CandidateTree.from_paths([list(path) for path in paths]) == tree


def test_chain() -> None:
    assert CandidateTree.chain(3).paths == ((0,), (0, 0), (0, 0, 0))
    assert CandidateTree.chain(3).parents().tolist() == [0, 0, 1, 2]
    assert CandidateTree.chain(0) == CandidateTree(())


def test_root_alone() -> None:
    root = CandidateTree.from_paths([])
    assert (root.num_nodes, root.depth, root.top_k) == (1, 0, 0)
    assert root.parents().tolist() == root.depths().tolist() == root.ranks().tolist() == [0]
    assert root.ancestors().tolist() == [[True]]


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([(0,), ()], r"\(\) must hold at least one rank"),
        ([(0,), (0, -1)], r"\(0, -1\).*ranks start at 0"),
        ([(0,), (1, 0)], r"\(1, 0\) has no parent: add \(1,\)"),
        ([(0, 0, 0), (0,)], r"\(0, 0, 0\) has no parent: add \(0, 0\)"),
        ([(0,), (1,), (0,)], r"\(0,\) stands twice"),
    ],
)
def test_impossible_paths_are_named(paths: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CandidateTree.from_paths(paths)


def test_tree_must_fit_the_heads() -> None:
    tree = CandidateTree.from_paths([(0,), (4,), (4, 1)])
    tree.check_heads(num_heads=2, vocab_size=5)
    with pytest.raises(ValueError, match="2 levels deep but the model has 1 heads"):
        tree.check_heads(num_heads=1, vocab_size=5)
    with pytest.raises(ValueError, match=r"rank 4.*4 tokens"):
        tree.check_heads(num_heads=2, vocab_size=4)
