"""Filling a tree with guesses: the likeliest ones against picking them one by one, drawn ones by chi-square."""

import itertools
from collections.abc import Callable

import pytest
import torch
from chi_square import p_value
from tiny import VOCAB, random_tree, shared_model, tiny_medusa
from torch import Tensor

from medusa import CandidateTree
from medusa.heads import MedusaHeads
from medusa.inference.accept import NO_TOKEN
from medusa.inference.layout import TreeLayout
from medusa.inference.propose import Candidates, Chance, propose, propose_by_chance

K = 4
CPU = torch.device("cpu")


@pytest.mark.parametrize("draft_vocab", [None, range(1, VOCAB, 2)], ids=["full", "draft"])
@pytest.mark.parametrize("seed", range(3))
def test_each_node_takes_the_guess_of_its_depth_and_rank(seed: int, draft_vocab: range | None) -> None:
    heads = tiny_medusa(shared_model("llama"), num_heads=K, draft_vocab=draft_vocab, root_conditioned=True).heads
    tree = random_tree(seed, depth=K)
    hidden, root = torch.randn(2, 32, dtype=torch.float64), torch.tensor([42, 7])
    candidates = propose(heads, hidden, root, TreeLayout.of(tree, CPU))
    ids = list(range(VOCAB) if draft_vocab is None else draft_vocab)
    for row, tokens in enumerate(candidates.tokens.tolist()):
        logits = heads(hidden[row : row + 1], root[row : row + 1])[:, 0]
        guesses = [[ids[i] for i in own.argsort(descending=True)] for own in logits]
        assert tokens == [int(root[row]), *(guesses[len(path) - 1][path[-1]] for path in tree.paths)]
    assert candidates.drawn is None


def test_siblings_differ() -> None:
    heads = tiny_medusa(shared_model("llama"), num_heads=2).heads
    layout = TreeLayout.of(CandidateTree.from_paths([(rank,) for rank in range(VOCAB)]), CPU)
    candidates = propose(heads, torch.randn(1, 32, dtype=torch.float64), torch.tensor([0]), layout)
    assert sorted(candidates.tokens[0, 1:].tolist()) == list(range(VOCAB))


def test_root_alone_asks_no_head() -> None:
    layout = TreeLayout.of(CandidateTree(()), CPU)
    candidates = propose(None, torch.zeros(2, 32), torch.tensor([7, 8]), layout)  # type: ignore[arg-type]
    assert candidates.tokens.tolist() == [[7], [8]]


# By chance. Heads with a draft vocabulary of five tokens, and many rows that all look from the same place.

IDS = (3, 10, 20, 50, 96)
ROWS = 20_000
TREE = CandidateTree.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (2, 0)])
Warp = Callable[[Tensor], Tensor]


def small_heads() -> MedusaHeads:
    heads = tiny_medusa(shared_model("llama"), num_heads=2, draft_vocab=IDS).heads
    assert isinstance(heads, MedusaHeads)
    return heads


def half(logits: Tensor) -> Tensor:
    """Temperature 2: draws must see it."""
    return logits / 2


def drawn(mixed: bool, warp: Warp = half, rows: int = ROWS) -> tuple[Candidates, Tensor]:
    """Candidates of many equal rows, and the heads' distributions over the draft vocabulary [K, Vd]."""
    heads = small_heads()
    hidden = torch.randn(1, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) / 4
    root = torch.tensor([5])
    q = warp(heads(hidden, root).transpose(0, 1))[0].softmax(dim=-1).detach()
    candidates = propose_by_chance(
        heads,
        hidden.expand(rows, -1),
        root.expand(rows),
        TreeLayout.of(TREE, CPU),
        Chance(torch.ones(rows, dtype=torch.bool), mixed, warp, VOCAB, torch.Generator().manual_seed(0)),
    )
    return candidates, q


@pytest.mark.parametrize("mixed", [False, True])
def test_greedy_rows_of_a_batch_take_the_likeliest(mixed: bool) -> None:
    heads, layout = small_heads(), TreeLayout.of(TREE, CPU)
    hidden, root = torch.randn(40, 32, dtype=torch.float64), torch.full((40,), 5)
    chance = torch.arange(40) % 2 == 0
    drawn = propose_by_chance(heads, hidden, root, layout, Chance(chance, mixed, half, VOCAB)).tokens
    likeliest = propose(heads, hidden, root, layout).tokens
    same = (drawn == likeliest).all(dim=1)
    assert same[~chance].all()
    assert not same[chance].all()


def frequencies(tokens: Tensor) -> dict[tuple[int, ...], int]:
    """How often each row of tokens [B, n] occurs."""
    rows, how_often = tokens.unique(dim=0, return_counts=True)
    return dict(zip(map(tuple, rows.tolist()), how_often.tolist(), strict=True))


def one_after_the_other(q: Tensor, count: int) -> dict[tuple[int, ...], float]:
    """How `count` draws from q [Vd] without replacement are distributed, in draw order."""
    law = {}
    for order in itertools.permutations(range(len(q)), count):
        chance, left = 1.0, 1.0
        for i in order:
            chance *= float(q[i]) / left
            left -= float(q[i])
        law[tuple(IDS[i] for i in order)] = chance
    return law


def test_siblings_are_draws_without_replacement_in_draw_order() -> None:
    candidates, q = drawn(mixed=False)
    assert p_value(frequencies(candidates.tokens[:, 1:4]), one_after_the_other(q[0], 3)) > 1e-3
    assert p_value(frequencies(candidates.tokens[:, 4:6]), one_after_the_other(q[1], 2)) > 1e-3
    sideways = frequencies(candidates.tokens[:, [2, 1, 3]])
    assert p_value(sideways, one_after_the_other(q[0], 3)) < 1e-6, "the order matters, and the test sees it"
    unwarped = one_after_the_other((q[0].log() * 2).softmax(dim=-1), 3)
    assert p_value(frequencies(candidates.tokens[:, 1:4]), unwarped) < 1e-6, "the heads' own temperature shows"


def test_depths_are_drawn_independently() -> None:
    candidates, q = drawn(mixed=False)
    first, second = one_after_the_other(q[0], 1), one_after_the_other(q[1], 1)
    both = {a + b: first[a] * second[b] for a in first for b in second}
    assert p_value(frequencies(candidates.tokens[:, [1, 4]]), both) > 1e-3


@pytest.mark.parametrize("mixed", [False, True])
def test_parents_at_one_depth_see_the_same_draws(mixed: bool) -> None:
    """Each takes as many as it has children: a lone child is the first draw, or drawn from all of q."""
    candidates, q = drawn(mixed)
    assert (candidates.tokens[:, 0] == 5).all()
    if not mixed:
        assert torch.equal(candidates.tokens[:, 6], candidates.tokens[:, 4])
    assert p_value(frequencies(candidates.tokens[:, [6]]), one_after_the_other(q[1], 1)) > 1e-3


def test_mixed_siblings_are_the_likeliest_and_one_drawn_from_the_rest() -> None:
    candidates, q = drawn(mixed=True)
    for nodes, own in (([1, 2, 3], q[0]), ([4, 5], q[1])):
        order = own.argsort(descending=True).tolist()
        fixed = order[: len(nodes) - 1]
        assert (candidates.tokens[:, nodes[:-1]] == torch.tensor([IDS[i] for i in fixed])).all()
        rest = {(IDS[i],): float(own[i]) for i in order[len(fixed) :]}
        law = {token: chance / sum(rest.values()) for token, chance in rest.items()}
        assert p_value(frequencies(candidates.tokens[:, nodes[-1:]]), law) > 1e-3


@pytest.mark.parametrize("mixed", [False, True])
def test_q_is_what_siblings_are_drawn_from(mixed: bool) -> None:
    """Over the whole vocabulary: nothing outside the draft vocabulary."""
    candidates, q = drawn(mixed, rows=3)
    assert candidates.drawn is not None
    assert candidates.drawn.q.shape == (3, 2, VOCAB)
    for own in candidates.drawn.q:
        torch.testing.assert_close(own[:, list(IDS)], q.float())
        assert own.sum(dim=-1).tolist() == pytest.approx([1, 1])


@pytest.mark.parametrize("mixed", [False, True])
def test_nodes_stay_empty_where_nothing_is_left_to_draw(mixed: bool) -> None:
    """A warper that leaves two tokens fills two of three siblings, the first ones."""

    def two(logits: Tensor) -> Tensor:
        return logits.masked_fill(logits < logits.topk(2, dim=-1).values[..., -1:], -torch.inf)

    candidates, q = drawn(mixed, two, rows=50)
    best = sorted(IDS[i] for i in q[0].topk(2).indices.tolist())
    for tokens in candidates.tokens[:, 1:4].tolist():
        assert sorted(tokens[:2]) == best
        assert tokens[2] == NO_TOKEN


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("sharpness", [10.0, 30.0, 100.0, 1000.0])
def test_no_token_is_drawn_that_q_cannot_represent(mixed: bool, sharpness: float) -> None:
    """At low temperature q underflows: a token with q = 0 would be accepted whatever its p."""
    candidates, _ = drawn(mixed, lambda logits: logits * sharpness, rows=50)
    assert candidates.drawn is not None
    layout = TreeLayout.of(TREE, CPU)
    for node in range(1, layout.num_nodes):
        tokens = candidates.tokens[:, node]
        q = candidates.drawn.q[:, layout.depths[0, node] - 1].gather(1, tokens.clamp(min=0)[:, None])[:, 0]
        assert (q[tokens != NO_TOKEN] >= torch.finfo(q.dtype).tiny).all()
