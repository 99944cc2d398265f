"""Every shipped recipe runs to its end through the command line, on a tiny model and a few steps."""

import importlib.util
import json
from pathlib import Path

import pytest
from chatml import save_tiny_chat_model
from console import medusa

from medusa import MedusaModel
from medusa.train import load_config

CONFIGS = Path(__file__).parent.parent / "configs"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, and answers of its own with recorded states."""
    directory = tmp_path_factory.mktemp("user")
    save_tiny_chat_model(directory / "model")
    (directory / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"count {i}"}) + "\n" for i in range(4)))
    command = ["distill", "--backbone", directory / "model", "--prompts", directory / "prompts.jsonl", "--record"]
    medusa(*command, "--out", directory / "answers.jsonl", "--max-new-tokens", 12)
    return directory


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda file: file.stem)
def test_recipe(file: Path, folder: Path) -> None:
    tiny = [f"backbone.path={folder / 'model'}", f"data.train={folder / 'answers.jsonl'}"]
    config = load_config(file, tiny)
    out = folder / "runs" / file.stem
    tiny += [
        f"output.dir={out}",
        "optimization.max_steps=2",
        "optimization.batch_size=2",
        "optimization.accumulation=1",
    ]
    tiny += ["joint.max_steps=2", "optimization.mixed_precision=none", "backbone.dtype=float32"]
    if config.data.eval is not None:
        tiny.append(f"data.eval={folder / 'answers.jsonl'}")
    if config.backbone.quantization != "none" and importlib.util.find_spec("bitsandbytes") is None:
        tiny.append("backbone.quantization=none")
    medusa("train", "--config", file, *tiny)
    model = MedusaModel.from_pretrained(out / "final")
    assert len(model.heads) == config.heads.num_heads
    assert (out / "final" / "adapter").is_dir() == (config.joint.method == "lora")
    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert steps[-1] == 2 * ((config.optimization.epochs > 0) + (config.joint.method != "none"))
