"""The `medusa` command. Every command imports what it needs itself, so that `--help` is quick."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .cli_bench import bench
from .cli_common import Checkpoint, Data, Dtype, Json, MaxLength, Recorded, fail, load, show
from .cli_decoding import chat, generate
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


@app.command()
def distill(
    backbone: Annotated[str, typer.Option(help="Directory or hub id of the model that answers.")],
    prompts: Annotated[Path, typer.Option(help="JSONL file with `prompt`, `messages` or `conversations`.")],
    out: Annotated[Path, typer.Option(help="JSONL file of answers; continued if it exists.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 512,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts answered together.")] = 16,
    limit: Annotated[int | None, typer.Option(min=1, help="Use the first so many prompts only.")] = None,
    record: Annotated[bool, typer.Option(help="Record hidden states for training without the backbone.")] = False,
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Let the backbone answer prompts itself: the best text to train its heads on."""
    from medusa.backbone import Backbone
    from medusa.model import load_backbone, load_tokenizer
    from medusa.train.distill import distill as run
    from medusa.train.distill import read_prompts

    tokenizer = load_tokenizer(backbone)
    found, report = read_prompts(prompts, tokenizer, limit)
    Console(stderr=True).print(f"{prompts}: {report.summary()}", highlight=False)
    model = Backbone(load_backbone(backbone, dtype))
    answered = run(model, tokenizer, found, out, max_new_tokens, batch_size, record)
    figures = {"prompts": len(found), "answered": answered, "already_there": len(found) - answered, "out": str(out)}
    show(
        as_json,
        figures,
        ["prompts", "answered now", "already there"],
        [[str(v) for v in figures.values()][:3]],
        str(out),
    )


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


for command in (train, tree, simulate, inspect, verify, generate, chat, bench, push, export, estimate):
    app.command()(command)
