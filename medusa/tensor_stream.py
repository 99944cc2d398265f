"""Write a safetensors file tensor by tensor: the library wants all of them in memory at once."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
}


ALIGNMENT = 64
"""Bytes: where fast kernels want tensors to begin, and where torch puts its own."""


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor that will be written: what it will be, and how to get it when its turn comes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """Its size in a file."""
        return math.prod(self.shape) * self.dtype.itemsize

    def tensor(self, name: str) -> Tensor:
        """Make it, in its type.

        Raises:
            ValueError: it holds values that are too large for this type.
        """
        tensor = self.make().to(self.dtype).contiguous()
        assert tensor.shape == self.shape, f"{name} is planned as {self.shape} and made as {tuple(tensor.shape)}"
        if not all_finite(tensor):
            raise ValueError(
                f"tensor {name} holds values that are too large for {str(self.dtype).removeprefix('torch.')}; take "
                "--dtype bfloat16 or float32"
            )
        return tensor


def all_finite(tensor: Tensor) -> bool:
    """Whether there is neither NaN nor infinity, without a copy of the tensor: it may be as large as memory allows."""
    if tensor.numel() == 0:
        return True
    return bool(torch.stack(torch.aminmax(tensor)).isfinite().all())


def write_stream(file: Path, planned: dict[str, PlannedTensor]) -> None:
    """Write a safetensors file (8 bytes length of the header, header, data), with one tensor in memory at a time.

    Raises:
        ValueError: a tensor holds values that are too large for its type.
        OSError: the disk is full or forbids writing.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, plan in planned.items():
        start, end = end, end + plan.nbytes
        header[name] = {"dtype": DTYPE_NAMES[plan.dtype], "shape": plan.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    with file.open("wb") as output:
        output.write(len(text).to_bytes(8, "little") + text)
        for name, plan in planned.items():
            output.write(plan.tensor(name).flatten().view(torch.uint8).numpy().data)
