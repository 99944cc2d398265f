"""What is exported computes the same as what was trained, by each engine's own rules of reading."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from chatml import byte_tokenizer, save_tiny_chat_model
from console import medusa
from safetensors.torch import load_file
from tiny import CONFIGS, random_model, tiny_medusa
from transformers import AutoModelForCausalLM, PreTrainedModel

from medusa import MedusaModel
from medusa.checkpoint import CONFIG_FILE, HEADS_FILE
from medusa.engine_rules import read_as
from medusa.engines import ENGINES
from medusa.export import export
from medusa.materialise import full_projection
from medusa.tree_search import search_tree

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


def model_of(name: str, path: Path) -> PreTrainedModel:
    """A saved model of another architecture, for the byte tokenizer."""
    config = deepcopy(CONFIGS[name])
    config.vocab_size = len(byte_tokenizer())
    random_model(config, torch.float32).save_pretrained(path)
    return AutoModelForCausalLM.from_pretrained(path)


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


def test_config_keys_are_those_that_each_engine_reads(saved: Path, tmp_path: Path) -> None:
    for engine in ENGINES:
        export(saved, engine, tmp_path / engine)
        entries = config_of(tmp_path / engine)
        assert entries["medusa_num_heads"] == 3
        assert entries["medusa_fc_bias"] is True
        assert {"hidden_size", "vocab_size", "base_model_name_or_path", "backbone_fingerprint"} <= entries.keys()
        assert not {"architectures", "num_attention_heads", "truncated_vocab_size"} & entries.keys()
        assert (entries.get("num_medusa_heads") == 3) == (engine == "tensorrt-llm")
        for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
            assert (tmp_path / engine / name).exists(), (engine, name)


@pytest.mark.parametrize("engine", ENGINES)
def test_what_was_exported_comes_back_bit_for_bit(
    backbone: PreTrainedModel, saved: Path, tmp_path: Path, engine: str
) -> None:
    """Native -> the engine's format -> native, by what the tensors say."""
    export(saved, engine, tmp_path / "there")
    MedusaModel.from_pretrained(tmp_path / "there", backbone=backbone).save_pretrained(tmp_path / "back")
    before, after = load_file(saved / HEADS_FILE), load_file(tmp_path / "back" / HEADS_FILE)
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_a_backbone_without_a_tokenizer(backbone: PreTrainedModel, tmp_path: Path) -> None:
    backbone.save_pretrained(tmp_path / "model")
    bare = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    tiny_medusa(bare, num_heads=3).save_pretrained(tmp_path / "heads")
    export(tmp_path / "heads", "vllm", tmp_path / "there")
    assert not (tmp_path / "there" / "tokenizer.json").exists()
    assert (tmp_path / "there" / "model.safetensors").exists()


def test_the_searched_tree_becomes_a_list_of_choices(saved: Path, tmp_path: Path) -> None:
    without = export(saved, "tensorrt-llm", tmp_path / "without")
    assert json.loads((tmp_path / "without" / "medusa_choices.json").read_text()) == [[0], [0, 0], [0, 0, 0]]
    assert any("no tree was searched" in remark for remark in without.remarks)
    search_tree(torch.tensor([[0, 0, 0], [1, 0, 1], [0, 1, 0]] * 5), 100).save(saved)
    export(saved, "tensorrt-llm", tmp_path / "all")
    paths = json.loads((tmp_path / "all" / "medusa_choices.json").read_text())
    assert [0, 1, 0] in paths
    assert len(paths) <= 63
    export(saved, "tensorrt-llm", tmp_path / "two", num_heads=2)
    assert max(map(len, json.loads((tmp_path / "two" / "medusa_choices.json").read_text()))) == 2


@pytest.mark.parametrize("engine", ENGINES)
def test_native_again_is_bit_identical(saved: Path, tmp_path: Path, engine: str) -> None:
    """Native -> engine -> native; how an engine reads it stands for our own reader of its format."""
    export(saved, engine, tmp_path / engine)
    read = read_as(engine, tmp_path / engine, 3)
    stored = load_file(saved / HEADS_FILE)
    for k in range(3):
        weight, bias = read.blocks[k][0]
        projection = read.projections[k]
        assert projection is not None
        assert bias is not None
        assert torch.equal(weight, stored[f"{k}.0.linear.weight"])
        assert torch.equal(bias, stored[f"{k}.0.linear.bias"])
        assert torch.equal(projection, stored[f"{k}.1.weight"])


@pytest.mark.parametrize("config", [{}, {"draft_vocab": DRAFT, "projection": "shared", "sequential": True}])
def test_native_export_keeps_everything(backbone: PreTrainedModel, tmp_path: Path, config: dict[str, Any]) -> None:
    checkpoint = save(backbone, tmp_path / "heads", **config)
    search_tree(torch.tensor([[0, 0, 0], [1, 0, 1]] * 5), 20).save(checkpoint)
    export(checkpoint, "native", tmp_path / "again")
    before, after = everything_in(checkpoint), everything_in(tmp_path / "again")
    assert before.keys() == after.keys()
    assert all(before[name] == after[name] for name in before if name != HEADS_FILE)
    first, second = load_file(checkpoint / HEADS_FILE), load_file(tmp_path / "again" / HEADS_FILE)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    export(checkpoint, "native", tmp_path / "two", num_heads=2, dtype="bfloat16")
    two = MedusaModel.from_pretrained(tmp_path / "two", backbone=backbone)
    assert two.config.num_heads == 2
    assert two.searched_tree is not None
    assert two.searched_tree.best(100).depth == 2
    assert load_file(tmp_path / "two" / HEADS_FILE)["0.0.linear.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("engine", ENGINES)
def test_other_types_and_fewer_heads(backbone: PreTrainedModel, tmp_path: Path, engine: str) -> None:
    checkpoint = save(backbone, tmp_path / "heads", **KINDS["shared, draft"])
    done = export(checkpoint, engine, dtype="bfloat16", num_heads=2)
    read = read_as(engine, Path(done.out), 2)
    assert read.blocks[1][0][0].dtype == torch.bfloat16
    assert config_of(Path(done.out))["medusa_num_heads"] == 2
    with pytest.raises(ValueError, match=r"3|blocks\.2"):
        read_as(engine, Path(done.out), 3)


def test_tokens_outside_the_draft_vocabulary_never_win() -> None:
    """Where all logits are negative, as GPT-2's are, rows of zeros would win."""
    torch.manual_seed(0)
    weight = torch.randn(5, 16)
    hidden = -10 * weight.mean(dim=0) + 0.1 * torch.randn(50, 16)
    full = full_projection(weight, (1, 3, 5, 7, 9), 20)
    zeros = torch.zeros_like(full).index_copy(0, torch.tensor([1, 3, 5, 7, 9]), weight)
    right = torch.tensor([1, 3, 5, 7, 9])[(hidden @ weight.T).argmax(dim=-1)]
    assert torch.equal((hidden @ full.T).argmax(dim=-1), right)
    assert not torch.equal((hidden @ zeros.T).argmax(dim=-1), right)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("option", ["root_conditioned", "sequential"])
def test_heads_that_see_tokens_are_refused(backbone: PreTrainedModel, tmp_path: Path, engine: str, option: str) -> None:
    checkpoint = save(backbone, tmp_path / "heads", **{option: True})
    with pytest.raises(ValueError, match=f"hidden state alone.*heads.{option}=false"):
        export(checkpoint, engine)


@pytest.mark.parametrize("projection", ["own", "shared"])
def test_an_lm_head_with_bias_is_refused(tmp_path: Path, projection: str) -> None:
    save(model_of("phi", tmp_path / "phi"), tmp_path / "heads", projection=projection)
    with pytest.raises(ValueError, match="bias"):
        export(tmp_path / "heads", "vllm")


def test_an_adapter_must_be_folded_first_and_a_backbone_of_its_own_is_named(
    backbone: PreTrainedModel, tmp_path: Path
) -> None:
    medusa_model = tiny_medusa(backbone, num_heads=3)
    medusa_model.save_pretrained(tmp_path / "own", byte_tokenizer(), with_backbone=True)
    export(tmp_path / "own", "tgi", tmp_path / "tgi")
    assert config_of(tmp_path / "tgi")["base_model_name_or_path"] == str(tmp_path / "own" / "backbone")
    checkpoint = save(backbone, tmp_path / "heads")
    (checkpoint / "adapter").mkdir()
    with pytest.raises(ValueError, match="medusa merge"):
        export(checkpoint, "vllm")


def test_a_softcap_changes_no_guess(tmp_path: Path) -> None:
    checkpoint = save(model_of("gemma3", tmp_path / "gemma"), tmp_path / "heads", projection="shared")
    assert export(checkpoint, "vllm").check is not None


def test_dry_run_writes_nothing(saved: Path, tmp_path: Path) -> None:
    before = everything_in(tmp_path)
    done = export(saved, "vllm", dry_run=True)
    assert everything_in(tmp_path) == before
    written = export(saved, "vllm")
    sizes = {name: len(content) for name, content in everything_in(Path(written.out)).items()}
    assert 0 < sizes["model.safetensors"] - done.files["model.safetensors"] < 4096
    assert all(sizes[name] == size for name, size in done.files.items() if name != "model.safetensors")
    assert not done.files.keys() - sizes.keys()


def test_top1_before_and_after(backbone: PreTrainedModel, data: Path, tmp_path: Path) -> None:
    checkpoint = save(backbone, tmp_path / "heads", projection="shared", draft_vocab=tuple(range(20, 80)))
    found = json.loads(medusa("export", checkpoint, "--to", "tgi", "--data", data, "--json"))["top1"]
    assert found["before"] == found["after"]
    assert len(found["after"]) == 3


def test_the_command(saved: Path, tmp_path: Path) -> None:
    figures = json.loads(medusa("export", saved, "--to", "vllm", "--out", tmp_path / "out", "--heads", 2, "--json"))
    assert figures["num_heads"] == 2
    assert figures["check"]["same_guess"] == [1.0, 1.0]
    assert "chain" in medusa("export", saved, "--to", "vllm", "--dry-run", "--out", tmp_path / "other")
