"""Filling a tree with guesses, against picking them one by one."""

import pytest
import torch
from tiny import VOCAB, random_tree, shared_model, tiny_medusa

from medusa import CandidateTree
from medusa.inference.layout import TreeLayout
from medusa.inference.propose import propose

K = 4


@pytest.mark.parametrize("draft_vocab", [None, range(1, VOCAB, 2)], ids=["full", "draft"])
@pytest.mark.parametrize("seed", range(3))
def test_each_node_takes_the_guess_of_its_depth_and_rank(seed: int, draft_vocab: range | None) -> None:
    heads = tiny_medusa(shared_model("llama"), num_heads=K, draft_vocab=draft_vocab, root_conditioned=True).heads
    tree = random_tree(seed, depth=K)
    hidden, root = torch.randn(32, dtype=torch.float64), torch.tensor(42)
    tokens = propose(heads, hidden, root, TreeLayout.of(tree, torch.device("cpu"))).tolist()
    ids = list(range(VOCAB) if draft_vocab is None else draft_vocab)
    guesses = [[ids[i] for i in logits.argsort(descending=True)] for logits in heads(hidden[None], root[None])[:, 0]]
    assert tokens == [42, *(guesses[len(path) - 1][path[-1]] for path in tree.paths)]


def test_siblings_differ() -> None:
    """Acceptance relies on it: at most one child of a node can be the backbone's choice."""
    heads = tiny_medusa(shared_model("llama"), num_heads=2).heads
    layout = TreeLayout.of(CandidateTree.from_paths([(rank,) for rank in range(VOCAB)]), torch.device("cpu"))
    tokens = propose(heads, torch.randn(32, dtype=torch.float64), torch.tensor(0), layout)
    assert sorted(tokens[1:].tolist()) == list(range(VOCAB))


def test_root_alone_asks_no_head() -> None:
    layout = TreeLayout.of(CandidateTree(()), torch.device("cpu"))
    tokens = propose(None, torch.zeros(32), torch.tensor(7), layout)  # type: ignore[arg-type]
    assert tokens.tolist() == [7]
