"""Where the time of a decoding step goes: heads, backbone, and everything else.

Usage: python scripts/profile_step.py CHECKPOINT [--nodes N] [--dtype D] [--pack-weights] [--steps N] [--context N]
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
from medusa.inference.head_proposer import HeadProposer
from medusa.inference.proposer import DecodingState
from medusa.inference.request import Row

PARTS = ("heads and proposal", "backbone pass", "acceptance", "commit and bookkeeping")


def run_heads(model: MedusaModel, decoder: MedusaDecoder, state: DecodingState) -> None:
    """Only what the heads compute in a step."""
    assert isinstance(decoder.proposer, HeadProposer)
    if not model.config.sequential:
        model.heads(state.hidden, state.root)
        return
    for depth, level in enumerate(decoder.proposer.levels):
        width = len(level.counts)
        model.heads.forward_one(depth, state.hidden.expand(width, -1), state.root.expand(width, depth + 1))


@torch.inference_mode()
def main() -> None:
    """Measure the parts of `MedusaDecoder.step` one by one on random text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--pack-weights", action="store_true")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--context", type=int, default=200)
    arguments = parser.parse_args()
    model = MedusaModel.from_pretrained(arguments.checkpoint, dtype=arguments.dtype)
    if model.searched_tree is None:
        raise SystemExit("search a tree first: medusa tree CHECKPOINT --data FILE")
    tree = model.searched_tree.best(arguments.nodes)
    decoder = MedusaDecoder(model, tree=tree, pack_weights=arguments.pack_weights)
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(model.backbone.vocab_size, (arguments.context,), generator=generator)
    state = decoder.prefill([Row.greedy(prompt, 5 * arguments.steps)])

    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(arguments.steps):
        marks = [time.perf_counter()]
        candidates, layout = decoder.propose(state)
        marks.append(time.perf_counter())
        hidden, logits = decoder.verify(candidates.tokens, layout, state.cache)
        marks.append(time.perf_counter())
        paths = decoder.accept(state, candidates, logits, layout)
        marks.append(time.perf_counter())
        decoder.commit(state, hidden, paths)
        marks.append(time.perf_counter())
        for part, begin, end in zip(PARTS, marks, marks[1:], strict=False):
            times[part].append(end - begin)

    milliseconds = {part: 1000 * median(values[arguments.steps // 4 :]) for part, values in times.items()}
    # Gathering the heads' guesses is bookkeeping too: measure the heads' own pass apart and count the rest.
    alone = []
    for _ in range(arguments.steps):
        begin = time.perf_counter()
        run_heads(model, decoder, state)
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
