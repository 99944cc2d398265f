"""Heads on a backbone they were not made for: what differs is named, and fine-tunes of the right one are welcome."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, config_of
from chatml import TAGGED, byte_tokenizer, save_tiny_chat_model
from tiny import CONFIGS, VOCAB, random_model, tiny_medusa, tiny_model
from transformers import PreTrainedModel

from medusa import MedusaModel
from medusa.checkpoint import CONFIG_FILE, HEADS_FILE
from medusa.cli_common import load
from medusa.compatibility import architecture
from medusa.export import export
from medusa.loading import load_backbone

MADE_FOR = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
LLAMA = {**MADE_FOR, "model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2}


def backbone_of(**fields: Any) -> PreTrainedModel:
    """A Llama whose LM head is the same in every test, with some fields of its configuration changed."""
    model = random_model(config_of("llama", {**LLAMA, **fields}))
    weight = model.get_output_embeddings().weight
    with torch.no_grad():
        weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(5), dtype=weight.dtype))
    return model


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tiny_medusa(backbone_of(), num_heads=2).save_pretrained(tmp_path / "heads", FakeTokenizer())
    return tmp_path / "heads"


class FakeTokenizer:
    chat_template: str | None = "{{ messages }}"

    def get_vocab(self) -> dict[str, int]:
        return {"a": 0, "z": 90}

    def save_pretrained(self, save_directory: str) -> None:
        (Path(save_directory) / "tokenizer.json").write_text("{}")


def change_config(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    entries = json.loads((path / CONFIG_FILE).read_text())
    change(entries)
    (path / CONFIG_FILE).write_text(json.dumps(entries))


def quietly(path: Path, backbone: PreTrainedModel) -> MedusaModel:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return MedusaModel.from_pretrained(path, backbone=backbone)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "mistral"}, "model_type llama, this one has mistral"),
        ({"num_hidden_layers": 3}, "num_hidden_layers 2, this one has 3"),
        ({"num_attention_heads": 8}, "num_attention_heads 4, this one has 8; head_dim 8, this one has 4"),
        ({"num_key_value_heads": 4}, "num_key_value_heads 2, this one has 4"),
        ({"head_dim": 16}, "head_dim 8, this one has 16"),
        ({"intermediate_size": 64}, "intermediate_size 48, this one has 64"),
        ({"vocab_size": 128}, r"vocab_size 97, this one has 128 \(the vocabulary was padded or extended\)"),
        (
            {"num_hidden_layers": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 5.0}},
            "num_hidden_layers 2, this one has 1",
        ),
    ],
)
def test_another_model_is_refused_by_what_differs(saved: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"heads was made for another backbone.*: {message}; use"):
        MedusaModel.from_pretrained(saved, backbone=backbone_of(**fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            r"rope_parameters\.rope_theta 10000\.0, this one has 500000\.0",
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
            r"rope_parameters\.rope_type default, this one has linear",
        ),
        ({"tie_word_embeddings": True}, "tie_word_embeddings False, this one has True"),
    ],
)
def test_a_model_that_merely_behaves_otherwise_loads_with_a_warning(
    saved: Path, fields: dict[str, Any], message: str
) -> None:
    with pytest.warns(UserWarning, match=message):
        MedusaModel.from_pretrained(saved, backbone=backbone_of(**fields))


def test_a_window_that_differs_is_named(tmp_path: Path) -> None:
    tiny_medusa(tiny_model("mistral"), num_heads=1).save_pretrained(tmp_path / "heads")
    other = random_model(config_of("mistral", {**CONFIGS["mistral"].to_dict(), "sliding_window": 16}))
    with pytest.warns(UserWarning, match="sliding_window 8, this one has 16"):
        MedusaModel.from_pretrained(tmp_path / "heads", backbone=other)


def test_a_fine_tune_with_the_same_lm_head_loads_in_silence(saved: Path) -> None:
    tuned = backbone_of(max_position_embeddings=4096, attention_dropout=0.5, pad_token_id=7)
    with torch.no_grad():
        for parameter in tuned.get_decoder().parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    quietly(saved, tuned)


def test_another_lm_head_is_refused_with_both_values(saved: Path) -> None:
    other = backbone_of()
    with torch.no_grad():
        other.get_output_embeddings().weight[0, 0] = 7.5
    with pytest.raises(ValueError, match=r"another LM head \(value 0 of its fingerprint is -?\d\.\d+, here 7\.5\)"):
        MedusaModel.from_pretrained(saved, backbone=other)


def test_checkpoints_of_before_load_in_silence(saved: Path) -> None:
    change_config(saved, lambda entries: entries.pop("backbone_architecture"))
    quietly(saved, backbone_of(rope_parameters={"rope_type": "default", "rope_theta": 5e5}))
    change_config(saved, lambda entries: entries.pop("backbone_fingerprint"))
    quietly(saved, backbone_of())


def test_a_backbone_that_was_never_on_disk_is_not_said_to_be_the_working_directory(saved: Path) -> None:
    with pytest.raises(ValueError, match="does not name its backbone"):
        MedusaModel.from_pretrained(saved)


def test_entries_that_only_one_version_of_transformers_knows_are_not_compared(saved: Path) -> None:
    change_config(saved, lambda entries: entries["backbone_architecture"].update(rope_scaling=4, head_size=3))
    quietly(saved, backbone_of())


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("backbone_architecture", [1]),
        ("backbone_architecture", "llama"),
        ("backbone_architecture", None),
        ("backbone_fingerprint", "abc"),
        ("backbone_fingerprint", [None]),
        ("backbone_fingerprint", None),
        ("backbone_fingerprint", [[1.0]]),
    ],
)
def test_entries_of_the_wrong_kind_are_named(saved: Path, entry: str, value: object) -> None:
    change_config(saved, lambda entries: entries.update({entry: value}))
    with pytest.raises(ValueError, match=rf"config\.json: {entry} is "):
        MedusaModel.from_pretrained(saved, backbone=backbone_of())


@pytest.mark.parametrize("engine", ["vllm", "tgi", "reference"])
def test_exported_heads_remember_their_backbone(tmp_path: Path, engine: str) -> None:
    backbone = backbone_of()
    backbone.save_pretrained(tmp_path / "backbone")
    backbone.config._name_or_path = str(tmp_path / "backbone")
    tiny_medusa(backbone, num_heads=2).save_pretrained(tmp_path / "heads")
    export(tmp_path / "heads", engine, tmp_path / "out")
    quietly(tmp_path / "out", backbone)
    with pytest.raises(ValueError, match="num_hidden_layers 2, this one has 3"):
        MedusaModel.from_pretrained(tmp_path / "out", backbone=backbone_of(num_hidden_layers=3))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_is_described(name: str) -> None:
    """By at least its type, layers and attention heads; nothing that JSON would change."""
    found = architecture(config_of(name, ARCHITECTURES[name]))
    assert {"model_type", "num_hidden_layers", "num_attention_heads"} <= found.keys()
    assert json.loads(json.dumps(found)) == found


def test_another_chat_template_is_said(tmp_path: Path) -> None:
    model = save_tiny_chat_model(tmp_path / "model")
    medusa = tiny_medusa(load_backbone(str(model)), num_heads=1)
    medusa.save_pretrained(tmp_path / "heads", byte_tokenizer())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(str(tmp_path / "heads"), "auto")
    byte_tokenizer(TAGGED).save_pretrained(tmp_path / "heads")
    with pytest.warns(UserWarning, match=r"tokenizer of .*heads has another chat template \(sha256 .*heads .* learned"):
        load(str(tmp_path / "heads"), "auto")
    for file in (tmp_path / "heads").iterdir():
        if file.name not in (CONFIG_FILE, HEADS_FILE):
            file.unlink()
    byte_tokenizer(TAGGED).save_pretrained(model)
    with pytest.warns(UserWarning, match=r"tokenizer of .*model has another chat template"):
        load(str(tmp_path / "heads"), "auto")
    plain = byte_tokenizer()
    plain.chat_template = None
    for file in model.glob("chat_template*"):
        file.unlink()
    plain.save_pretrained(model)
    with pytest.warns(UserWarning, match=r"tokenizer of .*model has no chat template"):
        load(str(tmp_path / "heads"), "auto")
