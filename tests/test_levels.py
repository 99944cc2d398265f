"""Filling a tree level by level: against asking each head behind each node alone."""

import pytest
import torch
from tiny import VOCAB, random_tree, shared_model, tiny_medusa
from torch import Tensor

from medusa import CandidateTree
from medusa.heads import MedusaHeads
from medusa.inference.accept import NO_TOKEN
from medusa.inference.layout import TreeLayout
from medusa.inference.levels import levels_of, propose_by_level, propose_by_level_and_chance
from medusa.inference.propose import Chance

K = 4
CPU = torch.device("cpu")
DRAFT = range(1, VOCAB, 2)


def sequential_heads(draft_vocab: range | None = DRAFT) -> MedusaHeads:
    return tiny_medusa(shared_model("llama"), num_heads=K, draft_vocab=draft_vocab, sequential=True).heads


def slow_logits(heads: MedusaHeads, hidden: Tensor, path: list[int]) -> Tensor:
    """What the head behind a path from the root on says, over the vocabulary, [V]."""
    logits = heads.forward_one(len(path) - 1, hidden[None], torch.tensor([path]))[0].detach()
    ids = heads.to_vocab(torch.arange(heads.draft_size))
    return torch.full((VOCAB,), -torch.inf, dtype=logits.dtype).index_copy(0, ids, logits)


@pytest.mark.parametrize("draft_vocab", [None, DRAFT], ids=["full", "draft"])
@pytest.mark.parametrize("seed", range(3))
def test_each_node_takes_the_guess_of_its_rank_behind_its_parent(seed: int, draft_vocab: range | None) -> None:
    heads, tree = sequential_heads(draft_vocab), random_tree(seed, depth=K)
    hidden, root = torch.randn(3, 32, dtype=torch.float64), torch.tensor([42, 7, 42])
    layout = TreeLayout.of(tree, CPU)
    tokens, log_confidence = propose_by_level(heads, hidden, root, levels_of(layout), layout.num_nodes)
    for row in range(3):
        chosen: dict[tuple[int, ...], list[int]] = {(): [int(root[row])]}
        for node, path in enumerate(tree.paths, start=1):
            before = chosen[path[:-1]]
            log_p = slow_logits(heads, hidden[row], before).log_softmax(dim=-1)
            chosen[path] = [*before, int(log_p.argsort(descending=True)[path[-1]])]
            assert log_confidence[row, node].item() == pytest.approx(float(log_p[chosen[path][-1]]), abs=1e-5)
        assert tokens[row].tolist() == [path[-1] for path in chosen.values()]


def test_root_alone_asks_no_head() -> None:
    levels = levels_of(TreeLayout.of(CandidateTree(()), CPU))
    tokens, _ = propose_by_level(None, torch.zeros(2, 32), torch.tensor([7, 8]), levels, 1)  # type: ignore[arg-type]
    assert tokens.tolist() == [[7], [8]]


@pytest.mark.parametrize("mixed", [False, True])
def test_acceptance_is_told_what_each_node_drew_from(mixed: bool) -> None:
    heads, tree = sequential_heads(), random_tree(1, depth=K)
    hidden, root = torch.randn(2, 32, dtype=torch.float64), torch.tensor([42, 7])
    layout = TreeLayout.of(tree, CPU)
    chance = Chance(torch.tensor([True, False]), mixed, lambda x: x / 2, VOCAB)
    candidates = propose_by_level_and_chance(heads, hidden, root, levels_of(layout), layout.num_nodes, chance)
    assert candidates.drawn is not None
    assert candidates.drawn.mixed is mixed
    for row, tokens in enumerate(candidates.tokens.tolist()):
        for node, children in enumerate(layout.children[0]):
            path = [tokens[i] for i in layout.ancestors[0, node].nonzero()[:, 0].tolist()]
            if not children or NO_TOKEN in path:
                continue
            expected = (slow_logits(heads, hidden[row], path).float() / 2).softmax(dim=-1)
            torch.testing.assert_close(candidates.drawn.q[row, candidates.drawn.q_of[node]], expected)
            drawn = [tokens[child] for child in children]
            assert len(set(drawn)) == len(drawn)
            assert all(token in DRAFT for token in drawn)
            if row == 1:  # greedy
                assert drawn == expected.argsort(descending=True)[: len(drawn)].tolist()
            elif mixed:
                assert drawn[:-1] == expected.argsort(descending=True)[: len(drawn) - 1].tolist()
