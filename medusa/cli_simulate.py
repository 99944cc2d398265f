"""`medusa simulate`: what trees would give, from recorded text and the heads alone."""

from typing import TYPE_CHECKING, Annotated

import typer

from .cli_common import Checkpoint, Data, Dtype, Json, MaxLength, Recorded, load, show

if TYPE_CHECKING:
    from .tree import CandidateTree
    from .tree_search import SearchedTree


def simulate(
    checkpoint: Checkpoint,
    data: Data,
    nodes: Annotated[str, typer.Option(help="Sizes of the searched tree, root included: 4,8,16.")] = "",
    choices: Annotated[
        list[str] | None, typer.Option(help="A published tree by name, or a JSON file of rank paths; may be repeated.")
    ] = None,
    max_length: MaxLength = 2048,
    recorded: Recorded = False,
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Predict tokens per step of trees on text that the backbone wrote, without decoding it again."""
    from medusa.train.evaluate import judge_file

    from .simulation import simulate as run

    model, tokenizer = load(checkpoint, dtype)
    trees = _trees(model.searched_tree, nodes, choices or [], model.config.num_heads)
    judged = judge_file(model, tokenizer, str(data), max_length, recorded)
    found = {name: run(judged.ranks, judged.ends, tree) for name, tree in trees.items()}
    figures = {
        name: {
            "nodes": trees[name].num_nodes,
            "depth": trees[name].depth,
            "steps": one.steps,
            "tokens": one.tokens,
            "tokens_per_step": round(one.tokens_per_step, 4),
            "accepted": one.accepted,
        }
        for name, one in found.items()
    }
    rows = [
        [name, str(trees[name].num_nodes), str(trees[name].depth), str(one.steps), f"{one.tokens_per_step:.3f}"]
        for name, one in found.items()
    ]
    show(as_json, figures, ["tree", "nodes", "depth", "steps", "tokens per step"], rows, f"simulated on {data.name}")


def _trees(
    searched: "SearchedTree | None", nodes: str, choices: list[str], num_heads: int
) -> "dict[str, CandidateTree]":
    """The trees that were asked for, by name."""
    from .choices import read_choices

    trees = {name: read_choices(name).cut(num_heads) for name in choices}
    if not nodes and trees:
        return trees
    if searched is None:
        raise ValueError(
            "no tree was searched for these heads: run `medusa tree CHECKPOINT --data FILE` first, or name --choices"
        )
    try:
        sizes = [int(size) for size in (nodes or "2,4,8,16,32,64").split(",")]
    except ValueError:
        raise ValueError(f"--nodes is {nodes!r}; give whole numbers with commas, like 4,8,16") from None
    return {f"searched, {size} nodes": searched.best(size) for size in sizes} | trees
