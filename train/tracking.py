"""Metrics: metrics.jsonl is the truth, Weights & Biases and TensorBoard are copies for those who ask for them."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .config import TrackingSection, WandbSection


class Tracker:
    """Writes from the main process only. Training never stops because tracking failed."""

    def __init__(
        self,
        directory: Path,
        section: WandbSection,
        tracking: TrackingSection,
        config: dict[str, Any],
        step: int,
        run_id: str | None,
        active: bool,
    ) -> None:
        """Open the log; lines of steps after `step` are from a run that was cut off and are dropped.

        Args:
            directory: of the run.
            section: what the user wants of Weights & Biases.
            tracking: what the user wants besides.
            config: the resolved configuration and provenance, shown there.
            step: the step that the run continues after.
            run_id: the Weights & Biases run to continue, if any.
            active: whether this is the main process; others call the same methods, and nothing happens.
        """
        self.active = active
        self.file = directory / "metrics.jsonl"
        self.run: Any = None
        self.writer: Any = None
        if not active:
            return
        kept = []
        if self.file.exists():
            for line in self.file.read_text().splitlines():
                try:
                    if json.loads(line)["step"] <= step:
                        kept.append(line + "\n")
                except (json.JSONDecodeError, KeyError):
                    continue  # a line torn by a crash
        self.file.write_text("".join(kept))
        if section.enabled:
            self._try("Weights & Biases", lambda: self._open_wandb(directory, section, config, run_id))
        if tracking.tensorboard:
            self._try("TensorBoard", lambda: self._open_tensorboard(directory, step))

    @property
    def run_id(self) -> str | None:
        """The Weights & Biases run, kept in checkpoints so that a resumed run continues it."""
        return None if self.run is None else str(self.run.id)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Append one line."""
        if not self.active:
            return
        with self.file.open("a") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")
        if self.run is not None:
            self._try("Weights & Biases", lambda: self.run.log(metrics, step=step))
        if self.writer is not None:
            self._try("TensorBoard", lambda: self._write_scalars(step, metrics))

    def show(self, step: int, columns: list[str], rows: list[list[str]], picture: Path | None) -> None:
        """Send the final table, and its picture if there is one."""
        if self.run is not None:
            self._try("Weights & Biases", lambda: self._show_in_wandb(step, columns, rows, picture))

    def close(self) -> None:
        """Finish the run."""
        if self.run is not None:
            self._try("Weights & Biases", lambda: self.run.finish())
        if self.writer is not None:
            self._try("TensorBoard", lambda: self.writer.close())

    def _open_wandb(self, directory: Path, section: WandbSection, config: dict[str, Any], run_id: str | None) -> None:
        import wandb

        self.run = wandb.init(
            project=section.project,
            name=section.name,
            config=config,
            id=run_id,
            resume="allow" if run_id else None,
            dir=str(directory),
        )

    def _open_tensorboard(self, directory: Path, step: int) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self.writer = SummaryWriter(str(directory / "tensorboard"), purge_step=step + 1)

    def _write_scalars(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def _show_in_wandb(self, step: int, columns: list[str], rows: list[list[str]], picture: Path | None) -> None:
        import wandb

        shown: dict[str, Any] = {"head_accuracy": wandb.Table(columns=list(columns), data=rows)}
        if picture is not None:
            shown["head_accuracy_plot"] = wandb.Image(str(picture))
        self.run.log(shown, step=step)

    def _try(self, name: str, action: Callable[[], object]) -> None:
        """Do something that may fail; where it does, say so once and leave that tracker alone from then on."""
        try:
            action()
        except Exception as error:
            warnings.warn(f"{name} is off from here on: {error}", stacklevel=3)
            if name == "TensorBoard":
                self.writer = None
            else:
                self.run = None
