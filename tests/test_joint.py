"""Medusa-2: heads alone, then heads and backbone; what learns, what it is compared with, what is saved."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from chatml import save_tiny_chat_model
from console import medusa
from safetensors.torch import load_file
from training import CONFIG, log
from training import run as run_tiny
from transformers import AutoModelForCausalLM

from medusa import MedusaModel
from medusa.train import loop as loop_module

IDS = torch.arange(20, 40)[None]


def run(model_path: Path, data: Path, out: Path, *overrides: str) -> Path:
    options = [
        "joint.method=lora",
        "joint.lora_rank=4",
        "joint.learning_rate=0.01",
        "joint.backbone_learning_rate=0.01",
    ]
    options += ["optimization.max_steps=3", "joint.max_steps=6", "joint.warmup_steps=1"]
    return run_tiny(model_path, data, out, *options, *overrides)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS).logits
    return found


@pytest.mark.parametrize("method", ["lora", "full", "last_layers"])
def test_both_learn_and_what_is_saved_is_what_was_trained(
    model_path: Path, data: Path, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reports T9, T12, X8: the adapter learns, the drift is told, and the checkpoint gives the trained logits."""
    seen = {}
    original = loop_module.finish

    def spy(run, stage, directory, tracker):  # type: ignore[no-untyped-def]
        seen["logits"] = logits(run.model.model)
        seen["heads"] = run.model.heads(torch.ones(1, 32), torch.tensor([5]))
        seen["learned"] = set(stage.backbone)
        original(run, stage, directory, tracker)

    monkeypatch.setattr(loop_module, "finish", spy)
    final = run(model_path, data, tmp_path / "run", f"joint.method={method}", "joint.epochs=2", "joint.max_steps=12")
    before = AutoModelForCausalLM.from_pretrained(model_path)
    assert not torch.allclose(seen["logits"], logits(before), atol=1e-2)
    loaded = MedusaModel.from_pretrained(final)
    torch.testing.assert_close(logits(loaded.model), seen["logits"], rtol=1e-4, atol=1e-4)
    assert torch.equal(loaded.heads(torch.ones(1, 32), torch.tensor([5])), seen["heads"])
    frozen = {"lora": "lora_", "full": "layers.0.mlp", "last_layers": "layers.1."}[method]
    assert any(frozen in name for name in seen["learned"])
    assert not any("lm_head" in name or "embed_tokens" in name for name in seen["learned"])
    assert method != "last_layers" or not any("layers.0." in name for name in seen["learned"])
    lines = log(tmp_path / "run")
    assert [line["step"] for line in lines[:-1]] == list(range(1, 16))
    assert lines[-2]["loss/backbone"] < 0.8 * lines[3]["loss/backbone"]
    assert lines[-2]["learning_rate/backbone"] < lines[6]["learning_rate/backbone"]
    drift = json.loads((final / "drift.json").read_text())
    assert drift["perplexity_after"] < drift["perplexity_before"]
    assert drift["kl"] > 0.01
    assert 0 <= drift["greedy_agreement"] < 1


def test_a_teacher_holds_the_backbone(model_path: Path, data: Path, tmp_path: Path) -> None:
    """With the divergence from itself as its loss the backbone moves less than when it learns the text."""
    figures = {}
    for loss in ("teacher", "data"):
        final = run(model_path, data, tmp_path / loss, f"joint.loss={loss}", "joint.heads_weight=0.05")
        figures[loss] = json.loads((final / "drift.json").read_text())
    assert log(tmp_path / "teacher")[3]["loss/backbone"] < 1e-5  # a fresh adapter is no change
    assert 0 < figures["teacher"]["kl"] < 0.3 * figures["data"]["kl"]
    assert figures["teacher"]["greedy_agreement"] > figures["data"]["greedy_agreement"]


def test_resumed_equals_uninterrupted(
    model_path: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the heads' stage, at its end, and in the joint one, dropout included."""
    options = ("joint.lora_dropout=0.3", "joint.loss=teacher", "joint.heads_schedule=sine")
    straight = run(model_path, data, tmp_path / "straight", *options)
    original = loop_module.take_step
    for stop in (2, 3, 7):

        def interrupt(run, stage, step, stop=stop):  # type: ignore[no-untyped-def]
            if step == stop:
                raise KeyboardInterrupt
            return original(run, stage, step)

        monkeypatch.setattr(loop_module, "take_step", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(model_path, data, tmp_path / str(stop), *options)
        monkeypatch.setattr(loop_module, "take_step", original)
        resumed = run(model_path, data, tmp_path / str(stop), *options)
        for file in ("medusa_lm_head.safetensors", "adapter/adapter_model.safetensors"):
            a, b = load_file(straight / file), load_file(resumed / file)
            assert a.keys() == b.keys()
            assert all(torch.equal(a[name], b[name]) for name in a), (stop, file)
        assert log(tmp_path / str(stop)) == log(tmp_path / "straight")


def test_merge(model_path: Path, data: Path, tmp_path: Path) -> None:
    """The folded backbone is a model of its own, and the heads beside it find it."""
    final = run(model_path, data, tmp_path / "run", "heads.projection=own", "joint.lora_targets=[q_proj,lm_head]")
    report = json.loads(medusa("merge", final, "--out", tmp_path / "merged", "--json"))
    assert report["relative_difference"] < 1e-5
    assert report["greedy_agreement"] == 1
    together = MedusaModel.from_pretrained(final)
    merged = MedusaModel.from_pretrained(tmp_path / "merged")
    alone = AutoModelForCausalLM.from_pretrained(tmp_path / "merged" / "backbone")
    assert torch.equal(logits(merged.model), logits(alone))
    torch.testing.assert_close(logits(together.model), logits(alone), rtol=1e-5, atol=1e-5)
    assert all(torch.equal(p, q) for p, q in zip(together.heads.parameters(), merged.heads.parameters(), strict=True))
    with pytest.raises(AssertionError, match="ended with 1"):
        medusa("merge", tmp_path / "merged", "--out", tmp_path / "again")


def test_adapters_on_shared_weights_are_refused(model_path: Path, data: Path, tmp_path: Path) -> None:
    """Report X8."""
    with pytest.raises(ValueError, match=r"lm_head.*heads share it"):
        run(model_path, data, tmp_path / "a", "joint.lora_targets=[lm_head]")
    tied = AutoModelForCausalLM.from_pretrained(model_path)
    tied.config.tie_word_embeddings = True
    tied.tie_weights()
    save_tiny_chat_model(tmp_path / "tied")
    tied.save_pretrained(tmp_path / "tied")
    with pytest.raises(ValueError, match="are one weight"):
        run(tmp_path / "tied", data, tmp_path / "b", "joint.lora_targets=[lm_head]", "heads.projection=own")
    run(tmp_path / "tied", data, tmp_path / "c", "joint.max_steps=1")  # the other layers can learn
    with pytest.raises(ValueError, match=r"lora_targets is \['nowhere'\]"):
        run(model_path, data, tmp_path / "d", "joint.lora_targets=[nowhere]")


def test_accumulation_and_batch_size_are_the_same_thing(model_path: Path, data: Path, tmp_path: Path) -> None:
    plain = ("joint.lora_dropout=0", "optimization.accumulation=1")
    whole = run(model_path, data, tmp_path / "a", *plain, "optimization.batch_size=4")
    parts = run(model_path, data, tmp_path / "b", plain[0], "optimization.batch_size=1", "optimization.accumulation=4")
    for file in ("medusa_lm_head.safetensors", "adapter/adapter_model.safetensors"):
        a, b = load_file(whole / file), load_file(parts / file)
        for name in a:
            torch.testing.assert_close(a[name], b[name], rtol=1e-3, atol=2e-6)


@pytest.mark.parametrize("options", [("joint.loss=teacher",), ("joint.loss=teacher", "optimization.shard=true")])
def test_two_processes_equal_one(model_path: Path, data: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    """Reports R15, T5: data parallel, and split over both by FSDP2; stopped in the middle of the joint stage, too."""
    common = ["joint.method=lora", "joint.lora_rank=4", "optimization.max_steps=1", "joint.max_steps=2"]
    common += ["joint.lora_dropout=0", "joint.warmup_steps=1", "optimization.max_grad_norm=0.1", f"data.eval={data}"]
    common += [options[0], "output.eval_every=1", "output.save_every=1"]
    one = run_tiny(model_path, data, tmp_path / "one", *common, "optimization.batch_size=8")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "-m", "medusa.train"]
    command += ["--config", str(CONFIG), f"backbone.path={model_path}", f"data.train={data}"]
    command += [f"output.dir={tmp_path / 'two'}", "optimization.batch_size=4", *common, *options]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    split = "optimization.shard=true" in options
    for attempt in range(2 if split else 1):
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
        assert done.returncode == 0, done.stderr[-3000:]
        parts = re.search(r"split with FSDP2: (\d+) of (\d+) parameters", done.stdout)
        assert (parts is not None) == split
        assert parts is None or int(parts[1]) < 0.6 * int(parts[2])
        two = tmp_path / "two" / "final"
        for file in ("medusa_lm_head.safetensors", "adapter/adapter_model.safetensors"):
            a, b = load_file(one / file), load_file(two / file)
            assert a.keys() == b.keys()
            for name in a:
                torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=2e-6, msg=f"{attempt} {name}")
        assert json.loads((two / "drift.json").read_text()) == pytest.approx(
            json.loads((one / "drift.json").read_text()), rel=1e-3, abs=1e-6
        )
        shutil.rmtree(two)
        shutil.rmtree(sorted((tmp_path / "two" / "states").glob("step-*"))[-1])  # go on from the one before
