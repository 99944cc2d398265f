"""A smaller model drafts: the text stays what plain decoding gives. Greedy against Hugging Face's own `generate`."""

import copy
import itertools
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

import pytest
import torch
from enumeration import assert_same_law, law
from test_exactness import FEW, MANY, WARPING, check, small_model
from tiny import COMMON, VOCAB, hf_greedy, prompt_of, random_model, shared_model, tiny_medusa, tiny_model
from torch import Tensor
from transformers import (
    GenerationConfig,
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
from medusa.backbone import Backbone
from medusa.inference import (
    DecodingStats,
    DraftModel,
    DraftStats,
    MedusaDecoder,
    check_same_vocabulary,
    draft_model,
    walk,
)
from medusa.inference.accept import NO_TOKEN, accept_sampled
from medusa.inference.draft_model import ModelDrafting, draw_drafts
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
    draft = copy.deepcopy(shared_model("llama")).to(dtype)
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
PAIR = CandidateTree.from_paths([(0,), (1,)])
RAGGED = CandidateTree.from_paths([(0,), (1,), (0, 0)])
DICE: dict[str, tuple[dict[str, Any], int]] = {
    "chain of 2": ({"num_drafts": 2}, 3),
    "chain of 1": ({"num_drafts": 1}, 4),
    "siblings": ({"tree": CandidateTree.from_paths([(0,), (1,), (2,)])}, 3),
    "ragged": ({"tree": RAGGED}, 3),
}
Text = tuple[int, ...]


@cache
def smallest(seed: int, vocab: int = V) -> PreTrainedModel:
    model = random_model(LlamaConfig(**{**TINY, "vocab_size": vocab}), seed=seed)
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


def plainly_written(model: PreTrainedModel, new: int, warpers: list[LogitsProcessor], draws: Draws) -> Text:
    text, processors = PROMPT, LogitsProcessorList(warpers)
    while len(text) < len(PROMPT) + new and (text == PROMPT or text[-1] != EOS):
        ids = torch.tensor([text])
        with torch.inference_mode():
            scores = processors(ids, model(ids).logits[:, -1])
        text = (*text, int(draws.categorical(scores.softmax(dim=-1))))
    return text


@pytest.fixture
def in_double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores are otherwise fp32, as those of `generate`."""

    def scores(rows: list[Row], contexts: list[Tensor], logits: Tensor) -> Tensor:
        each = zip(rows, contexts, logits.split(1), strict=True)
        return torch.cat([row.processors(context, own.clone()) for row, context, own in each])

    monkeypatch.setattr(walk, "processed_scores", scores)


def check_law(options: dict[str, Any], new: int, warpers: list[LogitsProcessor], vocab: int = V) -> None:
    target, draft = smallest(0, vocab), smallest(1, vocab)
    decoder = Dice(target, proposer=DraftModel(draft, **options))
    found = law(lambda draws: decoder.text(row_of(PROMPT, new, warpers), draws))
    assert_same_law(found, law(lambda draws: plainly_written(target, new, warpers, draws)))


WARPERS: dict[str, list[LogitsProcessor]] = {
    "none": [],
    "temperature and top-p": [hf.TemperatureLogitsWarper(0.7), hf.TopPLogitsWarper(0.8)],  # zeros in q where p > 0
    "penalty": [hf.RepetitionPenaltyLogitsProcessor(1.8)],  # which the draft does not see
}


CASES = [
    pytest.param(shape, name, marks=[pytest.mark.long] if shape == "ragged" and name != "temperature and top-p" else [])
    for shape in DICE
    for name in WARPERS
]


@pytest.mark.usefixtures("in_double")
@pytest.mark.parametrize(("shape", "warpers"), CASES)
def test_texts_are_distributed_as_by_plain_decoding(shape: str, warpers: str) -> None:
    check_law(*DICE[shape], WARPERS[warpers])


def parted(q: Tensor) -> Tensor:
    """All of q [..., V] on token 0, as a draft would give it that is certain."""
    return torch.zeros_like(q).index_fill(-1, torch.tensor([0]), 1.0)


@pytest.mark.usefixtures("in_double")
@pytest.mark.parametrize("options", [{"num_drafts": 1}, {"tree": PAIR}], ids=["chain", "pair"])
def test_a_draft_that_is_certain_leaves_the_text_as_it_is(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    own = ModelDrafting._distributions
    monkeypatch.setattr(ModelDrafting, "_distributions", lambda *given: parted(own(*given)))
    check_law(options, 2, [], vocab=4)


@pytest.mark.usefixtures("in_double")
@pytest.mark.parametrize("options", [{"num_drafts": 1}, {"tree": PAIR}], ids=["chain", "pair"])
def test_a_larger_vocabulary_is_left_as_it_is(options: dict[str, Any]) -> None:
    check_law(options, 2, [], vocab=4)  # in which the wrong rules below fail


def test_what_underflows_is_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a draft is rejected the rest of q is brought to 1, which denormal numbers do not come to."""
    model = shared_model("llama", torch.float32)
    seen: list[Tensor] = []
    original = draft_model.draw_drafts

    def watching(q: Tensor, count: int, greedy: Tensor, draws: Draws) -> Tensor:
        seen.append(q)
        return original(q, count, greedy, draws)

    monkeypatch.setattr(draft_model, "draw_drafts", watching)
    decoder = MedusaDecoder(model, proposer=DraftModel(model, tree=PAIR))
    decoder.generate(prompt_of(5), NEW, do_sample=True, temperature=0.05, top_k=0, seed=0)
    q = torch.cat([own.flatten() for own in seen])
    assert ((q == 0) | (q >= torch.finfo(q.dtype).tiny)).all()
    assert ((q > 0) & (q < 1e-20)).any(), "q is meant to come close to underflow"


# Drafting that is nearly right


def with_replacement(q: Tensor, count: int, greedy: Tensor, draws: Draws) -> Tensor:
    return torch.stack([draws.categorical(q) for _ in range(count)], dim=1) if count else q.new_zeros(len(q), 0).long()


def likeliest_first(q: Tensor, count: int, greedy: Tensor, draws: Draws) -> Tensor:
    drawn = draw_drafts(q, count, greedy, draws)
    order = q.gather(1, drawn.clamp(min=0)).where(drawn != NO_TOKEN, -1.0).argsort(dim=1, descending=True)
    return drawn.gather(1, order)


def certain(q: Tensor, count: int, greedy: Tensor, draws: Draws) -> Tensor:
    return draw_drafts(q, count, torch.ones_like(greedy), draws)


@pytest.mark.usefixtures("in_double")
@pytest.mark.parametrize("wrong", [with_replacement, likeliest_first, certain])
def test_wrong_siblings_fail(monkeypatch: pytest.MonkeyPatch, wrong: Any) -> None:
    monkeypatch.setattr(draft_model, "draw_drafts", wrong)
    with pytest.raises(AssertionError, match="instead of"):
        check_law({"tree": PAIR}, 2, [], vocab=4)


def redrawn_from_p(p: Tensor, q: Tensor, children: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
    token, child = accept_sampled(p, q, children, draws)
    return torch.where(child == NO_TOKEN, draws.categorical(p), token), child


@pytest.mark.usefixtures("in_double")
@pytest.mark.parametrize("wrong", [redrawn_from_p, partial(accept_sampled, replacement=True)])
def test_wrong_acceptance_fails(monkeypatch: pytest.MonkeyPatch, wrong: Any) -> None:
    monkeypatch.setattr(walk, "accept_sampled", wrong)
    with pytest.raises(AssertionError, match="instead of"):
        check_law({"tree": PAIR}, 2, [], vocab=4)


# Sampling: random dice


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_samples_are_distributed_as_the_targets(shape: str) -> None:
    check_samples(shape, FEW, 1.0, 0.8)


@pytest.mark.long
@pytest.mark.parametrize(("temperature", "top_p"), WARPING)
@pytest.mark.parametrize("shape", SHAPES)
def test_many_samples_are_distributed_as_the_targets(shape: str, temperature: float, top_p: float) -> None:
    check_samples(shape, MANY, temperature, top_p)


def check_samples(shape: str, samples: int, temperature: float, top_p: float) -> None:
    draft = copy.deepcopy(small_model())
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    check(MedusaDecoder(small_model(), proposer=DraftModel(draft, **SHAPES[shape])), samples, temperature, top_p)


# What is refused


ONE_LAYER = {"num_hidden_layers": 1}


def other(**changes: Any) -> PreTrainedModel:
    return random_model(LlamaConfig(**{**COMMON, **changes}))


@pytest.mark.parametrize("num_drafts", [0, -1, 2.5, "many"])
def test_strange_numbers_of_drafts_are_refused(num_drafts: Any) -> None:
    with pytest.raises(ValueError, match=f"num_drafts is {num_drafts!r}"):
        DraftModel(shared_model("llama"), num_drafts=num_drafts)


def test_what_cannot_be_drafted_is_refused() -> None:
    with pytest.raises(ValueError, match="256 drafts a step do not fit"):
        DraftModel(shared_model("llama"), num_drafts=256)
    with pytest.raises(ValueError, match="root alone"):
        DraftModel(shared_model("llama"), tree=CandidateTree(()))
    with pytest.raises(ValueError, match="leave it out to draft a tree"):
        DraftModel(shared_model("llama"), "auto", tree=BUSHY)


def test_a_draft_without_a_cache_that_can_be_rolled_back_is_refused() -> None:
    config = MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, state_size=4)
    with pytest.raises(ValueError, match="cannot roll back"):
        DraftModel(MambaForCausalLM(config))


def test_a_draft_on_another_device_is_refused() -> None:
    target = Backbone(shared_model("llama"))
    target.lm_weight = target.lm_weight.to("meta")
    with pytest.raises(ValueError, match="the draft is on cpu, the target on meta"):
        DraftModel(shared_model("llama")).for_target(target, VOCAB)


def test_a_draft_larger_than_its_target_is_pointed_out() -> None:
    with pytest.warns(UserWarning, match="only slows it down"):
        MedusaDecoder(shared_model("llama"), proposer=DraftModel(other(num_hidden_layers=3)))


def test_a_text_longer_than_the_drafts_context_is_refused() -> None:
    decoder = MedusaDecoder(shared_model("llama"), proposer=DraftModel(other(max_position_embeddings=16, **ONE_LAYER)))
    assert decoder.generate(prompt_of(5, seed=3), 11).stats.new_tokens == 11
    with pytest.raises(ValueError, match="may take 17 tokens, but the draft's context holds 16"):
        decoder.generate(prompt_of(5), 12)


class Words:
    """As much of a tokenizer as is compared."""

    chat_template = None

    def __init__(self, **changes: int) -> None:
        self.vocab = {**{f"w{i}": i for i in range(VOCAB)}, **changes}

    def get_vocab(self) -> dict[str, int]:
        return self.vocab

    def save_pretrained(self, save_directory: str) -> None:
        raise NotImplementedError


def test_other_vocabularies_are_refused_and_their_entries_named() -> None:
    with pytest.raises(ValueError, match="vocabulary has 120 ids, the target's 97"):
        MedusaDecoder(shared_model("llama"), proposer=DraftModel(other(vocab_size=120)))
    with pytest.raises(ValueError, match=r"2 entries \('<end>' is missing and 97; 'w3' is 3 and 4\)"):
        check_same_vocabulary(Words(), Words(**{"w3": 4, "<end>": 97}))


@pytest.mark.parametrize("size", [90 + 7 + 23, 97 - 4])
def test_padded_vocabularies_are_taken_where_tokenizers_agree(size: int) -> None:
    """The draft's favourite is an id that the target lacks, or the target knows more ids than the draft."""
    draft = other(vocab_size=size, **ONE_LAYER)
    with torch.no_grad():
        draft.lm_head.weight[-1] = 5 * draft.lm_head.weight[3]
    words = Words()
    words.vocab = {token: i for token, i in words.vocab.items() if i < 90}
    for shape in SHAPES.values():
        decoder = MedusaDecoder(shared_model("llama"), proposer=DraftModel(draft, tokenizers=(words, words), **shape))
        text = text_of("llama", 5)
        assert decoder.generate(text[:, :5], NEW).sequences.tolist() == text.tolist()
        decoder.generate(text[:, :5], NEW, do_sample=True, temperature=3.0, seed=0)
