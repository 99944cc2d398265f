"""Resumable state of a run: written whole or not at all, the two newest kept."""

import shutil
from pathlib import Path
from typing import Any

import torch

from medusa.checkpoint import atomic_directory

STATE_FILE = "state.pt"
KEEP = 2


def save_state(directory: Path, step: int, state: dict[str, Any]) -> None:
    """Write the state after `step` and remove all but the newest ones."""
    with atomic_directory(directory / f"step-{step:08d}") as work:
        torch.save(state, work / STATE_FILE)
    for old in _states(directory)[:-KEEP]:
        shutil.rmtree(old, ignore_errors=True)


def load_newest_state(directory: Path) -> dict[str, Any] | None:
    """The newest complete state, or None."""
    states = _states(directory)
    if not states:
        return None
    stored = torch.load(states[-1] / STATE_FILE, map_location="cpu", weights_only=True)
    assert isinstance(stored, dict)
    return stored


def _states(directory: Path) -> list[Path]:
    return sorted(path for path in directory.glob("step-*") if (path / STATE_FILE).is_file())
