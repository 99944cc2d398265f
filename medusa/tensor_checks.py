"""Whether tensors that were read from a file can be heads. D hidden, V vocabulary, K heads, L blocks of each."""

import re
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor

from .config import MedusaConfig
from .tensor_stream import all_finite

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SHOWN = 6
"""How many missing parts are listed."""


def check_values(file: Path, name: str, tensor: Tensor) -> None:
    """Refuse weights that are no floating-point numbers, or not finite.

    Raises:
        ValueError: so it is, with the tensor's name.
    """
    if tensor.dtype not in FLOATS or tensor.layout != torch.strided:
        kind = tensor.dtype if tensor.layout == torch.strided else tensor.layout
        raise ValueError(
            f"{file}: tensor {name} is of type {str(kind).removeprefix('torch.')}; heads are float32, bfloat16, "
            "float16 or float64: the file is damaged or quantised, copy it again or ask for plain weights"
        )
    if not all_finite(tensor):
        raise ValueError(f"{file}: tensor {name} holds NaN or infinity; copy or download it again, or train again")


def token_ids(file: Path, name: str, tensor: Tensor) -> tuple[int, ...]:
    """The ids in a draft vocabulary's tensor.

    Raises:
        ValueError: it is no list of whole numbers.
    """
    if tensor.dim() != 1 or tensor.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"{file}: {name} must be a list of token ids, but is {tuple(tensor.shape)} of type "
            f"{str(tensor.dtype).removeprefix('torch.')}; copy or download it again"
        )
    return tuple(tensor.tolist())


def check_counts(file: Path, names: Collection[str], config: MedusaConfig) -> None:
    """Refuse a config.json that promises more heads or blocks than there are, before they are built.

    Raises:
        ValueError: it does; what is missing is named.
    """
    blocks = {(int(m[1]), int(m[2])) for name in names if (m := re.match(r"([0-9]{1,9})\.([0-9]{1,9})\.", name))}
    found = 1 + max((k for k, _ in blocks), default=-1)
    stored = {j for k, j in blocks if k == 0 and f"0.{j}.linear.weight" in names}
    wrong = [
        f"medusa_{what} is {said}, the file has {has}: missing "
        + listed([part.format(n) for n in range(has, min(said, has + SHOWN + 1))])
        for what, said, has, part in (
            ("num_heads", config.num_heads, found, "{}.0.linear.weight"),
            ("num_layers", config.num_layers, len(stored), "0.{}.linear.weight"),
        )
        if said > has
    ]
    if wrong:
        raise ValueError(f"{file} does not hold the heads that its config.json describes: {'; '.join(wrong)}")


def listed(names: list[str]) -> str:
    """Names for a message: all of a few, the first of many."""
    return ", ".join(names) if len(names) <= SHOWN else f"{', '.join(names[:SHOWN])} and more"


def check_tensors(file: Path, stored: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Compare names and shapes with what the configuration asks for.

    Raises:
        ValueError: every missing, unexpected and wrongly shaped tensor is named.
    """
    problems = [f"missing {name}" for name in expected if name not in stored]
    problems += [f"unexpected {name}" for name in stored if name not in expected]
    problems += [
        f"{name} has shape {tuple(stored[name].shape)}, expected {tuple(tensor.shape)}"
        f"{explanation(name, stored[name], tensor)}"
        for name, tensor in expected.items()
        if name in stored and stored[name].shape != tensor.shape
    ]
    if problems:
        raise ValueError(f"{file} does not hold the heads that its config.json describes: " + "; ".join(problems))


def explanation(name: str, stored: Tensor, expected: Tensor) -> str:
    """What a wrong shape looks like, where that can be told."""
    if stored.shape == expected.shape[::-1]:
        return f" (it is transposed; store {name}.T)"
    if ".linear." not in name and stored.dim() == expected.dim() and stored.shape[1:] == expected.shape[1:]:
        return " (the vocabulary was padded or extended; use the backbone that the heads were trained on)"
    return ""
