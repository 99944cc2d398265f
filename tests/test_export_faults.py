"""Faults of exports and of whoever asks for them: each is named, and nothing that was there is lost."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from chatml import byte_tokenizer, save_tiny_chat_model
from safetensors.torch import load_file, save_file
from tiny import tiny_medusa
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from medusa.checkpoint import CONFIG_FILE, HEADS_FILE
from medusa.engine_rules import read_as
from medusa.export import export
from medusa.export_check import check_export
from medusa.stored_heads import open_heads

Fault = Callable[[Path], None]


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    path = save_tiny_chat_model(tmp_path_factory.mktemp("backbone"))
    return AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval()


@pytest.fixture
def saved(backbone: PreTrainedModel, tmp_path: Path) -> Path:
    tiny_medusa(backbone, num_heads=3).save_pretrained(tmp_path / "heads", byte_tokenizer())
    return tmp_path / "heads"


def in_config(**entries: Any) -> Fault:
    """Change config.json; None takes an entry out."""

    def plant(directory: Path) -> None:
        file = directory / CONFIG_FILE
        changed = {**json.loads(file.read_text()), **entries}
        file.write_text(json.dumps({key: value for key, value in changed.items() if value is not None}))

    return plant


def in_weights(change: Callable[[dict[str, Tensor]], object]) -> Fault:
    """Change the tensors, whatever the file is called."""

    def plant(directory: Path) -> None:
        pickles = list(directory.glob("*.pt"))
        if pickles:
            state = torch.load(pickles[0], weights_only=True)
            change(state)
            torch.save(state, pickles[0])
            return
        (file,) = directory.glob("*.safetensors")
        state = load_file(file)
        change(state)
        save_file(state, file)

    return plant


def renamed(old: str, new: str) -> Fault:
    return in_weights(lambda state: state.__setitem__(new, state.pop(old)))


FAULTS: dict[str, tuple[str, Fault, str]] = {
    "vllm drops biases without the flag": ("vllm", in_config(medusa_fc_bias=None), r"drop blocks.0.layers.0.bias"),
    "vllm's default hidden size": ("vllm", in_config(hidden_size=None), "4096"),
    "vllm's default vocabulary": ("vllm", in_config(vocab_size=None), "32001"),
    "vllm renames every head count": ("vllm", in_config(num_attention_heads=4), "num_attention_heads"),
    "vllm cannot truncate": ("vllm", in_config(truncated_vocab_size=50), "truncated_vocab_size"),
    "vllm shares an LM head that is not there": (
        "vllm",
        lambda directory: (
            in_config(original_lm_head=True)(directory),
            in_weights(lambda state: [state.pop(f"lm_heads.{k}.weight") for k in range(3)])(directory),
        )[0],
        "without lm_head.weight",
    ),
    "vllm takes the first projection for all": ("vllm", in_config(original_lm_head=True), "drop lm_heads.1.weight"),
    "vllm, wrong key": ("vllm", renamed("lm_heads.1.weight", "lm_head.1.weight"), "without lm_heads.1.weight"),
    "vllm, transposed block": (
        "vllm",
        in_weights(
            lambda state: state.update({"blocks.0.layers.0.weight": state["blocks.0.layers.0.weight"].T.contiguous()})
        ),
        "other logits",
    ),
    "tgi, architectures": ("tgi", in_config(architectures=["MedusaModel"]), "runs without heads"),
    "tgi, no head count": ("tgi", in_config(medusa_num_heads=None), "medusa_num_heads"),
    "tgi falls back to the LM head": ("tgi", renamed("2.1.weight", "2.2.weight"), "drop 0.1.weight"),
    "tgi, missing bias": ("tgi", in_weights(lambda state: state.pop("1.0.linear.bias")), "no 1.0.linear.bias"),
    "tgi, wrong file": (
        "tgi",
        lambda directory: (directory / HEADS_FILE).rename(directory / "model.safetensors") and None,
        HEADS_FILE,
    ),
    "tensorrt-llm, missing bias": (
        "tensorrt-llm",
        in_weights(lambda state: state.pop("1.0.linear.bias")),
        "1.0.linear.bias",
    ),
    "tensorrt-llm, missing projection": (
        "tensorrt-llm",
        in_weights(lambda state: state.pop("2.1.weight")),
        "2.1.weight",
    ),
    "tensorrt-llm, other count": ("tensorrt-llm", in_config(num_medusa_heads=2), "num_medusa_heads"),
    "reference leaves heads random": ("reference", in_weights(lambda state: state.pop("2.1.weight")), "2.1.weight"),
    "reference, a head more": (
        "reference",
        in_weights(lambda state: state.update({"3.1.weight": state["2.1.weight"]})),
        "drop 3.1.weight",
    ),
    "a wrong weight": ("tgi", in_weights(lambda state: state["1.0.linear.bias"].add_(0.01)), "head 1 .*other logits"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(saved: Path, tmp_path: Path, fault: str) -> None:
    engine, plant, message = FAULTS[fault]
    export(saved, engine, tmp_path / "out")
    with open_heads(saved) as stored:
        check_export(engine, tmp_path / "out", stored, None, 3, torch.float32)
        plant(tmp_path / "out")
        with pytest.raises(ValueError, match=message):
            check_export(engine, tmp_path / "out", stored, None, 3, torch.float32)


def test_the_reference_ties_the_blocks_of_a_head(backbone: PreTrainedModel, tmp_path: Path) -> None:
    """Why heads of several blocks are not exported to it."""
    tiny_medusa(backbone, num_heads=1, num_layers=2).save_pretrained(tmp_path / "heads", byte_tokenizer())
    state = load_file(tmp_path / "heads" / HEADS_FILE)
    torch.save(state, tmp_path / "heads" / "medusa_lm_head.pt")
    with open_heads(tmp_path / "heads") as stored, pytest.raises(ValueError, match="other logits"):
        check_export("reference", tmp_path / "heads", stored, None, 1, torch.float32)


def test_a_native_directory_of_full_heads_runs_in_vllm_and_tgi_as_it_is(saved: Path) -> None:
    with open_heads(saved) as stored:
        for engine in ("vllm", "tgi"):
            check_export(engine, saved, stored, None, 3, torch.float32)


def everything_in(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_a_directory_that_exists_needs_overwrite(saved: Path, tmp_path: Path) -> None:
    export(saved, "vllm", tmp_path / "out")
    before = everything_in(tmp_path)
    with pytest.raises(ValueError, match="--overwrite"):
        export(saved, "tgi", tmp_path / "out")
    assert everything_in(tmp_path) == before
    export(saved, "tgi", tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / HEADS_FILE).exists()
    assert not (tmp_path / "out" / "model.safetensors").exists()
    assert sorted(item.name for item in tmp_path.iterdir()) == ["heads", "out"]


@pytest.mark.parametrize("engine", ["native", "reference", "vllm"])
def test_a_full_disk_leaves_the_old_export(
    saved: Path, tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(saved, engine, tmp_path / "out")
    before = everything_in(tmp_path)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("medusa.export_plan.write_stream", full)
    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(ValueError, match=r"No space left on device.*still there"):
        export(saved, engine, tmp_path / "out", overwrite=True)
    assert everything_in(tmp_path) == before


def test_a_forbidden_directory(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("medusa.checkpoint.tempfile.mkdtemp", forbidden)
    with pytest.raises(ValueError, match="Permission denied"):
        export(saved, "vllm", tmp_path / "out")


def test_an_export_that_fails_its_check_is_not_put_in_place(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medusa.export_check.read_as", lambda *_: read_as("tgi", saved, 4))
    before = everything_in(tmp_path)
    with pytest.raises(ValueError, match="would not run"):
        export(saved, "vllm", tmp_path / "out")
    assert everything_in(tmp_path) == before


@pytest.mark.parametrize("place", [".", "inside", ".."])
def test_the_checkpoint_itself_is_never_overwritten(saved: Path, place: str) -> None:
    with pytest.raises(ValueError, match="lie in each other"):
        export(saved, "native", saved / place, overwrite=True)


def test_wrong_arguments(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no export to 'sglang'; allowed: native, reference, vllm, tgi, tensorrt-llm"):
        export(saved, "sglang")
    with pytest.raises(ValueError, match=r"--heads is 4.* 3 heads"):
        export(saved, "vllm", num_heads=4)
    with pytest.raises(ValueError, match="--dtype is 'int8'"):
        export(saved, "vllm", dtype="int8")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        export(saved, "vllm", tmp_path / "file", overwrite=True)
    with pytest.raises(ValueError, match="neither a directory nor a repository"):
        export(tmp_path / "nothing", "vllm")


def test_a_damaged_checkpoint_is_named_and_nothing_is_written(saved: Path, tmp_path: Path) -> None:
    file = saved / HEADS_FILE
    whole = file.read_bytes()
    for length in (0, 7, 8, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="damaged"):
            export(saved, "vllm", tmp_path / "out")
    file.write_bytes(whole)
    state = load_file(file)
    for change, message in (
        ({"0.0.linear.bias": torch.full((32,), torch.nan)}, "0.0.linear.bias holds NaN"),
        ({"0.0.linear.bias": torch.zeros(33)}, "0.0.linear.bias has shape"),
        ({"9.0.linear.bias": torch.zeros(32)}, "unexpected 9.0.linear.bias"),
    ):
        save_file({**state, **change}, file)
        with pytest.raises(ValueError, match=message):
            export(saved, "vllm", tmp_path / "out")
    file.write_bytes(whole)
    in_config(medusa_num_heads=4)(saved)
    with pytest.raises(ValueError, match=r"missing 3.0.linear.weight"):
        export(saved, "vllm", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_values_too_large_for_float16_are_refused(saved: Path, tmp_path: Path) -> None:
    in_weights(lambda state: state["0.0.linear.bias"].fill_(1e6))(saved)
    with pytest.raises(ValueError, match=r"layers.0.bias holds values that are too large for float16.*bfloat16"):
        export(saved, "vllm", tmp_path / "out", dtype="float16")
