"""Train heads on a backbone, on one process or many. Reads from top to bottom.

First the heads alone learn (Medusa-1, heads_stage.py), then, where it is asked for, the backbone with them (Medusa-2,
joint.py).
"""

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, set_seed
from omegaconf import OmegaConf
from torch.distributed.fsdp import FSDPModule

from medusa.backbone import Backbone
from medusa.config import MedusaConfig
from medusa.model import MedusaModel, load_backbone, load_tokenizer
from medusa.progress import progress_bar

from .adapt import adapt_backbone, learning_parameters
from .config import TrainConfig, save_config
from .heads_stage import start_heads, take_heads_step
from .hidden_states import HiddenStates, LiveHiddenStates, RecordedHiddenStates, recording_directory
from .joint import start_joint, take_joint_step
from .metrics import measure, step_metrics
from .plot import plot_accuracy
from .provenance import provenance
from .rows import load_rows
from .run import HeldOut, Run, Stage, StepResult
from .run_state import BEST, NEWEST, load_newest_state, save_state
from .schedule import Schedule
from .sharding import gathered, load_optimizer_state, optimizer_state, split_like, whole
from .state_cache import cached_states
from .stopping import stop_asked
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
        SystemExit: with status 0, on SIGTERM, after the state was saved.
    """
    directory = Path(config.output.dir)
    run = prepare(config)
    stored = load_newest_state(directory / "states")
    step = 0 if stored is None else restore(run, stored)
    tracker = open_tracker(run, step, stored)
    total = sum(schedule.steps for schedule in schedules(run))
    non_finite = 0
    with (
        progress_bar("training", total, step, enabled=tracker.active) as advance,
        stop_asked(run.accelerator) as stopping,
    ):
        for stage in stages(run, step, stored):
            try:
                while step < stage.last_step:
                    started = time.perf_counter()
                    result = take_step(run, stage, step)
                    step += 1
                    advance(1)
                    non_finite = 0 if result.finite else non_finite + 1
                    if non_finite == NON_FINITE_LIMIT:
                        raise ValueError(non_finite_message(config, stage, result))
                    ended, stop = step == stage.last_step, stopping()
                    seconds = time.perf_counter() - started
                    if ended or step % config.output.log_every == 0:
                        with gathered(stage.loss):
                            tracker.log(step, step_metrics(run, stage, result, step, seconds))
                    if run.held_out is not None and step % config.output.eval_every == 0:
                        evaluate(run, stage, step, tracker)
                    if ended or stop or step % config.output.save_every == 0:
                        save(run, stage, step, tracker.run_id)
                    if stop and step < total:
                        run.accelerator.print(f"told to stop after step {step} of {total}; the same command continues")
                        raise SystemExit(0)
            except KeyboardInterrupt:
                if not isinstance(stage.loss, FSDPModule):  # to put together what is split, all ranks must be here
                    save(run, stage, step, tracker.run_id)
                run.accelerator.print(f"stopped after step {step} of {total}; the same command continues there")
                raise
    if config.optimization.shard and config.joint.method != "none":
        put_together(run, stage)
    if run.accelerator.is_main_process:
        finish(run, stage, directory, tracker)
    run.accelerator.wait_for_everyone()
    run.accelerator.print(f"heads saved in {directory / 'final'}")
    return directory / "final"


def open_tracker(run: Run, step: int, stored: dict[str, Any] | None) -> Tracker:
    """Start or continue the run's log."""
    config, directory, active = run.config, Path(run.config.output.dir), run.accelerator.is_main_process
    if active:
        directory.mkdir(parents=True, exist_ok=True)
        save_config(config, directory / "config.yaml")
    facts = as_dict(config) | {"provenance": provenance(config.optimization.seed)}
    run_id = None if stored is None else stored["wandb_id"]
    return Tracker(directory, config.wandb, config.tracking, facts, step, run_id, active)


def non_finite_message(config: TrainConfig, stage: Stage, result: StepResult) -> str:
    """Why training stops, and what to do."""
    rates = "optimization.learning_rate" if stage.name == "heads" else "joint.learning_rate and backbone_learning_rate"
    return (
        f"the loss was not finite for {NON_FINITE_LIMIT} steps in a row (last rows: {', '.join(result.row_ids)}); "
        f"lower {rates}, or look at these rows with `medusa inspect {config.data.train}`"
    )


def prepare(config: TrainConfig) -> Run:
    """Load data and backbone, and put fresh heads on it: in fp32, whatever the backbone is."""
    options = config.optimization
    precision = "no" if options.mixed_precision == "none" else options.mixed_precision
    accelerator = Accelerator(mixed_precision=precision)
    refuse_launcher(accelerator)
    set_seed(options.seed)
    tokenizer = load_tokenizer(config.backbone.path)
    rows, report = load_rows(config.data.train, tokenizer, config.data.max_length)
    accelerator.print(f"{config.data.train}: {report.summary()}")
    section = config.backbone
    backbone = load_backbone(section.path, section.dtype, {"": accelerator.device}, section.quantization)
    model = MedusaModel.attach(backbone, heads_config(config, rows))
    model.heads.float()
    states = hidden_states(config, config.data.train, model.backbone, rows, accelerator)
    held_out = None
    if config.data.eval is not None:
        eval_rows, _ = load_rows(config.data.eval, tokenizer, config.data.max_length)
        held_out = HeldOut(eval_rows, hidden_states(config, config.data.eval, model.backbone, eval_rows, accelerator))
    dtype = model.backbone.lm_weight.dtype
    if isinstance(states, RecordedHiddenStates) and config.joint.method == "none":
        model.backbone.decoder.to("meta")  # the heads learn without it; LM head and embedding are held elsewhere
    return Run(config, accelerator, model, tokenizer, rows, states, held_out, dtype)


def hidden_states(
    config: TrainConfig, file: str, backbone: Backbone, rows: list[TrainingRow], accelerator: Accelerator
) -> HiddenStates:
    """Where the hidden states of a file's rows come from."""
    if config.data.recorded:
        return RecordedHiddenStates(recording_directory(Path(file)))
    if config.cache.dir is not None:
        return cached_states(Path(config.cache.dir), backbone, rows, accelerator)
    return LiveHiddenStates(backbone)


def refuse_launcher(accelerator: Accelerator) -> None:
    """The loop takes its own optimizer steps, and splits what it needs to split itself.

    Raises:
        ValueError: accelerate was told to use DeepSpeed, its own FSDP, or something else of that kind.
    """
    kind = accelerator.distributed_type
    if kind not in (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU):
        raise ValueError(
            f"accelerate was told to use {kind.value}; launch with distributed_type MULTI_GPU (configs/accelerate/) "
            "and set optimization.shard=true to split backbone and optimizer over the processes"
        )


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
        load_optimizer_state(stage.optimizer, stored["optimizer"])
        load_backbone_parameters(stage, stored)
        stage.best = float(stored["best"])
    return stage


@torch.no_grad()
def load_backbone_parameters(stage: Stage, stored: dict[str, Any]) -> None:
    """Give what of the backbone learns the values of a stored state."""
    for name, parameter in stage.backbone.items():
        parameter.copy_(split_like(stored["backbone"][name], parameter))


def take_step(run: Run, stage: Stage, step: int) -> StepResult:
    """One optimizer step of a stage."""
    return take_heads_step(run, stage, step) if stage.name == "heads" else take_joint_step(run, stage, step)


def evaluate(run: Run, stage: Stage, step: int, tracker: Tracker) -> None:
    """Measure the heads on the held-out chats, and keep them if they are the best so far."""
    assert run.held_out is not None
    with gathered(stage.loss):
        measured = measure(run.model, run.held_out)
    tracker.log(step, measured.metrics())
    if measured.tokens_per_step > stage.best:
        stage.best = measured.tokens_per_step
        save(run, stage, step, tracker.run_id, BEST)


def save(run: Run, stage: Stage, step: int, wandb_id: str | None, kind: str = NEWEST) -> None:
    """Write a resumable state. All ranks must be here where it is split over them; the main process writes."""
    state = {
        "step": step,
        "stage": stage.name,
        "heads": {name: whole(tensor) for name, tensor in run.model.heads.state_dict().items()},
        "backbone": {name: whole(parameter) for name, parameter in stage.backbone.items()},
        "optimizer": optimizer_state(stage.optimizer),
        "best": stage.best,
        "wandb_id": wandb_id,
        "config": as_dict(run.config),
    }
    keep = 1 if kind == BEST else run.config.output.keep
    if run.accelerator.is_main_process:
        save_state(Path(run.config.output.dir) / "states", kind, step, state, keep)


def restore(run: Run, stored: dict[str, Any]) -> int:
    """Take up the heads of a stored state; returns the step it was written after. See `resumed` for the rest.

    Raises:
        ValueError: the state belongs to another configuration; the sections that differ are named.
    """
    now = as_dict(run.config)
    sections = ("backbone", "heads", "data", "optimization", "joint")  # where states come from may change
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
        sequential=heads.sequential,
    )


def put_together(run: Run, stage: Stage) -> None:
    """Replace a model that is split over the ranks by a whole one, on the main process."""
    heads = {name: whole(tensor) for name, tensor in run.model.heads.state_dict().items()}
    learned = {name: whole(parameter) for name, parameter in stage.backbone.items()}
    if not run.accelerator.is_main_process:
        return
    section = run.config.backbone
    backbone = load_backbone(section.path, section.dtype, {"": run.accelerator.device}, section.quantization)
    run.model = MedusaModel.attach(backbone, run.model.config)
    run.model.heads.float()
    run.model.heads.load_state_dict(heads)
    run.adapter = adapt_backbone(run.model, run.config.joint)
    stage.backbone = learning_parameters(run.model.model)
    load_backbone_parameters(stage, {"backbone": learned})
    if run.held_out is not None:
        run.held_out = HeldOut(run.held_out.rows, LiveHiddenStates(run.model.backbone))
    run.model.eval()


def finish(run: Run, stage: Stage, directory: Path, tracker: Tracker) -> None:
    """Measure what was trained, and save it in the backbone's dtype: the last heads, and the best where others are."""
    drift = None if stage.original is None else stage.original.drift(run.model.backbone)
    if drift is not None:
        tracker.log(stage.last_step, {f"drift/{name}": value for name, value in asdict(drift).items()})
    measured = None if run.held_out is None else measure(run.model, run.held_out)
    write_checkpoint(run, directory / "final")
    if drift is not None:
        drift.save(directory / "final")
    if measured is not None:
        found = measured.accuracy
        found.save(directory / "final")
        tracker.log(stage.last_step, measured.metrics())
        columns = ["head", "top-1", "top-5", "top-10", "positions"]
        tracker.show(stage.last_step, columns, found.table(), plot_accuracy(found, directory / "final"))
    if measured is not None and stage.best > measured.tokens_per_step:
        best = load_newest_state(directory / "states", BEST)
        assert best is not None, "the best state is written when it is found"
        run.model.heads.load_state_dict(best["heads"])
        load_backbone_parameters(stage, best)
        write_checkpoint(run, directory / "best")
        run.accelerator.print(f"better on {run.config.data.eval}: step {best['step']}, in {directory / 'best'}")
    tracker.close()


def write_checkpoint(run: Run, directory: Path) -> None:
    """Write the model as it is now; its trained weights are in the backbone's dtype from then on."""
    whole = run.config.joint.method in ("full", "last_layers")
    (run.model if whole else run.model.heads).to(run.dtype)
    facts = provenance(run.config.optimization.seed) | {"config": as_dict(run.config)}
    run.model.save_pretrained(directory, run.tokenizer, facts, run.adapter, with_backbone=whole)


def as_dict(config: TrainConfig) -> dict[str, Any]:
    """The configuration as plain values."""
    container = OmegaConf.to_container(OmegaConf.structured(config))
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}
