"""Medusa-1: the heads learn from the hidden states of a frozen backbone. P positions, K heads, D hidden."""

from contextlib import nullcontext

import torch

from .loss import HeadLoss
from .pairs import HeadBatch, make_batch
from .run import Run, Stage, StepResult, apply_gradients
from .schedule import Schedule
from .supervision import IGNORE


def start_heads(run: Run, schedule: Schedule) -> Stage:
    """Set up what learns: the heads, in fp32 whatever the backbone is, and nothing else."""
    options = run.config.optimization
    run.model.backbone.model.requires_grad_(False)
    backbone = run.model.backbone
    loss = HeadLoss(
        run.model.heads,
        options.head_decay,
        options.soft_labels,
        options.label_smoothing,
        (backbone.lm_weight, backbone.lm_bias),
    )
    # Dynamic: every step has another number of positions.
    compiled = torch.compile(loss, dynamic=True) if options.compile else loss
    group = {"params": list(run.model.heads.parameters()), "lr": 0.0, "peak": options.learning_rate}
    optimizer = torch.optim.AdamW([group], weight_decay=options.weight_decay, fused=True)
    return Stage("heads", schedule, 0, run.accelerator.prepare(compiled), optimizer)


def take_heads_step(run: Run, stage: Stage, step: int) -> StepResult:
    """One optimizer step over all ranks. A step whose loss is not finite changes nothing."""
    accelerator, heads = run.accelerator, run.model.heads
    parts = [[run.rows[i] for i in part] for part in stage.schedule.parts(step, accelerator.process_index)]
    batches = [
        make_batch(part, run.states.of(part), len(heads), accelerator.device) if part else empty_batch(run)
        for part in parts
    ]
    pairs = torch.stack([(heads.to_draft(batch.targets) != IGNORE).sum(dim=0) for batch in batches]).sum(dim=0)
    pairs = accelerator.reduce(pairs, reduction="sum")
    sums = torch.zeros(len(heads), device=accelerator.device)
    stage.set_rates(step)
    for i, batch in enumerate(batches):
        last = i == len(batches) - 1
        with nullcontext() if last else accelerator.no_sync(stage.loss):
            with accelerator.autocast():
                loss, head_sums = stage.loss(batch.hidden.float(), batch.root, batch.targets)
            # Data parallelism averages gradients over ranks; the loss is per pair of all ranks and passes.
            accelerator.backward(loss * accelerator.num_processes / pairs.sum().clamp(min=1))
        sums += head_sums
    sums = accelerator.reduce(sums, reduction="sum")
    norm = apply_gradients(run, stage, heads.parameters(), bool(torch.isfinite(sums).all()))
    return StepResult(batches, [row.id for part in parts for row in part], sums, pairs, norm)


def empty_batch(run: Run) -> HeadBatch:
    """No positions: every rank takes part in every step, also where an epoch has run out of rows."""
    device = run.accelerator.device
    return HeadBatch(
        hidden=torch.zeros(0, run.model.backbone.hidden_size, device=device),
        root=torch.zeros(0, dtype=torch.long, device=device),
        targets=torch.zeros(0, len(run.model.heads), dtype=torch.long, device=device),
    )
