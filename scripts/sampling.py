"""Tokens per step when sampling: acceptances and proposals at several temperatures, against greedy decoding.

Usage: python scripts/sampling.py CHECKPOINT [--prompts FILE] [--per-category N] [--new-tokens N] [--nodes N]
Counts, and does not time: prompts are decoded in batches. Prints a table and one line of JSON.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from prompt_file import OWN_PROMPTS, read_prompts
from rich.console import Console
from rich.table import Table
from torch.nn.utils.rnn import pad_sequence

from medusa import MedusaModel
from medusa.inference import MedusaDecoder
from medusa.loading import load_tokenizer
from medusa.progress import progress_bar

WAYS: dict[str, dict[str, Any]] = {
    "exact, top_k": {"proposal": "top_k"},
    "exact, sampled": {"proposal": "sampled"},
    "exact, mixed": {"proposal": "mixed"},
    "typical": {"acceptance": "typical"},
}


def main() -> None:
    """Count."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("--prompts", type=Path, default=OWN_PROMPTS)
    parser.add_argument("--per-category", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.7, 1.0])
    parser.add_argument("--batch-size", type=int, default=16)
    arguments = parser.parse_args()
    model = MedusaModel.from_pretrained(arguments.checkpoint, dtype=arguments.dtype)
    if model.searched_tree is None:
        raise SystemExit("search a tree first: medusa tree CHECKPOINT --data FILE")
    tree = model.searched_tree.best(arguments.nodes)
    tokenizer = load_tokenizer(arguments.checkpoint)
    prompts = sorted(read_prompts(arguments.prompts, arguments.per_category, tokenizer), key=len)
    size = arguments.batch_size
    batches = [prompts[start : start + size] for start in range(0, len(prompts), size)]

    def tokens_per_step(decoder: MedusaDecoder, **options: Any) -> float:
        new_tokens = steps = 0
        for batch in batches:
            ids = pad_sequence(batch, batch_first=True, padding_side="left")
            mask = pad_sequence([torch.ones_like(p) for p in batch], batch_first=True, padding_side="left")
            stats = decoder.generate(ids, arguments.new_tokens, attention_mask=mask, **options).stats
            new_tokens += stats.new_tokens - stats.rows
            steps += stats.steps
        return new_tokens / steps

    settings = [(name, temperature) for name in WAYS for temperature in arguments.temperatures]
    figures: dict[str, Any] = {"prompts": len(prompts), "tree_nodes": tree.num_nodes}
    with progress_bar("decoding", 1 + len(settings)) as advance:
        greedy = figures["greedy"] = tokens_per_step(MedusaDecoder(model, tree=tree))
        advance(1)
        for name, temperature in settings:
            decoder = MedusaDecoder(model, tree=tree, **WAYS[name])
            options = {"do_sample": True, "temperature": temperature, "top_k": 0, "seed": 0}
            figures[f"{name}, {temperature}"] = tokens_per_step(decoder, **options)
            advance(1)
    table = Table("", *(f"T = {t}" for t in arguments.temperatures), title=f"tokens per step; greedy {greedy:.2f}")
    for name in WAYS:
        values = [figures[f"{name}, {temperature}"] for temperature in arguments.temperatures]
        table.add_row(name, *(f"{value:.2f} ({value / greedy:.0%} of greedy)" for value in values))
    Console().print(table)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
