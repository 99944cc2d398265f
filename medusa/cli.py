"""The `medusa` command. Every command imports what it needs itself, so that `--help` is quick."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .cli_bench import bench
from .cli_common import Checkpoint, Data, Dtype, Json, MaxLength, Recorded, fail, load, show
from .cli_decoding import chat, generate
<<<<<<< HEAD
from .cli_distill import distill
=======
from .cli_inspect import inspect
>>>>>>> main
from .cli_push import push
from .cli_simulate import simulate
from .cli_train import train
from .cli_tree import tree
from .cli_verify import verify

app = typer.Typer(
    help="Train Medusa heads on your model, measure them, and decode with them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the command; a bad input ends with one message on stderr and status 1."""
    run_or_explain(app)


def train_main() -> None:
    """Run `medusa train` without the word `train`, for `accelerate launch -m medusa.train`."""
    sys.argv.insert(1, "train")
    run_or_explain(app)


def run_or_explain(command_line: typer.Typer) -> None:
    """Run a command line; errors meant for users are shown without a traceback."""
    try:
        command_line()
    except ValueError as error:
        fail(str(error))
    except KeyboardInterrupt:
        raise SystemExit(130) from None


@app.command("eval")
def evaluate(
    checkpoint: Checkpoint,
    data: Data,
    max_length: MaxLength = 2048,
    recorded: Recorded = False,
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Measure how often each head's guesses are right on held-out chats."""
    from dataclasses import asdict

    from medusa.train.evaluate import accuracy, judge_file

    model, tokenizer = load(checkpoint, dtype)
    found = accuracy(judge_file(model, tokenizer, str(data), max_length, recorded))
    show(as_json, asdict(found), ["head", "top-1", "top-5", "top-10", "positions"], found.table(), f"heads on {data}")


@app.command()
def merge(
    checkpoint: Checkpoint,
    out: Annotated[Path, typer.Option(help="New directory: the heads, and in backbone/ the model to serve.")],
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Fold the LoRA adapter of a Medusa-2 checkpoint into its backbone, and compare their logits."""
    from dataclasses import asdict

    from medusa.merge import merge as run

    figures = asdict(run(checkpoint, out, dtype))
    show(as_json, figures, ["", ""], [[name, f"{value:.6f}"] for name, value in figures.items()], str(out))


<<<<<<< HEAD
@app.command()
def inspect(
    target: Annotated[Path, typer.Argument(help="A checkpoint directory, or a JSONL file of chats.")],
    tokenizer: Annotated[str | None, typer.Option(help="For a chat file: whose template and tokens to use.")] = None,
    rows: Annotated[int, typer.Option(min=1, help="Show so many rows of a chat file.")] = 3,
    max_length: MaxLength = 2048,
    as_json: Json = False,
) -> None:
    """Show what a checkpoint holds, or which text of a chat file is learned."""
    if target.is_dir():
        _inspect_checkpoint(target, as_json)
    else:
        _inspect_data(target, tokenizer, rows, max_length, as_json)


def _inspect_checkpoint(directory: Path, as_json: bool) -> None:
    from medusa.checkpoint import read_config, read_heads
    from medusa.tree_search import TREE_FILE, SearchedTree

    entries = read_config(directory)
    tensors, draft_vocab = read_heads(directory)
    figures: dict[str, Any] = {
        "backbone": entries.get("base_model_name_or_path"),
        "heads": entries["medusa_num_heads"],
        "layers": entries.get("medusa_num_layers", 1),
        "projection": entries.get("medusa_projection", "own"),
        "root_conditioned": entries.get("medusa_root_conditioned", False),
        "sequential": entries.get("medusa_sequential", False),
        "hidden_size": entries.get("hidden_size"),
        "vocab_size": entries.get("vocab_size"),
        "draft_vocab_size": None if draft_vocab is None else len(draft_vocab),
        "parameters": sum(tensor.numel() for tensor in tensors.values()),
        "bytes": sum(tensor.nbytes for tensor in tensors.values()),
        "tensors": {name: list(tensor.shape) for name, tensor in tensors.items()},
    }
    if (directory / TREE_FILE).exists():
        searched = SearchedTree.load(directory)
        figures["tree_nodes"] = len(searched.paths) + 1
        figures["tree_tokens_per_step"] = round(searched.tokens_per_step(len(searched.paths) + 1), 3)
    if (directory / "evaluation.json").exists():
        figures["accuracy"] = json.loads((directory / "evaluation.json").read_text())
    show(as_json, figures, ["", ""], [[key, str(value)] for key, value in figures.items()], str(directory))


def _inspect_data(file: Path, tokenizer_name: str | None, count: int, max_length: int, as_json: bool) -> None:
    from medusa.model import load_tokenizer
    from medusa.train.rows import load_rows
    from medusa.train.supervision import IGNORE

    if tokenizer_name is None:
        raise ValueError(f"to show what is learned of {file}, name the model: --tokenizer PATH_OR_HUB_ID")
    tokenizer = load_tokenizer(tokenizer_name)
    loaded, report = load_rows(file, tokenizer, max_length)
    learned = sum(label != IGNORE for row in loaded for label in row.labels)
    tokens = sum(len(row.input_ids) for row in loaded)
    figures = {
        "rows": report.kept,
        "dropped": [{"line": line, "reason": reason} for line, reason in report.dropped],
        "tokens": tokens,
        "learned_tokens": learned,
        "learned_text": [
            tokenizer.decode([label for label in row.labels if label != IGNORE]) for row in loaded[:count]
        ],
    }
    if as_json:
        print(json.dumps(figures))
        return
    console = Console()
    console.print(f"{file}: {report.summary()}; {learned} of {tokens} tokens are learned (green)", highlight=False)
    for row in loaded[:count]:
        text = Text(f"--- {row.id}\n", style="bold")
        for token, label in zip(row.input_ids, row.labels, strict=True):
            text.append(tokenizer.decode([token]), style="dim" if label == IGNORE else "green")
        console.print(text)


for command in (train, distill, verify, generate, chat, bench, push):
=======
for command in (train, tree, simulate, inspect, verify, generate, chat, bench, push):
>>>>>>> main
    app.command()(command)
