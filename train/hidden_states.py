"""Where the backbone's hidden states come from: a pass over the rows, or a recording made while distilling.

B rows, T tokens, P root positions of a row, D hidden.
"""

import hashlib
import json
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from medusa.backbone import Backbone

from .pairs import root_positions
from .supervision import TrainingRow


class HiddenStates(Protocol):
    """Gives the final hidden states of rows at their root positions."""

    def of(self, rows: list[TrainingRow]) -> list[Tensor]:
        """One [P, D] for each row."""


class LiveHiddenStates:
    """Runs the frozen backbone over the rows."""

    def __init__(self, backbone: Backbone) -> None:
        self.backbone = backbone

    @torch.no_grad()
    def of(self, rows: list[TrainingRow]) -> list[Tensor]:
        """One padded pass; padding is masked by length, not by id."""
        device = self.backbone.lm_weight.device
        ids, mask = padded(rows)
        self.backbone.check_ids(ids)
        hidden = self.backbone.hidden(ids.to(device), mask.to(device))  # [B, T, D]
        return [hidden[i, root_positions(row.labels)] for i, row in enumerate(rows)]


class RecordedHiddenStates:
    """Reads what `record` wrote, by row id."""

    def __init__(self, directory: Path) -> None:
        """Index the recordings.

        Raises:
            ValueError: there are none, or a file is damaged.
        """
        self.directory = directory
        self.files: dict[str, Path] = {}
        for file in sorted(directory.glob("*.safetensors")):
            try:
                with safe_open(file, framework="pt") as handle:
                    self.files.update({name: file for name in handle.keys()})  # noqa: SIM118 (not a dict)
            except (SafetensorError, OSError) as error:
                raise ValueError(f"recorded hidden states {file} are damaged ({error}); distill again") from error
        if not self.files:
            raise ValueError(
                f"{directory} holds no recorded hidden states; distill with --record, or set data.recorded=false"
            )

    def of(self, rows: list[TrainingRow]) -> list[Tensor]:
        """Look the rows up.

        Raises:
            ValueError: a row was not recorded, or its recording has another length.
        """
        result = []
        for row in rows:
            if row.id not in self.files:
                raise ValueError(f"row {row.id!r} has no recorded hidden states in {self.directory}; distill again")
            with safe_open(self.files[row.id], framework="pt") as handle:
                states = handle.get_tensor(row.id)
            positions = len(root_positions(row.labels))
            if len(states) < positions:
                raise ValueError(
                    f"row {row.id!r} has {positions} positions, {len(states)} were recorded; distill again"
                )
            result.append(states[:positions].float())
        return result


def padded(rows: list[TrainingRow]) -> tuple[Tensor, Tensor]:
    """Token ids of rows, padded behind, and a mask that is 1 on text: [B, T] each."""
    longest = max(len(row.input_ids) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros(len(rows), longest, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row.input_ids)] = torch.tensor(row.input_ids)
        mask[i, : len(row.input_ids)] = 1
    return ids, mask


def recording_directory(data_file: Path) -> Path:
    """Where the hidden states of a data file's rows are recorded: one place for all files of a folder."""
    return data_file.parent / "hidden_states"


def record(directory: Path, states: dict[str, Tensor]) -> None:
    """Write the hidden states of a batch of rows, [P, D] by row id; complete or not at all."""
    directory.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(json.dumps(list(states)).encode()).hexdigest()[:16]  # ids may hold any character
    target = directory / f"{name}.safetensors"
    partial = target.with_suffix(".partial")
    save_file({name: tensor.contiguous() for name, tensor in states.items()}, partial)
    partial.replace(target)
