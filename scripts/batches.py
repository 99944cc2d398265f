"""Tokens per second of batches of several sizes, with heads and without.

Usage: python scripts/batches.py CHECKPOINT [--sizes 1 2 4 8] [--nodes N] [--new-tokens N] [--dtype D] [--pack-weights]
The same prompts are decoded at every size, in turns; rows never end early, so that all sizes write as many tokens.
Prints a table and one line of JSON.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from prompt_file import OWN_PROMPTS, read_prompts
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig

from medusa import MedusaModel
from medusa.inference import MedusaDecoder
from medusa.loading import load_tokenizer
from medusa.progress import progress_bar


def padded(prompts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Ids and mask of a batch, [B, T] each, padded on the left."""
    ids = pad_sequence(prompts, batch_first=True, padding_side="left")
    return ids, pad_sequence([torch.ones_like(p) for p in prompts], batch_first=True, padding_side="left")


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--prompts", type=Path, default=OWN_PROMPTS)
    parser.add_argument("--nodes", type=int, help="size of the searched tree; unsaid: the fastest for one prompt")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--pack-weights", action="store_true")
    arguments = parser.parse_args()
    model = MedusaModel.from_pretrained(arguments.checkpoint, dtype=arguments.dtype)
    if model.searched_tree is None:
        raise SystemExit("search a tree first: medusa tree CHECKPOINT --data FILE")
    tree = "auto" if arguments.nodes is None else model.searched_tree.best(arguments.nodes)
    decoder = MedusaDecoder(model, tree=tree, pack_weights=arguments.pack_weights)
    tokenizer = load_tokenizer(arguments.checkpoint)
    count = max(arguments.sizes)
    prompts = read_prompts(arguments.prompts, 1, tokenizer)[:count]
    if len(prompts) < count:
        raise SystemExit(f"{arguments.prompts} has {len(prompts)} categories, too few for --sizes {count}")
    options = {"max_new_tokens": arguments.new_tokens, "do_sample": False}
    config = GenerationConfig(**options, eos_token_id=None, pad_token_id=0)

    def with_heads(batch: list[Tensor]) -> int:
        ids, mask = padded(batch)
        return decoder.generate(ids, attention_mask=mask, generation_config=config).stats.new_tokens

    def plainly(batch: list[Tensor]) -> int:
        ids, mask = padded(batch)
        sequences = model.model.generate(ids, attention_mask=mask, generation_config=config)
        return (sequences.shape[1] - ids.shape[1]) * len(batch)

    ways = {"heads": with_heads, "generate": plainly}
    seconds = {(name, size): 0.0 for name in ways for size in arguments.sizes}
    tokens = dict.fromkeys(seconds, 0)
    for run in ways.values():
        run(prompts[:1])  # warm up
    with progress_bar("decoding", len(ways) * sum(-(-count // size) for size in arguments.sizes)) as advance:
        for start in range(count):
            for name, size in seconds:
                if start % size == 0:
                    begin = time.perf_counter()
                    tokens[name, size] += ways[name](prompts[start : start + size])
                    seconds[name, size] += time.perf_counter() - begin
                    advance(1)

    speeds = {key: tokens[key] / seconds[key] for key in seconds}
    table = Table("batch", "heads, tokens/s", "over batch 1", "generate, tokens/s", "heads over generate")
    first = arguments.sizes[0]
    for size in arguments.sizes:
        heads, plain = speeds["heads", size], speeds["generate", size]
        table.add_row(
            str(size), f"{heads:.1f}", f"{heads / speeds['heads', first]:.2f}", f"{plain:.1f}", f"{heads / plain:.2f}"
        )
    Console().print(table)
    figures = {f"{name}, {size}": round(speed, 2) for (name, size), speed in speeds.items()}
    print(json.dumps({"prompts": count, "nodes": decoder.proposer.sizes[-1], "tokens_per_second": figures}))


if __name__ == "__main__":
    main()
