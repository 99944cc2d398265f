"""`medusa inspect`: what a checkpoint holds, and which text of a chat file is learned."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from .cli_common import Json, MaxLength, show

if TYPE_CHECKING:
    from torch import Tensor


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
    from .checkpoint import EVALUATION_FILE, read_json
    from .formats import is_native
    from .tree_search import TREE_FILE, SearchedTree

    figures = _native(directory) if is_native(directory) else _published(directory)
    if (directory / TREE_FILE).exists():
        searched = SearchedTree.load(directory)
        figures["tree_nodes"] = len(searched.paths) + 1
        figures["tree_tokens_per_step"] = round(searched.tokens_per_step(len(searched.paths) + 1), 3)
    if (directory / EVALUATION_FILE).exists():
        figures["accuracy"] = read_json(directory / EVALUATION_FILE)
    show(as_json, figures, ["", ""], [[key, str(value)] for key, value in figures.items()], str(directory))


def _native(directory: Path) -> dict[str, Any]:
    from .checkpoint import read_config, read_heads

    entries = read_config(directory)
    tensors, draft_vocab = read_heads(directory)
    return {
        "format": "native",
        "backbone": entries.get("base_model_name_or_path"),
        "heads": entries["medusa_num_heads"],
        "layers": entries.get("medusa_num_layers", 1),
        "projection": entries.get("medusa_projection", "own"),
        "root_conditioned": entries.get("medusa_root_conditioned", False),
        "sequential": entries.get("medusa_sequential", False),
        "embedding_scale": entries.get("medusa_embedding_scale", "unit"),
        "hidden_size": entries.get("hidden_size"),
        "vocab_size": entries.get("vocab_size"),
        "draft_vocab_size": None if draft_vocab is None else len(draft_vocab),
        **_sizes(tensors),
    }


def _published(directory: Path) -> dict[str, Any]:
    from .formats import read_published

    found = read_published(directory)
    config, first = found.config, found.tensors["0.0.linear.weight"]
    projection = found.tensors.get(f"0.{config.num_layers}.weight")
    return {
        "format": found.format,
        "backbone": found.base_model,
        "heads": config.num_heads,
        "layers": config.num_layers,
        "projection": config.projection,
        "root_conditioned": False,
        "sequential": config.sequential,
        "embedding_scale": config.embedding_scale,
        "hidden_size": len(first),
        "vocab_size": None if projection is None or config.draft_vocab is not None else len(projection),
        "draft_vocab_size": None if config.draft_vocab is None else len(config.draft_vocab),
        **_sizes(found.tensors),
    }


def _sizes(tensors: "dict[str, Tensor]") -> dict[str, Any]:
    return {
        "parameters": sum(tensor.numel() for tensor in tensors.values()),
        "bytes": sum(tensor.nbytes for tensor in tensors.values()),
        "dtypes": sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}),
        "tensors": {name: list(tensor.shape) for name, tensor in tensors.items()},
    }


def _inspect_data(file: Path, tokenizer_name: str | None, count: int, max_length: int, as_json: bool) -> None:
    from medusa.loading import load_tokenizer
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
        "dropped": [{"place": place, "reason": reason} for place, reason in report.dropped],
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
