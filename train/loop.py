"""Train heads on a frozen backbone (Medusa-1), on one process or many. Reads from top to bottom."""

from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from omegaconf import OmegaConf
from torch import Tensor

from medusa.config import MedusaConfig
from medusa.model import MedusaModel, load_backbone, load_tokenizer
from medusa.progress import progress_bar

from .config import TrainConfig, save_config
from .evaluate import accuracy, judge, judge_file
from .hidden_states import HiddenStates, LiveHiddenStates, RecordedHiddenStates, recording_directory
from .loss import HeadLoss
from .pairs import HeadBatch, make_batch
from .provenance import provenance
from .rows import load_rows
from .run_state import load_newest_state, save_state
from .schedule import Schedule
from .supervision import IGNORE, TrainingRow
from .tracking import Tracker

LOGGED_POSITIONS = 512
"""Accuracy in the log is measured on so many positions of the step at most."""
NON_FINITE_LIMIT = 5
"""Stop after so many steps in a row whose loss is not finite."""


@dataclass
class Run:
    """Everything that a step needs."""

    config: TrainConfig
    accelerator: Accelerator
    model: MedusaModel
    tokenizer: Any
    rows: list[TrainingRow]
    states: HiddenStates
    schedule: Schedule
    head_loss: torch.nn.Module
    optimizer: torch.optim.Optimizer


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


def train(config: TrainConfig) -> Path:
    """Run a configuration to its end, continuing where an earlier run of the same directory stopped.

    Returns:
        Directory of the final checkpoint.

    Raises:
        ValueError: the configuration, the data or the backbone cannot be used, or the loss stays non-finite.
    """
    directory = Path(config.output.dir)
    run = prepare(config)
    stored = load_newest_state(directory / "states")
    step = 0 if stored is None else restore(run, stored)
    tracker = None
    if run.accelerator.is_main_process:
        directory.mkdir(parents=True, exist_ok=True)
        save_config(config, directory / "config.yaml")
        tracker = Tracker(directory, config.wandb, as_dict(config), step, stored["wandb_id"] if stored else None)

    non_finite = 0
    try:
        with progress_bar("training", run.schedule.steps, step, enabled=tracker is not None) as advance:
            while step < run.schedule.steps:
                result = take_step(run, step)
                step += 1
                advance(1)
                non_finite = 0 if torch.isfinite(result.sums).all() else non_finite + 1
                if non_finite == NON_FINITE_LIMIT:
                    raise ValueError(
                        f"the loss was not finite for {NON_FINITE_LIMIT} steps in a row (last rows: "
                        f"{', '.join(result.row_ids)}); lower optimization.learning_rate, or look at these rows with "
                        f"`medusa inspect {config.data.train}`"
                    )
                if tracker is not None and (step % config.output.log_every == 0 or step == run.schedule.steps):
                    tracker.log(step, step_metrics(run, result, step))
                if tracker is not None and step % config.output.save_every == 0:
                    save(run, step, tracker.run_id)
    except KeyboardInterrupt:
        if tracker is not None:
            save(run, step, tracker.run_id)
        run.accelerator.print(f"stopped after step {step} of {run.schedule.steps}; the same command continues there")
        raise
    if tracker is not None:
        save(run, step, tracker.run_id)
        finish(run, directory / "final", tracker)
    run.accelerator.wait_for_everyone()
    run.accelerator.print(f"heads saved in {directory / 'final'}")
    return directory / "final"


def prepare(config: TrainConfig) -> Run:
    """Load data and backbone, put fresh heads on it, and set up everything that learns."""
    options = config.optimization
    precision = "no" if options.mixed_precision == "none" else options.mixed_precision
    accelerator = Accelerator(mixed_precision=precision)
    set_seed(options.seed)
    tokenizer = load_tokenizer(config.backbone.path)
    rows, report = load_rows(config.data.train, tokenizer, config.data.max_length)
    accelerator.print(f"{config.data.train}: {report.summary()}")
    backbone = load_backbone(config.backbone.path, config.backbone.dtype).to(accelerator.device)
    backbone.requires_grad_(False)
    model = MedusaModel.attach(backbone, heads_config(config, rows))
    for parameter in model.heads.parameters():  # exactly what trains, and in fp32 whatever the backbone is
        parameter.data = parameter.data.float()
        parameter.requires_grad_(True)
    states: HiddenStates = LiveHiddenStates(model.backbone)
    if config.data.recorded:
        states = RecordedHiddenStates(recording_directory(Path(config.data.train)))
    return Run(
        config=config,
        accelerator=accelerator,
        model=model,
        tokenizer=tokenizer,
        rows=rows,
        states=states,
        schedule=Schedule(len(rows), options, accelerator.num_processes),
        head_loss=accelerator.prepare(HeadLoss(model.heads, options.head_decay)),
        optimizer=torch.optim.AdamW(
            model.heads.parameters(), lr=options.learning_rate, weight_decay=options.weight_decay
        ),
    )


def take_step(run: Run, step: int) -> StepResult:
    """One optimizer step over all ranks. A step whose loss is not finite changes nothing."""
    accelerator, options, heads = run.accelerator, run.config.optimization, run.model.heads
    parts = [[run.rows[i] for i in part] for part in run.schedule.parts(step, accelerator.process_index, options.seed)]
    batches = [
        make_batch(part, run.states.of(part), len(heads), accelerator.device) if part else empty_batch(run)
        for part in parts
    ]
    pairs = torch.stack([(heads.to_draft(batch.targets) != IGNORE).sum(dim=0) for batch in batches]).sum(dim=0)
    pairs = accelerator.reduce(pairs, reduction="sum")
    sums = torch.zeros(len(heads), device=accelerator.device)
    for group in run.optimizer.param_groups:
        group["lr"] = options.learning_rate * run.schedule.rate(step, options.warmup_steps)
    for i, batch in enumerate(batches):
        last = i == len(batches) - 1
        with nullcontext() if last else accelerator.no_sync(run.head_loss):
            with accelerator.autocast():
                loss, head_sums = run.head_loss(batch.hidden.float(), batch.root, batch.targets)
            # Data parallelism averages gradients over ranks; the loss is per pair of all ranks and passes.
            accelerator.backward(loss * accelerator.num_processes / pairs.sum().clamp(min=1))
        sums += head_sums
    sums = accelerator.reduce(sums, reduction="sum")
    norm = accelerator.clip_grad_norm_(heads.parameters(), options.max_grad_norm)
    if torch.isfinite(sums).all():
        run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    return StepResult(batches, [row.id for part in parts for row in part], sums, pairs, float(norm))


def step_metrics(run: Run, result: StepResult, step: int) -> dict[str, float]:
    """What the log says of a step."""
    options = run.config.optimization
    decay = options.head_decay ** torch.arange(len(result.sums), device=result.sums.device)
    per_head = (result.sums / result.pairs.clamp(min=1)).tolist()
    return {
        "loss": float((result.sums * decay).sum() / result.pairs.sum().clamp(min=1)),
        **{f"loss/head{k}": value for k, value in enumerate(per_head)},
        **train_accuracy(run.model, result.batches),
        "gradient_norm": result.gradient_norm,
        "learning_rate": float(run.optimizer.param_groups[0]["lr"]),
        "epoch": step / run.schedule.per_epoch,
        "pairs": int(result.pairs.sum()),
    }


def save(run: Run, step: int, wandb_id: str | None) -> None:
    """Write a resumable state."""
    state = {
        "step": step,
        "heads": run.model.heads.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "wandb_id": wandb_id,
        "config": as_dict(run.config),
    }
    save_state(Path(run.config.output.dir) / "states", step, state)


def restore(run: Run, stored: dict[str, Any]) -> int:
    """Take up a stored state; returns the step it was written after.

    Raises:
        ValueError: the state belongs to another configuration; the sections that differ are named.
    """
    now = as_dict(run.config)
    different = [name for name in ("backbone", "heads", "data", "optimization") if stored["config"][name] != now[name]]
    if different:
        raise ValueError(
            f"{run.config.output.dir} holds a run with other settings in {', '.join(different)} (see its config.yaml); "
            "set output.dir to a new directory, or remove the old one"
        )
    run.model.heads.load_state_dict(stored["heads"])
    run.optimizer.load_state_dict(stored["optimizer"])
    run.accelerator.print(f"continuing {run.config.output.dir} after step {stored['step']} of {run.schedule.steps}")
    return int(stored["step"])


def heads_config(config: TrainConfig, rows: list[TrainingRow]) -> MedusaConfig:
    """The heads' architecture, the draft vocabulary counted from the rows' answers."""
    heads = config.heads
    vocab = None
    if heads.draft_vocab_size is not None:
        if heads.draft_vocab_size < 1:
            raise ValueError(f"heads.draft_vocab_size is {heads.draft_vocab_size}; it must be at least 1, or null")
        counts = Counter(label for row in rows for label in row.labels if label != IGNORE)
        vocab = sorted(token for token, _ in counts.most_common(heads.draft_vocab_size))
    return MedusaConfig(
        num_heads=heads.num_heads,
        num_layers=heads.num_layers,
        projection=heads.projection,
        draft_vocab=vocab,
        root_conditioned=heads.root_conditioned,
        sequential=heads.sequential,
    )


def empty_batch(run: Run) -> HeadBatch:
    """No positions: every rank takes part in every step, also where an epoch has run out of rows."""
    device = run.accelerator.device
    return HeadBatch(
        hidden=torch.zeros(0, run.model.backbone.hidden_size, device=device),
        root=torch.zeros(0, dtype=torch.long, device=device),
        targets=torch.zeros(0, len(run.model.heads), dtype=torch.long, device=device),
    )


@torch.no_grad()
def train_accuracy(model: MedusaModel, batches: list[HeadBatch]) -> dict[str, float]:
    """Top-1 and top-5 of each head on some positions of the step, after it."""
    hidden = torch.cat([batch.hidden for batch in batches])[:LOGGED_POSITIONS].float()
    root = torch.cat([batch.root for batch in batches])[:LOGGED_POSITIONS]
    targets = torch.cat([batch.targets for batch in batches])[:LOGGED_POSITIONS]
    found = accuracy(judge(model.heads, hidden, root, targets))
    metrics = {f"top1/head{k}": share for k, share in enumerate(found.top1)}
    return metrics | {f"top5/head{k}": share for k, share in enumerate(found.top5)}


def finish(run: Run, final: Path, tracker: Tracker) -> None:
    """Save the heads in the backbone's dtype and judge them on the held-out chats, if there are any."""
    config, model = run.config, run.model
    model.heads.to(model.backbone.lm_weight.dtype)
    model.save_pretrained(final, run.tokenizer, provenance(config.optimization.seed) | {"config": as_dict(config)})
    if config.data.eval is not None:
        judged = judge_file(model, run.tokenizer, config.data.eval, config.data.max_length, config.data.recorded)
        found = accuracy(judged)
        found.save(final)
        tracker.log(run.schedule.steps, {f"eval/top1/head{k}": share for k, share in enumerate(found.top1)})
    tracker.close()


def as_dict(config: TrainConfig) -> dict[str, Any]:
    """The configuration as plain values."""
    container = OmegaConf.to_container(OmegaConf.structured(config))
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}
