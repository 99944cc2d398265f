"""What the log says of a step. K heads."""

import torch

from medusa.model import MedusaModel

from .evaluate import accuracy, judge
from .pairs import HeadBatch
from .run import Run, Stage, StepResult

LOGGED_POSITIONS = 512
"""Accuracy in the log is measured on so many positions of the step at most."""


def step_metrics(run: Run, stage: Stage, result: StepResult, step: int) -> dict[str, float]:
    """The figures of the step that led to `step`."""
    options = run.config.optimization
    decay = options.head_decay ** torch.arange(len(result.sums), device=result.sums.device)
    per_head = (result.sums / result.pairs.clamp(min=1)).tolist()
    groups = stage.optimizer.param_groups
    metrics = {
        "loss": float((result.sums * decay).sum() / result.pairs.sum().clamp(min=1)),
        **{f"loss/head{k}": value for k, value in enumerate(per_head)},
        **train_accuracy(run.model, result.batches),
        "gradient_norm": result.gradient_norm,
        "learning_rate": float(groups[0]["lr"]),
        "epoch": (step - stage.first_step) / stage.schedule.per_epoch,
        "pairs": int(result.pairs.sum()),
    }
    if result.backbone_loss is not None:
        metrics |= {"loss/backbone": result.backbone_loss, "learning_rate/backbone": float(groups[1]["lr"])}
    return metrics


@torch.no_grad()
def train_accuracy(model: MedusaModel, batches: list[HeadBatch]) -> dict[str, float]:
    """Top-1, top-5 and top-10 of each head on some positions of the step, after it."""
    hidden = torch.cat([batch.hidden for batch in batches])[:LOGGED_POSITIONS].float()
    root = torch.cat([batch.root for batch in batches])[:LOGGED_POSITIONS]
    targets = torch.cat([batch.targets for batch in batches])[:LOGGED_POSITIONS]
    found = accuracy(judge(model.heads, hidden, root, targets))
    named = {"top1": found.top1, "top5": found.top5, "top10": found.top10}
    return {f"{name}/head{k}": share for name, shares in named.items() for k, share in enumerate(shares)}
