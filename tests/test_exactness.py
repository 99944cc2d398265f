"""Sampled texts of the whole decoder are distributed as the backbone's own, by chi-square against all texts there are.

The rules are proved in test_accept.py and test_walk.py; here they meet a model, heads, a cache and random dice.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from chi_square import p_value
from tiny import tiny_medusa
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessorList, PreTrainedModel
from transformers.generation import TemperatureLogitsWarper, TopPLogitsWarper

from medusa import CandidateTree
from medusa.inference import MedusaDecoder, Typical, head_proposer, walk
from medusa.inference.accept import NO_TOKEN, accept_sampled
from medusa.inference.draws import Draws
from medusa.inference.layout import TreeLayout
from medusa.inference.propose import PROPOSALS, Candidates, Proposal
from medusa.inference.proposer import DecodingState
from medusa.inference.walk import Path

pytestmark = pytest.mark.decoding

V, NEW, EOS, PAD = 10, 3, 7, 0
PROMPTS = torch.tensor([[1, 2, 3], [4, 9, 1]])
TREE = CandidateTree.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0)])
FEW, MANY = 2_000, 25_000
"""Samples of each prompt."""
BATCH = 2_500
WARPING = [(0.7, 0.9), (1.0, 0.8), (1.5, 0.95)]
Text = tuple[int, ...]


@cache
def small_model() -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.4)
    return model


@cache
def law_of(prompt: int, temperature: float, top_p: float) -> dict[Text, float]:
    """How plain decoding's texts are distributed."""
    warp = LogitsProcessorList([TemperatureLogitsWarper(temperature), TopPLogitsWarper(top_p)])
    ended: dict[Text, float] = {}
    going = {tuple(PROMPTS[prompt].tolist()): 1.0}
    for length in range(1, NEW + 1):
        texts = torch.tensor(list(going))
        with torch.inference_mode():
            p = warp(texts, small_model()(texts).logits[:, -1].float()).double().softmax(dim=-1)
        longer = {
            (*text, token): reached * chance
            for (text, reached), own in zip(going.items(), p.tolist(), strict=True)
            for token, chance in enumerate(own)
        }
        going = {text: chance for text, chance in longer.items() if text[-1] != EOS and length < NEW}
        ended |= {(*text, *[PAD] * (NEW - length)): chance for text, chance in longer.items() if text not in going}
    return ended


def sampled(decoder: MedusaDecoder, samples: int, temperature: float, top_p: float) -> list[dict[Text, int]]:
    """How often each text was written behind each prompt."""
    options: dict[str, Any] = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    generator = torch.Generator().manual_seed(0)
    counts: list[dict[Text, int]] = [{} for _ in PROMPTS]
    for _ in range(0, samples, BATCH):
        size = min(samples, BATCH)
        result = decoder.generate(PROMPTS, NEW, generator=generator, num_return_sequences=size, **options)
        assert sum(result.stats.accepted) > samples // 100, "hardly a guess is accepted, so nothing is tested"
        width = PROMPTS.shape[1] + NEW
        texts = torch.nn.functional.pad(result.sequences, (0, width - result.sequences.shape[1]), value=PAD)
        for own, rows in zip(counts, texts.split(size), strict=True):
            for text in map(tuple, rows.tolist()):
                own[text] = own.get(text, 0) + 1
    return counts


def check(decoder: MedusaDecoder, samples: int, temperature: float, top_p: float) -> None:
    for prompt, counts in enumerate(sampled(decoder, samples, temperature, top_p)):
        value = p_value(counts, law_of(prompt, temperature, top_p))
        assert value > 1e-3, f"prompt {prompt}: p-value {value:.2g}"


def decoder_of(
    proposal: Proposal, kind: type[MedusaDecoder] = MedusaDecoder, sees: str = "root_conditioned", **options: Any
) -> MedusaDecoder:
    heads = tiny_medusa(small_model(), num_heads=2, draft_vocab=(0, 1, 3, 4, 5, 7, 8, 9), **{sees: True})
    return kind(heads, TREE, proposal=proposal, **options)


@pytest.mark.parametrize(
    ("proposal", "temperature", "top_p"), [("top_k", 0.7, 0.9), ("sampled", 1.0, 0.8), ("mixed", 1.5, 0.95)]
)
def test_samples_are_distributed_as_the_backbones(proposal: Proposal, temperature: float, top_p: float) -> None:
    check(decoder_of(proposal), FEW, temperature, top_p)


@pytest.mark.parametrize("proposal", ["sampled", "mixed"])
def test_samples_of_sequential_heads_are_distributed_as_the_backbones(proposal: Proposal) -> None:
    check(decoder_of(proposal, sees="sequential"), FEW, 1.5, 0.95)


@pytest.mark.long
@pytest.mark.parametrize(("temperature", "top_p"), WARPING)
@pytest.mark.parametrize("proposal", PROPOSALS)
@pytest.mark.parametrize("sees", ["root_conditioned", "sequential"])
def test_many_samples_are_distributed_as_the_backbones(
    sees: str, proposal: Proposal, temperature: float, top_p: float
) -> None:
    check(decoder_of(proposal, sees=sees), MANY, temperature, top_p)


# Decoders that are nearly right


class UnwarpedRoots(MedusaDecoder):
    """Draws the first token from the backbone's own logits."""

    def accept(self, state: DecodingState, candidates: Candidates, logits: Tensor, layout: TreeLayout) -> list[Path]:
        if layout.num_nodes > 1:
            return super().accept(state, candidates, logits, layout)
        for row, own in zip(state.rows, logits[:, 0], strict=True):
            row.emit(int(state.draws.categorical(own.softmax(dim=-1)[None])), own, own)
        return [[0] for _ in state.rows]


def redrawn_from_p(p: Tensor, q: Tensor, children: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
    token, child = accept_sampled(p, q, children, draws)
    return torch.where(child == NO_TOKEN, draws.categorical(p), token), child


def test_q_of_another_node_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequential heads draw behind every node from another distribution."""
    original = head_proposer.propose_by_level_and_chance

    def wrong(*given: Any) -> Candidates:
        candidates = original(*given)
        assert candidates.drawn is not None
        return replace(candidates, drawn=replace(candidates.drawn, q_of=torch.zeros_like(candidates.drawn.q_of)))

    monkeypatch.setattr(head_proposer, "propose_by_level_and_chance", wrong)
    with pytest.raises(AssertionError, match="p-value"):
        check(decoder_of("sampled", sees="sequential"), FEW, 1.5, 0.95)


def test_roots_drawn_before_warping_fail() -> None:
    with pytest.raises(AssertionError, match="p-value"):
        check(decoder_of("top_k", UnwarpedRoots), FEW // 4, 0.7, 0.9)


@pytest.mark.parametrize("rule", [redrawn_from_p, partial(accept_sampled, replacement=True)])
def test_wrong_rules_fail(monkeypatch: pytest.MonkeyPatch, rule: Callable[..., tuple[Tensor, Tensor]]) -> None:
    monkeypatch.setattr(walk, "accept_sampled", rule)
    with pytest.raises(AssertionError, match="p-value"):
        check(decoder_of("sampled"), FEW // 2, 1.5, 0.95)


def test_typical_acceptance_is_not_exact() -> None:
    with pytest.raises(AssertionError, match="p-value"):
        check(decoder_of("top_k", acceptance=Typical()), FEW // 8, 1.0, 0.8)
