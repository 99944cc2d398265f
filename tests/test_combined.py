"""Heads and look-up in one tree. K heads, G guesses of each, N nodes."""

import itertools
import random
from typing import Any

import pytest
import test_exactness
import torch
from test_batches import padded
from test_lookup import lookup_of
from tiny import guide, hf_greedy, prompt_of, shared_model, tiny_medusa
from torch import Tensor

from medusa import CandidateTree
from medusa.calibration import Calibration
from medusa.inference import Blockwise, HeadsAndLookup, Lookup, MedusaDecoder, StepSizes
from medusa.inference.combined import by_path, guess_with_heads, merge
from medusa.inference.dynamic_tree import DynamicLayout, DynamicTree, propose_dynamic
from medusa.inference.layout import TreeLayout
from medusa.inference.propose import Candidates
from medusa.inference.proposer import DecodingState
from medusa.inference.token_tree import Continuations, Tokens, TokenTree, grow, lay_out
from medusa.tree_search import SearchedTree, search_tree

pytestmark = pytest.mark.decoding

K, G, NEW = 3, 3, 24
PATHS = tuple(path for depth in range(1, K + 1) for path in itertools.product(range(G), repeat=depth))
CALIBRATION = Calibration((0.9, 0.8, 0.7), (-0.1, -0.2, 0.1))
FULL = SearchedTree(PATHS, (0.01,) * len(PATHS), 100, CALIBRATION)


# Trees of tokens


def random_continuations(seed: int) -> dict[Tokens, Continuations]:
    """What may follow each path, some levels deep; some paths end, and some chances are equal or certain."""
    generator = random.Random(seed)
    known: dict[Tokens, Continuations] = {}
    frontier: list[Tokens] = [()]
    while frontier and len(known) < 40:
        path = frontier.pop(0)
        weights = [generator.choice([1.0, 1.0, 2.0, 5.0]) for _ in range(generator.randrange(4) + (path == ()))]
        known[path] = {token: weight / sum(weights) for token, weight in enumerate(weights)}
        frontier += [(*path, token) for token in known[path]]
    return known


def paths_of(tree: TokenTree) -> list[Tokens]:
    paths: list[Tokens] = [()]
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


@pytest.mark.parametrize("num_nodes", [1, 2, 5, 16])
@pytest.mark.parametrize("seed", range(8))
def test_a_tree_takes_the_likeliest_paths(seed: int, num_nodes: int) -> None:
    """Against sorting all paths there are by the product of their chances."""
    known = random_continuations(seed)
    chances: dict[Tokens, float] = {(): 1.0}
    for path, after in known.items():  # parents first
        chances |= {(*path, token): chances[path] * share for token, share in after.items()}
    del chances[()]
    best = sorted(chances.values(), reverse=True)[: num_nodes - 1]
    tree = grow(lambda path: known.get(path, {}), num_nodes, min_chance=1e-9)
    paths = paths_of(tree)
    assert tree.chances == pytest.approx([value for value in best if value >= 1e-9])
    assert tree.chances == pytest.approx([chances[path] for path in paths])
    assert len(set(paths)) == len(paths), "every path stands once"
    for node, (path, parent) in enumerate(zip(paths, tree.parents, strict=True), start=1):
        assert parent < node
        assert len(path) == 1 or tree.chances[node - 1] <= tree.chances[parent - 1]


def test_unlikely_nodes_are_left_out() -> None:
    tree = grow(lambda path: {1: 0.5, 2: 0.1}, 50, min_chance=0.2)
    assert paths_of(tree) == [(1,), (1, 1)]


def test_rows_have_trees_of_their_own() -> None:
    trees = [TokenTree([5, 6, 7], [0, 1, 0], [0.9, 0.8, 0.7]), TokenTree([], [], []), TokenTree([8], [0], [0.5])]
    candidates, layout = lay_out(trees, torch.tensor([1, 2, 3]), 3)
    assert candidates.tokens.tolist() == [[1, 5, 6], [2, -1, -1], [3, 8, -1]]
    assert layout.children == [[[1], [2], []], [[], [], []], [[1], [], []]]
    assert layout.depths.tolist() == [[0, 1, 2], [0, 0, 0], [0, 1, 0]]


@pytest.mark.parametrize(
    ("chances", "size"),
    [([0.2], 1), ([0.5], 2), ([0.5, 0.45], 4), ([0.5, 0.4, 0.3], 4), ([0.5, 0.05, 0.02], 2), ([], 1)],
)
def test_a_size_is_chosen_if_it_earns_its_time(chances: list[float], size: int) -> None:
    sizes = StepSizes((1, 2, 4), seconds=(0.10, 0.13, 0.16), tokens_per_second=10.0)
    tree = TokenTree(list(range(len(chances))), list(range(len(chances))), chances)
    assert sizes.choose([tree]) == size
    assert StepSizes((1, 2, 4)).choose([tree]) == {0: 1, 1: 2, 2: 4, 3: 4}[len(chances)]


@pytest.mark.parametrize(
    ("num_nodes", "sizes"), [(1, (1,)), (3, (1, 3)), (4, (1, 4)), (16, (1, 4, 8, 16)), (20, (1, 4, 8, 16, 20))]
)
def test_sizes_are_few(num_nodes: int, sizes: tuple[int, ...]) -> None:
    assert StepSizes.up_to(num_nodes).sizes == sizes


# Merging


def test_what_both_propose_is_one_node_and_likelier() -> None:
    merged = merge({1: 0.4, 2: 0.2}, {3: 0.3, 1: 0.25})
    assert list(merged) == [1, 3, 2]
    assert merged[1] == pytest.approx((1 - 0.6 * 0.75) / 1.05), "chances add up to no more than 1"
    assert sum(merged.values()) == pytest.approx(1.0)
    assert merge({1: 0.4}, {1: 0.5}) == {1: pytest.approx(0.7)}
    assert merge({}, {1: 0.5}) == {1: 0.5} == merge({1: 0.5}, {})


def test_children_by_the_tokens_before_them() -> None:
    assert by_path([9, 5, 6, 5], [1.0, 0.5, 0.25, 0.125], [0, 0, 0, 1]) == {(): {5: 0.5, 6: 0.25}, (5,): {5: 0.125}}


def test_heads_alone_fill_the_dynamic_tree() -> None:
    """Without anything to look up, the nodes are those that `propose_dynamic` takes."""
    medusa = tiny_medusa(shared_model("llama"), num_heads=K, root_conditioned=True)
    tree = DynamicTree(CandidateTree.from_paths(PATHS), (12,), calibration=CALIBRATION)
    layout = DynamicLayout.of(tree, torch.device("cpu"))
    hidden, root = torch.randn(4, 32, dtype=torch.float64), torch.tensor([3, 14, 15, 92])
    with torch.inference_mode():
        guesses = guess_with_heads(medusa.heads, hidden, root, layout)
        candidates, expected = propose_dynamic(medusa.heads, hidden, root, layout)
    for row, guessed in enumerate(guesses):
        found = paths_of(grow(lambda path, guessed=guessed: guessed.get(path, {}), 12, 1e-12))
        tokens = candidates.tokens[row]
        paths = [tuple(tokens[seen.nonzero()[1:, 0]].tolist()) for seen in expected.ancestors[row]]
        assert set(found) == set(paths[1:])


# Decoding


def test_sequential_heads_are_asked_level_by_level() -> None:
    """Behind every path, what the head says that sees this path."""
    medusa = tiny_medusa(shared_model("llama"), num_heads=K, sequential=True)
    layout = DynamicLayout.of(DynamicTree(CandidateTree.from_paths(PATHS), (2,)), torch.device("cpu"))
    hidden, root = torch.randn(2, 32, dtype=torch.float64), torch.tensor([3, 14])
    with torch.inference_mode():
        guesses = guess_with_heads(medusa.heads, hidden, root, layout)
        for row, guessed in enumerate(guesses):
            assert len(guessed) == 1 + G + G**2
            for path, after in guessed.items():
                seen = torch.tensor([[int(root[row]), *path]])
                best = medusa.heads.forward_one(len(path), hidden[row : row + 1], seen)[0].softmax(dim=-1).topk(G)
                assert list(after) == medusa.heads.to_vocab(best.indices).tolist()
                assert list(after.values()) == pytest.approx(best.values.tolist(), rel=1e-3)


def decoder_of(texts: list[Tensor], name: str, guided: bool, known: bool) -> MedusaDecoder:
    """Heads and look-up that know the answers, each in its own way, or know nothing."""
    medusa = tiny_medusa(shared_model(name), num_heads=K, root_conditioned=True)
    if guided:
        guide(medusa, texts, rank=lambda t, k: (3 * t + 5 * k) % 4)
    lookup = lookup_of(texts) if known else Lookup(12)
    return MedusaDecoder(medusa, proposer=HeadsAndLookup(medusa, lookup, FULL))


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "gemma3"])
def test_greedy_output_is_that_of_generate(name: str) -> None:
    texts = [hf_greedy(shared_model(name), prompt_of(length, seed=7), NEW + K) for length in (1, 5, 13)]
    ids, mask = padded([text[:, : -NEW - K] for text in texts], "left")
    rates = {}
    for guided, known in itertools.product([False, True], repeat=2):
        decoder = decoder_of(texts, name, guided, known)
        result = decoder.generate(ids, NEW, attention_mask=mask)
        for row, text in zip(result.sequences, texts, strict=True):
            assert row[-NEW:].tolist() == text[0, -NEW - K : -K].tolist()
        alone = decoder.generate(texts[1][:, : -NEW - K], NEW)
        assert alone.sequences.tolist() == texts[1][:, :-K].tolist()
        rates[guided, known] = result.stats.tokens_per_step
    assert all(rate > 1.5 for good, rate in rates.items() if any(good)), rates


def test_a_searched_tree_is_taken() -> None:
    medusa = tiny_medusa(shared_model("llama"), num_heads=K)
    with pytest.raises(ValueError, match=r"none was searched for these heads.*medusa tree"):
        HeadsAndLookup(medusa, Lookup())
    prompt = prompt_of(6)
    for ranks in ([[0, 0, 0], [1, 0, -1], [2, 1, 0]], [[-1, -1, -1]]):  # the last heads were never right
        medusa.searched_tree = search_tree(torch.tensor(ranks), max_nodes=8)
        result = MedusaDecoder(medusa, proposer=HeadsAndLookup(medusa, Lookup())).generate(prompt, NEW)
        assert result.sequences.tolist() == hf_greedy(medusa.model, prompt, NEW).tolist()


def test_a_tree_of_other_heads_is_refused() -> None:
    deep = SearchedTree(CandidateTree.chain(K + 1).paths, (0.1,) * (K + 1), 100)
    with pytest.raises(ValueError, match="4 levels deep but the model has 3 heads"):
        HeadsAndLookup(tiny_medusa(shared_model("llama"), num_heads=K), Lookup(), deep)


def test_samples_are_distributed_as_the_backbones() -> None:
    medusa = tiny_medusa(test_exactness.small_model(), num_heads=2, root_conditioned=True)
    tree = SearchedTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0)), (0.1,) * 6, 100)
    lookup: dict[str, Any] = {"corpus": [[1, 2, 3, 4, 9, 1, 5, 5, 8, 3, 2, 9]], "vocab_size": test_exactness.V}
    proposer = HeadsAndLookup(medusa, Lookup(6, 2, **lookup), tree)
    test_exactness.check(MedusaDecoder(medusa, proposer=proposer), 2000, 1.0, 0.8)


@pytest.mark.parametrize("acceptance", ["exact", "typical", Blockwise("top_k", top_k=2), Blockwise(min_block=2)])
@pytest.mark.parametrize("combined", [False, True])
def test_padding_of_the_vocabulary_is_looked_up_but_never_proposed(acceptance: Any, combined: bool) -> None:
    """The prompt holds ids that the tokenizer lacks, and repeats what comes before them."""
    medusa = tiny_medusa(shared_model("llama"), num_heads=K)
    medusa.limit_tokens(90)
    medusa.searched_tree = search_tree(torch.tensor([[0, 0, 0], [1, 0, -1]]), max_nodes=8)
    proposer = HeadsAndLookup(medusa, Lookup()) if combined else Lookup()
    decoder = MedusaDecoder(medusa, proposer=proposer, acceptance=acceptance)
    seen: list[int] = []
    propose = decoder.propose

    def watching(state: DecodingState) -> tuple[Candidates, TreeLayout]:
        candidates, layout = propose(state)
        seen.extend(candidates.tokens.flatten().tolist())
        return candidates, layout

    decoder.propose = watching  # type: ignore[method-assign]
    prompt = torch.arange(3, 90).repeat_interleave(2)
    prompt[1::2] = 95  # whatever comes next, 95 followed it in the prompt
    assert decoder.generate(prompt[None], NEW).sequences[0, len(prompt) :].max() < 90
    assert max(seen) < 90


def test_heads_of_another_model_are_refused() -> None:
    medusa = tiny_medusa(shared_model("llama"), num_heads=K)
    medusa.searched_tree = search_tree(torch.tensor([[0, 0, 0]]), max_nodes=4)
    with pytest.raises(ValueError, match="heads belong to another model than the MistralForCausalLM"):
        MedusaDecoder(shared_model("mistral"), proposer=HeadsAndLookup(medusa, Lookup()))
