"""Read heads that other projects wrote. What a checkpoint is, its tensors' names say; its config.json only adds facts.

K heads, L residual blocks of each.
"""

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .checkpoint import CONFIG_FILE, config_entries, readable
from .config import MedusaConfig
from .hydra_files import EMBEDDING, check_hydra, from_hydra, hydra_layers, is_hydra, sees_tokens
from .tensor_checks import check_values, listed, token_ids
from .weight_files import head_tensors, weight_files

BLOCK = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})\.linear\.(weight|bias)")
PROJECTION = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})\.weight")


@dataclass(frozen=True)
class PublishedHeads:
    """Heads under the names that native checkpoints use."""

    format: str
    """reference; full model; vllm; modelopt; tensorrt-llm; hydra."""
    config: MedusaConfig
    tensors: dict[str, Tensor]
    base_model: str | None
    """Where their backbone is, if the checkpoint says so."""
    entries: dict[str, Any]
    """What config.json says."""
    embedding: Tensor | None = None
    """The backbone's input embedding, where it lies beside the heads."""


def is_native(directory: Path) -> bool:
    """Whether to read a checkpoint as this project's own: it says so, or it holds nothing else that could be heads.

    Raises:
        ValueError: it may not be read.
    """
    file = directory / CONFIG_FILE
    with readable(directory):
        return (file.is_file() and b'"medusa_format_version"' in file.read_bytes()) or not weight_files(directory)


def read_published(directory: Path) -> PublishedHeads:
    """Read the heads of a checkpoint that is not native.

    Raises:
        ValueError: there are no heads, they are damaged or incomplete, or of a kind that cannot be decoded here.
    """
    entries = config_entries(directory)
    found = head_tensors(directory)
    names = set(found)
    if is_hydra(names, entries):
        check_hydra(found, entries, directory)
    rename, kind = _renaming(names, directory)
    tensors = _renamed(found, rename, directory)
    num_heads, num_layers, projection = _count(tensors, directory)
    _compare_counts(directory, entries, num_heads, num_layers)
    if kind == "vllm":
        _give_every_head_its_projection(tensors, found, num_heads, num_layers)
        projection = "own" if f"0.{num_layers}.weight" in tensors else "shared"
    draft_vocab = _sort_draft_vocab(directory, tensors, found.get("token_map"), num_heads, num_layers)
    _give_every_block_its_bias(directory, tensors, optional=kind == "vllm")
    sequential = kind == "hydra" and sees_tokens(found)
    config = MedusaConfig(
        num_heads=num_heads,
        num_layers=num_layers,
        projection=projection,
        draft_vocab=draft_vocab,
        sequential=sequential,
        embedding_scale="raw" if sequential else "unit",
        projection_bias=kind == "hydra",
    )
    base = str(directory) if kind == "full model" else entries.get("base_model_name_or_path")
    return PublishedHeads(kind, config, tensors, base, entries, found.get(EMBEDDING) if kind == "hydra" else None)


def _renamed(found: dict[str, Tensor], rename: Callable[[str], str | None], directory: Path) -> dict[str, Tensor]:
    """The heads' tensors under native names."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in found.items():
        new = rename(name)
        if new is None:
            continue
        if new in tensors:
            raise ValueError(f"{directory}: two tensors are {new} of the heads, the second is {name}")
        check_values(directory, name, tensor)
        tensors[new] = tensor
    return tensors


def _renaming(names: set[str], directory: Path) -> tuple[Callable[[str], str | None], str]:
    """How a format's names become native ones (None: a tensor that is no head's), and what the format is called."""
    for prefix, kind in (("medusa_head.", "full model"), ("medusa_heads.", "modelopt")):
        rename = partial(_without, prefix)
        if any(BLOCK.fullmatch(rename(name) or "") for name in names):
            return rename, kind
    if any(re.fullmatch(r"medusa_heads\.\d+\.medusa_layers\.\d+\.linear\.weight", name) for name in names):
        layers = _layers(names, r"medusa_heads\.0\.medusa_layers\.(\d+)\.linear\.weight")
        return lambda name: _from_tensorrt(name, layers), "tensorrt-llm"
    if any(name.removeprefix("medusa_heads.").startswith("blocks.") for name in names):
        layers = _layers(names, r"(?:medusa_heads\.)?blocks\.0\.layers\.(\d+)\.weight")
        return lambda name: _from_vllm(name.removeprefix("medusa_heads."), layers), "vllm"
    if any(name.startswith("hydra_mlp.") for name in names):
        layers = hydra_layers(names)
        return lambda name: from_hydra(name, layers), "hydra"
    if any(BLOCK.fullmatch(name) for name in names):
        return lambda name: name if BLOCK.fullmatch(name) or PROJECTION.fullmatch(name) else None, "reference"
    shown = ", ".join(sorted(names)[:4]) or "those of a backbone"
    raise ValueError(
        f"{directory} holds no Medusa heads of a known format, its tensors are {shown}; if it is a backbone, load it "
        "with AutoModelForCausalLM and use MedusaModel.attach"
    )


def _without(prefix: str, name: str) -> str | None:
    return name.removeprefix(prefix) if name.startswith(prefix) else None


def _layers(names: set[str], pattern: str) -> int:
    """L, from the names of the first head's blocks."""
    return len({match[1] for name in names if (match := re.fullmatch(pattern, name))})


def _from_vllm(name: str, layers: int) -> str | None:
    if match := re.fullmatch(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)", name):
        return f"{match[1]}.{match[2]}.linear.{match[3]}"
    if match := re.fullmatch(r"lm_heads\.(\d+)\.weight", name):
        return f"{match[1]}.{layers}.weight"
    return None


def _from_tensorrt(name: str, layers: int) -> str | None:
    if match := re.fullmatch(r"medusa_heads\.(\d+)\.medusa_layers\.(\d+)\.linear\.(weight|bias)", name):
        return f"{match[1]}.{match[2]}.linear.{match[3]}"
    if match := re.fullmatch(r"medusa_heads\.(\d+)\.lm_head\.weight", name):
        return f"{match[1]}.{layers}.weight"
    return None


def _count(tensors: dict[str, Tensor], directory: Path) -> tuple[int, int, str]:
    """K, L and where the projections are.

    Raises:
        ValueError: a head or a part of one is missing.
    """
    blocks = {(int(m[1]), int(m[2])) for name in tensors if (m := BLOCK.fullmatch(name)) and m[3] == "weight"}
    projections = {int(m[1]) for name in tensors if (m := PROJECTION.fullmatch(name))}
    if not blocks:
        raise ValueError(f"{directory} holds parts of heads, but no weight of a block; copy or download it again")
    num_heads = 1 + max(k for k, _ in blocks)
    num_layers = 1 + max(layer for _, layer in blocks)
    if num_heads > len(tensors) or num_layers > len(tensors):  # one odd name must not make us list a million
        raise ValueError(
            f"{directory} has a head {num_heads - 1} and a block {num_layers - 1}, but only {len(tensors)} tensors; "
            "copy or download it again"
        )
    missing = [f"{k}.{j}.linear.weight" for k in range(num_heads) for j in range(num_layers) if (k, j) not in blocks]
    if projections:
        missing += [f"{k}.{num_layers}.weight" for k in range(num_heads) if k not in projections]
    if missing:
        raise ValueError(
            f"{directory} holds {num_heads} heads of {num_layers} blocks, but lacks {listed(missing)}; copy or "
            "download it again"
        )
    flat = [name for name, tensor in tensors.items() if name.endswith(".weight") and tensor.dim() != 2]
    if flat:
        raise ValueError(f"{directory}: {listed(flat)} must have two dimensions; copy or download it again")
    extra = sorted(projections - set(range(num_heads)))
    if extra:
        raise ValueError(f"{directory} holds projections of heads {extra}, which have no blocks; download it again")
    return num_heads, num_layers, "own" if projections else "shared"


def _compare_counts(directory: Path, entries: dict[str, Any], num_heads: int, num_layers: int) -> None:
    """Say where config.json and the tensors disagree: such configurations were published, the tensors count."""
    for said, found in (
        (("medusa_num_heads", "hydra_num_heads", "num_heads"), num_heads),
        (("medusa_num_layers", "hydra_num_layers", "num_hidden_layers"), num_layers),
    ):
        own = said if entries.get("model_type", "medusa") == "medusa" else said[:2]  # others are the backbone's
        for key in own:
            if key in entries and entries[key] != found:
                warnings.warn(
                    f"{directory / CONFIG_FILE} says {key} {entries[key]}, but there are {found}; the tensors count",
                    stacklevel=4,
                )


def _give_every_head_its_projection(
    tensors: dict[str, Tensor], found: dict[str, Tensor], num_heads: int, num_layers: int
) -> None:
    """vLLM's format may hold one LM head for all, which need not be the backbone's."""
    shared = found.get("lm_head.weight")
    if shared is not None and f"0.{num_layers}.weight" not in tensors:
        # A copy for each: loaded heads keep these very tensors, and may be trained.
        tensors |= {f"{k}.{num_layers}.weight": shared.clone() for k in range(num_heads)}


def _give_every_block_its_bias(directory: Path, tensors: dict[str, Tensor], optional: bool) -> None:
    """vLLM's format may leave the biases out, all of them.

    Raises:
        ValueError: one is missing where there are others, or where the format has them always.
    """
    weights = [name for name in tensors if name.endswith(".linear.weight")]
    missing = [name for weight in weights if (name := weight.replace(".weight", ".bias")) not in tensors]
    if missing and not (optional and len(missing) == len(weights)):
        raise ValueError(f"{directory} lacks {listed(missing)}; copy or download it again")
    for name in missing:
        weight = tensors[name.replace(".bias", ".weight")]
        tensors[name] = weight.new_zeros(len(weight))


def _sort_draft_vocab(
    directory: Path, tensors: dict[str, Tensor], token_map: Tensor | None, num_heads: int, num_layers: int
) -> list[int] | None:
    """Put the projections' rows in the order of their token ids; returns these.

    Raises:
        ValueError: there is not one id for each row.
    """
    if token_map is None:
        return None
    ids, order = torch.tensor(token_ids(directory, "token_map", token_map), dtype=torch.long).sort()
    for k in range(num_heads):
        name = f"{k}.{num_layers}.weight"
        if name not in tensors or len(tensors[name]) != len(ids):
            has = f"{len(tensors[name])} rows" if name in tensors else "none"
            raise ValueError(
                f"{directory}: token_map has {len(ids)} ids, but the projection {name} has {has}; copy or download it "
                "again"
            )
        tensors[name] = tensors[name][order]
    return [int(token) for token in ids]


def match_backbone(tensors: dict[str, Tensor], expected: dict[str, Tensor], source: Path) -> dict[str, Tensor]:
    """What the heads of this backbone load.

    Args:
        tensors: of `PublishedHeads`.
        expected: what the heads have on this backbone.
        source: where they came from.

    Raises:
        ValueError: they are of another size: a padded vocabulary and a transposed weight are called that.
    """
    ready = dict(tensors)
    for name, tensor in expected.items():
        if name.endswith(".bias") and name not in ready and ".linear." not in name:
            ready[name] = torch.zeros(tensor.shape)  # published projections have none, whatever the LM head has
        stored = ready.get(name)
        if stored is None or stored.shape == tensor.shape:
            continue
        if stored.shape == tensor.shape[::-1]:
            raise ValueError(f"{source}: {name} has shape {tuple(stored.shape)}: it is transposed; store {name}.T")
        if stored.dim() == 2 and stored.shape[1:] == tensor.shape[1:]:
            raise ValueError(
                f"{source}: {name} has {len(stored)} rows, but the backbone's LM head has {len(tensor)}: the "
                "vocabulary was padded or extended; use the backbone that the heads were trained on"
            )
        raise ValueError(
            f"{source}: {name} has shape {tuple(stored.shape)}, this backbone needs {tuple(tensor.shape)}; use the "
            "backbone that the heads were trained on"
        )
    return ready
