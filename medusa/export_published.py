"""Heads that other projects wrote, as a native checkpoint for as long as an export takes."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from .checkpoint import write_heads
from .formats import PublishedHeads, is_native, read_published


@contextmanager
def as_native(directory: Path, beside: tuple[str, ...]) -> Iterator[Path]:
    """Give a native checkpoint's directory itself, and that of a native copy of any other.

    Args:
        directory: the checkpoint.
        beside: files that the copy takes along, where they are there: those of the tokenizer.

    Raises:
        ValueError: it holds no heads, or damaged ones, or its backbone is not known.
    """
    if is_native(directory):
        yield directory
        return
    found = read_published(directory)
    with tempfile.TemporaryDirectory() as work:
        copy = Path(work)
        write_heads(copy, found.tensors, found.config, _facts(directory, found))
        for name in beside:
            source = directory / name
            if source.is_dir():
                shutil.copytree(source, copy / name)
            elif source.exists():
                shutil.copy(source, copy / name)
        yield copy


def _facts(directory: Path, found: PublishedHeads) -> dict[str, Any]:
    """What a native config.json says of the backbone, from that backbone's own config.json: it is not loaded."""
    if not found.base_model:
        raise ValueError(
            f"{directory} does not say whose heads it holds; write the backbone's path or hub id into its config.json "
            'as "base_model_name_or_path"'
        )
    try:
        config = AutoConfig.from_pretrained(found.base_model).get_text_config(decoder=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read the configuration of the backbone {found.base_model!r}: {error}") from error
    return {
        "base_model_name_or_path": found.base_model,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
    }
