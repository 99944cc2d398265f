"""What the log says of a step, and of the heads on held-out chats. K heads."""

import resource
import sys
from dataclasses import dataclass

import torch

from medusa.model import MedusaModel
from medusa.progress import progress_bar
from medusa.tree_search import search_tree_for_decoding

from .evaluate import HeadAccuracy, accuracy, judge, judge_rows
from .pairs import HeadBatch
from .run import HeldOut, Run, Stage, StepResult
from .supervision import IGNORE

LOGGED_POSITIONS = 512
"""Accuracy in the log is measured on so many positions of the step at most."""
TREE_NODES = 16
"""Size of the tree for which tokens per step are predicted and measured."""


@dataclass(frozen=True)
class Measured:
    """The heads on held-out chats."""

    accuracy: HeadAccuracy
    tokens_per_step: float
    """Predicted for the best tree of TREE_NODES nodes: tokens emitted / verify passes, roots included."""
    decoded: float | None
    """The same, measured by decoding held-out prompts with that tree; None where nothing decodes."""

    @property
    def best(self) -> float:
        """What heads are compared by: the measured figure where there is one."""
        return self.tokens_per_step if self.decoded is None else self.decoded

    def metrics(self) -> dict[str, float]:
        """For the log."""
        found = self.accuracy
        named = {"top1": found.top1, "top5": found.top5, "top10": found.top10, "conditional": found.conditional_top1}
        shares = {f"eval/{name}/head{k}": share for name, values in named.items() for k, share in enumerate(values)}
        found_steps = {"eval/tokens_per_step": round(self.tokens_per_step, 4)}
        if self.decoded is not None:
            found_steps["eval/decoded_tokens_per_step"] = round(self.decoded, 4)
        return shares | found_steps


def measure(model: MedusaModel, held_out: HeldOut) -> Measured:
    """Judge the heads on held-out rows, find the best tree for them, and decode with it if that is asked for."""
    with progress_bar("evaluating", len(held_out.rows)) as advance:
        judged = judge_rows(model.heads, held_out.rows, held_out.states, advance)
    searched = search_tree_for_decoding(judged.ranks, judged.targets[:, 0] == IGNORE, TREE_NODES)
    decoded = None
    if held_out.decode is not None:
        decoded = held_out.decode(model, searched.best(TREE_NODES))
    return Measured(accuracy(judged), searched.tokens_per_step(TREE_NODES), decoded)


def memory_gigabytes() -> float:
    """Most memory used so far: of the accelerator where there is one, else of this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / 1e9


def step_metrics(run: Run, stage: Stage, result: StepResult, step: int, seconds: float) -> dict[str, float]:
    """The figures of the step that led to `step` and took so many seconds."""
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
        "positions_per_second": int(result.pairs[0]) / seconds,
        "memory_gb": memory_gigabytes(),
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
