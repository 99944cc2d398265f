"""Medusa-2: heads and backbone learn together. B rows, T tokens, P positions, K heads, D hidden, V vocabulary."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa.backbone import Backbone

from . import loss as loss_module
from .adapt import adapt_backbone, decoder_layers, learning_parameters
from .drift import Original
from .hidden_states import LiveHiddenStates, padded
from .loss import HeadLoss, divergence, in_chunks
from .pairs import HeadBatch, head_targets, root_positions
from .run import Run, Stage, StepResult, apply_gradients
from .schedule import Schedule
from .sharding import shard
from .supervision import IGNORE, TrainingRow


@dataclass(frozen=True)
class JointBatch:
    """Whole rows, and where in them heads and backbone learn."""

    input_ids: Tensor
    """[B, T]"""
    attention_mask: Tensor
    """1 on text, 0 on padding, [B, T]."""
    row: Tensor
    """Row of each position, [P]."""
    column: Tensor
    """Column of each position, [P]."""
    root: Tensor
    """The token behind each position, which the backbone should say, [P]."""
    targets: Tensor
    """What the heads should say: vocabulary ids or IGNORE, [P, K]."""


class JointLoss(nn.Module):
    """Summed losses of the backbone and of its heads; one module, for data parallelism."""

    def __init__(
        self, backbone: Backbone, head_loss: HeadLoss, teacher: Callable[[], AbstractContextManager[None]] | None
    ) -> None:
        """`teacher` gives a context in which the backbone is what it was: it learns to stay that, else the text."""
        super().__init__()
        self.model = backbone.model  # registered, so that data parallelism sees what learns in it
        self.backbone = backbone
        self.head_loss = head_loss
        self.teacher = teacher

    def forward(self, batch: JointBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Run the backbone over whole rows, and the heads over its hidden states.

        Returns:
            The backbone's summed loss; the weighted sum of the heads'; each head's own, [K] (detached); and the hidden
            states that the heads saw, [P, D] (detached).
        """
        reference = None
        if self.teacher is not None:
            with torch.no_grad(), self.teacher():
                reference = self.hidden(batch)
        hidden = self.hidden(batch)
        heads, sums = self.head_loss(hidden.float(), batch.root, batch.targets)

        def part(start: int, stop: int) -> Tensor:
            ahead = None if reference is None else reference[start:stop]
            return self.backbone_loss(hidden[start:stop], batch.root[start:stop], ahead)

        size = max(1, loss_module.CHUNK_ENTRIES // (self.backbone.vocab_size * (1 if reference is None else 2)))
        return in_chunks(part, len(hidden), size), heads, sums, hidden.detach()

    def hidden(self, batch: JointBatch) -> Tensor:
        """The backbone's final hidden states where something is learned, [P, D]."""
        return self.backbone.hidden(batch.input_ids, batch.attention_mask)[batch.row, batch.column]

    def backbone_loss(self, hidden: Tensor, root: Tensor, reference: Tensor | None) -> Tensor:
        """Cross-entropy on the roots, or KL from the distributions of the `reference` states; [P, D] and [P]."""
        backbone = self.backbone
        logits = backbone.logits(hidden).float()  # [P, V]
        if reference is None:
            return F.cross_entropy(logits, root, reduction="sum")
        teacher = backbone.transform(F.linear(reference, backbone.lm_weight, backbone.lm_bias)).float()
        return divergence(logits, teacher.log_softmax(dim=-1))


def start_joint(run: Run, schedule: Schedule, first_step: int) -> Stage:
    """Make the backbone learn beside the heads, each at its own rate."""
    options = run.config.joint
    original = None
    if run.accelerator.is_main_process:
        original = Original(run.model.backbone, run.rows if run.held_out is None else run.held_out.rows)
    run.adapter = adapt_backbone(run.model, options)
    if run.held_out is not None:
        run.held_out = replace(run.held_out, states=LiveHiddenStates(run.model.backbone))
    run.model.heads.requires_grad_(True)
    if run.config.optimization.gradient_checkpointing:
        # Reentrant checkpoints give no gradient behind frozen inputs.
        run.model.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    head_loss = HeadLoss(
        run.model.heads,
        run.config.optimization.head_decay,
        run.config.optimization.soft_labels,
        run.config.optimization.label_smoothing,
        (run.model.backbone.lm_weight, run.model.backbone.lm_bias),
    )
    teacher = None
    if options.loss == "teacher":
        assert run.adapter is not None, "the teacher is the backbone with its adapter off"
        teacher = run.adapter.disable_adapter
    loss: nn.Module = JointLoss(run.model.backbone, head_loss, teacher)
    if run.config.optimization.shard:
        loss = shard(loss, decoder_layers(run.model.backbone), run.accelerator)
    else:
        loss = run.accelerator.prepare(loss)
    learning = learning_parameters(run.model.model)
    groups = [
        {"params": list(run.model.heads.parameters()), "lr": 0.0, "peak": options.learning_rate},
        {"params": list(learning.values()), "lr": 0.0, "peak": options.backbone_learning_rate},
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=run.config.optimization.weight_decay, fused=True)
    return Stage("joint", schedule, first_step, loss, optimizer, learning, original)


def take_joint_step(run: Run, stage: Stage, step: int) -> StepResult:
    """One optimizer step over all ranks. A step whose loss is not finite changes nothing."""
    accelerator, heads, options = run.accelerator, run.model.heads, run.config.joint
    parts = [
        [run.rows[i] for i in part] for part in stage.schedule.parts(step - stage.first_step, accelerator.process_index)
    ]
    batches = [joint_batch(run, part) for part in parts]
    pairs = torch.stack([(heads.to_draft(batch.targets) != IGNORE).sum(dim=0) for batch in batches]).sum(dim=0)
    roots = torch.tensor(sum(len(batch.root) for batch in batches), device=accelerator.device)
    pairs, roots = accelerator.reduce((pairs, roots), reduction="sum")
    weight = options.heads_weight * stage.schedule.heads_weight(step - stage.first_step, options.heads_schedule)
    weight *= run.config.optimization.head_decay * len(heads)  # the paper adds up the heads' means, from decay ** 1 on
    torch.manual_seed(run.config.optimization.seed + step * accelerator.num_processes + accelerator.process_index)
    stage.set_rates(step)
    run.model.train()
    sums = torch.zeros(len(heads) + 1, device=accelerator.device)
    seen = []
    for i, batch in enumerate(batches):
        last = i == len(batches) - 1
        with nullcontext() if last else accelerator.no_sync(stage.loss):
            with accelerator.autocast():
                backbone, weighted, head_sums, hidden = stage.loss(batch)
            loss = backbone / roots.clamp(min=1) + weight * weighted / pairs.sum().clamp(min=1)
            accelerator.backward(loss * accelerator.num_processes)
        sums += torch.cat([head_sums, backbone.detach()[None]])
        seen.append(HeadBatch(hidden, batch.root, batch.targets))
    run.model.eval()
    sums = accelerator.reduce(sums, reduction="sum")
    learning = [*heads.parameters(), *stage.backbone.values()]
    norm = apply_gradients(run, stage, learning, bool(torch.isfinite(sums).all()))
    names = [row.id for part in parts for row in part]
    return StepResult(seen, names, sums[:-1], pairs, norm, float(sums[-1] / roots.clamp(min=1)))


def joint_batch(run: Run, rows: list[TrainingRow]) -> JointBatch:
    """Pad and join rows. Without any, a row in which nothing is learned: all ranks take part in every step."""
    device = run.accelerator.device
    ids, mask = padded(rows or run.rows[:1])
    run.model.backbone.check_ids(ids)
    columns = [root_positions(row.labels) for row in rows]
    targets = [head_targets(row.labels, len(run.model.heads)) for row in rows]
    row = torch.tensor([i for i, places in enumerate(columns) for _ in places], dtype=torch.long)
    column = torch.tensor([t for places in columns for t in places], dtype=torch.long)
    empty = torch.zeros(0, len(run.model.heads), dtype=torch.long)
    return JointBatch(
        input_ids=ids.to(device),
        attention_mask=mask.to(device),
        row=row.to(device),
        column=column.to(device),
        root=ids[row, column + 1].to(device),
        targets=torch.cat([*targets, empty]).to(device),
    )
