"""A frozen backbone's hidden states on disk: written once by all ranks, read in every epoch. P positions, D hidden.

The folder is named by what the states depend on: the backbone's weights and every token and label of the rows, which
stand for tokenizer, template, data and options. So another backbone or other rows never meet the states of these.
"""

import hashlib
import json
import shutil
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from medusa.backbone import Backbone
from medusa.progress import progress_bar

from .hidden_states import LiveHiddenStates, RecordedHiddenStates
from .pairs import root_positions
from .supervision import TrainingRow

SHARD_BYTES = 2**26
BATCH_SIZE = 8
CHECKED_ROWS = 8
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
HALF_TOLERANCE = 0.05
"""Of logits, as norms: rows that are padded to another length are rounded differently."""


def cached_states(
    directory: Path, backbone: Backbone, rows: list[TrainingRow], accelerator: Accelerator
) -> RecordedHiddenStates:
    """The hidden states of `rows`, from the cache; what is missing, damaged or stale there is written first.

    Args:
        directory: of all caches.
        backbone: the frozen backbone.
        rows: every row that will be asked for.
        accelerator: each of its processes writes a part.

    Raises:
        ValueError: two different rows have the same id, the disk is too small, or the backbone does not give the same
            states twice.
    """
    refuse_doubles(rows)
    key = content_key(backbone, rows)
    folder = directory / key[:16]
    shards = plan(backbone, rows)
    fill(folder, key, shards, backbone, accelerator)
    wrong = differing_row(RecordedHiddenStates(folder), backbone, rows)
    if wrong is not None:
        accelerator.print(f"hidden states in {folder} are not this backbone's (row {wrong!r}): all are written again")
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            shutil.rmtree(folder)
        accelerator.wait_for_everyone()
        fill(folder, key, shards, backbone, accelerator)
        wrong = differing_row(RecordedHiddenStates(folder), backbone, rows)
    if wrong is not None:
        raise ValueError(
            f"the backbone gives other hidden states for row {wrong!r} than it gave a moment ago, so they cannot be "
            "cached; leave cache.dir out"
        )
    return RecordedHiddenStates(folder)


def content_key(backbone: Backbone, rows: list[TrainingRow]) -> str:
    """A hash of what the states depend on."""
    digest = hashlib.sha256()
    for name, parameter in backbone.model.named_parameters():
        bits = parameter.detach().contiguous().flatten().view(torch.uint8)
        # Whole numbers, so that the sums are the same in whatever order a machine adds.
        figures = [int(bits[start::4].sum(dtype=torch.int64)) for start in range(4)]
        digest.update(json.dumps([name, str(parameter.dtype), list(parameter.shape), figures]).encode())
    for row in rows:
        digest.update(json.dumps([row.id, row.input_ids, row.labels]).encode())
    return digest.hexdigest()


def refuse_doubles(rows: list[TrainingRow]) -> None:
    """States are kept by id, so ids must be unique.

    Raises:
        ValueError: the id that stands twice.
    """
    seen: dict[str, TrainingRow] = {}
    for row in rows:
        if seen.setdefault(row.id, row) != row:
            raise ValueError(f"two rows have the id {row.id!r}; hidden states are cached by id, so give each its own")


def plan(backbone: Backbone, rows: list[TrainingRow]) -> list[list[TrainingRow]]:
    """Which rows go into which shard: of similar length, since they are padded together."""
    shards: list[list[TrainingRow]] = []
    size = SHARD_BYTES
    for row in sorted({row.id: row for row in rows}.values(), key=lambda row: len(row.input_ids)):
        if size >= SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(row)
        size += bytes_of(backbone, row)
    return shards


def bytes_of(backbone: Backbone, row: TrainingRow) -> int:
    """What a row's states take."""
    return len(root_positions(row.labels)) * backbone.hidden_size * backbone.lm_weight.element_size()


def fill(folder: Path, key: str, shards: list[list[TrainingRow]], backbone: Backbone, accelerator: Accelerator) -> None:
    """Write the shards that are missing or wrong, each rank its part; returns when all ranks are done.

    Raises:
        ValueError: there is too little room for them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mine = [(i, shard) for i, shard in enumerate(shards) if i % accelerator.num_processes == accelerator.process_index]
    missing = []
    for i, shard in mine:
        problem = shard_problem(shard_file(folder, i), key, shard, backbone.hidden_size)
        if problem is not None:
            missing.append((i, shard))
            if shard_file(folder, i).exists():
                print(f"{shard_file(folder, i)} {problem}: written again")
    needed = sum(bytes_of(backbone, row) for _, shard in missing for row in shard)
    total = int(accelerator.reduce(torch.tensor(needed, device=accelerator.device), reduction="sum"))
    free = shutil.disk_usage(folder).free
    if total:
        accelerator.print(f"caching hidden states in {folder}: {total / 1e9:.2f} GB, {free / 1e9:.1f} GB are free")
    if total > free:
        raise ValueError(
            f"the hidden states take {total / 1e9:.2f} GB, and {folder} has {free / 1e9:.2f} GB left; set cache.dir to "
            "another disk, shorten data.max_length, or leave cache.dir out"
        )
    count = sum(len(shard) for _, shard in missing)
    with progress_bar("caching hidden states", count, enabled=accelerator.is_main_process and count > 0) as advance:
        for i, shard in missing:
            write_shard(shard_file(folder, i), key, shard, backbone)
            advance(len(shard))
    accelerator.wait_for_everyone()


def write_shard(file: Path, key: str, rows: list[TrainingRow], backbone: Backbone) -> None:
    """Run the backbone over rows and write their states; complete or not at all."""
    live = LiveHiddenStates(backbone)
    tensors = {}
    for start in range(0, len(rows), BATCH_SIZE):
        batch = rows[start : start + BATCH_SIZE]
        for row, states in zip(batch, live.of(batch), strict=True):
            tensors[row.id] = states.to(backbone.lm_weight.dtype).cpu().contiguous()
    partial = file.with_suffix(".partial")
    try:
        save_file(tensors, partial, metadata={"key": key, "sha256": checksum(tensors)})
    except (OSError, SafetensorError) as error:
        partial.unlink(missing_ok=True)
        raise ValueError(f"cannot write {file}: {error}; is the disk full? The shards before it are kept") from error
    partial.replace(file)


def shard_file(folder: Path, number: int) -> Path:
    """Where a shard lies."""
    return folder / f"shard-{number:05d}.safetensors"


def shard_problem(file: Path, key: str, rows: list[TrainingRow], hidden_size: int) -> str | None:
    """What is wrong with a shard, or None."""
    try:
        with safe_open(file, framework="pt") as handle:
            metadata = handle.metadata() or {}
        tensors = load_file(file)
    except FileNotFoundError:
        return "is missing"
    except (OSError, SafetensorError) as error:
        return f"is damaged ({error})"
    if metadata.get("key") != key:
        return "is of other data or another backbone"
    expected = {row.id: (len(root_positions(row.labels)), hidden_size) for row in rows}
    if {name: tuple(tensor.shape) for name, tensor in tensors.items()} != expected:
        return "holds other rows than it should"
    return None if metadata.get("sha256") == checksum(tensors) else "is damaged (its checksum differs)"


def checksum(tensors: dict[str, Tensor]) -> str:
    """A hash of the tensors' bytes."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(tensors[name].view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@torch.no_grad()
def differing_row(states: RecordedHiddenStates, backbone: Backbone, rows: list[TrainingRow]) -> str | None:
    """The first of some rows whose stored states do not give the backbone's logits, or None."""
    live = LiveHiddenStates(backbone)
    tolerance = TOLERANCE.get(backbone.lm_weight.dtype, HALF_TOLERANCE)
    for row in rows[:: max(1, len(rows) // CHECKED_ROWS)][:CHECKED_ROWS]:
        found, expected = states.of([row])[0], live.of([row])[0]
        stored = backbone.logits(found.to(expected)).float()
        wanted = backbone.logits(expected).float()
        if not (stored - wanted).norm() <= tolerance * wanted.norm():
            return row.id
    return None
