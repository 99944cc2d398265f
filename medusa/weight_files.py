"""The files that published heads lie in: safetensors, in one piece or in shards, or pickles of tensors alone."""

import pickle
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from .checkpoint import opened, read_json, readable

HEADS_ALONE = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "hydra_lm_head.safetensors", "hydra_lm_head.pt")
MODELS = ("model.safetensors", "pytorch_model.bin")
INDEX = "model.safetensors.index.json"
BACKBONE_PARTS = ("model.", "transformer.", "gpt_neox.")
"""Tensors of a backbone that lies in the same files: not read."""


def head_tensors(directory: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint that is not a backbone's layer.

    Raises:
        ValueError: there is no such file, it is damaged, or it is a pickle with more than tensors in it.
    """
    with readable(directory):
        if not directory.is_dir():
            raise ValueError(f"there is no directory {directory}; give the path of a Medusa checkpoint or its hub id")
        files = weight_files(directory)
    if not files:
        raise ValueError(f"{directory} holds no heads: none of {', '.join((*HEADS_ALONE, INDEX, *MODELS))} is there")
    found: dict[str, Tensor] = {}
    for file in files:
        for name, tensor in _tensors(file):
            if name in found:
                raise ValueError(f"{file} holds {name}, which another shard holds too; download the checkpoint again")
            found[name] = tensor
    return found


def weight_files(directory: Path) -> list[Path]:
    """Where the heads of a checkpoint may be: in one file, or in the shards that its index names; [] if nowhere."""
    for name in HEADS_ALONE:
        if (directory / name).is_file():
            return [directory / name]
    if (directory / INDEX).is_file():
        return _shards(directory)
    return [directory / name for name in MODELS if (directory / name).is_file()][:1]


def _shards(directory: Path) -> list[Path]:
    """The files that an index names, all of them inside the directory."""
    index = directory / INDEX
    entries = read_json(index)
    places = entries.get("weight_map") if isinstance(entries, dict) else None
    if not isinstance(places, dict) or not all(isinstance(name, str) and "\0" not in name for name in places.values()):
        raise ValueError(f"{index} is no index of shards: its weight_map does not name files; download it again")
    names = sorted(set(places.values()))
    # Downloads of the hub are links into its cache, which lies beside the snapshots.
    roots = {directory.resolve(), directory.resolve().parent.parent / "blobs"}
    for name in names:
        target = (directory / name).resolve()
        if Path(name).is_absolute() or ".." in Path(name).parts or target.parent not in roots:
            raise ValueError(f"{index} names {name!r}, which lies outside of {directory}; that is refused")
        if not target.is_file():
            raise ValueError(f"{index} names {name!r}, which is not there; download the checkpoint again")
    return [directory / name for name in names]


def _tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    with readable(file), file.open("rb"):
        pass
    if file.suffix == ".safetensors":
        with opened(file) as handle:
            for name in handle.keys():  # noqa: SIM118 (not a dict)
                if not name.startswith(BACKBONE_PARTS):
                    yield name, handle.get_tensor(name)
        return
    try:
        stored = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{file} is a pickle that runs code when it is opened, so it was not opened; ask its author for "
            "safetensors or a plain state dict"
        ) from error
    except Exception as error:  # a damaged pickle raises a dozen kinds
        raise ValueError(f"{file} is damaged ({error}); copy or download it again") from error
    if not isinstance(stored, dict) or not all(isinstance(value, Tensor) for value in stored.values()):
        raise ValueError(f"{file} holds no state dict: names and tensors are expected")
    for name, tensor in stored.items():
        if not str(name).startswith(BACKBONE_PARTS):
            yield str(name), tensor
