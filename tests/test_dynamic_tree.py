"""Trees grown in every step: topology against a slow search, size by hand, the output against `generate`."""

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_batches import NEW, padded, texts_of
from tiny import guide, hf_greedy, prompt_of, random_tree, shared_model, tiny_medusa
from torch import Tensor

from medusa import CandidateTree
from medusa.calibration import Calibration
from medusa.inference import DynamicTree, MedusaDecoder
from medusa.inference import tree_choice as tree_choice_module
from medusa.inference.dynamic_tree import DynamicLayout
from medusa.inference.layout import TreeLayout
from medusa.inference.propose import Candidates
from medusa.inference.proposer import DecodingState
from medusa.tree_search import search_tree

pytestmark = pytest.mark.decoding

K, G = 3, 3
CPU = torch.device("cpu")
FULL = CandidateTree.from_paths(path for depth in range(1, K + 1) for path in itertools.product(range(G), repeat=depth))
SIZES = (1, 2, 5, 9, 20)
CERTAIN = Calibration((0.0,) * K, (60.0,) * K)
INVERTED = Calibration((-3.0,) * K, (0.0,) * K)
CHEAP = {"seconds": tuple(1 + 0.05 * size for size in SIZES), "tokens_per_second": 1.2}


def confidences(kind: str, rows: int) -> Tensor:
    """Log-probabilities of guesses, best first, [rows, K, G]."""
    generator = torch.Generator().manual_seed(rows)
    if kind == "random":
        logits = 3 * torch.randn(rows, K, 8, generator=generator)
        return logits.log_softmax(dim=-1).sort(dim=-1, descending=True).values[..., :G]
    if kind == "ties":
        return torch.full((rows, K, G), math.log(1 / G))
    certain = torch.full((rows, K, G), -torch.inf)
    certain[..., 0] = 0.0
    return certain


def grown(tree: DynamicTree, log_confidence: Tensor) -> TreeLayout:
    """A tree of one step, from the confidence of every guess, [rows, K, G]."""
    of_nodes = [torch.stack([own[len(path) - 1, path[-1]] for path in tree.superset.paths]) for own in log_confidence]
    root = torch.zeros(len(log_confidence), 1)
    return DynamicLayout.of(tree, CPU).grow(torch.cat([root, torch.stack(of_nodes)], dim=1))[0]


def paths_of(layout: TreeLayout, row: int) -> list[tuple[int, ...]]:
    """The paths of a row's nodes, read from its ancestors; the root's is ()."""
    paths = []
    for seen in layout.ancestors[row]:
        nodes = sorted(seen.nonzero()[:, 0].tolist(), key=lambda node: int(layout.depths[row, node]))
        paths.append(tuple(int(layout.ranks[row, node]) for node in nodes[1:]))
    return paths


def best_first(superset: CandidateTree, log_confidence: Tensor, size: int) -> tuple[set[tuple[int, ...]], float]:
    """Take the likeliest node whose parent is taken, again and again; also the sum of their probabilities."""
    known = {(), *superset.paths}
    heap: list[tuple[float, int, tuple[int, ...]]] = [(0.0, 0, ())]
    taken: set[tuple[int, ...]] = set()
    total = 0.0
    while len(taken) < size:
        cost, _, path = heapq.heappop(heap)
        taken.add(path)
        total += math.exp(-cost)
        for rank in range(G if len(path) < K else 0):
            if (*path, rank) in known:
                heapq.heappush(heap, (cost - float(log_confidence[len(path), rank]), len(path) + 1, (*path, rank)))
    return taken, total


@pytest.mark.parametrize("size", [1, 2, 3, 7, 12])
@pytest.mark.parametrize("superset", [FULL, random_tree(5, nodes=20, depth=K, width=G)], ids=["full", "sparse"])
@pytest.mark.parametrize("rows", [1, 4])
def test_it_takes_the_likeliest_nodes(superset: CandidateTree, size: int, rows: int) -> None:
    log_confidence = confidences("random", rows)
    layout = grown(DynamicTree(superset, (size,)), log_confidence)
    assert layout.num_nodes == size
    for row in range(rows):
        paths = paths_of(layout, row)
        assert (set(paths), len(paths)) == (best_first(superset, log_confidence[row], size)[0], size)
        static = TreeLayout.of(CandidateTree.from_paths(paths[1:]), CPU)
        assert layout.depths[row].tolist() == static.depths[0].tolist()
        assert layout.ranks[row].tolist() == static.ranks[0].tolist()
        assert torch.equal(layout.ancestors[row], static.ancestors[0])
        assert layout.children[row] == static.children[0]


@pytest.mark.parametrize("size", range(1, 20, 3))
@pytest.mark.parametrize("kind", ["random", "ties", "certain"])
@pytest.mark.parametrize("calibration", [None, CERTAIN, INVERTED])
def test_parents_are_always_there(calibration: Calibration | None, kind: str, size: int) -> None:
    """Also where a child is as sure as its parent: by certainty, by a calibration that makes everything certain."""
    layout = grown(DynamicTree(FULL, (size,), calibration=calibration), confidences(kind, 5))
    for row in range(5):
        paths = paths_of(layout, row)
        CandidateTree.from_paths(paths[1:])  # refuses a node without its parent, or one that stands twice
        assert paths[0] == ()
        assert [len(path) for path in paths] == layout.depths[row].tolist()
        for node, children in enumerate(layout.children[row]):
            assert [paths[child][:-1] for child in children] == [paths[node]] * len(children)
        assert sum(map(len, layout.children[row])) == size - 1


@pytest.mark.parametrize(
    ("first", "second", "size"),
    [
        (0.1, 0.1, 1),  # a guess that is seldom right is not worth the 0.3 tokens of its time
        (0.5, 0.1, 2),
        (0.5, 0.8, 3),  # 0.5 + 0.4 tokens for 0.6
        (0.2, 0.99, 1),  # 0.2 + 0.2 tokens for 0.6
    ],
)
def test_a_size_is_chosen_if_it_earns_its_time(first: float, second: float, size: int) -> None:
    chain = CandidateTree.chain(2)
    tree = DynamicTree(chain, (1, 2, 3), seconds=(0.10, 0.13, 0.16), tokens_per_second=10.0)
    log_confidence = torch.tensor([[[first], [second]]]).log()
    assert grown(tree, log_confidence).num_nodes == size


def test_rows_of_a_batch_choose_one_size_together() -> None:
    tree = DynamicTree(CandidateTree.chain(1), (1, 2), seconds=(0.10, 0.13), tokens_per_second=10.0)
    sure, unsure, hopeless = ([[[p]]] for p in (0.5, 0.2, 0.01))
    assert grown(tree, torch.tensor([*sure, *unsure]).log()).num_nodes == 2
    assert grown(tree, torch.tensor([*sure, *hopeless]).log()).num_nodes == 1


def test_calibration_decides_between_heads() -> None:
    """The second head promises as much as the first but is never right, so the first one's second guess is better."""
    superset = CandidateTree.from_paths([(0,), (1,), (0, 0)])
    log_confidence = torch.tensor([[[0.6, 0.3], [0.9, 0.05]]]).log()
    tree = DynamicTree(superset, (3,))
    assert paths_of(grown(tree, log_confidence), 0) == [(), (0,), (0, 0)]
    tree = replace(tree, calibration=Calibration((1.0, 1.0), (0.0, -5.0)))
    assert paths_of(grown(tree, log_confidence), 0) == [(), (0,), (1,)]


def watch(decoder: MedusaDecoder, monkeypatch: pytest.MonkeyPatch) -> list[TreeLayout]:
    """Every tree that the decoder verifies."""
    seen: list[TreeLayout] = []
    propose: Callable[[DecodingState], tuple[Candidates, TreeLayout]] = decoder.propose

    def watching(state: DecodingState) -> tuple[Candidates, TreeLayout]:
        candidates, layout = propose(state)
        seen.append(layout)
        return candidates, layout

    monkeypatch.setattr(decoder, "propose", watching)
    return seen


@pytest.mark.parametrize("options", [{}, CHEAP], ids=["largest", "chosen"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "gemma3"])
def test_greedy_output_is_that_of_generate(name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts inside, at and beyond the sliding windows, alone and together, random heads and good ones."""
    texts = texts_of(name)
    ids, mask = padded([text[:, : -NEW - K] for text in texts], "left")
    tree = DynamicTree(FULL, SIZES, **options)
    random = tiny_medusa(shared_model(name), num_heads=K, root_conditioned=True, draft_vocab=range(5, 60))

    def rank(t: int, k: int) -> int:
        return (3 * t + 5 * k) % 4

    guided = guide(tiny_medusa(shared_model(name), num_heads=K), texts, rank)
    sequential = guide(tiny_medusa(shared_model(name), num_heads=K, sequential=True), texts, rank)
    for medusa in (random, sequential, guided):
        decoder = MedusaDecoder(medusa, tree)
        seen = watch(decoder, monkeypatch)
        result = decoder.generate(ids, NEW, attention_mask=mask)
        for row, text in zip(result.sequences, texts, strict=True):
            assert row[-NEW:].tolist() == text[0, -NEW - K : -K].tolist()
        if medusa is random and not options:
            assert any(not torch.equal(layout.ranks[0], layout.ranks[-1]) for layout in seen)
        for text in texts:
            alone = decoder.generate(text[:, : -NEW - K], NEW)
            assert alone.sequences.tolist() == text[:, :-K].tolist()
    assert result.stats.tokens_per_step > 1.3, "guided heads are meant to be right often"


def test_the_size_changes_from_step_to_step(monkeypatch: pytest.MonkeyPatch) -> None:
    medusa = tiny_medusa(shared_model("llama"), num_heads=K)
    decoder = MedusaDecoder(medusa, DynamicTree(FULL, SIZES, **CHEAP))
    seen = watch(decoder, monkeypatch)
    prompt = prompt_of(6)
    assert decoder.generate(prompt, 40).sequences.tolist() == hf_greedy(shared_model("llama"), prompt, 40).tolist()
    assert len({layout.num_nodes for layout in seen}) > 1
    assert decoder.tree.num_nodes == SIZES[-1]


def test_sampling_and_typical_acceptance_run() -> None:
    medusa = tiny_medusa(shared_model("llama"), num_heads=K)
    for acceptance in ("exact", "typical"):
        decoder = MedusaDecoder(medusa, DynamicTree(FULL, SIZES, **CHEAP), acceptance=acceptance)  # type: ignore[arg-type]
        result = decoder.generate(prompt_of(5).repeat(2, 1), 12, do_sample=True, temperature=0.5, seed=0)
        assert result.stats.new_tokens == 24


def test_dynamic_times_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    medusa = tiny_medusa(shared_model("llama"), num_heads=K)
    ranks = torch.tensor([[0, 0, 0], [1, 0, -1], [0, 1, -1], [2, 1, 0]])
    calibration = Calibration((0.9,) * K, (-0.1,) * K)
    medusa.searched_tree = replace(search_tree(ranks, max_nodes=8), calibration=calibration)
    took = {1: 0.10, 2: 0.11, 4: 0.12, 8: 0.41}  # 8 nodes cost more than they could ever give
    monkeypatch.setattr(tree_choice_module.StepTimer, "seconds", lambda self, tree: took[tree.num_nodes])
    tree = MedusaDecoder(medusa, "dynamic").tree
    assert isinstance(tree, DynamicTree)
    assert tree.sizes == (1, 2, 4, 8)
    assert tree.seconds == (0.10, 0.11, 0.12, 0.41)
    assert tree.tokens_per_second == pytest.approx(medusa.searched_tree.tokens_per_step(4) / 0.12)
    assert tree.calibration == calibration
    monkeypatch.undo()
    decoder = MedusaDecoder(medusa, "dynamic")
    prompt = prompt_of(5)
    assert decoder.generate(prompt, 9).sequences.tolist() == hf_greedy(shared_model("llama"), prompt, 9).tolist()


def test_dynamic_needs_a_searched_tree() -> None:
    with pytest.raises(ValueError, match=r"none was searched for these heads.*medusa tree"):
        MedusaDecoder(tiny_medusa(shared_model("llama"), num_heads=K), "dynamic")


@pytest.mark.parametrize("proposal", ["sampled", "mixed"])
@pytest.mark.parametrize("tree", ["dynamic", DynamicTree(FULL, (4,))], ids=["dynamic", "explicit"])
def test_drawn_siblings_are_refused(tree: str | DynamicTree, proposal: Any) -> None:
    with pytest.raises(ValueError, match=f"proposal='{proposal}' draws siblings.*takes 'top_k'"):
        MedusaDecoder(tiny_medusa(shared_model("llama"), num_heads=K), tree, proposal=proposal)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sizes": ()}, r"sizes of a dynamic tree are \(\)"),
        ({"sizes": (4, 2)}, r"\(4, 2\); give at least one, ascending"),
        ({"sizes": (0, 2)}, "each 1 or more"),
        ({"sizes": (2, 99)}, "cannot choose 99 nodes out of 40"),
        ({"superset": CandidateTree(()), "sizes": (1,)}, "the root alone"),
        ({"seconds": (1.0, 2.0)}, "tokens_per_second None; give both"),
        ({"seconds": (1.0,), "tokens_per_second": 1.0}, "one for each of the 2 sizes"),
        ({"seconds": (0.0, 1.0), "tokens_per_second": 1.0}, "must be positive"),
        ({"seconds": (1.0, 1.0), "tokens_per_second": 0.0}, "tokens_per_second is 0.0"),
    ],
)
def test_bad_trees_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DynamicTree(**{"superset": FULL, "sizes": (2, 4), **options})


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (DynamicTree(CandidateTree.chain(K + 1), (2,)), "4 levels deep but the model has 3 heads"),
        (DynamicTree(FULL, (2,), calibration=Calibration.identity(2)), "calibration is of 2 heads but the model has 3"),
    ],
)
def test_trees_of_other_heads_are_refused(tree: DynamicTree, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MedusaDecoder(tiny_medusa(shared_model("llama"), num_heads=K), tree)
