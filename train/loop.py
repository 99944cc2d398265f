"""Train heads on a backbone, on one process or many. Reads from top to bottom.

First the heads alone learn (Medusa-1, heads_stage.py), then, where it is asked for, the backbone with them (Medusa-2,
joint.py).
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from omegaconf import OmegaConf

from medusa.config import MedusaConfig
from medusa.model import MedusaModel, load_backbone, load_tokenizer
from medusa.progress import progress_bar

from .config import TrainConfig, save_config
from .evaluate import accuracy, judge_file
from .heads_stage import start_heads, take_heads_step
from .hidden_states import HiddenStates, LiveHiddenStates, RecordedHiddenStates, recording_directory
from .joint import start_joint, take_joint_step
from .metrics import step_metrics
from .provenance import provenance
from .rows import load_rows
from .run import Run, Stage, StepResult
from .run_state import load_newest_state, save_state
from .schedule import Schedule
from .supervision import IGNORE, TrainingRow
from .tracking import Tracker

NON_FINITE_LIMIT = 5
"""Stop after so many steps in a row whose loss is not finite."""


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
    total = sum(schedule.steps for schedule in schedules(run))
    with progress_bar("training", total, step, enabled=tracker is not None) as advance:
        for stage in stages(run, step, stored):
            try:
                while step < stage.last_step:
                    result = take_step(run, stage, step)
                    step += 1
                    advance(1)
                    non_finite = 0 if result.finite else non_finite + 1
                    if non_finite == NON_FINITE_LIMIT:
                        raise ValueError(
                            f"the loss was not finite for {NON_FINITE_LIMIT} steps in a row (last rows: "
                            f"{', '.join(result.row_ids)}); lower {stage.name}'s learning rate "
                            f"(optimization.learning_rate, joint.*learning_rate), or look at these rows with "
                            f"`medusa inspect {config.data.train}`"
                        )
                    if tracker is not None and (step % config.output.log_every == 0 or step == stage.last_step):
                        tracker.log(step, step_metrics(run, stage, result, step))
                    if tracker is not None and (step % config.output.save_every == 0 or step == stage.last_step):
                        save(run, stage, step, tracker.run_id)
            except KeyboardInterrupt:
                if tracker is not None:
                    save(run, stage, step, tracker.run_id)
                run.accelerator.print(f"stopped after step {step} of {total}; the same command continues there")
                raise
    if tracker is not None:
        finish(run, stage, directory / "final", tracker)
    run.accelerator.wait_for_everyone()
    run.accelerator.print(f"heads saved in {directory / 'final'}")
    return directory / "final"


def prepare(config: TrainConfig) -> Run:
    """Load data and backbone, and put fresh heads on it: in fp32, whatever the backbone is."""
    options = config.optimization
    precision = "no" if options.mixed_precision == "none" else options.mixed_precision
    accelerator = Accelerator(mixed_precision=precision)
    set_seed(options.seed)
    tokenizer = load_tokenizer(config.backbone.path)
    rows, report = load_rows(config.data.train, tokenizer, config.data.max_length)
    accelerator.print(f"{config.data.train}: {report.summary()}")
    section = config.backbone
    backbone = load_backbone(section.path, section.dtype, {"": accelerator.device}, section.quantization)
    model = MedusaModel.attach(backbone, heads_config(config, rows))
    model.heads.float()
    states: HiddenStates = LiveHiddenStates(model.backbone)
    if config.data.recorded:
        states = RecordedHiddenStates(recording_directory(Path(config.data.train)))
    return Run(config, accelerator, model, tokenizer, rows, states, dtype=model.backbone.lm_weight.dtype)


def schedules(run: Run) -> list[Schedule]:
    """Of the stages of the run: the heads alone, and then, where the backbone learns too, both."""
    options, joint = run.config.optimization, run.config.joint
    rows, ranks, seed = len(run.rows), run.accelerator.num_processes, options.seed
    found = [Schedule(rows, options, ranks, options.epochs, options.max_steps, options.warmup_steps, seed)]
    if joint.method != "none":
        later = seed + options.epochs  # another order than that of the first epochs
        found.append(Schedule(rows, options, ranks, joint.epochs, joint.max_steps, joint.warmup_steps, later))
    return found


def stages(run: Run, step: int, stored: dict[str, Any] | None) -> Iterator[Stage]:
    """The stages that are not over after `step`, and the last; each is set up when the one before has ended."""
    heads, *joint = schedules(run)
    if step < heads.steps or not joint:
        yield resumed(start_heads(run, heads), stored)
    if joint:
        yield resumed(start_joint(run, joint[0], heads.steps), stored)


def resumed(stage: Stage, stored: dict[str, Any] | None) -> Stage:
    """Give a stage what a stored state says of it, if the state was written in this stage."""
    if stored is not None and stored["stage"] == stage.name:
        stage.optimizer.load_state_dict(stored["optimizer"])
        with torch.no_grad():
            for name, parameter in stage.backbone.items():
                parameter.copy_(stored["backbone"][name])
    return stage


def take_step(run: Run, stage: Stage, step: int) -> StepResult:
    """One optimizer step of a stage."""
    return take_heads_step(run, stage, step) if stage.name == "heads" else take_joint_step(run, stage, step)


def save(run: Run, stage: Stage, step: int, wandb_id: str | None) -> None:
    """Write a resumable state."""
    state = {
        "step": step,
        "stage": stage.name,
        "heads": run.model.heads.state_dict(),
        "backbone": {name: parameter.detach() for name, parameter in stage.backbone.items()},
        "optimizer": stage.optimizer.state_dict(),
        "wandb_id": wandb_id,
        "config": as_dict(run.config),
    }
    save_state(Path(run.config.output.dir) / "states", step, state)


def restore(run: Run, stored: dict[str, Any]) -> int:
    """Take up the heads of a stored state; returns the step it was written after. See `resumed` for the rest.

    Raises:
        ValueError: the state belongs to another configuration; the sections that differ are named.
    """
    now = as_dict(run.config)
    sections = ("backbone", "heads", "data", "optimization", "joint")
    different = [name for name in sections if stored["config"][name] != now[name]]
    if different:
        raise ValueError(
            f"{run.config.output.dir} holds a run with other settings in {', '.join(different)} (see its config.yaml); "
            "set output.dir to a new directory, or remove the old one"
        )
    run.model.heads.load_state_dict(stored["heads"])
    run.accelerator.print(f"continuing {run.config.output.dir} after step {stored['step']}")
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
    )


def finish(run: Run, stage: Stage, final: Path, tracker: Tracker) -> None:
    """Save what was trained in the backbone's dtype, and measure it on the held-out chats, if there are any."""
    config, model = run.config, run.model
    drift = None if stage.original is None else stage.original.drift(model.backbone)
    whole = config.joint.method in ("full", "last_layers")
    (model if whole else model.heads).to(run.dtype)
    facts = provenance(config.optimization.seed) | {"config": as_dict(config)}
    model.save_pretrained(final, run.tokenizer, facts, run.adapter, with_backbone=whole)
    if drift is not None:
        drift.save(final)
        tracker.log(stage.last_step, {f"drift/{name}": value for name, value in asdict(drift).items()})
    if config.data.eval is not None:
        recorded = config.data.recorded and stage.original is None  # a backbone that learned has other states
        found = accuracy(judge_file(model, run.tokenizer, config.data.eval, config.data.max_length, recorded))
        found.save(final)
        tracker.log(stage.last_step, {f"eval/top1/head{k}": share for k, share in enumerate(found.top1)})
    tracker.close()


def as_dict(config: TrainConfig) -> dict[str, Any]:
    """The configuration as plain values."""
    container = OmegaConf.to_container(OmegaConf.structured(config))
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}
