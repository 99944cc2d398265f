"""Several rows at once: each gets what it would get alone, whatever its length, its guesses and its neighbours."""

from typing import Any

import pytest
import torch
from tiny import guide, hf_greedy, prompt_of, random_tree, shared_model, tiny_medusa
from torch import Tensor
from transformers import GenerationConfig

from medusa import CandidateTree, MedusaModel
from medusa.inference import MedusaDecoder
from medusa.inference.proposer import DecodingState

pytestmark = pytest.mark.decoding

K = 3
NEW = 17
LENGTHS = (2, 5, 9, 13)
TREE = CandidateTree.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 1), (0, 0, 0), (0, 1, 1), (1, 0, 0)])


def texts_of(name: str, attention: str = "sdpa") -> list[Tensor]:
    model = shared_model(name, torch.float64, attention)
    return [hf_greedy(model, prompt_of(length, seed=3), NEW + K) for length in LENGTHS]


def guided(name: str, attention: str = "sdpa") -> tuple[MedusaModel, list[Tensor]]:
    """Heads whose guesses are right at changing ranks, so that rows accept different numbers of tokens."""
    texts = texts_of(name, attention)
    medusa = tiny_medusa(shared_model(name, torch.float64, attention), num_heads=K)
    return guide(medusa, texts, rank=lambda t, k: (3 * t + 5 * k) % 4), texts


def padded(prompts: list[Tensor], side: str) -> tuple[Tensor, Tensor]:
    """Prompts [1, T] each as one matrix with its mask; `side` is left, right or both."""
    width = max(prompt.shape[1] for prompt in prompts) + 2
    ids, mask = torch.zeros(len(prompts), width, dtype=torch.long), torch.zeros(len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        free = width - prompt.shape[1]
        before = {"left": free, "right": 0, "both": free // 2}[side]
        ids[row, before : before + prompt.shape[1]] = prompt[0]
        mask[row, before : before + prompt.shape[1]] = 1
    return ids, mask


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("side", ["left", "right", "both"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "gemma3"])
def test_each_row_equals_its_own_output(name: str, side: str, attention: str) -> None:
    medusa, texts = guided(name, attention)
    ids, mask = padded([text[:, : -NEW - K] for text in texts], side)
    result = MedusaDecoder(medusa, TREE).generate(ids, NEW, attention_mask=mask)
    for row, text in zip(result.sequences, texts, strict=True):
        assert row[-NEW:].tolist() == text[0, -NEW - K : -K].tolist()
    accepted = [stats.accepted for stats in result.row_stats]
    assert len({tuple(steps) for steps in accepted}) > 1, "rows are meant to accept different numbers of tokens"
    assert result.sequences[:, : ids.shape[1]].tolist() == ids.tolist()


def test_rows_that_end_early_leave_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    medusa, texts = guided("llama")
    ids, mask = padded([text[:, : -NEW - K] for text in texts], "left")
    ends = [int(text[0, -NEW - K + when]) for text, when in zip(texts, (0, 4, 9, 9), strict=True)]
    decoder = MedusaDecoder(medusa, TREE)
    sizes: list[int] = []
    step = decoder.step

    def counting_step(state: DecodingState) -> None:
        sizes.append(len(state.rows))
        assert state.cache.tree_layers[0].keys.shape[0] == len(state.rows), "their memory must be given back"
        step(state)

    monkeypatch.setattr(decoder, "step", counting_step)
    result = decoder.generate(ids, NEW, attention_mask=mask, eos_token_id=ends, pad_token_id=96)
    for row, text, stats in zip(result.sequences, texts, result.row_stats, strict=True):
        alone = hf_greedy(medusa.model, text[:, : -NEW - K], NEW, eos_token_id=ends)[
            0, text.shape[1] - NEW - K :
        ].tolist()
        answer = row[ids.shape[1] :].tolist()
        assert answer == alone + [96] * (len(answer) - len(alone))
        assert stats.new_tokens == len(alone)
        assert stats.finish_reason == ("stop" if alone[-1] in ends else "length")
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] < len(LENGTHS), "one row ends with its first token"
    assert result.stats.new_tokens == sum(stats.new_tokens for stats in result.row_stats)
    assert result.stats.steps == sum(sizes)


@pytest.mark.parametrize("seed", range(3))
def test_random_heads_on_random_trees(seed: int) -> None:
    medusa = tiny_medusa(shared_model("qwen3"), seed=seed, num_heads=4, root_conditioned=True)
    texts = texts_of("qwen3")
    ids, mask = padded([text[:, : -NEW - K] for text in texts], "left")
    result = MedusaDecoder(medusa, random_tree(seed)).generate(ids, NEW, attention_mask=mask)
    for row, text in zip(result.sequences, texts, strict=True):
        assert row[-NEW:].tolist() == text[0, -NEW - K : -K].tolist()


def test_a_batch_without_padding_needs_no_mask() -> None:
    medusa, texts = guided("llama")
    prompt = texts[1][:, :5]
    result = MedusaDecoder(medusa, TREE).generate(prompt.repeat(3, 1), NEW)
    assert result.sequences.tolist() == [texts[1][0, :-K].tolist()] * 3
    assert result.stats.tokens_per_step == result.row_stats[0].tokens_per_step


def test_rows_may_have_settings_of_their_own() -> None:
    """Greedy, greedy with a penalty, an end token, and a row that samples one token out of one."""
    medusa, texts = guided("llama")
    model = medusa.model
    prompts = [text[:, : -NEW - K] for text in texts]
    ids, mask = padded(prompts, "left")
    settings: list[dict[str, Any]] = [
        {"max_new_tokens": 5},
        {"max_new_tokens": NEW, "repetition_penalty": 3.0},
        {"max_new_tokens": NEW, "eos_token_id": int(texts[2][0, -NEW - K + 6])},
        {"max_new_tokens": NEW, "do_sample": True, "top_k": 1},
    ]
    decoder = MedusaDecoder(tiny_medusa(model, num_heads=K), TREE)
    configs = [GenerationConfig(**setting, pad_token_id=0) for setting in settings]
    result = decoder.generate(ids, attention_mask=mask, generation_config=configs)
    for row, prompt, setting in zip(result.sequences, prompts, settings, strict=True):
        greedy = {
            name: value for name, value in setting.items() if name not in ("do_sample", "top_k", "max_new_tokens")
        }
        alone = hf_greedy(model, prompt, setting["max_new_tokens"], **greedy)[0, prompt.shape[1] :].tolist()
        answer = row[ids.shape[1] :].tolist()
        assert answer == alone + [0] * (len(answer) - len(alone))


def test_rows_may_want_different_numbers_of_answers() -> None:
    decoder = MedusaDecoder(tiny_medusa(shared_model("llama"), num_heads=K), TREE)
    ids = torch.cat([prompt_of(4), prompt_of(4, seed=1)])
    configs = [GenerationConfig(max_new_tokens=3, num_return_sequences=n, do_sample=True) for n in (1, 2)]
    for order in (configs, configs[::-1]):
        result = decoder.generate(ids, generation_config=order, seed=0)
        prompts = [ids[i].tolist() for i, config in enumerate(order) for _ in range(config.num_return_sequences)]
        assert result.sequences[:, :4].tolist() == prompts
    three = [GenerationConfig(max_new_tokens=3, num_return_sequences=n, do_sample=True) for n in (1, 3)]
    assert decoder.generate(ids, generation_config=three).sequences[:, :4].tolist() == [
        ids[i].tolist() for i in (0, 1, 1, 1)
    ]


def test_one_configuration_for_each_row() -> None:
    decoder = MedusaDecoder(tiny_medusa(shared_model("llama"), num_heads=K), TREE)
    with pytest.raises(ValueError, match="3 generation configs for 2 rows"):
        decoder.generate(prompt_of(4).repeat(2, 1), generation_config=[GenerationConfig(max_new_tokens=2)] * 3)


def test_a_padded_prompt_is_penalised_for_its_own_tokens_only() -> None:
    """transformers counts padding as text; a row of ours must not differ from the same prompt alone."""
    model = shared_model("llama")
    prompts = [prompt_of(length, seed=5) for length in (4, 11)]
    ids, mask = padded(prompts, "left")
    options: dict[str, Any] = {
        "repetition_penalty": 2.5,
        "min_new_tokens": 6,
        "eos_token_id": 7,
        "no_repeat_ngram_size": 2,
    }
    result = MedusaDecoder(tiny_medusa(model, num_heads=K), TREE).generate(ids, 12, attention_mask=mask, **options)
    for row, prompt in zip(result.sequences, prompts, strict=True):
        alone = hf_greedy(model, prompt, 12, **options)[0, prompt.shape[1] :].tolist()
        assert row[ids.shape[1] :].tolist()[: len(alone)] == alone


def test_length_limits_count_the_whole_matrix_as_in_transformers() -> None:
    """max_length and min_length include the padding, so every row gets equally many new tokens."""
    model = shared_model("llama")
    prompts = [prompt_of(length, seed=6) for length in (4, 11)]
    ids, mask = padded(prompts, "left")
    expected = model.generate(
        ids, attention_mask=mask, max_length=22, min_length=18, eos_token_id=list(range(3, 40)), pad_token_id=0
    )
    decoder = MedusaDecoder(tiny_medusa(model, num_heads=K), TREE)
    result = decoder.generate(
        ids, attention_mask=mask, max_length=22, min_length=18, eos_token_id=list(range(3, 40)), pad_token_id=0
    )
    assert result.sequences.tolist() == expected.tolist()


def test_several_answers_to_each_prompt() -> None:
    model = shared_model("llama")
    decoder = MedusaDecoder(tiny_medusa(model, num_heads=K), TREE)
    prompts = [prompt_of(4), prompt_of(7)]
    ids, mask = padded(prompts, "left")
    result = decoder.generate(ids, 8, attention_mask=mask, do_sample=True, num_return_sequences=3, seed=0, top_k=0)
    assert result.sequences.shape == (6, ids.shape[1] + 8)
    assert result.sequences[:, : ids.shape[1]].tolist() == [row for row in ids.tolist() for _ in range(3)]
    assert len({tuple(row) for row in result.sequences.tolist()}) == 6, "answers are meant to differ"
    again = decoder.generate(ids, 8, attention_mask=mask, do_sample=True, num_return_sequences=3, seed=0, top_k=0)
    assert again.sequences.tolist() == result.sequences.tolist()


def test_a_row_of_padding_is_refused_also_without_a_mask() -> None:
    decoder = MedusaDecoder(tiny_medusa(shared_model("llama"), num_heads=K), TREE)
    with pytest.raises(ValueError, match="row 1 holds nothing but the pad token"):
        decoder.generate(torch.tensor([[5, 6], [0, 0]]), 4, pad_token_id=0)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.tensor([[1, 1, 1], [0, 0, 0]]), "row 1: attention_mask is all zeros"),
        (torch.ones(1, 3), r"attention_mask has shape \(1, 3\), input_ids \(2, 3\)"),
    ],
)
def test_bad_masks_are_refused(mask: Tensor, message: str) -> None:
    decoder = MedusaDecoder(tiny_medusa(shared_model("llama"), num_heads=K), TREE)
    with pytest.raises(ValueError, match=message):
        decoder.generate(torch.full((2, 3), 5), 4, attention_mask=mask)
