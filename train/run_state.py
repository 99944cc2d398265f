"""Resumable state of a run: written whole or not at all; the newest are kept, and the best."""

import shutil
from pathlib import Path
from typing import Any

import torch

from medusa.checkpoint import atomic_directory

STATE_FILE = "state.pt"
NEWEST = "step"
BEST = "best"


def save_state(directory: Path, kind: str, step: int, state: dict[str, Any], keep: int) -> None:
    """Write the state after `step` beside others of its kind, and remove all but the `keep` newest."""
    with atomic_directory(directory / f"{kind}-{step:08d}") as work:
        torch.save(state, work / STATE_FILE)
    for old in _states(directory, kind)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)


def load_newest_state(directory: Path, kind: str = NEWEST) -> dict[str, Any] | None:
    """The newest complete state of a kind, or None."""
    states = _states(directory, kind)
    if not states:
        return None
    stored = torch.load(states[-1] / STATE_FILE, map_location="cpu", weights_only=True)
    assert isinstance(stored, dict)
    return stored


def _states(directory: Path, kind: str) -> list[Path]:
    return sorted(path for path in directory.glob(f"{kind}-*") if (path / STATE_FILE).is_file())
