"""Do heads get in vLLM exactly what they get here? Same greedy text, same guesses accepted at every position.

Each way into vLLM is a server with 16 requests at once, of different lengths, prompts read in chunks and, the second
time, found in the prefix cache. What is expected comes from HF `generate` and `vllm_simulation.py`.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from demo_split import split_prompts
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from vllm_routes import Asked, Question, Route, ask_offline, ask_server
from vllm_simulation import Counts, greedy, simulate

from medusa import MedusaConfig, MedusaModel
from medusa.export import export
from medusa.loading import load_backbone, load_tokenizer

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

OPTIONS = [
    *("--dtype", "float32", "--enforce-eager", "--max-model-len", "256", "--skip-tokenizer-init"),
    *("--max-num-seqs", str(CONCURRENT), "--max-num-batched-tokens", str(CONCURRENT * CHUNK)),
    *("--enable-chunked-prefill", "--long-prefill-token-threshold", str(CHUNK)),
    *("--enable-prefix-caching", "--block-size", str(BLOCK)),
]
TIGHT = ["--max-num-batched-tokens", "40"]
"""A budget for a step that is less than what 16 drafts and a piece of a prompt need. The last option counts."""
REAL_TOKENS = 64
KINDS = {
    "own": MedusaConfig(num_heads=DEPTH),
    "draft vocabulary": MedusaConfig(num_heads=DEPTH, projection="shared", draft_vocab=range(0, VOCAB, 2)),
    "root-conditioned": MedusaConfig(num_heads=DEPTH, root_conditioned=True),
    "sequential": MedusaConfig(num_heads=DEPTH, projection="shared", sequential=True),
}
EXPORTED = ("own", "draft vocabulary")
"""What vLLM's own Medusa can run once it is exported: heads that see the hidden state alone."""

HEADER = f"{'route':28} {'answers':>7} {'other':>5} {'cached':>6} {'drafts':>7} accepted by position (expected)"


@dataclass(frozen=True)
class Result:
    """What one route gave."""

    route: str
    answers: int
    other_texts: int
    """Answers that are not what HF `generate` says."""
    cached_tokens: int
    """Tokens of prompts that the prefix cache had."""
    found: Counts
    expected: Counts
    seconds: float

    def line(self) -> str:
        """A row of the table."""
        counts = f"{self.found.drafts:7} {self.found.accepted} ({self.expected.drafts} {self.expected.accepted})"
        return f"{self.route:28} {self.answers:7} {self.other_texts:5} {self.cached_tokens:6} {counts}"


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


def compare(
    route: Route, model: MedusaModel, questions: Sequence[Question], ask: Callable[[], Asked], rounds: int
) -> Result:
    """Ask all questions `rounds` times, and set what comes back beside our own decoding."""
    expected = [simulate(model, prompt, new_tokens, route.depth) for prompt, new_tokens in questions]
    counts = sum((counts for _, counts in expected * rounds), Counts(0, [0] * route.depth))
    texts = [text for text, _ in expected] * rounds
    started = time.perf_counter()
    asked = ask()
    seconds = round(time.perf_counter() - started, 1)
    other = sum(answer != text for answer, text in zip(asked.answers, texts, strict=True))
    result = Result(route.name, len(texts), other, asked.cached_tokens, asked.counts, counts, seconds)
    print(result.line(), flush=True)
    return result


def tiny_checks(work: Path) -> tuple[list[Result], int]:
    """All routes and kinds of heads on a tiny model; the rows, and how many things differ."""
    questions, target = make_questions(), work / "model"
    tiny_llama().save_pretrained(target)
    backbone = AutoModelForCausalLM.from_pretrained(target).eval()
    models = {kind: MedusaModel.attach(backbone, config) for kind, config in KINDS.items()}
    for kind, model in models.items():
        overfit(model, questions)
        model.save_pretrained(work / kind)
    for kind in EXPORTED:
        export(work / kind, "vllm", work / f"{kind}, exported")
    own = str(work / "own")
    routes = [
        (models["own"], Route("vLLM's own Medusa", own, DEPTH, proposer=False, options=OPTIONS)),
        *(
            (models[kind], Route(f"exported, {kind}", str(work / f"{kind}, exported"), DEPTH, False, OPTIONS))
            for kind in EXPORTED
        ),
        *((models[kind], Route(f"proposer, {kind}", str(work / kind), DEPTH, options=OPTIONS)) for kind in KINDS),
        (models["own"], Route("proposer, drafts cut", own, DEPTH, options=[*OPTIONS, *TIGHT], drafts_are_cut=True)),
    ]
    results, differences = [], 0
    for model, route in routes:
        result = compare(route, model, questions, partial(ask_server, route, target, questions, 2), 2)
        differences += result.other_texts
        differences += not any(result.found.accepted) if route.drafts_are_cut else result.found != result.expected
        results.append(result)
    offline = Route("vLLM's own Medusa, offline", own, DEPTH, proposer=False)
    result = compare(offline, models["own"], questions, partial(ask_offline, offline, target, questions), 1)
    differences += result.other_texts + (result.found != result.expected)
    return [*results, result], differences


def real_check(work: Path, backbone: str, heads: str) -> tuple[list[Result], int]:
    """Trained heads on the model they were trained for: acceptance within three standard errors of ours.

    Plain heads are exported for vLLM's own Medusa, others go through our proposer. The demo trains on other prompts.
    """
    model = MedusaModel.from_pretrained(heads, backbone=load_backbone(backbone, "float32"))
    tokenizer, held_out = load_tokenizer(backbone), split_prompts(1)
    questions: list[Question] = []
    for row in held_out["test"] + held_out["calibration"]:
        chat = [{"role": "user", "content": row["prompt"]}]
        questions.append((tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"], REAL_TOKENS))
    target = work / "model"
    target.symlink_to(Path(backbone).resolve())
    options = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", str(CONCURRENT)]
    route = Route("proposer, real model", heads, model.config.num_heads, options=options)
    if not (model.config.root_conditioned or model.config.sequential):
        export(heads, "vllm", work / "exported")
        route = Route("exported, real model", str(work / "exported"), model.config.num_heads, False, options)
    result = compare(route, model, questions, partial(ask_server, route, target, questions, 1), 1)
    differences, drafts = 0, result.expected.drafts
    for found, expected in zip(result.found.accepted, result.expected.accepted, strict=True):
        rate = expected / drafts
        differences += abs(found / result.found.drafts - rate) > 3 * (2 * rate * (1 - rate) / drafts) ** 0.5
    return [result], differences


def main() -> None:
    """Run the checks, print a row for each and a line of JSON at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--real", action="store_true", help="trained heads on a real model, instead of tiny ones")
    parser.add_argument("--model", default=".demo/model", help="the real model")
    parser.add_argument("--heads", help="the checkpoint of its heads")
    arguments = parser.parse_args()
    if arguments.real and not arguments.heads:
        parser.error("--real needs --heads CHECKPOINT")
    print(HEADER)
    with tempfile.TemporaryDirectory() as folder:
        if arguments.real:
            results, differences = real_check(Path(folder), arguments.model, arguments.heads)
        else:
            results, differences = tiny_checks(Path(folder))
    rows = [asdict(result) for result in results]
    print(json.dumps({"vllm": version("vllm-cpu"), "differences": int(differences), "routes": rows}))
    sys.exit(differences > 0)


if __name__ == "__main__":
    main()
