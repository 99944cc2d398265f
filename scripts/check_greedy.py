"""Decode many prompts in fp32 with and without heads and compare token by token.

Usage: python scripts/check_greedy.py CHECKPOINT [--prompts N] [--new-tokens N] [--nodes N]
Ends with one line of JSON; exit status 1 if any output differs.
"""

import argparse
import json
from pathlib import Path

import torch
from rich.console import Console

from medusa import MedusaModel
from medusa.inference import MedusaDecoder
from medusa.inference.benchmark import compare
from medusa.model import load_tokenizer
from medusa.progress import progress_bar

PROMPTS = Path(__file__).parent / "demo_prompts.jsonl"


def main() -> None:
    """Compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--nodes", type=int, default=16)
    arguments = parser.parse_args()
    model = MedusaModel.from_pretrained(arguments.checkpoint, dtype=torch.float32)
    if model.searched_tree is None:
        raise SystemExit("search a tree first: medusa tree CHECKPOINT --data FILE")
    decoder = MedusaDecoder(model, tree=model.searched_tree.best(arguments.nodes))
    tokenizer = load_tokenizer(arguments.checkpoint)
    rows = [json.loads(line) for line in PROMPTS.read_text().splitlines()]
    chosen = rows[:: max(len(rows) // arguments.prompts, 1)][: arguments.prompts]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": row["prompt"]}], add_generation_prompt=True, return_tensors="pt"
        )["input_ids"]
        for row in chosen
    ]
    with progress_bar("decoding, float32", len(prompts)) as advance:
        summary = compare(decoder, prompts, arguments.new_tokens, advance)
    for row, comparison in zip(chosen, summary.comparisons, strict=True):
        if not comparison.identical:
            Console(stderr=True).print(f"{row['id']}: differs from token {comparison.first_difference} on")
    print(
        json.dumps(
            {
                "prompts": len(prompts),
                "identical": summary.identical,
                "tokens_per_step": round(summary.tokens_per_step, 3),
                "tree_nodes": decoder.tree.num_nodes,
            }
        )
    )
    raise SystemExit(summary.identical != len(prompts))


if __name__ == "__main__":
    main()
