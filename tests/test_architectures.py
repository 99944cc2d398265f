"""Every architecture decodes with heads to what `generate` gives without them, or is refused by name.

Everything is float64. Sliding windows look back 8: one prompt is shorter and its answer crosses, one is as long, one is
longer.
"""

import itertools
from functools import cache

import pytest
import torch
from architectures import ARCHITECTURES, CACHE_ORDER, RECURRENT, STRANGE, config_of
from tiny import guide, hf_greedy, prompt_of, random_model, tiny_medusa
from torch import Tensor
from transformers import PreTrainedModel

from medusa import CandidateTree
from medusa.backbone import Backbone
from medusa.inference import GenerationResult, MedusaDecoder

pytestmark = pytest.mark.decoding

K = 3
NEW = 1 + 2 * (K + 1)  # the prefill's token and two steps in which every guess is right
PROMPT_LENGTHS = (5, 8, 13)
CHAIN = CandidateTree.chain(K)
BRANCHING = CandidateTree.from_paths(
    path for depth in range(1, K + 1) for path in itertools.product(range(2), repeat=depth)
)
TREES = pytest.mark.parametrize("tree", [CHAIN, BRANCHING], ids=["chain", "branching"])


@cache
def model_of(name: str) -> PreTrainedModel:
    return random_model(config_of(name, ARCHITECTURES[name]))


@cache
def texts_of(name: str) -> list[Tensor]:
    """Prompts with the answers of `generate`, as many tokens longer as the last step looks ahead."""
    return [hf_greedy(model_of(name), prompt_of(length), NEW + K) for length in PROMPT_LENGTHS]


def decode_together(decoder: MedusaDecoder, texts: list[Tensor]) -> GenerationResult:
    """Decode the prompts of all texts as one left-padded batch."""
    longest = max(PROMPT_LENGTHS)
    ids, mask = torch.zeros(2, len(texts), longest, dtype=torch.long)
    for row, (text, length) in enumerate(zip(texts, PROMPT_LENGTHS, strict=True)):
        ids[row, longest - length :] = text[0, :length]
        mask[row, longest - length :] = 1
    return decoder.generate(ids, NEW, attention_mask=mask)


@TREES
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_random_heads_do_not_change_the_output(name: str, tree: CandidateTree) -> None:
    decoder = MedusaDecoder(tiny_medusa(model_of(name), num_heads=K, root_conditioned=True), tree)
    result = decode_together(decoder, texts_of(name))
    assert result.sequences[:, -NEW:].tolist() == [text[0, -NEW - K : -K].tolist() for text in texts_of(name)]


@TREES
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_right_guesses_fill_every_step(name: str, tree: CandidateTree) -> None:
    """In the branching tree they lie now left, now right, so rows of the cache move."""
    texts = texts_of(name)
    medusa = guide(tiny_medusa(model_of(name), num_heads=K), texts, rank=lambda t, k: (t + k) % tree.top_k)
    decoder = MedusaDecoder(medusa, tree)
    for text, length in zip(texts, PROMPT_LENGTHS, strict=True):
        result = decoder.generate(text[:, :length], NEW)
        assert result.sequences.tolist() == text[:, :-K].tolist()
        assert result.stats.accepted == [K] * 2
    result = decode_together(decoder, texts)
    assert result.sequences[:, -NEW:].tolist() == [text[0, -NEW - K : -K].tolist() for text in texts]
    assert [stats.accepted for stats in result.row_stats] == [[K] * 2] * len(texts)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_table_tests_something(name: str) -> None:
    """The answers are no single word, and a window in the fields is one in the model."""
    answers = [text[0, length:].tolist() for text, length in zip(texts_of(name), PROMPT_LENGTHS, strict=True)]
    assert len(set(itertools.chain(*answers))) > 5
    fields = ARCHITECTURES[name]
    if "sliding_window" in fields:
        ids, unlimited = texts_of(name)[0], random_model(config_of(name, {**fields, "sliding_window": 256}))
        with torch.no_grad():
            same = torch.isclose(model_of(name)(ids).logits, unlimited(ids).logits).all(dim=-1)[0]
        assert same[:8].all()
        assert not same[8:].any()


def test_crossing_the_switch_of_longrope_is_refused() -> None:
    """Rows of the cache would need other frequencies than they were made with; below and past it all is well."""
    model = random_model(config_of("phi3", {**ARCHITECTURES["phi3_long"], "original_max_position_embeddings": 16}))
    decoder = MedusaDecoder(tiny_medusa(model, num_heads=K), CHAIN)
    for length, new in ((11, 3), (17, NEW)):  # the last step begins at position 11 + 3 - 2 and looks 3 further
        prompt = prompt_of(length)
        assert decoder.generate(prompt, new).sequences.tolist() == hf_greedy(model, prompt, new).tolist()
    for length, new in ((11, 4), (16, NEW)):
        with pytest.raises(ValueError, match=r"position 16.*LongRoPE.*max_new_tokens.*plain `generate`"):
            decoder.generate(prompt_of(length), new)
    mask = torch.ones(2, 17, dtype=torch.long)
    mask[0, :9] = 0
    with pytest.raises(ValueError, match=r"position 16.*decode prompts on either side of it apart"):
        decoder.generate(prompt_of(17).repeat(2, 1), 1, attention_mask=mask)


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_models_are_refused_by_name(name: str) -> None:
    model = random_model(config_of(name, RECURRENT[name]))
    with pytest.raises(ValueError, match=rf"{type(model).__name__} has layers .* roll back \(.*plain `generate`"):
        Backbone(model)


@pytest.mark.parametrize("name", CACHE_ORDER)
def test_models_that_go_by_the_order_in_the_cache_are_refused_by_name(name: str) -> None:
    """Their heads may be trained, but a tree would get the wrong positions."""
    medusa = tiny_medusa(random_model(config_of(name, CACHE_ORDER[name])), num_heads=K)
    with pytest.raises(ValueError, match=f"{type(medusa.model).__name__} uses .*order in the cache.*plain `generate`"):
        MedusaDecoder(medusa, CHAIN)


@pytest.mark.parametrize("name", STRANGE)
def test_models_that_do_otherwise_are_refused_by_name(name: str) -> None:
    """Nothing in their configuration says so; the decoder and the backbone adapter find it out by trying."""
    model = random_model(config_of(name, STRANGE[name]))
    with pytest.raises(ValueError, match=f"{type(model).__name__} .*not supported. Use plain `generate`"):
        MedusaDecoder(tiny_medusa(model, num_heads=K), CHAIN)
