"""What a draft model brings: acceptance, tokens per step and speed, beside what the formula predicts.

Usage: python scripts/draft_speed.py MODEL DRAFT [--prompts FILE] [--per-category N] [--new-tokens N] [--drafts K ...]
Decodes greedily, one prompt at a time, in turn with plain decoding. Prints a table and one line of JSON.
"""

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from prompt_file import OWN_PROMPTS, read_prompts
from rich.console import Console
from rich.table import Table
from torch import Tensor

from medusa.inference import DraftModel, DraftStats, MedusaDecoder
from medusa.inference.bench import generate_method
from medusa.inference.draft_model import ModelDrafting
from medusa.inference.request import Row
from medusa.loading import load_backbone, load_tokenizer
from medusa.progress import progress_bar


@torch.inference_mode()
def decode(decoder: MedusaDecoder, prompt: Tensor, new_tokens: int) -> tuple[float, DraftStats]:
    """Seconds of the steps for one prompt [T], and what drafting was like."""
    row = Row.greedy(prompt, new_tokens)
    state = decoder.prefill([row])
    drafting = state.drafting
    assert isinstance(drafting, ModelDrafting)
    started = time.perf_counter()
    while state.rows:
        decoder.step(state)
    return time.perf_counter() - started, drafting.stats


def plain_seconds(model: Any, prompt: Tensor, new_tokens: int) -> float:
    """Mean seconds of one token of `generate` behind the first."""
    arrivals = generate_method(model, {"min_new_tokens": new_tokens})(prompt[None], new_tokens).arrivals
    return (arrivals[-1] - arrivals[0]) / (len(arrivals) - 1)


def summary(k: int | str, runs: list[tuple[float, DraftStats]], plain: list[float], new_tokens: int) -> dict[str, Any]:
    """Figures of one number of drafts over all prompts."""
    tested, accepted = sum(s.tested for _, s in runs), sum(s.accepted for _, s in runs)
    steps = sum(len(s.levels) for _, s in runs)
    ratios = [token * (new_tokens - 1) / seconds for token, (seconds, _) in zip(plain, runs, strict=True)]
    figures = {
        "drafts": k,
        "alpha": accepted / max(tested, 1),
        "tokens_per_step": (new_tokens - 1) * len(runs) / steps,
        "draft_seconds": sum(s.draft_seconds for _, s in runs),
        "verify_seconds": sum(s.verify_seconds for _, s in runs),
        "speedup": median(ratios),
    }
    if isinstance(k, int):
        predicted = [s.predicted_speedup(k, token) for token, (_, s) in zip(plain, runs, strict=True)]
        figures |= {
            "predicted_tokens_per_step": sum(s.expected_tokens(k) for _, s in runs) / len(runs),
            "predicted_speedup": median(predicted),
        }
    return figures


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("draft")
    parser.add_argument("--prompts", type=Path, default=OWN_PROMPTS)
    parser.add_argument("--per-category", type=int, default=1)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--drafts", nargs="+", default=["1", "2", "4", "auto"])
    parser.add_argument("--dtype", default="auto")
    arguments = parser.parse_args()
    target, draft = (load_backbone(name, arguments.dtype) for name in (arguments.model, arguments.draft))
    tokenizer, own = load_tokenizer(arguments.model), load_tokenizer(arguments.draft)
    counts: list[Any] = [int(k) if k != "auto" else k for k in arguments.drafts]
    decoders = [MedusaDecoder(target, proposer=DraftModel(draft, k, tokenizers=(tokenizer, own))) for k in counts]
    prompts = read_prompts(arguments.prompts, arguments.per_category, tokenizer)
    plain: list[float] = []
    runs: list[list[tuple[float, DraftStats]]] = [[] for _ in counts]
    with progress_bar("decoding", len(prompts)) as advance:
        for prompt in prompts:
            plain.append(plain_seconds(target, prompt, arguments.new_tokens))
            for decoder, results in zip(decoders, runs, strict=True):
                results.append(decode(decoder, prompt, arguments.new_tokens))
            advance(1)
    found = [summary(k, results, plain, arguments.new_tokens) for k, results in zip(counts, runs, strict=True)]
    names = list(found[0])
    table = Table(*(name.replace("_", " ") for name in names), title="greedy; speed-up against generate")
    for figures in found:
        cells = [figures.get(name, "") for name in names]
        table.add_row(*(f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in cells))
    Console().print(table)
    print(json.dumps({"prompts": len(prompts), "plain_seconds_per_token": median(plain), "runs": found}))


if __name__ == "__main__":
    main()
