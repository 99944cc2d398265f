"""What a run would take, from its data and from a few of its steps; nothing is written."""

import time
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from .config import CacheSection, TrainConfig
from .heads_stage import start_heads
from .joint import start_joint
from .loop import prepare, schedules, take_step
from .metrics import memory_gigabytes
from .pairs import root_positions
from .run import Run, Stage
from .supervision import IGNORE

TRIED_STEPS = 3


@dataclass(frozen=True)
class Forecast:
    """Of a whole run, on this machine and as many processes as take part in the dry run."""

    rows: int
    dropped: list[tuple[str, str]]
    """Where each row stands that is left out, and why."""
    tokens: int
    learned_tokens: int
    steps: int
    seconds: float
    """Of all steps, by the time of the first ones; measuring and saving take more."""
    memory_gb: float
    """Most that was used so far."""
    cache_gb: float
    """What the hidden states would take on the disk with `cache.dir`."""
    state_gb: float
    """What one resumable state would take; `output.keep` of them and one more are there at a time."""

    def table(self) -> list[list[str]]:
        """For people."""
        minutes, seconds = divmod(round(self.seconds), 60)
        return [
            ["rows", f"{self.rows} kept, {len(self.dropped)} dropped"],
            ["tokens", f"{self.tokens}, {self.learned_tokens / self.tokens:.0%} of them learned"],
            ["steps", str(self.steps)],
            ["time", f"{minutes // 60} h {minutes % 60:02} min {seconds:02} s"],
            ["memory", f"{self.memory_gb:.2f} GB"],
            ["disk: a state", f"{self.state_gb:.3f} GB"],
            ["disk: cache of hidden states", f"{self.cache_gb:.3f} GB"],
        ]


def dry_run(config: TrainConfig) -> Forecast:
    """Load everything and take a few steps of each stage, without the cache of hidden states.

    Raises:
        ValueError: as for a real run.
    """
    run = prepare(replace(config, cache=CacheSection()), None)
    heads, *joint = schedules(run)
    seconds = 0.0
    if heads.steps or not joint:
        stage = start_heads(run, heads)
        seconds += heads.steps * step_seconds(run, stage)
    if joint:
        stage = start_joint(run, joint[0], heads.steps)
        seconds += joint[0].steps * step_seconds(run, stage)
    labels = [row.labels for row in run.rows]
    positions = sum(len(root_positions(own)) for own in labels)
    learning = [parameter for group in stage.optimizer.param_groups for parameter in group["params"]]
    return Forecast(
        rows=run.report.kept,
        dropped=run.report.dropped,
        tokens=sum(map(len, labels)),
        learned_tokens=sum(label != IGNORE for own in labels for label in own),
        steps=heads.steps + sum(schedule.steps for schedule in joint),
        seconds=seconds,
        memory_gb=memory_gigabytes(),
        cache_gb=positions * run.model.backbone.hidden_size * run.dtype.itemsize / 1e9,
        # The weights, and two moments of each in the optimizer.
        state_gb=3 * sum(parameter.numel() * parameter.element_size() for parameter in learning) / 1e9,
    )


def step_seconds(run: Run, stage: Stage) -> float:
    """Time of one step: the middle of the first few, since the very first is slow."""
    times = []
    for step in range(stage.first_step, min(stage.first_step + TRIED_STEPS, stage.last_step)):
        started = time.perf_counter()
        take_step(run, stage, step)
        times.append(time.perf_counter() - started)
    return median(times) if times else 0.0


def figures(forecast: Forecast) -> dict[str, Any]:
    """For machines."""
    dropped = [{"place": place, "reason": reason} for place, reason in forecast.dropped]
    return asdict(forecast) | {"dropped": dropped}
