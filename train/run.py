"""What a training run consists of, and how a step ends. K heads."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from peft import PeftModel
from torch import Tensor, nn

from medusa.model import MedusaModel
from medusa.tree import CandidateTree

from .chat import ReadReport
from .config import TrainConfig
from .drift import Original
from .hidden_states import HiddenStates
from .pairs import HeadBatch
from .schedule import Schedule
from .sharding import split_like, whole
from .supervision import TrainingRow

Decode = Callable[[MedusaModel, CandidateTree, list[list[int]], int], float]
"""Answers prompts (token ids) with a tree by at most so many tokens, and returns the tokens per step that it measured.
Training is given it, since it does not know the decoder."""


@dataclass
class HeldOut:
    """Rows to measure on, and where their hidden states come from."""

    rows: list[TrainingRow]
    states: HiddenStates
    decode: Callable[[MedusaModel, CandidateTree], float] | None = None
    """Measures tokens per step on the rows' prompts; None: that is not asked for."""


@dataclass
class Run:
    """What all stages share."""

    config: TrainConfig
    accelerator: Accelerator
    model: MedusaModel
    tokenizer: Any
    rows: list[TrainingRow]
    report: ReadReport
    states: HiddenStates
    held_out: HeldOut | None
    dtype: torch.dtype
    """What the trained weights are saved in: the backbone's own."""
    adapter: PeftModel | None = None
    """The backbone with its adapters, once it learns with such."""


@dataclass
class Stage:
    """A part of a run: what learns, from which loss, for how long."""

    name: str
    """heads (the backbone is frozen) or joint."""
    schedule: Schedule
    first_step: int
    """Steps of the run before this stage."""
    loss: nn.Module
    """Wrapped for data parallelism."""
    optimizer: torch.optim.Optimizer
    backbone: dict[str, nn.Parameter] = field(default_factory=dict)
    """Parameters of the backbone that learn, by name."""
    original: Original | None = None
    """What the backbone said before it learned; on the main process."""
    best: float = 0.0
    """Most predicted tokens per step so far."""

    @property
    def last_step(self) -> int:
        """Steps of the run after this stage."""
        return self.first_step + self.schedule.steps

    def set_rates(self, step: int) -> None:
        """Give every parameter group the learning rate of a step of the run."""
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * self.schedule.rate(step - self.first_step)


@dataclass
class StepResult:
    """What a step saw and found, over all ranks."""

    batches: list[HeadBatch]
    row_ids: list[str]
    sums: Tensor
    """Summed cross-entropy of each head, [K]."""
    pairs: Tensor
    """How many pairs each head was trained on, [K]."""
    gradient_norm: float
    backbone_loss: float | None = None
    """Mean of the backbone's own loss, where it learns."""

    @property
    def finite(self) -> bool:
        """Whether the step changed anything."""
        figures = (self.backbone_loss or 0.0, self.gradient_norm)
        return bool(torch.isfinite(self.sums).all()) and all(map(math.isfinite, figures))


def apply_gradients(run: Run, stage: Stage, parameters: Iterable[nn.Parameter], finite: bool) -> float:
    """Clip and take the optimizer's step, unless loss or gradient is not finite; returns the norm before clipping."""
    norm = float(whole(run.accelerator.clip_grad_norm_(parameters, run.config.optimization.max_grad_norm)))
    if finite and math.isfinite(norm):
        stage.optimizer.step()
    stage.optimizer.zero_grad(set_to_none=True)
    return norm


@torch.no_grad()
def load_backbone_parameters(stage: Stage, stored: dict[str, Any]) -> None:
    """Give what of the backbone learns the values of a stored state."""
    for name, parameter in stage.backbone.items():
        parameter.copy_(split_like(stored["backbone"][name], parameter))
