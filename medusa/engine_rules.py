"""How serving engines read heads, written down a second time, from their sources and apart from our exporter.

`medusa export` reads what it wrote by these rules: whatever an engine would drop without a word is an error here.
P positions, D hidden, V vocabulary.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional as F

State = dict[str, Tensor]


class EngineError(ValueError):
    """An engine would stop with an error, or run other heads than the directory holds."""


@dataclass(frozen=True)
class EngineHeads:
    """What an engine has after loading."""

    blocks: list[list[tuple[Tensor, Tensor | None]]]
    """Weight and bias of every residual block of every head."""
    projections: list[Tensor | None]
    """Of every head, [V, D]; None is the backbone's LM head."""
    dropped: list[str]
    """Tensors in the file that the engine does not read, without saying so."""

    def logits(self, k: int, hidden: Tensor, lm_weight: Tensor | None) -> Tensor:
        """Head k on hidden states [P, D], in their type -> [P, V]."""
        for weight, bias in self.blocks[k]:
            added = None if bias is None else bias.to(hidden.dtype)
            hidden = hidden + F.silu(F.linear(hidden, weight.to(hidden.dtype), added))
        projection = self.projections[k]
        if projection is None:
            assert lm_weight is not None, "the engine uses the LM head, which was not given"
            projection = lm_weight
        return F.linear(hidden, projection.to(hidden.dtype))


def read_as(engine: str, directory: Path, num_heads: int) -> EngineHeads:
    """Read a directory as `engine` would when told to draft `num_heads` tokens.

    Raises:
        EngineError: the engine would stop, or leave the heads out.
    """
    return LOADERS[engine](directory, num_heads)


def as_vllm(directory: Path, num_heads: int) -> EngineHeads:
    """vLLM 0.32: `transformers_utils/configs/medusa.py`, `model_executor/models/medusa.py`."""
    config: dict[str, Any] = {"hidden_size": 4096, "vocab_size": 32001, "num_hidden_layers": 1}
    renamed: dict[str, Any] = {}
    for key, value in _config(directory).items():
        name = key
        if "num" in key and ("heads" in key or "layers" in key):
            name = "num_heads" if "heads" in key else "num_hidden_layers"
        if renamed.setdefault(name, value) != value:
            raise EngineError(f"vLLM takes {key} = {value} in config.json for {name}, which is {renamed[name]}")
    config |= renamed
    vocab, layers, shared = config["vocab_size"], config["num_hidden_layers"], config.get("original_lm_head", False)
    if config.get("truncated_vocab_size", vocab) != vocab:
        raise EngineError("vLLM 0.32 fails on truncated_vocab_size")
    wanted: dict[str, tuple[int, ...]] = {}
    for k in range(num_heads):
        for layer in range(layers):
            wanted[f"blocks.{k}.layers.{layer}.weight"] = (config["hidden_size"],) * 2
            if config.get("medusa_fc_bias", False):
                wanted[f"blocks.{k}.layers.{layer}.bias"] = (config["hidden_size"],)
        wanted["lm_head.weight" if shared else f"lm_heads.{k}.weight"] = (vocab, config["hidden_size"])
    loaded, dropped = {}, []
    for stored, tensor in _weights(directory).items():
        name = _vllm_name(stored.replace("medusa_heads.", ""), layers)
        name = "lm_head.weight" if shared and name == "lm_heads.0.weight" else name
        if name not in wanted:
            dropped.append(stored)
        elif tensor.shape != wanted[name]:
            raise EngineError(f"vLLM stops: {stored} has shape {tuple(tensor.shape)}, it expects {wanted[name]}")
        else:
            loaded[name] = tensor
    # It checks blocks, and forgets LM heads: these would stay whatever was in memory.
    missing = [name for name in wanted if name not in loaded]
    if missing:
        raise EngineError(f"vLLM would run without {', '.join(missing)}")
    return EngineHeads(
        [
            [
                (loaded[f"blocks.{k}.layers.{i}.weight"], loaded.get(f"blocks.{k}.layers.{i}.bias"))
                for i in range(layers)
            ]
            for k in range(num_heads)
        ],
        [loaded["lm_head.weight" if shared else f"lm_heads.{k}.weight"] for k in range(num_heads)],
        dropped,
    )


def _vllm_name(name: str, layers: int) -> str:
    """The reference's names, as vLLM renames them."""
    if block := re.fullmatch(r"(\d+)\.(\d+)\.linear\.(weight|bias)", name):
        return f"blocks.{block[1]}.layers.{block[2]}.{block[3]}"
    if (head := re.fullmatch(r"(\d+)\.(\d+)\.weight", name)) and int(head[2]) == layers:
        return f"lm_heads.{head[1]}.weight"
    return name


def as_tgi(directory: Path, num_heads: int) -> EngineHeads:
    """TGI: `models/__init__.py`, `layers/speculative.py`, `layers/medusa.py`."""
    config = _config(directory)
    for key in ("medusa_num_heads", "medusa_num_layers", "base_model_name_or_path"):
        if key not in config:
            raise EngineError(f"TGI needs {key} in config.json, or takes this for a model of its own")
    if "architectures" in config:
        raise EngineError("TGI runs without heads, and says nothing, where config.json has `architectures`")
    if config["medusa_num_heads"] < num_heads:
        raise EngineError(f"TGI stops: config.json says {config['medusa_num_heads']} heads, not {num_heads}")
    weights = _read_file(directory / "medusa_lm_head.safetensors")
    layers = config["medusa_num_layers"]
    used = [f"{k}.{i}.linear.{part}" for k in range(num_heads) for i in range(layers) for part in ("weight", "bias")]
    own = [f"{k}.{layers}.weight" for k in range(num_heads)]
    found: list[Tensor | None] = [None] * num_heads
    if all(name in weights for name in used + own):
        found = [weights[name] for name in own]
    elif layers == 1 and all(name in weights for name in used):  # on any error it tries its second kind of heads
        own = []
    else:
        missing = [name for name in used + own if name not in weights]
        raise EngineError(f"TGI stops: {directory} has no {', '.join(missing)}")
    dropped = [name for name in weights if name not in used + own]
    return EngineHeads(_reference_blocks(weights, num_heads, layers), found, dropped)


def as_tensorrt_llm(directory: Path, num_heads: int) -> EngineHeads:
    """TensorRT-LLM: `load_medusa_hf`, with head and layer counts from the flags or from `num_medusa_*`."""
    config = _config(directory)
    if config.get("num_medusa_heads", num_heads) < num_heads or "num_medusa_layers" not in config:
        raise EngineError(f"TensorRT-LLM needs num_medusa_layers and num_medusa_heads >= {num_heads} in config.json")
    layers = config["num_medusa_layers"]
    file = directory / "medusa_lm_head.pt"
    weights = _read_file(file if file.exists() else directory / "medusa_lm_head.safetensors")
    used = [f"{k}.{i}.linear.{part}" for k in range(num_heads) for i in range(layers) for part in ("weight", "bias")]
    used += [f"{k}.{layers}.weight" for k in range(num_heads)]
    if missing := [name for name in used if name not in weights]:
        raise EngineError(f"TensorRT-LLM stops: {directory} has no {', '.join(missing)}")
    return EngineHeads(
        _reference_blocks(weights, num_heads, layers),
        [weights[f"{k}.{layers}.weight"] for k in range(num_heads)],
        [name for name in weights if name not in used],
    )


def as_reference(directory: Path, num_heads: int) -> EngineHeads:
    """The reference, branch v0.1: `load_state_dict(strict=False)` into `Sequential(*[ResBlock] * L, Linear)`."""
    config = _config(directory)
    built, layers = config.get("medusa_num_heads", 4), config.get("medusa_num_layers", 1)
    if built < num_heads:
        raise EngineError(f"the reference builds {built} heads, not {num_heads}")
    weights = _read_file(directory / "medusa_lm_head.pt")
    used = [f"{k}.{i}.linear.{part}" for k in range(num_heads) for i in range(layers) for part in ("weight", "bias")]
    used += [f"{k}.{layers}.weight" for k in range(num_heads)]
    if missing := [name for name in used if name not in weights]:
        raise EngineError(f"the reference would leave heads as they are at first, for want of {', '.join(missing)}")
    blocks = [[head[-1]] * layers for head in _reference_blocks(weights, num_heads, layers)]  # one block, L times
    return EngineHeads(
        blocks,
        [weights[f"{k}.{layers}.weight"] for k in range(num_heads)],
        [name for name in weights if name not in used],
    )


LOADERS: dict[str, Callable[[Path, int], EngineHeads]] = {
    "vllm": as_vllm,
    "tgi": as_tgi,
    "tensorrt-llm": as_tensorrt_llm,
    "reference": as_reference,
}


def _reference_blocks(weights: State, num_heads: int, layers: int) -> list[list[tuple[Tensor, Tensor | None]]]:
    return [
        [(weights[f"{k}.{i}.linear.weight"], weights[f"{k}.{i}.linear.bias"]) for i in range(layers)]
        for k in range(num_heads)
    ]


def _config(directory: Path) -> dict[str, Any]:
    config = json.loads((directory / "config.json").read_text())
    assert isinstance(config, dict)
    return config


def _weights(directory: Path) -> State:
    """All weights in a directory, whatever the files' names."""
    files = sorted(directory.glob("*.safetensors")) or sorted(directory.glob("*.pt"))
    return {name: tensor for file in files for name, tensor in _read_file(file).items()}


def _read_file(file: Path) -> State:
    """Tensors by name, mapped from the file where they can be."""
    if not file.exists():
        raise EngineError(f"the engine looks for {file.name} in {file.parent} and does not find it")
    if file.suffix == ".pt":
        state: State = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        return state
    with safe_open(file, framework="pt") as handle:
        return {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 (not a dict)
