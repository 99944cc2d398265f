"""The searched tree against published ones and against trees grown in every step, at equal size, by simulation.

Usage: python scripts/compare_trees.py CHECKPOINT --data FILE [--nodes N ...] [--temperature T] [--new-tokens N]
FILE holds held-out answers of the backbone. Above temperature 0 its prompts are answered anew, once, by exact sampling.
Trees are searched on one half of the answers and simulated on the other, and the other way round, so nothing is timed
and all trees see the same text. Tokens per step = tokens emitted by verify passes / verify passes, roots included.
Prints a table and one line of JSON.
"""

import argparse
import json
from pathlib import Path

import torch
from own_text import prompts_of, write_answers
from rich.console import Console
from rich.table import Table
from torch import Tensor

from medusa import CandidateTree, MedusaModel
from medusa.choices import published_trees
from medusa.inference import DynamicTree
from medusa.inference.dynamic_tree import DynamicLayout
from medusa.loading import load_tokenizer
from medusa.simulation import Simulation, simulate
from medusa.train.acceptance import Target
from medusa.train.evaluate import Judged, judge_rows
from medusa.train.hidden_states import HiddenStates, LiveHiddenStates, RecordedHiddenStates, recording_directory
from medusa.train.rows import load_rows
from medusa.tree_search import search_tree_for_decoding

SUPERSET_NODES = 256
PUBLISHED_NODES = 64


def halves_of(model: MedusaModel, arguments: argparse.Namespace) -> list[Judged]:
    """Every other answer, and the rest."""
    if arguments.temperature:
        prompts = prompts_of(arguments.data, arguments.checkpoint)
        tree = CandidateTree.chain(1) if model.searched_tree is None else model.searched_tree.best(8)
        rows, _ = write_answers(model, tree, prompts, arguments.new_tokens, arguments.temperature)
    else:
        rows, _ = load_rows(arguments.data, load_tokenizer(arguments.checkpoint), 2048)
    states: HiddenStates = LiveHiddenStates(model.backbone)
    if arguments.recorded:
        states = RecordedHiddenStates(recording_directory(arguments.data))
    target = Target(model.backbone, (arguments.temperature,)) if arguments.temperature else None
    return [judge_rows(model.heads, half, states, lambda count: None, target) for half in (rows[::2], rows[1::2])]


def dynamic_nodes(tree: DynamicTree, log_confidence: Tensor) -> Tensor:
    """Which nodes of the superset a step from each position checks: bool [P, M], from [P, K, G]."""
    layout = DynamicLayout.of(tree, log_confidence.device)
    heads, ranks = layout.superset.depths[0] - 1, layout.superset.ranks[0]
    joint = layout.joint(log_confidence[:, heads.clamp(min=0), ranks])  # [P, M]
    order = joint.sort(dim=1, descending=True, stable=True).indices[:, : tree.num_nodes]
    return torch.zeros_like(joint, dtype=torch.bool).scatter(1, order, True)


def simulate_all(known: Judged, judged: Judged, sizes: list[int]) -> dict[str, Simulation]:
    """Search on one half, simulate on the other."""
    acceptance = known.acceptance[:, 0] if known.acceptance.shape[1] else None
    searched = search_tree_for_decoding(known.ranks, known.ends, SUPERSET_NODES, known.log_confidence, acceptance)
    superset = searched.best(SUPERSET_NODES)
    found = {}
    for size in sizes:
        found[f"searched, {size}"] = simulate(judged.ranks, judged.ends, searched.best(size))
        grown = DynamicTree(superset, (min(size, superset.num_nodes),), calibration=searched.calibration)
        kept = dynamic_nodes(grown, judged.log_confidence)
        found[f"dynamic, {size}"] = simulate(judged.ranks, judged.ends, superset, kept)
    for name, tree in published_trees().items():
        fitting = tree.cut(judged.ranks.shape[1])
        found[f"{name}, {fitting.num_nodes}"] = simulate(judged.ranks, judged.ends, fitting)
    return found


def main() -> None:
    """Compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--recorded", action="store_true", help="use the recorded hidden states beside FILE")
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 16, PUBLISHED_NODES])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--new-tokens", type=int, default=96, help="of each answer above temperature 0")
    parser.add_argument("--dtype", default="float32")
    arguments = parser.parse_args()
    if arguments.recorded and arguments.temperature:
        raise SystemExit("answers at a temperature are made anew, so none are recorded; leave --recorded out")
    model = MedusaModel.from_pretrained(arguments.checkpoint, dtype=arguments.dtype)
    if model.config.sequential:
        raise SystemExit("sequential heads say how sure they are along the true text only, so no tree can be grown")
    first, second = halves_of(model, arguments)
    runs = [simulate_all(first, second, arguments.nodes), simulate_all(second, first, arguments.nodes)]
    figures = {
        name: round(sum(run[name].tokens for run in runs) / sum(run[name].steps for run in runs), 4) for name in runs[0]
    }
    table = Table("tree, nodes", "tokens per step", title=f"temperature {arguments.temperature:g}")
    for name, value in figures.items():
        table.add_row(name, f"{value:.3f}")
    Console().print(table)
    positions = len(first.ranks) + len(second.ranks)
    print(json.dumps({"temperature": arguments.temperature, "positions": positions, "tokens_per_step": figures}))


if __name__ == "__main__":
    main()
