"""The native checkpoint: a directory with the heads, their configuration and, where known, tree and provenance.

Tensors carry the names of the reference implementation, so that full-vocabulary `own` heads load in serving engines as
they are. Everything written is read back and compared before it counts as saved.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from .config import MedusaConfig
from .tensor_checks import check_values, token_ids
from .tensor_stream import PlannedTensor, all_finite, write_stream

HEADS_FILE = "medusa_lm_head.safetensors"
CONFIG_FILE = "config.json"
PROVENANCE_FILE = "provenance.json"
EVALUATION_FILE = "evaluation.json"
"""How often the heads were right on held-out text."""
DRIFT_FILE = "drift.json"
"""How far Medusa-2 moved the backbone."""
DRAFT_VOCAB = "draft_vocab"
ADAPTER_FOLDER = "adapter"
"""In a checkpoint: a LoRA adapter that the backbone learned beside the heads (Medusa-2)."""
BACKBONE_FOLDER = "backbone"
"""In a checkpoint: the whole backbone, where it learned beside the heads or an adapter was folded into it."""
FORMAT_VERSION = 1


@contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """Give a temporary directory that takes the place of `target` only when the block ends without an error."""
    target = Path(os.path.abspath(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield work
        for written in (*work.rglob("*"), work):
            _sync(written)
        work.chmod(0o777 & ~_umask())
        replaced = target.with_name(f".{target.name}.replaced")
        shutil.rmtree(replaced, ignore_errors=True)
        if target.exists():
            target.rename(replaced)
        work.rename(target)
        _sync(target.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _sync(path: Path) -> None:
    """Wait until a file or folder is on the disk: what a crash of the machine finds after a rename is whole, then."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_heads(directory: Path, state: dict[str, Tensor], config: MedusaConfig, facts: dict[str, Any]) -> None:
    """Write heads and configuration into an existing directory and read them back.

    Args:
        directory: where to.
        state: the heads' tensors by reference name.
        config: their architecture.
        facts: more entries of config.json: hidden_size, vocab_size, base_model_name_or_path, ...

    Raises:
        ValueError: a tensor is not finite, a head's projection is all zero, or the file read back differs.
    """
    tensors = {name: tensor.detach().to("cpu").contiguous() for name, tensor in state.items()}
    for name, tensor in tensors.items():
        if not all_finite(tensor):
            raise ValueError(f"head tensor {name} holds NaN or infinity; nothing was saved")
        if name.endswith(f".{config.num_layers}.weight") and not tensor.any():
            raise ValueError(f"head tensor {name} is all zero, so the head was never built; nothing was saved")
    if config.draft_vocab is not None:
        tensors[DRAFT_VOCAB] = torch.tensor(config.draft_vocab)
    write_stream(
        directory / HEADS_FILE,
        {
            name: PlannedTensor(tuple(it.shape), it.dtype, partial(tensors.__getitem__, name))
            for name, it in tensors.items()
        },
    )
    stored = load_file(directory / HEADS_FILE)
    for name, tensor in tensors.items():
        if name not in stored or not torch.equal(stored[name], tensor):
            raise ValueError(f"head tensor {name} reads back differently from {directory / HEADS_FILE}: disk fault?")
    entries = {
        "model_type": "medusa",
        "medusa_format_version": FORMAT_VERSION,
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_layers,
        "medusa_projection": config.projection,
        "medusa_root_conditioned": config.root_conditioned,
        "medusa_sequential": config.sequential,
        "medusa_embedding_scale": config.embedding_scale,
        "medusa_projection_bias": config.projection_bias,
        "medusa_fc_bias": True,
        **facts,
    }
    (directory / CONFIG_FILE).write_text(json.dumps(entries, indent=2) + "\n")


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Say what the file system refuses as an error for users.

    Raises:
        ValueError: something inside the block may not be read, or cannot be.
    """
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"cannot read {path} ({error.strerror or error}); give this user the right to read it, or copy it again"
        ) from error


def read_json(file: Path) -> Any:
    """What a JSON file holds.

    Raises:
        ValueError: it cannot be read or is not JSON.
    """
    with readable(file):
        raw = file.read_bytes()
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{file} is not JSON ({error}); the checkpoint is damaged, copy or download it again"
        ) from error


def config_entries(directory: Path) -> dict[str, Any]:
    """config.json, which heads of other projects may lack.

    Raises:
        ValueError: it is damaged.
    """
    file = directory / CONFIG_FILE
    with readable(directory):
        if not file.is_file():
            return {}
    entries = read_json(file)
    if not isinstance(entries, dict):
        raise ValueError(f"{directory} holds no Medusa heads: its {CONFIG_FILE} has no entries")
    return entries


def read_config(directory: Path) -> dict[str, Any]:
    """Read a checkpoint's config.json.

    Raises:
        ValueError: the directory or the file is missing, is not JSON, or belongs to something else.
    """
    file = directory / CONFIG_FILE
    with readable(directory):
        if not directory.is_dir():
            raise ValueError(f"there is no directory {directory}; give the path of a Medusa checkpoint or its hub id")
        if not file.is_file():
            raise ValueError(f"{directory} is not a Medusa checkpoint: it has no {CONFIG_FILE}")
    entries = read_json(file)
    if not isinstance(entries, dict) or "medusa_num_heads" not in entries:
        kind = entries.get("model_type") if isinstance(entries, dict) else None
        raise ValueError(
            f"{directory} holds no Medusa heads (model_type {kind!r}); if it is a backbone, load it with "
            "AutoModelForCausalLM and use MedusaModel.attach"
        )
    version = entries.get("medusa_format_version", FORMAT_VERSION)
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise ValueError(
            f"{directory} was made by a newer medusa-heads (format {version}; this one reads {FORMAT_VERSION})"
        )
    return entries


def tokenizer_size(directory: Path, entries: dict[str, Any], vocab_size: int) -> int:
    """How many ids the tokenizer has; all of the backbone's where config.json does not say.

    Raises:
        ValueError: what it says is no count.
    """
    size = entries.get("tokenizer_size", vocab_size)
    if not isinstance(size, int) or size < 1:
        raise ValueError(
            f"{directory / CONFIG_FILE}: tokenizer_size is {size!r}, not a count of tokens; copy or download it again"
        )
    return size


def heads_config(entries: dict[str, Any], draft_vocab: tuple[int, ...] | None) -> MedusaConfig:
    """The heads' architecture, from what config.json says and the draft vocabulary that lies beside the tensors."""
    return MedusaConfig(
        num_heads=entries["medusa_num_heads"],
        num_layers=entries.get("medusa_num_layers", 1),
        projection=entries.get("medusa_projection", "own"),
        draft_vocab=draft_vocab,
        root_conditioned=entries.get("medusa_root_conditioned", False),
        sequential=entries.get("medusa_sequential", False),
        embedding_scale=entries.get("medusa_embedding_scale", "unit"),
        projection_bias=entries.get("medusa_projection_bias", False),
    )


def read_heads(directory: Path) -> tuple[dict[str, Tensor], tuple[int, ...] | None]:
    """Read the heads' tensors, and the draft vocabulary where there is one.

    Raises:
        ValueError: the file is missing, truncated, or holds values that are not finite.
    """
    file = heads_file(directory)
    with opened(file) as handle:
        tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 (not a dict)
    vocab = tensors.pop(DRAFT_VOCAB, None)
    for name, tensor in tensors.items():
        check_values(file, name, tensor)
    return tensors, None if vocab is None else token_ids(file, DRAFT_VOCAB, vocab)


def heads_file(directory: Path) -> Path:
    """Where a native checkpoint's heads are.

    Raises:
        ValueError: they are not there.
    """
    file = directory / HEADS_FILE
    with readable(directory):
        if not file.is_file():
            raise ValueError(
                f"{directory} has no {HEADS_FILE}: the checkpoint is incomplete, copy or download it again"
            )
    return file


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """A safetensors file, mapped into memory.

    Raises:
        ValueError: it cannot be read or is damaged.
    """
    try:
        with readable(file), file.open("rb"):  # safetensors names the reason less plainly
            pass
        with safe_open(file, framework="pt") as handle:
            yield handle
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged ({error}); copy or download it again") from error
