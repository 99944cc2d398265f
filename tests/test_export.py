"""What is exported computes the same as what was trained, by each engine's own rules of reading."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from chatml import byte_tokenizer, save_tiny_chat_model
from tiny import tiny_medusa
from transformers import AutoModelForCausalLM, PreTrainedModel

from medusa import MedusaModel
from medusa.checkpoint import CONFIG_FILE
from medusa.engine_rules import read_as
from medusa.engines import ENGINES
from medusa.export import export

DRAFT = (0, 3, 4, 50, 51, 52, 96, 200)
KINDS: dict[str, dict[str, Any]] = {
    "own": {},
    "own, two blocks": {"num_layers": 2},
    "own, draft": {"draft_vocab": DRAFT},
    "shared": {"projection": "shared"},
    "shared, two blocks": {"projection": "shared", "num_layers": 2},
    "shared, draft": {"projection": "shared", "draft_vocab": DRAFT},
}


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    path = save_tiny_chat_model(tmp_path_factory.mktemp("backbone"))
    return AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval()


def save(backbone: PreTrainedModel, path: Path, **config: Any) -> Path:
    """A checkpoint of three heads with random weights."""
    tiny_medusa(backbone, num_heads=3, **config).save_pretrained(path, byte_tokenizer())
    return path


@pytest.fixture
def saved(backbone: PreTrainedModel, tmp_path: Path) -> Path:
    return save(backbone, tmp_path / "heads")


def everything_in(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def config_of(path: Path) -> dict[str, Any]:
    entries = json.loads((path / CONFIG_FILE).read_text())
    assert isinstance(entries, dict)
    return entries


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_computes_what_our_heads_compute(
    backbone: PreTrainedModel, tmp_path: Path, engine: str, kind: str
) -> None:
    checkpoint = save(backbone, tmp_path / "heads", **KINDS[kind])
    if engine == "reference" and KINDS[kind].get("num_layers", 1) > 1:
        with pytest.raises(ValueError, match=r"one residual block over and over.*heads.num_layers=1"):
            export(checkpoint, engine)
        return
    done = export(checkpoint, engine)
    assert done.check is not None
    assert done.check.same_guess == [1.0] * 3
    model = MedusaModel.from_pretrained(checkpoint, backbone=backbone)
    read = read_as(engine, Path(done.out), 3)
    assert read.dropped == []
    hidden = torch.randn(7, model.backbone.hidden_size)
    with torch.no_grad():
        ours = model.heads(hidden, torch.zeros(7, dtype=torch.long))  # [K, P, Vd]
        ids = model.heads.to_vocab(torch.arange(model.heads.draft_size))
        for k in range(3):
            theirs = read.logits(k, hidden, model.backbone.lm_weight)  # [P, V]
            torch.testing.assert_close(theirs[:, ids], ours[k], rtol=1e-5, atol=1e-5)
            assert torch.equal(theirs.argmax(dim=-1), ids[ours[k].argmax(dim=-1)])
