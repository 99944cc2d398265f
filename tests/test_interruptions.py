"""Whatever ends a process, the newest state is whole and the next run goes on from it."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training import CONFIG, log, run

from medusa.checkpoint import HEADS_FILE
from medusa.train import loop as loop_module
from medusa.train.run_state import load_newest_state, save_state

STATE = {"heads": torch.zeros(2**20)}
SAVING = """
import sys, torch
from pathlib import Path
from medusa.train.run_state import save_state
state = {"heads": torch.zeros(2**20)}
step = int(sys.argv[2])
print("ready", flush=True)
while True:
    step += 1
    state["heads"].fill_(step)
    save_state(Path(sys.argv[1]), "step", step, state | {"step": step}, keep=2)
"""


def test_sigterm_saves_and_ends_with_status_0(
    model_path: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = load_file(run(model_path, data, tmp_path / "straight") / HEADS_FILE)
    original = loop_module.take_step
    before = signal.getsignal(signal.SIGTERM)

    def terminated(run, stage, step):  # type: ignore[no-untyped-def]
        if step == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(run, stage, step)

    monkeypatch.setattr(loop_module, "take_step", terminated)
    with pytest.raises(SystemExit) as end:
        run(model_path, data, tmp_path / "run")
    assert end.value.code == 0
    assert signal.getsignal(signal.SIGTERM) == before
    stored = load_newest_state(tmp_path / "run" / "states")
    assert stored is not None
    assert stored["step"] == 7
    monkeypatch.setattr(loop_module, "take_step", original)
    resumed = load_file(run(model_path, data, tmp_path / "run") / HEADS_FILE)
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
    assert log(tmp_path / "run") == log(tmp_path / "straight")


def test_ctrl_c_in_the_middle_of_a_step_waits_for_its_end(
    model_path: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights have changed already, and the step is not counted yet."""
    straight = load_file(run(model_path, data, tmp_path / "straight") / HEADS_FILE)
    original = torch.optim.AdamW.step
    taken = 0

    def interrupted(self, *given):  # type: ignore[no-untyped-def]
        nonlocal taken
        original(self, *given)
        taken += 1
        if taken == 3:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(torch.optim.AdamW, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(model_path, data, tmp_path / "run")
    stored = load_newest_state(tmp_path / "run" / "states")
    assert stored is not None
    assert stored["step"] == 3
    monkeypatch.setattr(torch.optim.AdamW, "step", original)
    resumed = load_file(run(model_path, data, tmp_path / "run") / HEADS_FILE)
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)


@pytest.mark.parametrize("moments", [3, pytest.param(50, marks=pytest.mark.long)])
def test_killed_while_saving(tmp_path: Path, moments: int) -> None:
    """kill -9 at random moments of a process that does nothing but save."""
    generator = random.Random(0)
    newest = 0
    for _ in range(moments):
        command = [sys.executable, "-c", SAVING, str(tmp_path), str(newest)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(generator.uniform(0.05, 0.5))
        process.kill()
        process.wait()
        process.stdout.close()
        stored = load_newest_state(tmp_path)
        if stored is not None:
            assert stored["step"] >= newest
            assert (stored["heads"] == stored["step"]).all()
            newest = stored["step"]
    assert newest > 0


def test_the_newest_are_kept_and_the_best(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save_state(tmp_path, "step", step, {"step": step}, keep=3)
    save_state(tmp_path, "best", 2, {"step": 2}, keep=1)
    save_state(tmp_path, "best", 4, {"step": 4}, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "best-00000004",
        "step-00000002",
        "step-00000003",
        "step-00000004",
    ]


def test_a_full_disk_loses_nothing_that_was_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_state(tmp_path, "step", 1, {"step": 1}, keep=2)

    def full(state, file):  # type: ignore[no-untyped-def]
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space left"):
        save_state(tmp_path, "step", 2, {"step": 2}, keep=2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_the_command_line_ends_with_status_0(model_path: Path, data: Path, tmp_path: Path) -> None:
    """As a scheduler does it: SIGTERM to a running process."""
    command = [sys.executable, "-m", "medusa.train", "--config", str(CONFIG), f"backbone.path={model_path}"]
    command += [f"data.train={data}", f"output.dir={tmp_path}", "optimization.epochs=5000", "output.save_every=100000"]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (tmp_path / "metrics.jsonl").exists() or not (tmp_path / "metrics.jsonl").read_text():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.terminate()
    assert process.wait(timeout=60) == 0
    assert load_newest_state(tmp_path / "states") is not None
