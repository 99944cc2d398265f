"""Tokens per step of trees nobody calibrated on: predicted without the backbone, and measured with the real decoder.

Usage: python scripts/predict_tokens_per_step.py CHECKPOINT --data FILE [--prompts N] [--new-tokens N] [--dtype D]
FILE holds held-out chats, of which the prompts are used. `replayed` simulates each tree on the backbone's answers, from
hidden states and heads alone. `calibrated` is what the answers to the other half of the prompts promise.
Tokens per step = tokens emitted by verify passes / verify passes, roots included. Prints a table and one line of JSON.
"""

import argparse
import json
import random
from pathlib import Path
from statistics import mean

from own_text import prompts_of, write_answers
from rich.console import Console
from rich.table import Table

from medusa import CandidateTree, MedusaModel
from medusa.choices import published_trees
from medusa.simulation import simulate
from medusa.train.evaluate import judge_rows
from medusa.train.hidden_states import LiveHiddenStates
from medusa.tree_search import rate_tree

PUBLISHED = ("mc_sim_7b_63", "vicuna_7b_stage2", "vicuna_33b_stage1", "zephyr_stage2")


def trees_for(num_heads: int) -> dict[str, CandidateTree]:
    """Trees that were made without looking at these heads."""
    trees = {name: published_trees()[name].cut(num_heads) for name in PUBLISHED}
    trees["chain"] = CandidateTree.chain(num_heads)
    trees["wide, 9 nodes"] = CandidateTree.from_paths([(rank,) for rank in range(8)])
    trees["random, 24 nodes"] = random_tree(24, num_heads, seed=0)
    return trees


def random_tree(nodes: int, depth: int, seed: int) -> CandidateTree:
    """Grown by hanging the next rank under some node or other."""
    dice = random.Random(seed)
    children: dict[tuple[int, ...], int] = {(): 0}
    while len(children) < nodes:
        parent = dice.choice([path for path in children if len(path) < depth])
        child = (*parent, children[parent])
        children[parent] += 1
        children[child] = 0
    return CandidateTree.from_paths(path for path in children if path)


def main() -> None:
    """Predict and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--dtype", default="float32")
    arguments = parser.parse_args()
    model = MedusaModel.from_pretrained(arguments.checkpoint, dtype=arguments.dtype)
    prompts = prompts_of(arguments.data, arguments.checkpoint)[: arguments.prompts]
    answers, _ = write_answers(model, CandidateTree.chain(1), prompts, arguments.new_tokens, temperature=0.0)
    halves = [
        judge_rows(model.heads, half, LiveHiddenStates(model.backbone), lambda rows: None)
        for half in (answers[::2], answers[1::2])
    ]
    found = {}
    for name, tree in trees_for(model.config.num_heads).items():
        replayed = simulate(halves[1].ranks, halves[1].ends, tree).tokens_per_step
        rated = rate_tree(tree, halves[0].ranks, halves[0].ends)
        _, measured = write_answers(model, tree, prompts[1::2], arguments.new_tokens, temperature=0.0)
        calibrated = rated.tokens_per_step(tree.num_nodes)
        found[name] = {
            "nodes": tree.num_nodes,
            "measured": round(measured, 4),
            "replayed": round(replayed, 4),
            "replayed_error": round(replayed / measured - 1, 4),
            "calibrated": round(calibrated, 4),
            "calibrated_error": round(calibrated / measured - 1, 4),
            "calibrated_uncertainty": round(rated.uncertainty(tree.num_nodes), 4),
        }
    table = Table("tree", "nodes", "measured", "replayed", "error", "calibrated", "error")
    for name, one in found.items():
        shown = [f"{one['measured']:.3f}", f"{one['replayed']:.3f}", f"{one['replayed_error']:+.1%}"]
        promised = [f"{one['calibrated']:.3f} ± {one['calibrated_uncertainty']:.3f}", f"{one['calibrated_error']:+.1%}"]
        table.add_row(name, str(one["nodes"]), *shown, *promised)
    Console().print(table)
    worst = max(abs(one["replayed_error"]) for one in found.values())
    average = mean(abs(one["calibrated_error"]) for one in found.values())
    settings = {"prompts": len(prompts), "new_tokens": arguments.new_tokens, "dtype": arguments.dtype}
    summary = {"worst_replayed_error": worst, "mean_calibrated_error": round(average, 4)}
    print(json.dumps({**settings, **summary, "trees": found}))


if __name__ == "__main__":
    main()
