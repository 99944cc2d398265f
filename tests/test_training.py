"""The loop: it learns, it leaves the backbone alone, it resumes, and it does not care how the rows are split."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from safetensors.torch import load_file
from training import CONFIG, log, run

from medusa import MedusaModel
from medusa.checkpoint import HEADS_FILE
from medusa.train import heads_stage as heads_module
from medusa.train import loop as loop_module
from medusa.train import run as run_module
from medusa.train.run_state import STATE_FILE


def weights(final: Path) -> dict[str, torch.Tensor]:
    return load_file(final / HEADS_FILE)


def test_it_learns_and_leaves_the_backbone_alone(model_path: Path, data: Path, tmp_path: Path) -> None:
    before = hashlib.sha256((model_path / "model.safetensors").read_bytes()).hexdigest()
    captured = {}
    original = loop_module.finish

    def spy(run, stage, directory, tracker):  # type: ignore[no-untyped-def]
        captured["backbone"] = {name: p.clone() for name, p in run.model.model.named_parameters()}
        captured["trainable"] = {name for name, p in run.model.named_parameters() if p.requires_grad}
        original(run, stage, directory, tracker)

    loop_module.finish = spy
    try:
        final = run(model_path, data, tmp_path / "run", "optimization.epochs=60", f"data.eval={data}")
    finally:
        loop_module.finish = original
    lines = log(tmp_path / "run")
    assert lines[-2]["loss"] < 0.3 * lines[0]["loss"]
    assert lines[-2]["learning_rate"] < 1e-5
    for k in range(3):
        assert lines[-2][f"top1/head{k}"] > 0.7  # overfit: twelve rows
    assert json.loads((final / "evaluation.json").read_text())["top1"][0] > 0.7
    assert captured["trainable"] == {f"heads.{k}.0.linear.{part}" for k in range(3) for part in ("weight", "bias")}
    stored = load_file(model_path / "model.safetensors")
    for name, parameter in captured["backbone"].items():
        assert torch.equal(parameter, stored.get(name, stored["model.embed_tokens.weight"])), name
    assert hashlib.sha256((model_path / "model.safetensors").read_bytes()).hexdigest() == before
    facts = json.loads((final / "provenance.json").read_text())
    assert facts["seed"] == 0
    assert facts["versions"]["torch"] == torch.__version__
    assert "num_heads: 3" in (tmp_path / "run" / "config.yaml").read_text()


def test_saved_heads_give_the_logits_they_had(model_path: Path, data: Path, tmp_path: Path) -> None:
    seen = {}
    original = loop_module.finish

    def spy(run, stage, directory, tracker):  # type: ignore[no-untyped-def]
        seen["logits"] = run.model.heads(torch.ones(1, 32), torch.tensor([5]))
        original(run, stage, directory, tracker)

    loop_module.finish = spy
    try:
        final = run(model_path, data, tmp_path / "run")
    finally:
        loop_module.finish = original
    loaded = MedusaModel.from_pretrained(final)
    assert torch.equal(loaded.heads(torch.ones(1, 32), torch.tensor([5])), seen["logits"])


def test_resumed_equals_uninterrupted(
    model_path: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Report R14: stopped by Ctrl-C in the middle of the second epoch; bit for bit the same heads, one log."""
    straight = weights(run(model_path, data, tmp_path / "straight"))
    original = loop_module.take_step

    def interrupt(run, stage, step):  # type: ignore[no-untyped-def]
        if step == 8:
            raise KeyboardInterrupt
        return original(run, stage, step)

    monkeypatch.setattr(loop_module, "take_step", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(model_path, data, tmp_path / "resumed")
    monkeypatch.setattr(loop_module, "take_step", original)
    resumed = weights(run(model_path, data, tmp_path / "resumed"))
    assert straight.keys() == resumed.keys()
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
    assert [line["step"] for line in log(tmp_path / "resumed")] == list(range(1, 13))
    assert log(tmp_path / "resumed") == log(tmp_path / "straight")


def test_crash_between_checkpoints_loses_only_what_came_after(
    model_path: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash at step 7 goes back to the state of step 4, and the log has no step twice."""
    original = loop_module.take_step

    def crash(run, stage, step):  # type: ignore[no-untyped-def]
        if step == 7:
            raise MemoryError
        return original(run, stage, step)

    monkeypatch.setattr(loop_module, "take_step", crash)
    with pytest.raises(MemoryError):
        run(model_path, data, tmp_path / "run")
    monkeypatch.setattr(loop_module, "take_step", original)
    (tmp_path / "run" / "states" / ".step-00000008.torn").mkdir()
    final = weights(run(model_path, data, tmp_path / "run"))
    straight = weights(run(model_path, data, tmp_path / "straight"))
    assert all(torch.equal(straight[name], final[name]) for name in straight)
    assert [line["step"] for line in log(tmp_path / "run")] == list(range(1, 13))


def test_resuming_with_other_settings_is_refused(model_path: Path, data: Path, tmp_path: Path) -> None:
    run(model_path, data, tmp_path / "run", "optimization.max_steps=2")
    with pytest.raises(ValueError, match="other settings in optimization"):
        run(model_path, data, tmp_path / "run", "optimization.max_steps=2", "optimization.learning_rate=0.5")


def test_a_run_of_an_older_version_goes_on(model_path: Path, data: Path, tmp_path: Path) -> None:
    """Its state does not know the options that came later."""
    out = tmp_path / "run"
    run(model_path, data, out)
    (state,) = sorted(out.glob("states/step-*"))[-1:]
    stored = torch.load(state / STATE_FILE, weights_only=True)
    del stored["config"]["joint"], stored["config"]["optimization"]["compile"]
    torch.save(stored, state / STATE_FILE)
    run(model_path, data, out)
    with pytest.raises(ValueError, match="other settings in joint"):
        run(model_path, data, out, "joint.method=lora")


def test_accumulation_and_batch_size_are_the_same_thing(model_path: Path, data: Path, tmp_path: Path) -> None:
    """Rows have different numbers of pairs, so a mean of means would differ."""
    whole = weights(run(model_path, data, tmp_path / "a", "optimization.batch_size=4"))
    parts = weights(run(model_path, data, tmp_path / "b", "optimization.batch_size=1", "optimization.accumulation=4"))
    for name in whole:
        torch.testing.assert_close(whole[name], parts[name], rtol=1e-4, atol=1e-6)


def test_two_processes_equal_one(model_path: Path, data: Path, tmp_path: Path) -> None:
    """Report R15, and an epoch whose last step has rows for one rank only (12 rows, 8 a step)."""
    one = weights(run(model_path, data, tmp_path / "one", "optimization.batch_size=8"))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "-m", "medusa.train"]
    command += ["--config", str(CONFIG), f"backbone.path={model_path}", f"data.train={data}"]
    command += [f"output.dir={tmp_path / 'two'}", "optimization.batch_size=4"]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    two = weights(tmp_path / "two" / "final")
    assert one.keys() == two.keys()
    for name in one:
        assert torch.isfinite(two[name].float()).all()
        torch.testing.assert_close(one[name], two[name], rtol=1e-4, atol=1e-6)
    assert len(log(tmp_path / "two")) == len(log(tmp_path / "one"))


def test_a_compiled_loss_is_the_same_loss(model_path: Path, data: Path, tmp_path: Path) -> None:
    options = ("optimization.max_steps=3", "output.log_every=1")
    run(model_path, data, tmp_path / "eager", *options)
    run(model_path, data, tmp_path / "compiled", *options, "optimization.compile=true")
    for eager, compiled in zip(log(tmp_path / "eager"), log(tmp_path / "compiled"), strict=True):
        assert compiled == pytest.approx(eager, rel=1e-4)


def test_loss_that_stays_infinite_stops_with_the_rows(
    model_path: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps with such a loss change nothing, so the heads in the last state are finite."""
    original = heads_module.make_batch

    def poisoned(rows, hidden, *rest):  # type: ignore[no-untyped-def]
        return original(rows, [states * float("inf") for states in hidden], *rest)

    monkeypatch.setattr(heads_module, "make_batch", poisoned)
    with pytest.raises(ValueError, match=r"not finite for 5 steps.*learning_rate"):
        run(model_path, data, tmp_path / "run")
    state = torch.load(next((tmp_path / "run" / "states").glob("step-*")) / "state.pt", weights_only=True)
    assert all(torch.isfinite(tensor).all() for tensor in state["heads"].values())


def test_a_gradient_that_is_not_finite_changes_nothing(
    model_path: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss is: the run goes on behind that step."""
    original = run_module.apply_gradients
    calls = 0

    def poisoned(run, stage, parameters, finite):  # type: ignore[no-untyped-def]
        nonlocal calls
        parameters = list(parameters)
        calls += 1
        if calls == 2:
            parameters[0].grad[0] = float("inf")
            before = [parameter.clone() for parameter in parameters]
        norm = original(run, stage, parameters, finite)
        if calls == 2:
            assert all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))
        return norm

    monkeypatch.setattr(heads_module, "apply_gradients", poisoned)
    final = weights(run(model_path, data, tmp_path / "run"))
    assert calls > 2
    assert all(torch.isfinite(tensor).all() for tensor in final.values())


def test_wandb_offline_is_one_run_and_jsonl_stays_the_truth(
    model_path: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    run(model_path, data, tmp_path / "run", "wandb.enabled=true", "optimization.max_steps=3")
    assert len(list((tmp_path / "run" / "wandb").glob("offline-run-*"))) == 1
    assert len(log(tmp_path / "run")) == 3


def test_training_goes_on_when_wandb_does_not(
    model_path: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.warns(UserWarning, match="Weights & Biases is off"):
        run(model_path, data, tmp_path / "run", "wandb.enabled=true", "optimization.max_steps=1")
    assert len(log(tmp_path / "run")) == 1


def test_bf16_backbone_still_trains_fp32_heads(model_path: Path, data: Path, tmp_path: Path) -> None:
    """Report R13: small updates are not lost to bf16 weights."""
    AcceleratorState._reset_state(reset_partial_state=True)  # one precision a process, as accelerate wants it
    final = run(
        model_path, data, tmp_path / "run", "backbone.dtype=bfloat16", "optimization.mixed_precision=bf16",
        "optimization.learning_rate=1e-5",
    )  # fmt: skip
    AcceleratorState._reset_state(reset_partial_state=True)
    state = torch.load(sorted((tmp_path / "run" / "states").glob("step-*"))[-1] / "state.pt", weights_only=True)
    assert all(tensor.dtype == torch.float32 for tensor in state["heads"].values())
    assert all(tensor.any() for tensor in state["heads"].values())
    assert all(tensor.dtype == torch.bfloat16 for name, tensor in weights(final).items() if name != "draft_vocab")


def test_launchers_that_split_the_model_themselves_are_refused() -> None:
    with pytest.raises(ValueError, match=r"told to use DEEPSPEED.*optimization.shard=true"):
        loop_module.refuse_launcher(SimpleNamespace(distributed_type=DistributedType.DEEPSPEED))  # type: ignore[arg-type]


def test_heads_start_where_others_ended(model_path: Path, data: Path, tmp_path: Path) -> None:
    first = run(model_path, data, tmp_path / "first", "optimization.epochs=4")
    second = run(model_path, data, tmp_path / "second", "optimization.max_steps=1", f"heads.init_from={first}")
    assert log(tmp_path / "second")[0]["loss"] < 0.8 * log(tmp_path / "first")[0]["loss"]
    assert torch.equal(weights(first)["draft_vocab"], weights(second)["draft_vocab"])
    with pytest.raises(ValueError, match=r"missing 3\.0\.linear\.weight"):
        run(model_path, data, tmp_path / "third", "heads.num_heads=4", f"heads.init_from={first}")
    with pytest.raises(ValueError, match=r"see embeddings at unit scale.*set heads\.embedding_scale=unit"):
        run(model_path, data, tmp_path / "raw", "heads.embedding_scale=raw", f"heads.init_from={first}")


def test_heads_like_those_of_the_hydra_repository_learn_and_learn_on(
    model_path: Path, data: Path, tmp_path: Path
) -> None:
    shape = [
        "projection=own",
        "root_conditioned=false",
        "sequential=true",
        "embedding_scale=raw",
        "projection_bias=true",
    ]
    options = [f"heads.{option}" for option in shape]
    first = run(model_path, data, tmp_path / "first", *options, "optimization.epochs=4")
    assert weights(first)["0.1.bias"].any(), "the bias learns too"
    assert MedusaModel.from_pretrained(first).config.embedding_scale == "raw"
    run(model_path, data, tmp_path / "second", *options, "optimization.max_steps=1", f"heads.init_from={first}")
    assert log(tmp_path / "second")[0]["loss"] < 0.9 * log(tmp_path / "first")[0]["loss"]


def test_heads_that_start_on_another_backbone_are_told(model_path: Path, data: Path, tmp_path: Path) -> None:
    first = run(model_path, data, tmp_path / "first", "optimization.max_steps=1")
    entries = json.loads((first / "config.json").read_text())
    entries["backbone_fingerprint"][0] += 1
    entries["chat_template_sha256"] = "0" * 64
    (first / "config.json").write_text(json.dumps(entries))
    with (
        pytest.warns(UserWarning, match=r"another backbone than .*another LM head"),
        pytest.warns(UserWarning, match=r"another chat template"),
    ):
        run(model_path, data, tmp_path / "second", "optimization.max_steps=1", f"heads.init_from={first}")
