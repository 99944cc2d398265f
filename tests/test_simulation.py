"""Simulated decoding, against walking down the text token by token."""

import pytest
import torch
from torch import Tensor

from medusa import CandidateTree
from medusa.choices import published_trees
from medusa.simulation import Simulation, accepted_lengths, simulate
from medusa.tree_search import MISS

TREE = CandidateTree.from_paths([(0,), (1,), (0, 0), (0, 2), (0, 2, 1)])


def answers(seed: int) -> list[Tensor]:
    """Ranks of answers of several lengths, [T, 3] each; no head reaches over an end."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for length in (9, 1, 30, 2, 17):
        ranks = torch.randint(MISS, 3, (length, 3), generator=generator)
        for position in range(length):
            ranks[position, max(length - 1 - position, 0) :] = MISS
        found.append(ranks)
    return found


def slow_simulation(texts: list[Tensor], tree: CandidateTree) -> Simulation:
    steps = tokens = 0
    accepted = [0] * (tree.depth + 1)
    for ranks in texts:
        root = 0
        while root < len(ranks) - 1:
            path: tuple[int, ...] = ()
            while len(path) < 3 and (*path, int(ranks[root, len(path)])) in tree.paths:
                path = (*path, int(ranks[root, len(path)]))
            steps += 1
            accepted[len(path)] += 1
            tokens += min(len(path) + 1, len(ranks) - 1 - root)  # what follows the end is not emitted
            root += len(path) + 1
    return Simulation(steps, tokens, tuple(accepted))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["small", "root", "mc_sim_7b_63"])
def test_it_takes_the_steps_of_a_decoder(seed: int, name: str) -> None:
    tree = {"small": TREE, "root": CandidateTree(())}.get(name) or published_trees()[name].cut(3)
    texts = answers(seed)
    ends = torch.cat([torch.arange(len(ranks)) == len(ranks) - 1 for ranks in texts])
    found = simulate(torch.cat(texts), ends, tree)
    assert found == slow_simulation(texts, tree)
    assert found.tokens_per_step == found.tokens / found.steps


def test_only_the_nodes_that_a_position_keeps_are_accepted() -> None:
    ranks = torch.tensor([[0, 2, 1]] * 4)
    everything = torch.ones(4, TREE.num_nodes, dtype=torch.bool)
    index = {path: node for node, path in enumerate(((), *TREE.paths))}
    everything[1, index[0, 2, 1]] = False
    everything[2, index[0, 2]] = False
    everything[3, index[0,]] = False
    assert accepted_lengths(ranks, TREE).tolist() == [3, 3, 3, 3]
    assert accepted_lengths(ranks, TREE, everything).tolist() == [3, 2, 1, 0]


def test_no_steps_are_no_division() -> None:
    assert simulate(torch.full((1, 2), MISS), torch.tensor([True]), TREE).tokens_per_step == 0
