"""Heads that other projects wrote: each format gives the logits of its own forward pass, and what is wrong is named."""

import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from console import medusa
from safetensors.torch import load_file, save_file
from tiny import VOCAB, prompt_of, tiny_model
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

from medusa import MedusaModel
from medusa.engine_rules import read_as
from medusa.export import export

HEADS, LAYERS = 3, 2


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base")
    tiny_model("llama").float().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def backbone(base: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(base, dtype="auto").eval()


def reference_tensors(backbone: PreTrainedModel, projections: bool = True) -> dict[str, Tensor]:
    """What the reference implementation saves."""
    width = backbone.config.hidden_size
    dice = torch.Generator().manual_seed(0)
    tensors = {}
    for k in range(HEADS):
        for layer in range(LAYERS):
            tensors[f"{k}.{layer}.linear.weight"] = 0.3 * torch.randn(width, width, generator=dice)
            tensors[f"{k}.{layer}.linear.bias"] = 0.3 * torch.randn(width, generator=dice)
        if projections:
            tensors[f"{k}.{LAYERS}.weight"] = 0.3 * torch.randn(VOCAB, width, generator=dice)
    return tensors


def expected_logits(tensors: dict[str, Tensor], hidden: Tensor, lm_head: Tensor) -> Tensor:
    """The reference's forward pass, written down again: [K, P, V]."""
    heads = []
    for k in range(HEADS):
        x = hidden
        for layer in range(LAYERS):
            x = x + F.silu(F.linear(x, tensors[f"{k}.{layer}.linear.weight"], tensors[f"{k}.{layer}.linear.bias"]))
        heads.append(F.linear(x, tensors.get(f"{k}.{LAYERS}.weight", lm_head)))
    return torch.stack(heads)


def write(directory: Path, tensors: dict[str, Tensor], entries: dict[str, Any] | None, file: str) -> Path:
    directory.mkdir()
    if file.endswith(".safetensors"):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / file)
    else:
        torch.save(tensors, directory / file)
    if entries is not None:
        (directory / "config.json").write_text(json.dumps(entries))
    return directory


def vllm_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    renamed = {}
    for name, tensor in tensors.items():
        parts = name.split(".")
        linear = len(parts) == 4
        renamed[f"blocks.{parts[0]}.layers.{parts[1]}.{parts[3]}" if linear else f"lm_heads.{parts[0]}.weight"] = tensor
    return renamed


def tensorrt_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    renamed = {}
    for name, tensor in tensors.items():
        k, rest = name.split(".", 1)
        linear = "linear" in rest
        renamed[f"medusa_heads.{k}.medusa_layers.{rest}" if linear else f"medusa_heads.{k}.lm_head.weight"] = tensor
    return renamed


def check(directory: Path, backbone: PreTrainedModel, tensors: dict[str, Tensor]) -> MedusaModel:
    loaded = MedusaModel.from_pretrained(directory, backbone=backbone)
    hidden = torch.randn(5, backbone.config.hidden_size)
    with torch.no_grad():
        found = loaded.heads(hidden, torch.zeros(5, dtype=torch.long))
    torch.testing.assert_close(found, expected_logits(tensors, hidden, backbone.lm_head.weight.detach()))
    return loaded


@pytest.mark.filterwarnings("ignore:.*medusa_num_layers 1, but there are 2")
@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
def test_reference_heads_with_a_configuration_that_counts_wrong(
    backbone: PreTrainedModel, base: Path, tmp_path: Path, file: str
) -> None:
    """Published: five heads, and a config.json that says two."""
    tensors = reference_tensors(backbone)
    entries = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": str(base)}
    directory = write(tmp_path / "a", tensors, entries, file)
    with pytest.warns(UserWarning, match="medusa_num_heads 2, but there are 3"):
        check(directory, backbone, tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert len(MedusaModel.from_pretrained(directory).heads) == HEADS  # the backbone that config.json names


def test_projections_are_without_bias_though_the_lm_head_has_one(tmp_path: Path) -> None:
    backbone = tiny_model("phi").float()
    tensors = reference_tensors(backbone)
    check(write(tmp_path / "a", tensors, None, "medusa_lm_head.safetensors"), backbone, tensors)


def test_heads_inside_of_a_full_model(backbone: PreTrainedModel, base: Path, tmp_path: Path) -> None:
    """v1.0: the backbone's own tensors beside `medusa_head.`, its config.json; without counts."""
    tensors = reference_tensors(backbone)
    whole = {f"medusa_head.{name}": tensor for name, tensor in tensors.items()} | backbone.state_dict()
    whole = {name: tensor.clone() for name, tensor in whole.items()}
    directory = write(tmp_path / "b", whole, json.loads((base / "config.json").read_text()), "model.safetensors")
    check(directory, backbone, tensors)
    loaded = MedusaModel.from_pretrained(directory)
    assert torch.equal(loaded.model.lm_head.weight, backbone.lm_head.weight)


def test_heads_that_share_the_lm_head(backbone: PreTrainedModel, base: Path, tmp_path: Path) -> None:
    tensors = reference_tensors(backbone, projections=False)
    entries = {"medusa_num_heads": 3, "medusa_num_layers": 2, "version": "2", "base_model_name_or_path": str(base)}
    directory = write(tmp_path / "c", tensors, entries, "medusa_lm_head.safetensors")
    assert check(directory, backbone, tensors).config.projection == "shared"


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
def test_vllm_heads(backbone: PreTrainedModel, tmp_path: Path, prefix: str) -> None:
    tensors = reference_tensors(backbone)
    stored = {prefix + name: tensor for name, tensor in vllm_names(tensors).items()}
    entries = {"model_type": "medusa", "num_heads": 3, "num_hidden_layers": 2, "medusa_fc_bias": True}
    check(write(tmp_path / "d", stored, entries, "model.safetensors"), backbone, tensors)


def test_vllm_heads_without_biases_and_with_one_lm_head(backbone: PreTrainedModel, tmp_path: Path) -> None:
    tensors = reference_tensors(backbone, projections=False)
    tensors = {name: torch.zeros_like(t) if name.endswith("bias") else t for name, t in tensors.items()}
    own = torch.randn(VOCAB, backbone.config.hidden_size)
    stored = {name: t for name, t in vllm_names(tensors).items() if not name.endswith("bias")} | {"lm_head.weight": own}
    directory = write(tmp_path / "d", stored, {"model_type": "medusa", "original_lm_head": True}, "model.safetensors")
    check(directory, backbone, tensors | {f"{k}.{LAYERS}.weight": own for k in range(HEADS)})


def test_vllm_heads_over_a_draft_vocabulary(backbone: PreTrainedModel, tmp_path: Path) -> None:
    """Rows in any order; they come out in that of the ids."""
    tensors = reference_tensors(backbone)
    ids = torch.tensor([40, 3, 17, 5])
    cut = {n: t[ids] if n.endswith(f"{LAYERS}.weight") and "linear" not in n else t for n, t in tensors.items()}
    stored = vllm_names(cut) | {"token_map": ids}
    loaded = MedusaModel.from_pretrained(write(tmp_path / "d", stored, {}, "model.safetensors"), backbone=backbone)
    assert loaded.config.draft_vocab == (3, 5, 17, 40)
    hidden = torch.randn(5, backbone.config.hidden_size)
    with torch.no_grad():
        found = loaded.heads(hidden, torch.zeros(5, dtype=torch.long))
    expected = expected_logits(tensors, hidden, backbone.lm_head.weight.detach())
    torch.testing.assert_close(found, expected[..., [3, 5, 17, 40]])


def test_modelopt_and_tensorrt_names(backbone: PreTrainedModel, tmp_path: Path) -> None:
    tensors = reference_tensors(backbone)
    prefixed = {f"medusa_heads.{name}": tensor for name, tensor in tensors.items()}
    check(write(tmp_path / "modelopt", prefixed, {}, "model.safetensors"), backbone, tensors)
    check(write(tmp_path / "tensorrt", tensorrt_names(tensors), {}, "model.safetensors"), backbone, tensors)


def test_heads_in_shards(backbone: PreTrainedModel, tmp_path: Path) -> None:
    tensors = vllm_names(reference_tensors(backbone))
    names = sorted(tensors)
    directory = write(tmp_path / "s", {n: tensors[n] for n in names[::2]}, {}, "model-1.safetensors")
    save_file({n: tensors[n] for n in names[1::2]}, directory / "model-2.safetensors")
    places = {n: f"model-{1 + i % 2}.safetensors" for i, n in enumerate(names)}
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    check(directory, backbone, reference_tensors(backbone))

    save_file({n: tensors[n] for n in names[1::2]}, tmp_path / "outside.safetensors")
    for wrong, message in (
        ("../outside.safetensors", "lies outside"),
        (str(tmp_path / "outside.safetensors"), "lies outside"),
        ("link.safetensors", "lies outside"),
        ("gone.safetensors", "is not there"),
    ):
        (directory / "link.safetensors").unlink(missing_ok=True)
        (directory / "link.safetensors").symlink_to(tmp_path / "outside.safetensors")
        index.write_text(json.dumps({"weight_map": {**places, names[1]: wrong}}))
        with pytest.raises(ValueError, match=message):
            MedusaModel.from_pretrained(directory, backbone=backbone)


def test_a_loaded_checkpoint_is_saved_as_native_and_comes_back_the_same(
    backbone: PreTrainedModel, base: Path, tmp_path: Path
) -> None:
    tensors = reference_tensors(backbone)
    source = write(tmp_path / "d", vllm_names(tensors), {}, "model.safetensors")
    MedusaModel.from_pretrained(source, backbone=backbone).save_pretrained(tmp_path / "native")
    stored = load_file(tmp_path / "native" / "medusa_lm_head.safetensors")
    assert stored.keys() == tensors.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in tensors.items())
    check(tmp_path / "native", backbone, tensors)


@pytest.mark.filterwarnings("ignore:.*says")
@pytest.mark.parametrize("engine", ["native", "vllm", "tgi", "tensorrt-llm"])
@pytest.mark.parametrize("shares", [False, True])
def test_published_heads_are_exported(
    backbone: PreTrainedModel, base: Path, tmp_path: Path, engine: str, shares: bool
) -> None:
    """From the reference's file to an engine's, without the backbone where every head has its own projection."""
    tensors = reference_tensors(backbone, projections=not shares)
    entries = {"medusa_num_heads": 2, "base_model_name_or_path": str(base)}
    source = write(tmp_path / "a", tensors, entries, "medusa_lm_head.pt")
    (source / "tokenizer_config.json").write_text("{}")
    done = export(source, engine, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer_config.json").read_text() == "{}"
    if engine == "native":
        check(tmp_path / "out", backbone, tensors)
        return
    assert done.check is not None
    assert done.check.same_guess == [1.0] * HEADS
    hidden, lm_head = torch.randn(5, backbone.config.hidden_size), backbone.lm_head.weight.detach()
    read, expected = read_as(engine, tmp_path / "out", HEADS), expected_logits(tensors, hidden, lm_head)
    for k in range(HEADS):
        torch.testing.assert_close(read.logits(k, hidden, lm_head), expected[k], rtol=1e-5, atol=1e-5)


def test_an_export_needs_to_know_the_backbone(backbone: PreTrainedModel, tmp_path: Path) -> None:
    source = write(tmp_path / "a", reference_tensors(backbone), None, "medusa_lm_head.pt")
    with pytest.raises(ValueError, match="does not say whose heads"):
        export(source, "vllm", tmp_path / "out")
    (source / "config.json").write_text('{"base_model_name_or_path": "/nowhere"}')
    with pytest.raises(ValueError, match=r"backbone '/nowhere'"):
        export(source, "vllm", tmp_path / "out")
    assert not (tmp_path / "out").exists()


class Opened:
    """Writes a file when it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.proof,)


def test_code_in_a_pickle_does_not_run(backbone: PreTrainedModel, tmp_path: Path) -> None:
    directory = write(tmp_path / "evil", {}, {"medusa_num_heads": 1}, "other.pt")
    (directory / "medusa_lm_head.pt").write_bytes(pickle.dumps(Opened(tmp_path / "ran")))
    with pytest.raises(ValueError, match=r"runs code|is damaged"):
        MedusaModel.from_pretrained(directory, backbone=backbone)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("file", ["medusa_lm_head.safetensors", "medusa_lm_head.pt"])
def test_a_truncated_file_is_named(backbone: PreTrainedModel, tmp_path: Path, file: str) -> None:
    """In the length of the header, in the header, in the data."""
    directory = write(tmp_path / "a", reference_tensors(backbone), {}, file)
    whole = (directory / file).read_bytes()
    for length in (0, 4, 8, 100, len(whole) // 2, len(whole) - 1):
        (directory / file).write_bytes(whole[:length])
        with pytest.raises(ValueError, match=rf"{file} .*(is damaged|runs code)"):
            MedusaModel.from_pretrained(directory, backbone=backbone)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"1.0.linear.weight": None}, r"lacks 1\.0\.linear\.weight"),
        ({"1.2.weight": None}, r"lacks 1\.2\.weight"),
        ({"7.2.weight": torch.ones(VOCAB, 32)}, r"projections of heads \[7\], which have no blocks"),
        ({"0.0.linear.bias": torch.full((32,), torch.nan)}, r"0\.0\.linear\.bias holds NaN"),
        ({"0.2.weight": torch.ones(32, VOCAB)}, r"0\.2\.weight .* transposed"),
        ({f"{k}.2.weight": torch.ones(VOCAB + 64, 32) for k in range(HEADS)}, "padded or extended"),
        ({"0.1.linear.weight": torch.ones(16, 16)}, r"this backbone needs \(32, 32\)"),
    ],
)
def test_what_is_wrong_with_tensors_is_named(
    backbone: PreTrainedModel, tmp_path: Path, changes: dict[str, Tensor | None], message: str
) -> None:
    assert backbone.config.hidden_size == 32
    tensors = {n: t for n, t in (reference_tensors(backbone) | changes).items() if t is not None}
    directory = write(tmp_path / "a", tensors, {}, "medusa_lm_head.safetensors")
    with pytest.raises(ValueError, match=message):
        MedusaModel.from_pretrained(directory, backbone=backbone)


def test_two_tensors_for_one_place(backbone: PreTrainedModel, tmp_path: Path) -> None:
    tensors = vllm_names(reference_tensors(backbone))
    tensors["medusa_heads.blocks.0.layers.0.weight"] = tensors["blocks.0.layers.0.weight"].clone()
    with pytest.raises(ValueError, match=r"two tensors are 0\.0\.linear\.weight"):
        MedusaModel.from_pretrained(write(tmp_path / "d", tensors, {}, "model.safetensors"), backbone=backbone)


def test_published_heads_decode(backbone: PreTrainedModel, base: Path, tmp_path: Path) -> None:
    from medusa.inference import MedusaDecoder

    entries = {"base_model_name_or_path": str(base)}
    directory = write(tmp_path / "a", reference_tensors(backbone), entries, "medusa_lm_head.pt")
    loaded = MedusaModel.from_pretrained(directory)
    found = MedusaDecoder(loaded, tree=[(0,), (1,), (0, 0)]).generate(prompt_of(6), max_new_tokens=12).sequences
    plain = loaded.model.generate(prompt_of(6), max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert torch.equal(found, plain)


def test_inspect_shows_what_a_published_checkpoint_holds(backbone: PreTrainedModel, tmp_path: Path) -> None:
    directory = write(tmp_path / "d", vllm_names(reference_tensors(backbone)), {}, "model.safetensors")
    shown = json.loads(medusa("inspect", directory, "--json"))
    assert (shown["format"], shown["heads"], shown["layers"], shown["vocab_size"]) == ("vllm", HEADS, LAYERS, VOCAB)
    assert shown["dtypes"] == ["float32"]
