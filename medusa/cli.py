"""The `medusa` command. Every command imports what it needs itself, so that `--help` is quick."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from .cli_bench import bench
from .cli_common import Checkpoint, Data, Dtype, Json, MaxLength, Recorded, fail, load, show
from .cli_decoding import chat, generate
from .cli_distill import distill
from .cli_estimate import estimate
from .cli_export import export
from .cli_inspect import inspect
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


for command in (train, distill, tree, simulate, inspect, verify, generate, chat, bench, push, export, estimate):
    app.command()(command)
