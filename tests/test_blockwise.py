"""Blockwise parallel decoding against the paper's definition (Stern et al. 2018, sections 3 and 5). V vocabulary."""

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import test_exactness
import torch
from enumeration import assert_same_law, law
from test_walk import CHAIN, PROMPT, Case, Language, Text, in_double, plainly_written, text_of
from test_walk import EOS as END
from test_walk import K as HEADS
from test_walk import V as TABLE_VOCAB
from tiny import guide, hf_greedy, prompt_of, shared_model, tiny_medusa
from transformers import LogitsProcessor, SuppressTokensLogitsProcessor

from medusa import CandidateTree
from medusa.inference import Blockwise, Lookup, MedusaDecoder
from medusa.inference.draws import CertainDraws
from medusa.inference.walk import walk_blockwise

pytestmark = pytest.mark.decoding
__all__ = ["in_double"]  # a fixture

K, NEW = 3, 20
CHAIN_OF_HEADS = CandidateTree.chain(HEADS)
CRITERIA = [
    Blockwise(),
    Blockwise("top_k", top_k=1),
    Blockwise("top_k", top_k=2),
    Blockwise("distance", epsilon=0),
    Blockwise("distance", epsilon=1),
    Blockwise(min_block=2),
    Blockwise("top_k", top_k=2, min_block=3),
    Blockwise("distance", epsilon=1, min_block=4),
]


def paper(language: Language, blockwise: Blockwise, new: int) -> tuple[Text, list[int]]:
    """Predict, verify, accept, written from the paper's definition: the text, and the size of every block.

    A block's first token is p1's own, the model's; heads p2, p3, ... look from the place before it.
    """
    text, sizes = PROMPT, []
    while True:
        first = int(language.logits(text).argmax())
        here = (*text, first)
        block = [first]  # predict
        for k in range(HEADS):
            block.append(int(language.q(here)[k].argmax()))
        accepted = 1  # the first is right by definition
        for i in range(1, len(block)):  # verify: largest j such that all up to it meet the criterion
            scores = language.logits((*text, *block[:i]))
            best = int(scores.argmax())
            if blockwise.criterion == "exact":
                meets = block[i] == best
            elif blockwise.criterion == "top_k":
                meets = sum(int(score > scores[block[i]]) for score in scores) < blockwise.top_k  # type: ignore[operator]
            else:
                meets = abs(block[i] - best) <= blockwise.epsilon  # type: ignore[operator]
            if not meets and accepted >= blockwise.min_block:
                break
            accepted += 1
        for token in block[:accepted]:  # accept
            text = (*text, token)
            if token == END or len(text) == len(PROMPT) + new:
                return text, sizes
        sizes.append(accepted)


@dataclass(frozen=True)
class BlockCase(Case):
    """Blocks of the table's heads."""

    blockwise: Blockwise = CRITERIA[0]

    def __post_init__(self) -> None:
        walk = lambda *given: walk_blockwise(*given[:-1], self.blockwise, given[-1])  # noqa: E731
        object.__setattr__(self, "walk", walk)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("blockwise", CRITERIA, ids=str)
def test_greedy_blocks_are_the_papers(blockwise: Blockwise, seed: int) -> None:
    language = Language(seed, left_out=0)
    case = BlockCase(CHAIN_OF_HEADS, new=14, do_sample=False, language=language, blockwise=blockwise)
    row, sizes = case.row(), []
    case.step(row, CertainDraws())
    while row.finish_reason is None:
        path = case.step(row, CertainDraws())
        sizes.append(len(path))
    text, expected = paper(language, blockwise, case.new)
    assert text_of(row) == text
    # Our step ends with the next block's first token, which the paper counts there.
    assert sizes[: len(expected)] == expected
    assert all(size >= min(blockwise.min_block, HEADS + 1) for size in sizes[:-1])


@pytest.mark.parametrize("blockwise", [CRITERIA[0], CRITERIA[3]], ids=str)
def test_the_exact_criterion_keeps_the_distribution(blockwise: Blockwise) -> None:
    for tree in (CHAIN, CandidateTree.from_paths([(0,), (1,), (0, 0), (1, 0)])):
        case = BlockCase(tree, blockwise=blockwise)
        assert_same_law(law_of(case), law(lambda draws, case=case: plainly_written(case, draws)))


@pytest.mark.parametrize("blockwise", [b for b in CRITERIA if b.top_k or b.epsilon or b.min_block > 1], ids=str)
def test_the_lossy_ones_do_not(blockwise: Blockwise) -> None:
    case = BlockCase(CHAIN, blockwise=blockwise)
    with pytest.raises(AssertionError, match="instead of"):
        assert_same_law(law_of(case), law(lambda draws: plainly_written(case, draws)), 1e-3)


def law_of(case: BlockCase) -> dict[Text, float]:
    def whole(draws: Any) -> Text:
        row = case.row()
        while row.finish_reason is None:
            case.step(row, draws)
        return text_of(row)

    return law(whole)


def test_a_forbidden_token_is_never_kept() -> None:
    """Not even to fill a block."""

    def forbids() -> list[LogitsProcessor]:
        return [SuppressTokensLogitsProcessor([3])]

    for seed, blockwise in itertools.product(range(4), CRITERIA):
        case = BlockCase(CHAIN_OF_HEADS, "top_k", forbids, 12, False, Language(seed), blockwise=blockwise)
        row = case.row()
        while row.finish_reason is None:
            case.step(row, CertainDraws())
        assert 3 not in text_of(row)[len(PROMPT) :]


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "gemma3"])
def test_exact_greedy_output_is_that_of_generate(name: str) -> None:
    model = shared_model(name)
    text = hf_greedy(model, prompt_of(7, seed=1), NEW + K)
    medusa = guide(tiny_medusa(model, num_heads=K), [text], rank=lambda t, k: (t + k) % 3 // 2)
    for blockwise in (Blockwise(), Blockwise("distance", epsilon=0)):
        result = MedusaDecoder(medusa, CandidateTree.chain(K), acceptance=blockwise).generate(text[:, :7], NEW)
        assert result.sequences.tolist() == text[:, :-K].tolist()
        assert result.stats.tokens_per_step > 1.5


def test_minimum_blocks_through_the_decoder() -> None:
    medusa = tiny_medusa(shared_model("llama"), num_heads=K)
    for least in (1, 2, 4):
        decoder = MedusaDecoder(medusa, CandidateTree.chain(K), acceptance=Blockwise(min_block=least))
        result = decoder.generate(prompt_of(5).repeat(2, 1), NEW)
        assert min(result.row_stats[0].accepted[:-1]) >= least - 1
        assert result.stats.tokens_per_step >= least * 0.9


def test_samples_are_distributed_as_the_backbones() -> None:
    medusa = tiny_medusa(test_exactness.small_model(), num_heads=2, root_conditioned=True)
    test_exactness.check(MedusaDecoder(medusa, CandidateTree.chain(2), acceptance=Blockwise()), 2000, 1.0, 0.8)
    lossy = MedusaDecoder(medusa, CandidateTree.chain(2), acceptance=Blockwise("top_k", top_k=6))
    with pytest.raises(AssertionError, match="p-value"):
        test_exactness.check(lossy, 500, 1.0, 0.8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"criterion": "nearly"}, "'nearly'; allowed: 'exact', 'top_k', 'distance'"),
        ({"criterion": "top_k"}, "top_k is None"),
        ({"criterion": "top_k", "top_k": 0}, "top_k is 0"),
        ({"criterion": "distance"}, "epsilon is None"),
        ({"criterion": "distance", "epsilon": -1}, "epsilon is -1"),
        ({"top_k": 3}, "top_k=3 does not go with criterion 'exact'"),
        ({"criterion": "top_k", "top_k": 3, "epsilon": 1}, "epsilon=1 does not go with"),
        ({"min_block": 0}, "min_block is 0"),
    ],
)
def test_bad_criteria_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Blockwise(**options)


def test_what_does_not_go_together_is_refused() -> None:
    medusa = tiny_medusa(shared_model("llama"), num_heads=K)
    with pytest.raises(ValueError, match=r"min_block is 5, but a step emits at most 4 tokens"):
        MedusaDecoder(medusa, CandidateTree.chain(K), acceptance=Blockwise(min_block=5))
    with pytest.raises(ValueError, match="proposal='mixed' is for exact acceptance"):
        MedusaDecoder(medusa, CandidateTree.chain(K), acceptance=Blockwise(), proposal="mixed")
    MedusaDecoder(shared_model("llama"), proposer=Lookup(4), acceptance=Blockwise(min_block=2))


def test_more_than_the_vocabulary_is_everything() -> None:
    scores, y = torch.zeros(1, TABLE_VOCAB), torch.tensor([0])
    tokens = torch.tensor([[0, 3, -1]])
    assert Blockwise("top_k", top_k=99).accepts(scores, y, tokens).tolist() == [[True, True, False]]
