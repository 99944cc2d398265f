"""`medusa tree`: count how often guesses are right, search the best trees, save, draw, export and import them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.tree import Tree

from .cli_common import Checkpoint, Data, Dtype, Json, MaxLength, Recorded, load, note, show

if TYPE_CHECKING:
    from medusa.train.evaluate import Judged

    from .hit_rates import HitRates
    from .tree_search import SearchedTree

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
RATE_TEMPERATURES = (0.7, 1.0)
"""At which hit rates are always counted, besides 0."""
SHOWN_NODES = 16


def tree(
    checkpoint: Checkpoint,
    data: Data,
    nodes: Annotated[int, typer.Option(min=1, help="Size of the largest tree, root included.")] = 64,
    depth: Annotated[int | None, typer.Option(min=1, help="How many heads the tree may use; unsaid: all.")] = None,
    branching: Annotated[
        int | None, typer.Option(min=1, help="How many children a node may have: its head's best guesses.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="Temperature that the tree is searched for.")] = 0.0,
    import_choices: Annotated[
        str | None, typer.Option(help="Take this tree: a published one by name, or a JSON file of rank paths.")
    ] = None,
    export_choices: Annotated[
        Path | None, typer.Option(help="Write the tree as a JSON list of rank paths, as the reference has them.")
    ] = None,
    draw: Annotated[Path | None, typer.Option(help="Draw the tree into a file, .svg or .png.")] = None,
    max_length: MaxLength = 2048,
    recorded: Recorded = False,
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Search the best tree of every size for these heads and save it in the checkpoint."""
    from medusa.train.evaluate import judge_file

    from .choices import read_choices, write_choices
    from .hit_rates import save_hit_rates
    from .tree_picture import draw_tree

    if not Path(checkpoint).is_dir():
        raise ValueError(
            f"there is no directory {checkpoint}; the tree is saved there, so download the checkpoint first"
        )
    imported = None if import_choices is None else read_choices(import_choices)
    model, tokenizer = load(checkpoint, dtype)
    num_heads = model.config.num_heads
    if imported is not None and imported.depth > num_heads:
        lost = imported.num_nodes - imported.cut(num_heads).num_nodes
        note(
            f"{import_choices} is {imported.depth} levels deep but there are {num_heads} heads: "
            f"the {lost} nodes below level {num_heads} are cut off"
        )
        imported = imported.cut(num_heads)
    temperatures = sorted({*RATE_TEMPERATURES, temperature} - {0.0})
    judged = judge_file(model, tokenizer, str(data), max_length, recorded, tuple(temperatures))
    layer = temperatures.index(temperature) if temperature else None
    searched = _search(judged, layer, nodes, depth, branching) if imported is None else _rate(judged, layer, imported)
    searched = _with_calibration(searched, judged, temperature)
    rates = _hit_rates(judged, temperatures, searched)
    if imported is None:
        searched = _explain_caution(searched)
    searched.save(Path(checkpoint))
    save_hit_rates(rates, Path(checkpoint))
    whole = searched.best(len(searched.paths) + 1)
    if draw is not None:
        draw_tree(whole, dict(zip(searched.paths, searched.gains, strict=True)), draw)
    if export_choices is not None:
        write_choices(whole, export_choices)
    _show(searched, rates, as_json)


def _search(
    judged: "Judged", layer: int | None, nodes: int, depth: int | None, branching: int | None
) -> "SearchedTree":
    """The best tree of every size; `layer` says which of the judged temperatures, None 0."""
    from .tree_search import search_tree_for_decoding

    limited = judged.limited(depth, branching)
    acceptance = None if layer is None else limited.acceptance[:, layer]
    return search_tree_for_decoding(limited.ranks, limited.ends, nodes, limited.log_confidence, acceptance)


def _rate(judged: "Judged", layer: int | None, imported: Any) -> "SearchedTree":
    """The imported tree with its gains."""
    from .tree_search import rate_tree

    acceptance = None if layer is None else judged.acceptance[:, layer]
    return rate_tree(imported, judged.ranks, judged.ends, acceptance)


def _with_calibration(searched: "SearchedTree", judged: "Judged", temperature: float) -> "SearchedTree":
    """Add what the heads' confidence is worth, whatever the limits of the tree."""
    from dataclasses import replace

    from .calibration import fit_calibration
    from .tree_search import TYPICAL_NODES, visited_positions

    visited = visited_positions(judged.ranks, judged.ends, searched.best(TYPICAL_NODES))
    calibration = fit_calibration(judged.log_confidence[visited], judged.ranks[visited])
    return replace(searched, calibration=calibration, temperature=temperature)


def _hit_rates(judged: "Judged", temperatures: list[float], searched: "SearchedTree") -> "list[HitRates]":
    """At temperature 0 and at the others, where decoding takes steps."""
    from .hit_rates import count_hit_rates, one_hot_ranks
    from .tree_search import TYPICAL_NODES, visited_positions

    visited = visited_positions(judged.ranks, judged.ends, searched.best(TYPICAL_NODES))
    ranks, acceptance = judged.ranks[visited], judged.acceptance[visited]
    at_zero = one_hot_ranks(ranks, judged.log_confidence.shape[2])
    return [
        count_hit_rates(ranks, at_zero, 0.0),
        *(count_hit_rates(ranks, acceptance[:, i], warm) for i, warm in enumerate(temperatures)),
    ]


def _explain_caution(searched: "SearchedTree") -> "SearchedTree":
    """Drop the nodes that too few steps speak for, and say so."""
    from .tree_search import FEW_STEPS, SURE_HITS

    if searched.positions >= FEW_STEPS:
        return searched
    cautious = searched.cautious()
    note(
        f"only {searched.positions} steps to count over (a sure tree takes {FEW_STEPS}), so intervals are wide; of "
        f"{len(searched.paths) + 1} nodes the {len(cautious.paths) + 1} are kept that were right {SURE_HITS} times or "
        "more. Give more held-out chats"
    )
    return cautious


def _show(searched: "SearchedTree", rates: "list[HitRates]", as_json: bool) -> None:
    """Sizes, rates and the tree itself."""
    from .hit_rates import wilson
    from .tree_search import FEW_STEPS

    sizes = [size for size in SIZES if size <= len(searched.paths) + 1]
    expected = {size: searched.tokens_per_step(size) for size in sizes}
    gain_of = {(): 1.0, **dict(zip(searched.paths, searched.gains, strict=True))}
    count = searched.positions
    figures = {
        "steps": count,
        "few_steps": count < FEW_STEPS,
        "temperature": searched.temperature,
        "tokens_per_step": {size: round(value, 3) for size, value in expected.items()},
        "uncertainty": {size: round(searched.uncertainty(size), 3) for size in sizes},
        "paths": searched.paths,
        "nodes": [
            {
                "path": path,
                "probability": round(gain, 4),
                "interval": _rounded(wilson(gain * count, count)),
                "conditional": round(gain / gain_of[path[:-1]], 4) if gain_of[path[:-1]] else 0.0,
                "conditional_interval": _rounded(wilson(gain * count, gain_of[path[:-1]] * count)),
                "reached": round(gain_of[path[:-1]] * count, 1),
            }
            for path, gain in zip(searched.paths, searched.gains, strict=True)
        ],
        "hit_rates": [_rate_figures(one) for one in rates],
    }
    rows = [
        [str(size), str(searched.best(size).depth), f"{expected[size]:.2f} ± {searched.uncertainty(size):.2f}"]
        for size in sizes
    ]
    title = f"{count} steps, temperature {searched.temperature:g}"
    show(as_json, figures, ["nodes", "depth", "tokens per step"], rows, title)
    if not as_json:
        _show_rates(rates)
        _show_tree(searched)


def _rate_figures(rates: "HitRates") -> dict[str, Any]:
    """For machines."""
    heads = [
        {
            "head": head,
            "reached": reached,
            "rates": [round(rates.rate(head, rank), 4) for rank in range(len(rates.hits[head]))],
            "intervals": [_rounded(rates.interval(head, rank)) for rank in range(len(rates.hits[head]))],
        }
        for head, reached in enumerate(rates.reached)
    ]
    return {"temperature": rates.temperature, "heads": heads}


def _show_rates(rates: "list[HitRates]") -> None:
    """Of every head's first guesses, for people."""
    shown = range(min(3, len(rates[0].hits[0])))
    rows = []
    for one in rates:
        for head, reached in enumerate(one.reached):
            cells = [(one.rate(head, rank), *one.interval(head, rank)) for rank in shown]
            texts = [f"{rate:.0%} ({100 * low:.0f}-{100 * high:.0f})" for rate, low, high in cells]
            rows.append([f"{one.temperature:g}", str(head), str(reached), *texts])
    columns = ["T", "head", "reached", *(f"rank {rank}" for rank in shown)]
    show(False, {}, columns, rows, "accepted once reached, with 95% interval")


def _show_tree(searched: "SearchedTree") -> None:
    """The first nodes."""
    best = searched.best(SHOWN_NODES)
    gain_of = dict(zip(searched.paths, searched.gains, strict=True))
    branches: dict[tuple[int, ...], Tree] = {(): Tree(f"the best {best.num_nodes} nodes: root")}
    for path in best.paths:
        branches[path] = branches[path[:-1]].add(f"rank {path[-1]}  {gain_of[path]:.1%}", highlight=False)
    Console().print(branches[()])


def _rounded(interval: tuple[float, float]) -> list[float]:
    return [round(interval[0], 4), round(interval[1], 4)]
