"""Where the time of a decoding step goes: heads, backbone, and everything else.

Usage: python scripts/profile_step.py CHECKPOINT [--nodes N] [--dtype D] [--pack-weights] [--steps N]
Prints a table and one line of JSON.
"""

import argparse
import json
import time
from collections import defaultdict
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from medusa import MedusaModel
from medusa.inference import MedusaDecoder
from medusa.inference.accept import accept_greedy
from medusa.inference.propose import propose
from medusa.inference.verify import verify

PARTS = ("heads and proposal", "backbone pass", "acceptance", "commit and bookkeeping")


@torch.inference_mode()
def main() -> None:
    """Measure the parts of `MedusaDecoder.step` one by one on random text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--pack-weights", action="store_true")
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    model = MedusaModel.from_pretrained(arguments.checkpoint, dtype=arguments.dtype)
    if model.searched_tree is None:
        raise SystemExit("search a tree first: medusa tree CHECKPOINT --data FILE")
    tree = model.searched_tree.best(arguments.nodes)
    decoder = MedusaDecoder(model, tree=tree, pack_weights=arguments.pack_weights)
    generator = torch.Generator().manual_seed(0)
    state = decoder.prefill(torch.randint(model.backbone.vocab_size, (200,), generator=generator), 5 * arguments.steps)

    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(arguments.steps):
        marks = [time.perf_counter()]
        start = state.cache.length
        tokens = propose(model.heads, state.hidden, state.root, decoder.layout)
        marks.append(time.perf_counter())
        hidden, logits = verify(decoder.backbone, tokens, decoder.layout, state.cache)
        marks.append(time.perf_counter())
        path, bonus = accept_greedy(tokens, logits, decoder.layout)
        marks.append(time.perf_counter())
        state.cache.keep(start, path)
        state.hidden, state.root = hidden[path[-1]], bonus
        _ = [*tokens[path[1:]].tolist(), int(bonus)]
        marks.append(time.perf_counter())
        for part, begin, end in zip(PARTS, marks, marks[1:], strict=False):
            times[part].append(end - begin)

    milliseconds = {part: 1000 * median(values[arguments.steps // 4 :]) for part, values in times.items()}
    # Gathering the heads' guesses is bookkeeping too: measure the heads' own pass apart and count the rest.
    alone = []
    guess_from = state.hidden[None].to(next(model.heads.parameters()).dtype)
    for _ in range(arguments.steps):
        begin = time.perf_counter()
        model.heads(guess_from, state.root[None])
        alone.append(time.perf_counter() - begin)
    heads = 1000 * median(alone[arguments.steps // 4 :])
    total = sum(milliseconds.values())
    overhead = total - milliseconds["backbone pass"] - min(heads, milliseconds["heads and proposal"])
    table = Table("part", "ms", "share", title=f"{tree.num_nodes} nodes, {model.backbone.lm_weight.dtype}")
    for part, value in milliseconds.items():
        table.add_row(part, f"{value:.2f}", f"{value / total:.1%}")
    table.add_row("heads alone", f"{heads:.2f}", f"{heads / total:.1%}")
    table.add_row("outside backbone and heads", f"{overhead:.2f}", f"{overhead / total:.1%}", style="bold")
    Console().print(table)
    print(json.dumps({"milliseconds": milliseconds, "heads_alone": heads, "overhead_share": overhead / total}))


if __name__ == "__main__":
    main()
