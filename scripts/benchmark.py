"""Ways to decode greedily, compared in one run: what people run today against trees with heads.

Usage: python scripts/benchmark.py CHECKPOINT [--prompts FILE] [--per-category N] [--new-tokens N] [--compile]
       [--static]
Every prompt goes through every way in turn, so that a slow moment of the machine hits all. Prints a table of medians
and one line of JSON; ratios are to `generate` as people run it (eager, dynamic cache) on the same prompt.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from prompt_file import OWN_PROMPTS, encode, read_questions
from rich.console import Console
from rich.table import Table

from medusa import MedusaModel
from medusa.inference import MedusaDecoder
from medusa.model import load_tokenizer
from medusa.progress import progress_bar

PLAIN = "generate"
Way = Callable[[torch.Tensor], tuple[int, float | None]]
"""Decodes a prompt; returns how many tokens it wrote, and tokens per step where there are steps."""


def generate_way(model: Any, new_tokens: int, **options: Any) -> Way:
    """`generate` of transformers with some options."""

    def run(prompt: torch.Tensor) -> tuple[int, float | None]:
        output = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new_tokens, do_sample=False, **options
        )
        return output.shape[1] - prompt.shape[1], None

    return run


def decoder_way(decoder: MedusaDecoder, new_tokens: int) -> Way:
    """A decoder with heads."""

    def run(prompt: torch.Tensor) -> tuple[int, float | None]:
        stats = decoder.generate(prompt, max_new_tokens=new_tokens).stats
        return stats.new_tokens, stats.tokens_per_step

    return run


def main() -> None:
    """Compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("--prompts", type=Path, default=OWN_PROMPTS)
    parser.add_argument("--per-category", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--longest", type=int, default=1024, help="skip longer prompts, in tokens")
    parser.add_argument("--compile", action="store_true", help="also the compiled decoder")
    parser.add_argument("--static", action="store_true", help="also generate with its static cache, compiled")
    arguments = parser.parse_args()
    model = MedusaModel.from_pretrained(arguments.checkpoint, dtype=arguments.dtype)
    tokenizer = load_tokenizer(arguments.checkpoint)
    encoded = [encode(tokenizer, question) for question in read_questions(arguments.prompts, arguments.per_category)]
    prompts = [prompt for prompt in encoded if prompt.shape[1] <= arguments.longest]

    decoder = MedusaDecoder(model, tree="auto", pack_weights="auto")
    packed = decoder.backbone is not model.backbone
    new = arguments.new_tokens
    ways = {
        PLAIN: generate_way(model.model, new),
        "generate, prompt lookup": generate_way(model.model, new, prompt_lookup_num_tokens=10),
        f"heads, {decoder.tree.num_nodes} nodes": decoder_way(decoder, new),
    }
    if arguments.compile:
        compiled = MedusaDecoder(model, tree=decoder.tree, pack_weights=packed, compile=True)
        ways[f"heads, {decoder.tree.num_nodes} nodes, compiled"] = decoder_way(compiled, new)
    if arguments.static:
        ways["generate, static cache, compiled"] = generate_way(model.model, new, cache_implementation="static")
    rates: dict[str, list[float]] = {name: [] for name in ways}
    steps: dict[str, list[float]] = {name: [] for name in ways}
    for run in ways.values():  # warm up
        run(prompts[0][:, :64])
    with progress_bar("decoding", len(prompts)) as advance:
        for prompt in prompts:
            for name, run in ways.items():
                started = time.perf_counter()
                written, per_step = run(prompt)
                rates[name].append(written / (time.perf_counter() - started))
                if per_step:
                    steps[name].append(per_step)
            advance(1)

    table = Table("", "tokens per step", "tokens/s", "ratio", title=f"{len(prompts)} prompts, {arguments.dtype}")
    figures: dict[str, Any] = {"prompts": len(prompts), "tree_nodes": decoder.tree.num_nodes, "weights_packed": packed}
    for name in ways:
        ratio = median(a / b for a, b in zip(rates[name], rates[PLAIN], strict=True))
        per_step = sum(steps[name]) / len(steps[name]) if steps[name] else None
        table.add_row(name, f"{per_step:.2f}" if per_step else "-", f"{median(rates[name]):.1f}", f"{ratio:.2f}")
        figures[name] = {"tokens_per_second": median(rates[name]), "ratio": ratio, "tokens_per_step": per_step}
    Console().print(table)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
