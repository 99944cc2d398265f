"""Metrics: metrics.jsonl is the truth, Weights & Biases a copy for those who ask for it."""

import json
import warnings
from pathlib import Path
from typing import Any

from .config import WandbSection


class Tracker:
    """Writes from the main process only. Training never stops because tracking failed."""

    def __init__(
        self, directory: Path, section: WandbSection, config: dict[str, Any], step: int, run_id: str | None
    ) -> None:
        """Open the log; lines of steps after `step` are from a run that was cut off and are dropped.

        Args:
            directory: of the run.
            section: what the user wants of Weights & Biases.
            config: the resolved configuration, shown there.
            step: the step that the run continues after.
            run_id: the Weights & Biases run to continue, if any.
        """
        self.file = directory / "metrics.jsonl"
        kept = []
        if self.file.exists():
            for line in self.file.read_text().splitlines():
                try:
                    if json.loads(line)["step"] <= step:
                        kept.append(line + "\n")
                except (json.JSONDecodeError, KeyError):
                    continue  # a line torn by a crash
        self.file.write_text("".join(kept))
        self.run: Any = None
        if section.enabled:
            try:
                import wandb

                self.run = wandb.init(
                    project=section.project,
                    name=section.name,
                    config=config,
                    id=run_id,
                    resume="allow" if run_id else None,
                    dir=str(directory),
                )
            except Exception as error:
                warnings.warn(f"Weights & Biases is off for this run: {error}", stacklevel=2)

    @property
    def run_id(self) -> str | None:
        """The Weights & Biases run, kept in checkpoints so that a resumed run continues it."""
        return None if self.run is None else str(self.run.id)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Append one line."""
        with self.file.open("a") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")
        if self.run is not None:
            try:
                self.run.log(metrics, step=step)
            except Exception as error:
                warnings.warn(f"Weights & Biases is off from step {step} on: {error}", stacklevel=2)
                self.run = None

    def close(self) -> None:
        """Finish the run."""
        if self.run is not None:
            self.run.finish()
