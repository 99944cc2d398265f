"""A native checkpoint's heads on disk, read one tensor at a time. P positions, D hidden, V vocabulary, Vd draft."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .checkpoint import DRAFT_VOCAB, HEADS_FILE, heads_config, heads_file, opened, read_config
from .heads import LogitTransform, MedusaHead, MedusaHeads
from .tensor_checks import check_counts, check_tensors, check_values, token_ids


class StoredHeads:
    """Heads that stay in their file, which is mapped into memory, until one is asked for."""

    def __init__(self, directory: Path, entries: dict[str, Any], handle: Any) -> None:
        """Check names and shapes. `open_heads` calls this.

        Raises:
            ValueError: the file does not hold the heads that config.json describes.
        """
        self.directory = directory
        self.entries = entries
        """What config.json says."""
        self._handle = handle
        self.shapes = {name: tuple(handle.get_slice(name).get_shape()) for name in handle.keys()}  # noqa: SIM118
        vocab = None
        if self.shapes.pop(DRAFT_VOCAB, None) is not None:
            vocab = token_ids(directory / HEADS_FILE, DRAFT_VOCAB, handle.get_tensor(DRAFT_VOCAB))
        for name in ("hidden_size", "vocab_size"):
            if not isinstance(entries.get(name), int) or entries[name] < 1:
                raise ValueError(
                    f"{directory}/config.json has no usable {name}; the checkpoint is damaged, copy it again"
                )
        self.hidden_size: int = entries["hidden_size"]
        self.vocab_size: int = entries["vocab_size"]
        self.config = heads_config(entries, vocab)
        check_counts(directory / HEADS_FILE, self.shapes, self.config)
        self.has_bias = f"0.{self.config.num_layers}.bias" in self.shapes
        """Whether the heads' own projections have biases, as the LM head had."""
        described = self._empty_heads().state_dict()
        stored = {name: torch.empty(shape, device="meta") for name, shape in self.shapes.items()}
        check_tensors(directory / HEADS_FILE, stored, described)
        self.dtype: torch.dtype = self.tensor(next(iter(self.shapes))).dtype

    def tensor(self, name: str) -> Tensor:
        """One tensor, mapped from the file.

        Raises:
            ValueError: it holds values that are not finite.
        """
        tensor = self._handle.get_tensor(name)
        assert isinstance(tensor, Tensor)
        check_values(self.directory / HEADS_FILE, name, tensor)
        return tensor

    def head(self, k: int) -> MedusaHead:
        """Head k, on the tensors in the file."""
        head = self._empty_heads().head(k)
        head.load_state_dict({name: self.tensor(f"{k}.{name}") for name in head.state_dict()}, assign=True)
        return head

    def _empty_heads(self) -> MedusaHeads:
        """The heads that config.json describes, without memory."""
        with torch.device("meta"):
            table = torch.empty(self.vocab_size, self.hidden_size)
            bias = torch.empty(self.vocab_size) if self.has_bias else None
            return MedusaHeads(self.config, table, bias, table, LogitTransform())


@contextmanager
def open_heads(directory: Path) -> Iterator[StoredHeads]:
    """Open a native checkpoint's heads without reading them.

    Raises:
        ValueError: the checkpoint is missing or damaged.
    """
    entries = read_config(directory)
    with opened(heads_file(directory)) as handle:
        yield StoredHeads(directory, entries, handle)
