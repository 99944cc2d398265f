"""Every option of `generate` means here what it means there. The reference is always transformers itself."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from chatml import byte_tokenizer, save_tiny_chat_model
from tiny import VOCAB, guide, hf_greedy, prompt_of, shared_model, tiny_medusa
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    MaxTimeCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from medusa import CandidateTree, MedusaModel
from medusa.inference import DecodingStats, MedusaDecoder

pytestmark = pytest.mark.decoding

K = 3
NEW = 20
TREE = CandidateTree.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (1, 0, 0)])


class Favour(LogitsProcessor):
    """A user's own processor: looks at the text, and remembers how often it was asked."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.asked.append(input_ids.shape[1])
        scores[:, (input_ids[0, -1] + len(self.asked)) % scores.shape[1]] += 3.0
        return scores


class SumReached(StoppingCriteria):
    """A user's own criterion: stops once the ids add up to so much."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids.sum(dim=1) >= self.limit


OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "repetition_penalty": lambda: {"repetition_penalty": 1.8},
    "a negative penalty": lambda: {"repetition_penalty": 0.5},
    "no_repeat_ngram_size": lambda: {"no_repeat_ngram_size": 2},
    "bad_words_ids": lambda: {"bad_words_ids": [[58], [72, 78], [40]]},
    "min_new_tokens": lambda: {"min_new_tokens": 15, "eos_token_id": list(range(0, 97, 2))},
    "min_length": lambda: {"min_length": 12, "eos_token_id": list(range(0, 97, 2))},
    "forced_eos_token_id": lambda: {"forced_eos_token_id": 4},
    "suppress_tokens": lambda: {"suppress_tokens": list(range(30, 60))},
    "begin_suppress_tokens": lambda: {"begin_suppress_tokens": [65]},
    "sequence_bias": lambda: {"sequence_bias": [[[7], 4.0], [[7, 8], 9.0]]},
    "exponential_decay": lambda: {"exponential_decay_length_penalty": (4, 1.5), "eos_token_id": 3},
    "encoder_repetition": lambda: {"encoder_repetition_penalty": 2.0},
    "prefix": lambda: {"prefix_allowed_tokens_fn": lambda row, text: [(int(text[-1]) * 3 + i) % 97 for i in range(5)]},
    "guidance_scale": lambda: {"guidance_scale": 1.7},
    "a processor of one's own": lambda: {"logits_processor": LogitsProcessorList([Favour()])},
    "a criterion of one's own": lambda: {"stopping_criteria": StoppingCriteriaList([SumReached(600)])},
    "max_time": lambda: {"stopping_criteria": StoppingCriteriaList([MaxTimeCriteria(0.0)])},
    "eos_token_id": lambda: {"eos_token_id": list(range(0, 97, 5))},
    "several at once": lambda: {"repetition_penalty": 1.5, "no_repeat_ngram_size": 3, "suppress_tokens": [1, 2, 3]},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_greedy_with_the_option_equals_generate(option: str) -> None:
    model = shared_model("llama")
    prompt = prompt_of(6, seed=2)
    expected = hf_greedy(model, prompt, NEW, **OPTIONS[option]())
    plain = hf_greedy(model, prompt, NEW + K)
    # Heads that know this very text, so that most tokens are accepted guesses, and heads that know nothing.
    known = torch.cat([expected, plain[:, expected.shape[1] :]], dim=1)
    for medusa in (guide(tiny_medusa(model, num_heads=K), [known], lambda t, k: (t + k) % 2), None):
        decoder = MedusaDecoder(medusa or tiny_medusa(model, num_heads=K), TREE)
        result = decoder.generate(prompt, NEW, pad_token_id=0, **OPTIONS[option]())
        assert result.sequences.tolist() == expected.tolist()
        custom = model.generate(
            prompt, max_new_tokens=NEW, pad_token_id=0, custom_generate=decoder, **OPTIONS[option]()
        )
        assert custom.tolist() == expected.tolist()
    assert expected.tolist() != plain[:, :-K].tolist(), "the option is meant to change the text"


@pytest.mark.parametrize("proposal", ["top_k", "sampled", "mixed"])
def test_padding_of_the_vocabulary_is_never_emitted(proposal: Any) -> None:
    model = shared_model("llama")
    prompt = prompt_of(6, seed=2).clamp(max=29)
    medusa = tiny_medusa(model, num_heads=K)
    medusa.limit_tokens(30)
    decoder = MedusaDecoder(medusa, TREE, proposal=proposal)
    expected = hf_greedy(model, prompt, NEW, suppress_tokens=list(range(30, VOCAB)))
    assert decoder.generate(prompt, NEW).sequences.tolist() == expected.tolist()
    sampled = decoder.generate(prompt, NEW, do_sample=True, temperature=5.0, top_k=0, seed=0).sequences
    assert sampled.max() < 30


def test_options_in_a_generation_config(monkeypatch: pytest.MonkeyPatch) -> None:
    model = shared_model("llama")
    monkeypatch.setattr(model.generation_config, "repetition_penalty", 1.8)
    prompt = prompt_of(6, seed=2)
    result = MedusaDecoder(tiny_medusa(model, num_heads=K), TREE).generate(prompt, NEW)
    assert result.sequences.tolist() == hf_greedy(model, prompt, NEW).tolist()
    monkeypatch.undo()
    assert result.sequences.tolist() != hf_greedy(model, prompt, NEW).tolist()


SAMPLING: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1e-5},
    "top_k": {"top_k": 1},
    "top_p": {"top_p": 1e-6},
    "min_p": {"min_p": 1.0},
    "epsilon and eta": {"epsilon_cutoff": 0.9, "eta_cutoff": 0.9},
    "with a penalty": {"top_k": 1, "repetition_penalty": 1.8},
}


@pytest.mark.parametrize("proposal", ["top_k", "sampled", "mixed"])
@pytest.mark.parametrize("option", SAMPLING)
def test_sampling_from_one_token_is_greedy(option: str, proposal: Any) -> None:
    """Each warper, turned up until one token is left, must leave the argmax, however siblings come about."""
    model = shared_model("llama")
    prompt = prompt_of(6, seed=2)
    settings = {"top_k": 0, **SAMPLING[option]}
    penalty = {name: value for name, value in settings.items() if name == "repetition_penalty"}
    decoder = MedusaDecoder(tiny_medusa(model, num_heads=K), TREE, proposal=proposal)
    result = decoder.generate(prompt, NEW, do_sample=True, seed=0, **settings)
    assert result.sequences.tolist() == hf_greedy(model, prompt, NEW, **penalty).tolist()


def test_typical_acceptance_of_greedy_decoding_is_greedy() -> None:
    model = shared_model("llama")
    prompt = prompt_of(6, seed=2)
    decoder = MedusaDecoder(tiny_medusa(model, num_heads=K), TREE, acceptance="typical")
    assert decoder.generate(prompt, NEW).sequences.tolist() == hf_greedy(model, prompt, NEW).tolist()


def test_a_seed_repeats_and_generators_go_on() -> None:
    model = shared_model("llama")
    decoder = MedusaDecoder(tiny_medusa(model, num_heads=K), TREE, proposal="sampled")
    prompt = prompt_of(6)

    def sample(**dice: Any) -> list[list[int]]:
        return decoder.generate(prompt, NEW, do_sample=True, top_k=0, **dice).sequences.tolist()

    assert sample(seed=1) == sample(seed=1) != sample(seed=2)
    generator = torch.Generator().manual_seed(1)
    first = sample(generator=generator)
    assert first == sample(seed=1) != sample(generator=generator)
    torch.manual_seed(1)
    assert sample() == first, "without a generator torch's own seed counts, as in transformers"
    through_generate = model.generate(
        prompt,
        max_new_tokens=NEW,
        do_sample=True,
        top_k=0,
        custom_generate=decoder,
        generator=torch.Generator().manual_seed(1),
    )
    assert through_generate.tolist() == first
    with pytest.raises(ValueError, match="both a generator and seed=1"):
        sample(seed=1, generator=generator)
    with pytest.raises(ValueError, match="the generator is on meta"):
        decoder.generate(prompt, 2, generator=OtherDevice())  # type: ignore[arg-type]


class OtherDevice:
    """Stands in for a generator on a GPU."""

    device = torch.device("meta")


def test_scores_and_logits_are_those_of_generate() -> None:
    model = shared_model("llama")
    prompt = prompt_of(6, seed=2)
    options: dict[str, Any] = {
        "max_new_tokens": NEW,
        "repetition_penalty": 1.8,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "pad_token_id": 0,
    }
    expected = model.generate(prompt, **options)
    medusa = guide(tiny_medusa(model, num_heads=K), [torch.cat([expected.sequences, prompt], dim=1)])
    decoder = MedusaDecoder(medusa, TREE)
    result = decoder.generate(prompt, **options)
    custom = model.generate(prompt, custom_generate=decoder, **options)
    assert isinstance(custom, GenerateDecoderOnlyOutput)
    for found in (result, custom):
        assert found.sequences.tolist() == expected.sequences.tolist()
        assert len(found.scores) == len(found.logits) == NEW
        torch.testing.assert_close(torch.stack(found.scores), torch.stack(expected.scores))
        torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits))
    assert decoder.generate(prompt, 3).scores is None


class Say(LogitsProcessor):
    """Lets the model say one text only."""

    def __init__(self, prompt_length: int, ids: list[int]) -> None:
        self.prompt_length, self.ids = prompt_length, ids

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.ids[input_ids.shape[1] - self.prompt_length]] = 0
        return forced


@pytest.mark.parametrize(
    ("strings", "answer"),
    [
        (["three"], "one two three"),
        (["wo th", "four"], "one two th"),
        (["é"], "one two three é"),
        (["nothing of this"], "one two three é four"),
    ],
)
@pytest.mark.parametrize("where", ["argument", "generation config"])
def test_stop_strings_cut_inside_a_block(strings: list[str], answer: str, where: str, tmp_path: Path) -> None:
    """One byte is one token here, so that é takes two; heads know the text, so that blocks reach past the string."""
    tokenizer = byte_tokenizer()
    model = AutoModelForCausalLM.from_pretrained(save_tiny_chat_model(tmp_path), dtype=torch.float64).eval()
    prompt = tokenizer("Count!", return_tensors="pt")["input_ids"]
    ids = tokenizer("one two three é four")["input_ids"]
    options: dict[str, Any] = {
        "max_new_tokens": len(ids),
        "logits_processor": LogitsProcessorList([Say(prompt.shape[1], ids)]),
        "tokenizer": tokenizer,
    }
    if where == "generation config":
        model.generation_config.stop_strings = strings
    else:
        options["stop_strings"] = strings
    expected = model.generate(prompt, **options)
    assert tokenizer.decode(expected[0, prompt.shape[1] :]) == answer
    known = torch.cat([prompt, torch.tensor([ids])], dim=1)
    decoder = MedusaDecoder(guide(tiny_medusa(model, num_heads=K), [known]), TREE)
    result = decoder.generate(prompt, **options)
    assert result.sequences.tolist() == expected.tolist()
    assert result.stats.tokens_per_step >= 3
    assert result.stats.finish_reason == ("length" if len(answer) == 20 else "stop")


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("num_beams", 2, "beam search"),
        ("penalty_alpha", 0.6, "contrastive search"),
        ("prompt_lookup_num_tokens", 3, "assisted generation"),
        ("assistant_model", shared_model, "assistant_model is not supported"),
        ("past_key_values", (), "past_key_values is not supported"),
        ("temperature", 0.0, "temperature"),
        ("temperature", -1.0, "temperature"),
        ("top_p", 1.5, "top_p"),
        ("stop_strings", ["x"], "stop_strings=.*needs the tokenizer"),
        ("no_such_option", 1, "no_such_option"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(option: str, value: Any, message: str) -> None:
    decoder = MedusaDecoder(tiny_medusa(shared_model("llama"), num_heads=K), TREE)
    more: dict[str, Any] = {"do_sample": True} if option in ("temperature", "top_p") else {}
    if option == "penalty_alpha":
        more["top_k"] = 4
    with pytest.raises(ValueError, match=message):
        decoder.generate(prompt_of(4), 5, **{option: value}, **more)
    assert decoder.generate(prompt_of(4), 5).stats.new_tokens == 5, "the decoder stays usable"


def test_attentions_are_refused() -> None:
    decoder = MedusaDecoder(tiny_medusa(shared_model("llama"), num_heads=K), TREE)
    with pytest.raises(ValueError, match="output_attentions"):
        decoder.generate(prompt_of(4), 5, return_dict_in_generate=True, output_attentions=True)


def test_another_model_cannot_borrow_the_heads() -> None:
    decoder = MedusaDecoder(tiny_medusa(shared_model("llama"), num_heads=K), TREE)
    with pytest.raises(ValueError, match="these heads belong to another model"):
        shared_model("mistral").generate(prompt_of(4), max_new_tokens=3, custom_generate=decoder)


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_a_processor_that_spoils_everything_is_named(bad: float) -> None:
    class Spoil(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            return torch.full_like(scores, bad) if input_ids.shape[1] > 8 else scores

    decoder = MedusaDecoder(tiny_medusa(shared_model("llama"), num_heads=K), TREE)
    with pytest.raises(ValueError, match=r"after 9 tokens the logits processors .*Spoil"):
        decoder.generate(prompt_of(6), 9, logits_processor=LogitsProcessorList([Spoil()]))
    assert decoder.generate(prompt_of(6), 9).stats.new_tokens == 9


class Recorder(BaseStreamer):
    """Keeps what it is given; may be told to fail."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.values: list[list[int]] = []
        self.ended = 0
        self.fail_at = fail_at

    def put(self, value: Tensor) -> None:
        if len(self.values) == self.fail_at:
            raise RuntimeError("the screen is gone")
        self.values.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


def perfect_decoder() -> tuple[MedusaDecoder, Tensor, Tensor]:
    model = shared_model("llama")
    text = hf_greedy(model, prompt_of(6, seed=2), NEW + K)
    medusa: MedusaModel = guide(tiny_medusa(model, num_heads=K), [text])
    return MedusaDecoder(medusa, TREE), text[:, :6], text[:, :-K]


def test_streamer_is_given_the_prompt_and_then_blocks() -> None:
    decoder, prompt, text = perfect_decoder()
    streamer = Recorder()
    result = decoder.generate(prompt, NEW, streamer=streamer)
    assert result.sequences.tolist() == text.tolist()
    assert streamer.values[0] == prompt[0].tolist()
    assert [token for block in streamer.values[1:] for token in block] == text[0, 6:].tolist()
    assert max(map(len, streamer.values[1:])) == K + 1
    assert streamer.ended == 1
    with pytest.raises(ValueError, match="a streamer takes one prompt"):
        decoder.generate(prompt.repeat(2, 1), NEW, streamer=streamer)
    with pytest.raises(ValueError, match=r"stream\(\) takes one prompt"):
        decoder.stream(prompt.repeat(2, 1), NEW)


def test_a_streamer_that_fails_does_no_harm() -> None:
    decoder, prompt, text = perfect_decoder()
    with pytest.raises(RuntimeError, match="the screen is gone"):
        decoder.generate(prompt, NEW, streamer=Recorder(fail_at=2))
    assert decoder.generate(prompt, NEW).sequences.tolist() == text.tolist()
    assert hf_greedy(decoder.model.model, prompt, NEW).tolist() == text.tolist()


def test_async_iteration_runs_beside_others_and_stops_early() -> None:
    decoder, prompt, text = perfect_decoder()
    threads = set()
    step = decoder.step

    def watched_step(state: Any) -> None:
        threads.add(threading.get_ident())
        step(state)

    decoder.step = watched_step  # type: ignore[method-assign]

    async def read(count: int | None) -> list[int]:
        tokens: list[int] = []
        stats = DecodingStats()
        async for block in decoder.astream(prompt, max_new_tokens=NEW, stats=stats):
            tokens += block
            if count is not None and len(tokens) >= count:
                break
        assert stats.new_tokens == len(tokens)
        return tokens

    async def both() -> list[list[int]]:
        return list(await asyncio.gather(read(None), read(5)))

    whole, part = asyncio.run(both())
    assert whole == text[0, 6:].tolist()
    assert part == whole[: len(part)]
    assert len(part) < len(whole)
    assert threading.get_ident() not in threads


def test_stopping_early_frees_the_cache() -> None:
    decoder, prompt, _ = perfect_decoder()
    caches: list[Any] = []
    prefill = decoder.prefill

    def watched_prefill(*arguments: Any) -> Any:
        state = prefill(*arguments)
        caches.append(weakref.ref(state.cache))
        return state

    decoder.prefill = watched_prefill  # type: ignore[method-assign]

    async def first_blocks() -> None:
        async for _ in decoder.astream(prompt, max_new_tokens=NEW):
            if len(caches) == 1:
                break

    blocks = decoder.stream(prompt, NEW)
    next(blocks), next(blocks)
    assert caches[0]() is not None
    blocks.close()
    caches_of_stream = caches.copy()
    caches.clear()
    asyncio.run(first_blocks())
    decoder.generate(prompt, NEW)
    gc.collect()
    assert len(caches) == 2
    assert [cache() for cache in caches_of_stream + caches] == [None] * 3
