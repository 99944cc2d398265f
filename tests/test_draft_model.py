"""A smaller model drafts: the text stays what plain decoding gives. Greedy against Hugging Face's own `generate`."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

import pytest
import torch
from enumeration import ROUNDING, assert_same_law, law
from tiny import COMMON, VOCAB, hf_greedy, prompt_of, random_model, shared_model, tiny_medusa, tiny_model
from torch import Tensor
from transformers import (
    GenerationConfig,
    GPT2Config,
    LlamaConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation import logits_process as hf
from transformers.generation.stopping_criteria import EosTokenCriteria

from medusa import CandidateTree
from medusa.inference import DecodingStats, DraftModel, DraftStats, MedusaDecoder, draft_model, walk
from medusa.inference.accept import NO_TOKEN, accept_sampled
from medusa.inference.draft_model import ModelDrafting, draw_siblings
from medusa.inference.draws import Draws
from medusa.inference.layout import TreeLayout
from medusa.inference.propose import Candidates
from medusa.inference.proposer import DecodingState
from medusa.inference.request import Row
from medusa.inference.walk import Path

pytestmark = pytest.mark.decoding

NEW = 17
LENGTHS = (2, 5, 13)
BUSHY = CandidateTree.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 0, 1)])
SHAPES: dict[str, dict[str, Any]] = {"chain": {"num_drafts": 4}, "tree": {"tree": BUSHY}, "one": {"num_drafts": 1}}


@cache
def text_of(name: str, length: int, new_tokens: int = NEW) -> Tensor:
    return hf_greedy(shared_model(name), prompt_of(length, seed=3), new_tokens)


@cache
def near(name: str, noise: float = 0.015) -> PreTrainedModel:
    """A draft that is often right: the target with noise on its weights."""
    model = tiny_model(name)
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    return model


# Greedy


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "gemma3"])
def test_greedy_text_is_that_of_generate(name: str, shape: str) -> None:
    counts = []
    for draft in (near(name), shared_model("llama" if name != "llama" else "qwen3")):
        decoder = MedusaDecoder(shared_model(name), proposer=DraftModel(draft, **SHAPES[shape]))
        for length in LENGTHS:
            text = text_of(name, length)
            result = decoder.generate(text[:, :length], NEW)
            assert result.sequences.tolist() == text.tolist()
            counts += result.stats.accepted
    assert len(set(counts)) > 1, "steps are meant to accept different numbers of drafts"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_draft_equal_to_the_target_is_always_right(name: str, shape: str) -> None:
    """So it reads exactly the text, and its own tree as the target would."""
    model = shared_model(name)
    proposer = DraftModel(model, **SHAPES[shape])
    result = MedusaDecoder(model, proposer=proposer).generate(text_of(name, 13)[:, :13], NEW)
    assert result.sequences.tolist() == text_of(name, 13).tolist()
    assert all(count == proposer.depth for count in result.stats.accepted[:-1])


def test_rows_of_different_lengths_get_what_they_would_get_alone() -> None:
    model = shared_model("mistral")
    prompts = [prompt_of(length, seed=3) for length in LENGTHS]
    width = max(LENGTHS)
    ids = torch.cat([torch.nn.functional.pad(p, (width - p.shape[1], 0)) for p in prompts])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(p), (width - p.shape[1], 0)) for p in prompts])
    ends = [int(text_of("mistral", 5)[0, 5 + 6])]  # this row leaves the batch early
    for shape in ("chain", "tree"):
        decoder = MedusaDecoder(model, proposer=DraftModel(near("mistral"), **SHAPES[shape]))
        result = decoder.generate(ids, NEW, attention_mask=mask, eos_token_id=ends, pad_token_id=0)
        for row, prompt in zip(result.sequences, prompts, strict=True):
            alone = hf_greedy(model, prompt, NEW, eos_token_id=ends)[0, prompt.shape[1] :].tolist()
            assert row[width:].tolist() == [*alone, *[0] * (len(row) - width - len(alone))]
        assert len({tuple(stats.accepted) for stats in result.row_stats}) > 1


def test_a_request_of_sampled_and_greedy_rows_keeps_the_greedy_ones() -> None:
    prompt = prompt_of(5, seed=3)
    configs = [GenerationConfig(do_sample=sample, max_new_tokens=NEW, pad_token_id=0) for sample in (True, False, True)]
    for shape in ("chain", "tree"):
        decoder = MedusaDecoder(shared_model("llama"), proposer=DraftModel(near("llama"), **SHAPES[shape]))
        result = decoder.generate(prompt.repeat(3, 1), generation_config=configs, seed=0)
        assert result.sequences[1].tolist() == text_of("llama", 5)[0].tolist()
        assert result.sequences[0].tolist() != result.sequences[1].tolist()


def test_streams_custom_generate_and_a_model_with_heads() -> None:
    text = text_of("llama", 5)
    medusa = tiny_medusa(shared_model("llama"), num_heads=2)
    decoder = MedusaDecoder(medusa, proposer=DraftModel(near("llama"), tree=BUSHY))
    blocks = list(decoder.stream(text[:, :5], NEW))
    assert [token for block in blocks for token in block] == text[0, 5:].tolist()
    assert len(blocks) < NEW
    sequences = medusa.model.generate(
        text[:, :5], custom_generate=decoder, max_new_tokens=NEW, do_sample=False, pad_token_id=0
    )
    assert sequences.tolist() == text.tolist()


def test_threads_share_a_decoder() -> None:
    decoder = MedusaDecoder(shared_model("llama"), proposer=DraftModel(near("llama"), num_drafts="auto"))
    texts = [text_of("llama", length) for length in LENGTHS] * 2

    def run(text: Tensor) -> list[int]:
        return decoder.generate(text[:, :-NEW], NEW).sequences[0].tolist()

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(run, texts)) == [text[0].tolist() for text in texts]


def test_a_draft_that_was_left_behind_catches_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of drafts in any order, none for several steps included."""
    lengths = itertools.cycle([0, 3, 0, 0, 0, 1, 0, 2, 7, 0, 0, 5])
    monkeypatch.setattr(DraftStats, "best_k", lambda self, most: next(lengths))
    text = text_of("llama", 5, 60)
    for draft in (shared_model("llama"), near("llama")):
        decoder = MedusaDecoder(shared_model("llama"), proposer=DraftModel(draft, num_drafts="auto"))
        result = decoder.generate(text[:, :5], 60)
        assert result.sequences.tolist() == text.tolist()
        assert sum(result.stats.accepted) > 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_draft_may_compute_in_another_type(dtype: torch.dtype) -> None:
    draft = tiny_model("llama", dtype)
    result = MedusaDecoder(shared_model("llama"), proposer=DraftModel(draft)).generate(text_of("llama", 5)[:, :5], NEW)
    assert result.sequences.tolist() == text_of("llama", 5).tolist()
    assert sum(result.stats.accepted) > 0


# Sampling: every throw of the dice, through the real models

V, EOS = 3, 0
PROMPT = (1, 2)
TINY: dict[str, Any] = {
    **COMMON, "vocab_size": V, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 1, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
RAGGED = CandidateTree.from_paths([(0,), (1,), (0, 0)])
DICE: dict[str, tuple[dict[str, Any], int]] = {
    "chain of 2": ({"num_drafts": 2}, 3),
    "chain of 1": ({"num_drafts": 1}, 4),
    "siblings": ({"tree": CandidateTree.from_paths([(0,), (1,), (2,)])}, 3),
    "ragged": ({"tree": RAGGED}, 3),
}
Text = tuple[int, ...]


@cache
def smallest(seed: int) -> PreTrainedModel:
    model = random_model(LlamaConfig(**TINY), seed=seed)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    return model


def row_of(text: Text, new: int, warpers: list[LogitsProcessor]) -> Row:
    limit = len(PROMPT) + new - len(text)
    ids = torch.tensor([*text, *[0] * limit])
    criteria = StoppingCriteriaList([EosTokenCriteria(EOS)])
    return Row(ids, len(text), torch.tensor(text), limit, LogitsProcessorList(warpers), criteria, do_sample=True)


class Dice(MedusaDecoder):
    """A decoder whose dice can be replaced."""

    dice: Draws

    def text(self, row: Row, draws: Draws) -> Text:
        self.dice = draws
        for _ in self._steps([row], [DecodingStats()], None):
            pass
        return tuple(row.context[0].tolist())

    def propose(self, state: DecodingState) -> tuple[Candidates, TreeLayout]:
        state.draws = self.dice
        return super().propose(state)

    def accept(self, state: DecodingState, candidates: Candidates, logits: Tensor, layout: TreeLayout) -> list[Path]:
        state.draws = self.dice
        return super().accept(state, candidates, logits, layout)


def plainly_written(new: int, warpers: list[LogitsProcessor], draws: Draws) -> Text:
    text, processors = PROMPT, LogitsProcessorList(warpers)
    while len(text) < len(PROMPT) + new and (text == PROMPT or text[-1] != EOS):
        ids = torch.tensor([text])
        with torch.inference_mode():
            scores = processors(ids, smallest(0)(ids).logits[:, -1])
        text = (*text, int(draws.categorical(scores.softmax(dim=-1))))
    return text


@pytest.fixture
def in_double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores are otherwise fp32, as those of `generate`."""

    def scores(rows: list[Row], contexts: list[Tensor], logits: Tensor) -> Tensor:
        each = zip(rows, contexts, logits.split(1), strict=True)
        return torch.cat([row.processors(context, own.clone()) for row, context, own in each])

    monkeypatch.setattr(walk, "processed_scores", scores)


def check_law(options: dict[str, Any], new: int, warpers: list[LogitsProcessor], draft: PreTrainedModel) -> None:
    decoder = Dice(smallest(0), proposer=DraftModel(draft, **options))
    found = law(lambda draws: decoder.text(row_of(PROMPT, new, warpers), draws))
    assert_same_law(found, law(lambda draws: plainly_written(new, warpers, draws)))


WARPERS: dict[str, list[LogitsProcessor]] = {
    "none": [],
    "temperature and top-p": [hf.TemperatureLogitsWarper(0.7), hf.TopPLogitsWarper(0.8)],  # zeros in q where p > 0
    "penalty": [hf.RepetitionPenaltyLogitsProcessor(1.8)],  # which the draft does not see
}


@pytest.mark.usefixtures("in_double")
@pytest.mark.parametrize("warpers", WARPERS)
@pytest.mark.parametrize("shape", DICE)
def test_texts_are_distributed_as_by_plain_decoding(shape: str, warpers: str) -> None:
    check_law(*DICE[shape], WARPERS[warpers], smallest(1))
