"""Do heads get in vLLM exactly what they get here? Same greedy text, same guesses accepted at every position.

Each way into vLLM is a server with 16 requests at once, of different lengths, prompts read in chunks and, the second
time, found in the prefix cache. What is expected comes from HF `generate` and `vllm_simulation.py`.
"""

import argparse
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from vllm_server import serving
from vllm_simulation import Counts, greedy, simulate

from medusa import MedusaConfig, MedusaModel

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

VOCAB = 256
DEPTH = 3
CONCURRENT = 16
QUESTIONS = 24
BLOCK = 32
"""Tokens in a block of vLLM's cache."""
CHUNK = 16
"""Longest piece of a prompt that one step reads. The budget of a step below never cuts a draft, then."""
Question = tuple[Sequence[int], int]
"""A prompt, and how many tokens the answer has."""

OPTIONS = [
    *("--dtype", "float32", "--enforce-eager", "--max-model-len", "256", "--skip-tokenizer-init"),
    *("--max-num-seqs", str(CONCURRENT), "--max-num-batched-tokens", str(CONCURRENT * CHUNK)),
    *("--enable-chunked-prefill", "--long-prefill-token-threshold", str(CHUNK)),
    *("--enable-prefix-caching", "--block-size", str(BLOCK)),
]
PROPOSER = "medusa.inference.vllm_proposer.MedusaProposer"
KINDS = {
    "own": MedusaConfig(num_heads=DEPTH),
    "draft vocabulary": MedusaConfig(num_heads=DEPTH, projection="shared", draft_vocab=range(0, VOCAB, 2)),
    "root-conditioned": MedusaConfig(num_heads=DEPTH, root_conditioned=True),
    "sequential": MedusaConfig(num_heads=DEPTH, projection="shared", sequential=True),
}


def tiny_llama() -> LlamaForCausalLM:
    """A random model whose text changes from token to token."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    return model


def make_questions() -> list[Question]:
    """Prompts of 3 to 90 tokens, answers of 5 to 40; every third prompt begins as the others of its kind do."""
    generator = torch.Generator().manual_seed(1)
    opening = torch.randint(3, VOCAB, (2 * BLOCK,), generator=generator).tolist()
    questions: list[Question] = []
    for i in range(QUESTIONS):
        own = torch.randint(3, VOCAB, (3 + i * 41 % 40,), generator=generator).tolist()
        questions.append(([*opening, *own] if i % 3 == 0 else own, 5 + i * 17 % 36))
    return questions


def overfit(model: MedusaModel, questions: Sequence[Question], steps: int = 100) -> None:
    """Teach each head about three quarters of the answers by heart: what it has not seen, it mostly gets wrong."""
    hidden, tokens = [], []
    for prompt, new_tokens in questions:
        text = torch.tensor([[*prompt, *greedy(model, prompt, new_tokens)]])
        with torch.no_grad():
            hidden.append(model.backbone.hidden(text)[0, len(prompt) - 1 : -DEPTH - 1])
        tokens.append(text[0, len(prompt) :].unfold(0, DEPTH + 1, 1))  # root and what the heads should say
    states, windows = torch.cat(hidden), torch.cat(tokens)  # [P, D], [P, K+1]
    seen = torch.rand(DEPTH, len(states), generator=torch.Generator().manual_seed(2)) < 0.75
    labels = model.heads.to_draft(windows[:, 1:].T).masked_fill(~seen, -100)  # [K, P]
    optimizer = torch.optim.Adam(model.heads.parameters(), lr=3e-3)
    for _ in range(steps):
        logits = model.heads(states, windows[:, 0], windows[:, 1:-1])  # [K, P, Vd]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def check(
    name: str, model: MedusaModel, questions: list[Question], server: dict[str, object], work: Path
) -> dict[str, object]:
    """Ask a server everything twice and compare; one row of the table."""
    expected = [simulate(model, prompt, new_tokens, DEPTH) for prompt, new_tokens in questions]
    answers = [answer for answer, _ in expected]
    counts = sum((counts for _, counts in expected[1:]), expected[0][1])
    row: dict[str, object] = {"route": name, "questions": len(questions)}
    method = {"method": "medusa", "model": server["heads"]}
    options = list(OPTIONS)
    if server["route"] == "proposer":
        method = {"method": "custom_class", "model": PROPOSER}
        options += ["--additional-config", json.dumps({"medusa_heads": server["heads"]})]
    speculative = {**method, "num_speculative_tokens": DEPTH}
    started = time.perf_counter()
    with serving(work / "model", free_port(), work / f"{name}.log", options, speculative) as vllm:
        before = vllm.counts()
        for asked in ("first", "second"):
            different = sum(a != b for a, b in zip(vllm.complete_all(questions), answers, strict=True))
            after = vllm.counts()
            found = after - before
            row[asked] = {"different": different, "drafts": found.drafts, "accepted": found.accepted}
            before = after
        row["cached_tokens"] = int(vllm.metric("vllm:prefix_cache_hits_total").get("", 0))
    row |= {"expected_drafts": counts.drafts, "expected_accepted": counts.accepted}
    row["seconds"] = round(time.perf_counter() - started, 1)
    return row


if __name__ == "__main__":
    questions = make_questions()
    backbone = tiny_llama()
    if True:
        work = Path("/tmp/vllm-work/w")
        work.mkdir(exist_ok=True)
        backbone.save_pretrained(work / "model")
        model = MedusaModel.attach(backbone, KINDS["own"])
        overfit(model, questions)
        model.save_pretrained(work / "own")
        for p, n in questions:
            print(len(p), n, simulate(model, p, n, DEPTH)[1])
        print(check("proposer", model, questions, {"route": "proposer", "heads": str(work / "own")}, work), flush=True)
        print(check("native", model, questions, {"route": "native", "heads": str(work / "own")}, work))
