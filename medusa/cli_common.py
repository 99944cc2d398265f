"""What the commands of the command line share."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from medusa.inference import MedusaDecoder
    from medusa.model import MedusaModel

Checkpoint = Annotated[str, typer.Argument(help="Directory or hub id of a Medusa checkpoint.")]
Json = Annotated[bool, typer.Option("--json", help="Print one line of JSON instead of a table.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Data = Annotated[Path, typer.Option(help="JSONL file of held-out chats.")]
MaxLength = Annotated[int, typer.Option(help="Cut chats after so many tokens.")]
Recorded = Annotated[bool, typer.Option(help="Use the hidden states that `distill --record` left beside the data.")]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Longest answer.")]
PackWeights = Annotated[
    bool | None, typer.Option(help="Packed half-precision weights on a CPU; unsaid: if faster here.")
]


def fail(message: str) -> NoReturn:
    """Print a message to stderr and exit with status 1."""
    Console(stderr=True, soft_wrap=True).print(Text.assemble(("error: ", "red"), message), highlight=False)
    raise SystemExit(1)


def note(message: str) -> None:
    """Print a remark to stderr, where it does not mix with the output."""
    Console(stderr=True, soft_wrap=True).print(message, style="dim", markup=False, highlight=False)


def show(as_json: bool, figures: dict[str, Any], columns: list[str], rows: list[list[str]], title: str) -> None:
    """Print figures as JSON or as a table."""
    if as_json:
        print(json.dumps(figures))
        return
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def load(checkpoint: str, dtype: str) -> tuple["MedusaModel", Any]:
    """The model and the tokenizer of a checkpoint; a warning where the heads learned with another chat template."""
    from medusa import MedusaModel
    from medusa.checkpoint import config_entries
    from medusa.compatibility import warn_of_template
    from medusa.loading import load_tokenizer, local_directory

    directory = local_directory(checkpoint)
    model = MedusaModel.from_pretrained(directory, dtype=dtype)
    has_tokenizer = (directory / "tokenizer_config.json").exists()
    whose = str(directory) if has_tokenizer else model.model.config._name_or_path
    tokenizer = load_tokenizer(whose)
    warn_of_template(directory, config_entries(directory), tokenizer, whose)
    return model, tokenizer


def make_decoder(
    model: "MedusaModel", pack_weights: bool | None, nodes: int | None = None, **options: Any
) -> "MedusaDecoder":
    """A decoder with the searched tree of `nodes` nodes, or the fastest one here."""
    from medusa import CandidateTree
    from medusa.inference import MedusaDecoder

    tree: str | CandidateTree = "auto"
    if nodes is not None:
        if model.searched_tree is None:
            raise ValueError(
                f"--nodes {nodes} needs a tree that was searched for these heads: run "
                "`medusa tree CHECKPOINT --data FILE` first, or leave --nodes out"
            )
        tree = model.searched_tree.best(nodes)
    return MedusaDecoder(model, tree=tree, pack_weights="auto" if pack_weights is None else pack_weights, **options)
