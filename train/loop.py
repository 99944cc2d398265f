"""Train heads on a backbone, on one process or many. Reads from top to bottom.

First the heads alone learn (Medusa-1, heads_stage.py), then, where it is asked for, the backbone with them (Medusa-2,
joint.py).
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType, set_seed
from torch.distributed.fsdp import FSDPModule

from medusa.backbone import Backbone
from medusa.loading import load_backbone, load_tokenizer
from medusa.model import MedusaModel
from medusa.progress import progress_bar

from .config import TrainConfig
from .config_file import as_dict, save_config
from .finish import finish, put_together
from .heads_stage import start_heads, take_heads_step
from .hidden_states import HiddenStates, LiveHiddenStates, RecordedHiddenStates, recording_directory
from .initial_heads import init_heads, initial_config
from .joint import start_joint, take_joint_step
from .metrics import measure, step_metrics
from .provenance import provenance
from .rows import coverage, load_rows, prompts_of
from .run import Decode, HeldOut, Run, Stage, StepResult, load_backbone_parameters
from .run_state import BEST, NEWEST, load_newest_state, save_state
from .schedule import Schedule
from .sharding import gathered, load_optimizer_state, optimizer_state, whole
from .state_cache import cached_states
from .stopping import stop_asked, undivided
from .supervision import TrainingRow
from .tracking import Tracker

NON_FINITE_LIMIT = 5
"""Stop after so many steps in a row whose loss is not finite."""


def train(config: TrainConfig, decode: Decode | None = None) -> Path:
    """Run a configuration to its end, continuing where an earlier run of the same directory stopped.

    Args:
        config: what to do.
        decode: the decoder that measures tokens per step, where `output.decode_prompts` asks for that.

    Returns:
        Directory of the final checkpoint.

    Raises:
        ValueError: the configuration, the data or the backbone cannot be used, or the loss stays non-finite.
        SystemExit: with status 0, on SIGTERM, after the state was saved.
    """
    directory = Path(config.output.dir)
    run = prepare(config, decode)
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
                    with undivided():
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
        f"loss or gradient was not finite for {NON_FINITE_LIMIT} steps in a row (last rows: "
        f"{', '.join(result.row_ids)}); lower {rates}, or look at these rows with `medusa inspect {config.data.train}`"
    )


def prepare(config: TrainConfig, decode: Decode | None) -> Run:
    """Load data and backbone, and put fresh heads on it: in fp32, whatever the backbone is."""
    options = config.optimization
    precision = "no" if options.mixed_precision == "none" else options.mixed_precision
    accelerator = Accelerator(mixed_precision=precision)
    refuse_launcher(accelerator)
    set_seed(options.seed)
    tokenizer = load_tokenizer(config.backbone.path)
    stop_on_error = config.data.on_error == "stop"
    rows, report = load_rows(config.data.train, tokenizer, config.data.max_length, stop_on_error)
    accelerator.print(f"{config.data.train}: {report.summary()}; {coverage(rows)}")
    section = config.backbone
    backbone = load_backbone(section.path, section.dtype, {"": accelerator.device}, section.quantization)
    model = MedusaModel.attach(backbone, initial_config(config, rows))
    model.heads.float()
    if config.heads.init_from is not None:
        init_heads(model, tokenizer, config)
    states = hidden_states(config, config.data.train, model.backbone, rows, accelerator)
    held_out = None
    decodes = decode is not None and config.output.decode_prompts > 0
    if config.data.eval is not None:
        eval_rows, _ = load_rows(config.data.eval, tokenizer, config.data.max_length, stop_on_error)
        held_out = HeldOut(eval_rows, hidden_states(config, config.data.eval, model.backbone, eval_rows, accelerator))
        if decode is not None and config.output.decode_prompts > 0:
            prompts, tokens = prompts_of(eval_rows[: config.output.decode_prompts]), config.output.decode_tokens
            held_out.decode = lambda model, tree: decode(model, tree, prompts, tokens)
    dtype = model.backbone.lm_weight.dtype
    if isinstance(states, RecordedHiddenStates) and config.joint.method == "none" and not decodes:
        model.backbone.decoder.to("meta")  # the heads learn without it; LM head and embedding are held elsewhere
    return Run(config, accelerator, model, tokenizer, rows, report, states, held_out, dtype)


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
            f"accelerate was told to use {kind.value}; launch with distributed_type MULTI_GPU (configs/accelerate/), "
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


def take_step(run: Run, stage: Stage, step: int) -> StepResult:
    """One optimizer step of a stage."""
    return take_heads_step(run, stage, step) if stage.name == "heads" else take_joint_step(run, stage, step)


def evaluate(run: Run, stage: Stage, step: int, tracker: Tracker) -> None:
    """Measure the heads on the held-out chats, and keep them if they are the best so far."""
    assert run.held_out is not None
    with gathered(stage.loss):
        measured = measure(run.model, run.held_out)
    tracker.log(step, measured.metrics())
    if measured.best > stage.best:
        stage.best = measured.best
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
    now, then, defaults = as_dict(run.config), stored["config"], as_dict(TrainConfig())
    sections = ("backbone", "heads", "data", "optimization", "joint")  # where states come from may change
    # What an older version did not know it did as the default does.
    different = [name for name in sections if defaults[name] | then.get(name, {}) != now[name]]
    if different:
        raise ValueError(
            f"{run.config.output.dir} holds a run with other settings in {', '.join(different)} (see its config.yaml); "
            "set output.dir to a new directory, or remove the old one"
        )
    run.model.heads.load_state_dict(stored["heads"])
    run.accelerator.print(f"continuing {run.config.output.dir} after step {stored['step']}")
    return int(stored["step"])
