"""The search, against trying every tree."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from medusa import CandidateTree
from medusa.tree_search import (
    MISS,
    TREE_FILE,
    TYPICAL_NODES,
    SearchedTree,
    rate_tree,
    search_tree,
    search_tree_for_decoding,
    visited_positions,
)

RANKS = range(2)
PATHS = [path for depth in (1, 2, 3) for path in itertools.product(RANKS, repeat=depth)]


def random_ranks(seed: int) -> Tensor:
    """[40, 3] ranks with many misses, and ranks outside PATHS never."""
    return torch.randint(MISS, len(RANKS), (40, 3), generator=torch.Generator().manual_seed(seed))


def slow_tokens_per_step(paths: tuple[tuple[int, ...], ...], ranks: Tensor) -> float:
    """Walk down the tree at every position and count the steps, the root's own token included."""
    total = 0
    for row in ranks.tolist():
        path: tuple[int, ...] = ()
        while len(path) < len(row) and (*path, row[len(path)]) in paths:
            path = (*path, row[len(path)])
        total += 1 + len(path)
    return total / len(ranks)


@pytest.mark.parametrize("seed", range(3))
def test_every_prefix_is_the_best_tree_of_its_size(seed: int) -> None:
    ranks = random_ranks(seed)
    searched = search_tree(ranks, max_nodes=64)
    assert searched.positions == 40
    for size in range(1, 6):
        best = max(
            slow_tokens_per_step(paths, ranks)
            for paths in itertools.combinations(PATHS, size - 1)
            if all(len(path) == 1 or path[:-1] in paths for path in paths)
        )
        tree = searched.best(size)
        assert tree.num_nodes == size
        assert slow_tokens_per_step(tree.paths, ranks) == pytest.approx(best)
        assert searched.tokens_per_step(size) == pytest.approx(best)


def test_every_prefix_is_a_tree_and_gains_fall() -> None:
    searched = search_tree(random_ranks(7), max_nodes=64)
    for size in range(1, len(searched.paths) + 2):
        assert searched.best(size).num_nodes == size  # from_paths refuses a node without its parent
    assert list(searched.gains) == sorted(searched.gains, reverse=True)
    assert all(gain > 0 for gain in searched.gains)


def test_gains_are_counted_together() -> None:
    """Both heads are right half of the time: together always or never. A product of rates would say a quarter."""
    together = search_tree(torch.tensor([[0, 0], [MISS, MISS]] * 10), max_nodes=8)
    assert together.paths == ((0,), (0, 0))
    assert together.gains == (0.5, 0.5)
    never = search_tree(torch.tensor([[0, MISS], [MISS, 0]] * 10), max_nodes=8)
    assert never.paths == ((0,),)
    assert never.gains == (0.5,)


def test_max_nodes_counts_the_root() -> None:
    ranks = random_ranks(0)
    assert search_tree(ranks, max_nodes=1).paths == ()
    assert len(search_tree(ranks, max_nodes=4).paths) == 3
    assert search_tree(ranks, max_nodes=1).best(16) == CandidateTree(())


def test_best_beyond_what_was_searched_is_the_whole_tree() -> None:
    searched = search_tree(random_ranks(0), max_nodes=5)
    assert searched.best(99) == searched.best(5)
    assert searched.tokens_per_step(99) == searched.tokens_per_step(5)
    assert searched.best(0) == searched.best(1) == CandidateTree(())


def test_nothing_to_search() -> None:
    with pytest.raises(ValueError, match="held-out positions"):
        search_tree(torch.zeros(0, 3, dtype=torch.long), max_nodes=4)
    with pytest.raises(ValueError, match="max_nodes is 0"):
        search_tree(torch.zeros(2, 3, dtype=torch.long), max_nodes=0)


def test_round_trip(tmp_path: Path) -> None:
    searched = search_tree(random_ranks(1), max_nodes=16)
    searched.save(tmp_path)
    assert SearchedTree.load(tmp_path) == searched


def test_no_tree_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no searched tree.*medusa tree"):
        SearchedTree.load(tmp_path)


@pytest.mark.parametrize(
    "content",
    ["", "{", '{"paths": [[0]]', "[1, 2]", "null", '{"paths": 3, "gains": [], "positions": 1}', '{"gains": []}'],
)
def test_damaged_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / TREE_FILE).write_text(content)
    with pytest.raises(ValueError, match=f"{TREE_FILE} is not a searched tree"):
        SearchedTree.load(tmp_path)


@pytest.mark.parametrize("cut", [1, 10, 30])
def test_truncated_file_is_named(tmp_path: Path, cut: int) -> None:
    search_tree(random_ranks(1), max_nodes=16).save(tmp_path)
    file = tmp_path / TREE_FILE
    file.write_text(file.read_text()[:cut])
    with pytest.raises(ValueError, match=TREE_FILE):
        SearchedTree.load(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"paths": [[0], [1, 0]]},  # a node without its parent
        {"paths": [[0], "ab"]},
        {"paths": [[0, 0], [0]]},  # a node before its parent
        {"paths": [[0], [0, -1]]},
        {"gains": [0.5]},  # fewer gains than paths
        {"gains": [0.5, "x"]},
    ],
    ids=str,
)
def test_a_file_that_is_no_tree_is_named(tmp_path: Path, change: dict[str, object]) -> None:
    stored = {"paths": [[0], [0, 0]], "gains": [0.5, 0.25], "positions": 8}
    (tmp_path / TREE_FILE).write_text(json.dumps(stored))
    SearchedTree.load(tmp_path)
    (tmp_path / TREE_FILE).write_text(json.dumps({**stored, **change}))
    with pytest.raises(ValueError, match=TREE_FILE):
        SearchedTree.load(tmp_path)


def test_expected_tokens_per_step_are_those_of_a_decoder() -> None:
    """Decoding is replayed token by token over answers whose right guesses are known; easy stretches are skipped."""
    generator = torch.Generator().manual_seed(0)
    answers = []
    for length in (9, 1, 30, 2, 17):
        ranks = torch.randint(-1, 3, (length, 3), generator=generator)
        ranks[: length // 2, :] = 0  # an easy half
        for position in range(length):  # head k guesses the token k+1 places after the root of its position
            ranks[position, max(length - 1 - position, 0) :] = MISS
        answers.append(ranks)
    ends = torch.cat([torch.arange(len(ranks)) == len(ranks) - 1 for ranks in answers])
    searched = search_tree_for_decoding(torch.cat(answers), ends, max_nodes=40)
    tree = searched.best(TYPICAL_NODES)
    steps = tokens = 0
    for ranks in answers:
        root = 0
        while root < len(ranks) - 1:  # a step is taken unless the root was the last token
            path: tuple[int, ...] = ()
            while len(path) < 3 and (*path, int(ranks[root, len(path)])) in tree.paths:
                path = (*path, int(ranks[root, len(path)]))
            root += len(path) + 1
            steps += 1
            tokens += len(path) + 1
    assert searched.positions == steps
    assert searched.tokens_per_step(TYPICAL_NODES) == pytest.approx(tokens / steps)
    everywhere = search_tree(torch.cat(answers)[~ends], max_nodes=40)
    assert everywhere.tokens_per_step(TYPICAL_NODES) > searched.tokens_per_step(TYPICAL_NODES) + 0.1


def random_acceptance(seed: int) -> Tensor:
    """[40, 3, 2] probabilities of both guesses."""
    return torch.rand(40, 3, 3, generator=torch.Generator().manual_seed(seed)).softmax(dim=-1)[..., :2]


def slow_gain(path: tuple[int, ...], ranks: Tensor, acceptance: Tensor) -> float:
    """The product of each guess's mean probability where the path before it was right."""
    gain = 1.0
    for k, rank in enumerate(path):
        there = [row for row in range(len(ranks)) if ranks[row, :k].tolist() == list(path[:k])]
        gain *= sum(float(acceptance[row, k, rank]) for row in there) / max(len(there), 1)
    return gain


@pytest.mark.parametrize("seed", range(2))
def test_above_temperature_zero_every_prefix_is_the_best_tree_too(seed: int) -> None:
    ranks, acceptance = random_ranks(seed), random_acceptance(seed)
    searched = search_tree(ranks, 16, acceptance)
    gains = {path: slow_gain(path, ranks, acceptance) for path in PATHS}
    assert dict(zip(searched.paths, searched.gains, strict=True)) == pytest.approx(
        {path: gains[path] for path in searched.paths}
    )
    for size in range(1, 6):
        best = max(
            1 + sum(gains[path] for path in paths)
            for paths in itertools.combinations(PATHS, size - 1)
            if all(len(path) == 1 or path[:-1] in paths for path in paths)
        )
        assert searched.tokens_per_step(size) == pytest.approx(best)


def test_a_given_tree_is_rated_as_the_search_rates_it() -> None:
    ranks, ends = random_ranks(3), torch.zeros(40, dtype=torch.bool)
    ends[-1] = True
    tree = CandidateTree.from_paths([(0,), (1,), (0, 1), (5,), (5, 0)])
    rated = rate_tree(tree, ranks, ends)
    steps = ranks[visited_positions(ranks, ends, tree)]
    assert rated.positions == len(steps)
    assert rated.tokens_per_step(6) == pytest.approx(slow_tokens_per_step(tree.paths, steps))
    assert rated.best(6) == tree
    assert rated.gains[-2:] == (0, 0)  # the nodes that were never right stand last
    warm = rate_tree(tree, ranks, ends, random_acceptance(3))
    expected = slow_gain((0, 1), steps, random_acceptance(3)[visited_positions(ranks, ends, tree)])
    assert dict(zip(warm.paths, warm.gains, strict=True))[0, 1] == pytest.approx(expected)


def test_few_steps_leave_the_sure_nodes() -> None:
    ranks = random_ranks(0)
    searched = search_tree(ranks, 64)
    cautious = searched.cautious()
    assert 0 < len(cautious.paths) < len(searched.paths)
    assert all(gain * 40 > 2.5 for gain in cautious.gains)
    assert all(gain * 40 < 2.5 for gain in searched.gains[len(cautious.paths) :])
    many = search_tree(ranks.repeat(13, 1), 64)
    assert many.cautious() == many


def test_uncertainty_is_that_of_the_mean() -> None:
    ranks = random_ranks(4)
    searched = search_tree(ranks, 8)
    lengths = torch.tensor([slow_tokens_per_step(searched.best(8).paths, row[None]) for row in ranks])
    expected = 1.96 * float(lengths.std(correction=0)) / 40**0.5
    assert searched.uncertainty(8) == pytest.approx(expected, rel=1e-3)
    assert searched.uncertainty(1) == 0
