"""Backbones in 4 and 8 bits, by bitsandbytes on the CPU: heads train on them, and QLoRA adapters in them."""

from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from chatml import save_tiny_chat_model
from training import log, run, write_chats

from medusa import MedusaModel
from medusa.compatibility import fingerprint
from medusa.train import loop as loop_module

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed (pip install medusa-heads[quantization])")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("user")
    save_tiny_chat_model(directory / "model")
    write_chats(directory / "chats.jsonl", 8)
    return directory


@pytest.mark.parametrize("bits", ["4bit", "8bit"])
@pytest.mark.parametrize("precision", ["none", "bf16"])
def test_qlora(folder: Path, tmp_path: Path, bits: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapter learns, and the checkpoint carries it to a backbone in full precision."""
    seen = {}
    original = loop_module.finish

    def spy(run, stage, directory, tracker):  # type: ignore[no-untyped-def]
        seen["layers"] = {type(module).__name__ for module in run.model.model.modules()}
        seen["learned"] = {name: parameter.detach().clone() for name, parameter in stage.backbone.items()}
        original(run, stage, directory, tracker)

    monkeypatch.setattr(loop_module, "finish", spy)
    AcceleratorState._reset_state(reset_partial_state=True)
    options = [f"backbone.quantization={bits}", f"optimization.mixed_precision={precision}", "joint.method=lora"]
    options += ["optimization.max_steps=2", "joint.epochs=3"]
    options += ["joint.learning_rate=0.01", "joint.backbone_learning_rate=0.01"]
    final = run(folder / "model", folder / "chats.jsonl", tmp_path / "run", *options)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert {"4bit": "Linear4bit", "8bit": "Linear8bitLt"}[bits] in seen["layers"]
    assert all(parameter.dtype == torch.float32 for parameter in seen["learned"].values())
    assert all(parameter.any() for name, parameter in seen["learned"].items() if "lora_B" in name)
    lines = log(tmp_path / "run")
    assert lines[-2]["loss/backbone"] < 0.9 * lines[2]["loss/backbone"]
    model = MedusaModel.from_pretrained(final)
    assert fingerprint(model.backbone.lm_weight)
    assert not any("bit" in type(module).__name__ for module in model.model.modules())
