"""What an export will write."""

from dataclasses import dataclass
from pathlib import Path

import torch

from .tensor_stream import PlannedTensor, write_stream


@dataclass(frozen=True)
class ExportPlan:
    """The files of an export, none of them written yet."""

    weights_file: str
    tensors: dict[str, PlannedTensor]
    texts: dict[str, str]
    """Small files by name."""
    copies: list[Path]
    """Files and folders to copy as they are."""
    remarks: list[str]
    backbone: str | None = None
    """Where tokenizer and generation config come from, if the checkpoint has none. Engines need them."""

    def sizes(self) -> dict[str, int]:
        """Bytes of every file and folder."""
        found = {self.weights_file: sum(plan.nbytes for plan in self.tensors.values())}
        found |= {name: len(text.encode()) for name, text in self.texts.items()}
        for item in self.copies:
            files = item.rglob("*") if item.is_dir() else [item]
            found[item.name] = sum(file.stat().st_size for file in files if file.is_file())
        return found

    def write(self, work: Path) -> None:
        """Write weights and texts into an existing directory.

        Raises:
            ValueError: a tensor holds values that are not finite, or too large for its type.
            OSError: the disk is full or forbids writing.
        """
        for name, text in self.texts.items():
            (work / name).write_text(text)
        file = work / self.weights_file
        if file.suffix != ".pt":
            write_stream(file, self.tensors)
            return
        # A pickle takes all tensors at once. Those of the checkpoint are mapped from its file, not copied.
        state = {name: plan.tensor(name) for name, plan in self.tensors.items()}
        try:
            torch.save(state, file)
        except RuntimeError as error:  # what torch makes of a full disk
            raise OSError(str(error)) from error
