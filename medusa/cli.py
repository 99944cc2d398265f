"""The `medusa` command. Every command imports what it needs itself, so that `--help` is quick."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from .cli_bench import bench
from .cli_common import Checkpoint, Dtype, Json, fail, load, show
from .cli_decoding import chat, generate
from .cli_estimate import estimate
from .cli_push import push
from .cli_train import train
from .cli_verify import verify

app = typer.Typer(
    help="Train Medusa heads on your model, measure them, and decode with them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Data = Annotated[Path, typer.Option(help="JSONL file of held-out chats.")]
MaxLength = Annotated[int, typer.Option(help="Cut chats after so many tokens.")]
Recorded = Annotated[bool, typer.Option(help="Use the hidden states that `distill --record` left beside the data.")]


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
def tree(
    checkpoint: Checkpoint,
    data: Data,
    nodes: Annotated[int, typer.Option(min=1, help="Size of the largest tree, root included.")] = 64,
    max_length: MaxLength = 2048,
    recorded: Recorded = False,
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Search the best tree of every size for these heads and save it in the checkpoint."""
    from medusa.train.evaluate import judge_file
    from medusa.train.supervision import IGNORE
    from medusa.tree_search import search_tree_for_decoding

    if not Path(checkpoint).is_dir():
        raise ValueError(
            f"there is no directory {checkpoint}; the tree is saved there, so download the checkpoint first"
        )
    model, tokenizer = load(checkpoint, dtype)
    judged = judge_file(model, tokenizer, str(data), max_length, recorded)
    searched = search_tree_for_decoding(judged.ranks, judged.targets[:, 0] == IGNORE, nodes, judged.log_confidence)
    searched.save(Path(checkpoint))
    sizes = [size for size in (2, 4, 8, 16, 32, 64, 128, 256) if size <= len(searched.paths) + 1]
    figures = {
        "steps": searched.positions,
        "tokens_per_step": {size: round(searched.tokens_per_step(size), 3) for size in sizes},
        "paths": searched.paths,
    }
    rows = [[str(size), str(searched.best(size).depth), f"{searched.tokens_per_step(size):.2f}"] for size in sizes]
    show(as_json, figures, ["nodes", "depth", "tokens per step"], rows, f"expected on {data}")


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


for command in (train, verify, generate, chat, bench, push, estimate):
    app.command()(command)
