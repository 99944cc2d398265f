"""Saving and loading heads: nothing changes on the way, and whatever is wrong is named."""

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from chatml import byte_tokenizer, save_tiny_chat_model
from safetensors.torch import load_file, save_file
from tiny import VOCAB, prompt_of, tiny_medusa, tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from medusa import MedusaModel
from medusa.checkpoint import CONFIG_FILE, DRAFT_VOCAB, HEADS_FILE, PROVENANCE_FILE, atomic_directory
from medusa.tree_search import TREE_FILE, search_tree

DRAFT = (0, 3, 4, 50, VOCAB - 1)
SEES = ({}, {"root_conditioned": True}, {"sequential": True}, {"sequential": True, "embedding_scale": "raw"})


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    """A model that knows where it was loaded from, as a real one does."""
    path = tmp_path_factory.mktemp("backbone")
    tiny_model("llama").save_pretrained(path)
    return AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval()


@pytest.fixture
def saved(backbone: PreTrainedModel, tmp_path: Path) -> Path:
    """A checkpoint of two full heads, the same in every test."""
    tiny_medusa(backbone, num_heads=2).save_pretrained(tmp_path / "heads")
    return tmp_path / "heads"


def head_logits(medusa: MedusaModel) -> Tensor:
    ids = prompt_of(6)
    with torch.no_grad():
        return medusa.heads(medusa.backbone.hidden(ids)[0], ids[0], ids[0, :, None].repeat(1, len(medusa.heads) - 1))


def change_config(path: Path, **entries: object) -> None:
    file = path / CONFIG_FILE
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))


def change_tensors(path: Path, **tensors: Tensor | None) -> None:
    """Replace tensors by name; None removes one."""
    changed: dict[str, Any] = {**load_file(path / HEADS_FILE), **{k.replace("_", "."): v for k, v in tensors.items()}}
    save_file({name: tensor for name, tensor in changed.items() if tensor is not None}, path / HEADS_FILE)


def everything_in(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


@pytest.mark.parametrize(
    "config",
    [
        {"projection": projection, "draft_vocab": draft, "num_layers": layers, **sees}
        for projection, draft, layers, sees in itertools.product(("own", "shared"), (None, DRAFT), (1, 2), SEES)
    ],
    ids=lambda config: "-".join(str(value) for value in config.values()),
)
def test_loaded_heads_are_the_saved_ones(backbone: PreTrainedModel, tmp_path: Path, config: dict[str, Any]) -> None:
    medusa = tiny_medusa(backbone, num_heads=3, **config)
    medusa.save_pretrained(tmp_path / "heads")
    loaded = MedusaModel.from_pretrained(tmp_path / "heads")  # finds the backbone by the path in config.json
    assert loaded.config == medusa.config
    assert loaded.model is not backbone
    assert torch.equal(head_logits(loaded), head_logits(medusa))
    assert loaded.heads.state_dict().keys() == medusa.heads.state_dict().keys()
    given = MedusaModel.from_pretrained(str(tmp_path / "heads"), backbone=backbone)
    assert given.model is backbone
    assert torch.equal(head_logits(given), head_logits(medusa))


def test_weights_stay_in_their_file_and_learning_leaves_it_alone(backbone: PreTrainedModel, saved: Path) -> None:
    before = everything_in(saved)
    loaded = MedusaModel.from_pretrained(saved, backbone=backbone)
    weight = loaded.heads.projection(0)[0]
    maps = Path("/proc/self/maps")
    if maps.exists():
        mapped = [line.split()[0] for line in maps.read_text().splitlines() if str(saved / HEADS_FILE) in line]
        ranges = [[int(end, 16) for end in text.split("-")] for text in mapped]
        assert any(start <= weight.data_ptr() < stop for start, stop in ranges), "the weights were copied"
    with torch.no_grad():
        for parameter in loaded.heads.parameters():
            assert parameter.data_ptr() % 64 == 0
            parameter.add_(1.0)
    assert everything_in(saved) == before
    loaded.save_pretrained(saved)  # over the very file
    assert torch.equal(MedusaModel.from_pretrained(saved, backbone=backbone).heads.projection(0)[0], weight)


def test_a_checkpoint_from_before_embeddings_had_a_scale(backbone: PreTrainedModel, tmp_path: Path) -> None:
    medusa = tiny_medusa(backbone, num_heads=2, sequential=True)
    medusa.save_pretrained(tmp_path / "heads")
    entries = json.loads((tmp_path / "heads" / CONFIG_FILE).read_text())
    del entries["medusa_embedding_scale"], entries["medusa_projection_bias"]
    (tmp_path / "heads" / CONFIG_FILE).write_text(json.dumps(entries))
    loaded = MedusaModel.from_pretrained(tmp_path / "heads", backbone=backbone)
    assert loaded.config.embedding_scale == "unit"
    assert torch.equal(head_logits(loaded), head_logits(medusa))


def test_full_heads_are_a_reference_checkpoint(saved: Path) -> None:
    """Serving engines read exactly these names and entries."""
    tensors = load_file(saved / HEADS_FILE)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "0.0.linear.weight": (32, 32),
        "0.0.linear.bias": (32,),
        "0.1.weight": (VOCAB, 32),
        "1.0.linear.weight": (32, 32),
        "1.0.linear.bias": (32,),
        "1.1.weight": (VOCAB, 32),
    }
    entries = json.loads((saved / CONFIG_FILE).read_text())
    assert entries["model_type"] == "medusa"
    assert entries["medusa_num_heads"] == 2
    assert entries["medusa_num_layers"] == 1
    assert entries["medusa_fc_bias"] is True
    assert entries["hidden_size"] == 32
    assert entries["vocab_size"] == VOCAB
    assert Path(entries["base_model_name_or_path"]).is_dir()
    assert entries.keys().isdisjoint({"architectures", "num_attention_heads"})


def test_draft_vocabulary_lies_with_the_heads(backbone: PreTrainedModel, tmp_path: Path) -> None:
    tiny_medusa(backbone, num_heads=1, draft_vocab=DRAFT).save_pretrained(tmp_path / "heads")
    tensors = load_file(tmp_path / "heads" / HEADS_FILE)
    assert tensors[DRAFT_VOCAB].tolist() == list(DRAFT)
    assert tensors["0.1.weight"].shape == (len(DRAFT), 32)


def test_dtype_of_the_heads_is_the_backbones(saved: Path) -> None:
    assert next(MedusaModel.from_pretrained(saved).heads.parameters()).dtype == torch.float64
    half = MedusaModel.from_pretrained(saved, dtype=torch.bfloat16)
    assert next(half.heads.parameters()).dtype == half.model.dtype == torch.bfloat16
    assert not half.model.training


def test_tree_tokenizer_and_provenance_travel_along(backbone: PreTrainedModel, tmp_path: Path) -> None:
    class FakeTokenizer:
        chat_template: str | None = "{{ messages }}"

        def get_vocab(self) -> dict[str, int]:
            return {"a": 0, "z": 90}

        def save_pretrained(self, save_directory: str) -> None:
            (Path(save_directory) / "tokenizer.json").write_text("{}")

    medusa = tiny_medusa(backbone, num_heads=2)
    medusa.searched_tree = search_tree(torch.tensor([[0, 0], [1, 0]]), max_nodes=4)
    medusa.save_pretrained(tmp_path / "heads", FakeTokenizer(), {"seed": 7})
    assert MedusaModel.from_pretrained(tmp_path / "heads", backbone=backbone).searched_tree == medusa.searched_tree
    assert json.loads((tmp_path / "heads" / PROVENANCE_FILE).read_text()) == {"seed": 7}
    assert (tmp_path / "heads" / "tokenizer.json").is_file()
    assert MedusaModel.from_pretrained(tmp_path / "heads", backbone=backbone).known_tokens == 91


def test_damaged_tree_is_an_error_and_a_missing_one_is_not(backbone: PreTrainedModel, saved: Path) -> None:
    assert MedusaModel.from_pretrained(saved, backbone=backbone).searched_tree is None
    (saved / TREE_FILE).write_text('{"paths": [[0]')
    with pytest.raises(ValueError, match=TREE_FILE):
        MedusaModel.from_pretrained(saved, backbone=backbone)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"1_1_weight": None}, r"missing 1\.1\.weight"),
        ({"2_1_weight": torch.ones(VOCAB, 32)}, r"unexpected 2\.1\.weight"),
        ({"0_0_linear_bias": torch.ones(31)}, r"0\.0\.linear\.bias has shape \(31,\), expected \(32,\)"),
        ({"0_1_weight": torch.ones(32, VOCAB)}, rf"0\.1\.weight has shape \(32, {VOCAB}\), expected \({VOCAB}, 32\)"),
    ],
    ids=["missing", "unexpected", "short", "transposed"],
)
def test_wrong_tensors_are_named(
    backbone: PreTrainedModel, saved: Path, tensors: dict[str, Tensor | None], message: str
) -> None:
    change_tensors(saved, **tensors)
    with pytest.raises(ValueError, match=message) as caught:
        MedusaModel.from_pretrained(saved, backbone=backbone)
    assert str(saved / HEADS_FILE) in str(caught.value)


def test_all_wrong_tensors_are_named_at_once(backbone: PreTrainedModel, saved: Path) -> None:
    change_tensors(saved, **{"0_0_linear_bias": None, "1_1_weight": torch.ones(3, 32), "9_1_weight": torch.ones(3)})
    with pytest.raises(
        ValueError, match=r"missing 0\.0\.linear\.bias.*unexpected 9\.1\.weight.*1\.1\.weight has shape"
    ):
        MedusaModel.from_pretrained(saved, backbone=backbone)


@pytest.mark.parametrize(("entry", "value"), [("medusa_num_heads", 3), ("medusa_num_layers", 2)])
def test_config_that_promises_more_than_there_is(
    backbone: PreTrainedModel, saved: Path, entry: str, value: int
) -> None:
    change_config(saved, **{entry: value})
    with pytest.raises(ValueError, match=r"does not hold the heads.*missing"):
        MedusaModel.from_pretrained(saved, backbone=backbone)


@pytest.mark.parametrize("length", [0, 4, 8, 20, 200, -1, -1000])
def test_truncated_heads(backbone: PreTrainedModel, saved: Path, length: int) -> None:
    """Cut in the header's length, in the header and in the data."""
    file = saved / HEADS_FILE
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(ValueError, match=f"{HEADS_FILE} is damaged"):
        MedusaModel.from_pretrained(saved, backbone=backbone)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_stored_heads_that_are_not_finite(backbone: PreTrainedModel, saved: Path, value: float) -> None:
    change_tensors(saved, **{"1_0_linear_bias": torch.full((32,), value)})
    with pytest.raises(ValueError, match=r"1\.0\.linear\.bias holds NaN or infinity"):
        MedusaModel.from_pretrained(saved, backbone=backbone)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_heads_that_are_not_finite_are_not_saved(backbone: PreTrainedModel, saved: Path, value: float) -> None:
    before = everything_in(saved)
    bad = tiny_medusa(backbone, seed=1, num_heads=2)
    with torch.no_grad():
        bad.heads.state_dict()["1.1.weight"][3, 4] = value
    with pytest.raises(ValueError, match=r"1\.1\.weight holds NaN or infinity; nothing was saved"):
        bad.save_pretrained(saved)
    assert everything_in(saved) == before
    with pytest.raises(ValueError, match="NaN"):
        bad.save_pretrained(saved.with_name("new"))
    assert [path.name for path in saved.parent.iterdir()] == [saved.name], "something is left behind"


@pytest.mark.parametrize("num_layers", [1, 2])
def test_heads_that_were_never_built_are_not_saved(backbone: PreTrainedModel, tmp_path: Path, num_layers: int) -> None:
    medusa = tiny_medusa(backbone, num_heads=2, num_layers=num_layers)
    with torch.no_grad():
        medusa.heads.state_dict()[f"1.{num_layers}.weight"].zero_()
    with pytest.raises(ValueError, match=rf"1\.{num_layers}\.weight is all zero"):
        medusa.save_pretrained(tmp_path / "heads")
    assert not list(tmp_path.iterdir())


def test_fresh_heads_are_saved(backbone: PreTrainedModel, tmp_path: Path) -> None:
    """Their blocks are zero on purpose."""
    MedusaModel.attach(backbone, tiny_medusa(backbone, num_heads=2).config).save_pretrained(tmp_path / "heads")
    assert not MedusaModel.from_pretrained(tmp_path / "heads").heads.state_dict()["0.0.linear.weight"].any()


@pytest.mark.parametrize(
    "what", ["medusa.checkpoint.write_stream", "medusa.checkpoint.load_file", "medusa.model.write_heads"]
)
def test_failed_save_leaves_the_old_checkpoint(
    backbone: PreTrainedModel, saved: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    before = everything_in(saved)

    def fail(*_args: object, **_kwargs: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(what, fail)
        with pytest.raises(OSError, match="disk full"):
            tiny_medusa(backbone, seed=1, num_heads=2).save_pretrained(saved)
    assert everything_in(saved) == before
    assert [path.name for path in saved.parent.iterdir()] == [saved.name], "something is left behind"
    MedusaModel.from_pretrained(saved, backbone=backbone)


def test_tokenizer_that_fails_leaves_the_old_checkpoint(backbone: PreTrainedModel, saved: Path) -> None:
    class Broken:
        chat_template: str | None = None

        def get_vocab(self) -> dict[str, int]:
            return {"a": 0}

        def save_pretrained(self, save_directory: str) -> None:
            raise RuntimeError("no vocabulary")

    before = everything_in(saved)
    with pytest.raises(RuntimeError, match="no vocabulary"):
        tiny_medusa(backbone, seed=1, num_heads=2).save_pretrained(saved, Broken())
    assert everything_in(saved) == before


def test_disk_that_returns_other_bytes(backbone: PreTrainedModel, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = everything_in(saved)

    def faulty(path: Path) -> dict[str, Tensor]:
        return {name: tensor + 1 for name, tensor in load_file(path).items()}

    monkeypatch.setattr("medusa.checkpoint.load_file", faulty)
    with pytest.raises(ValueError, match="reads back differently"):
        tiny_medusa(backbone, seed=1, num_heads=2).save_pretrained(saved)
    assert everything_in(saved) == before


def test_saving_again_replaces_everything(backbone: PreTrainedModel, saved: Path) -> None:
    (saved / TREE_FILE).write_text("of the old heads")
    new = tiny_medusa(backbone, seed=1, num_heads=3)
    new.save_pretrained(saved)
    assert torch.equal(head_logits(MedusaModel.from_pretrained(saved, backbone=backbone)), head_logits(new))
    assert set(everything_in(saved)) == {HEADS_FILE, CONFIG_FILE}
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def test_relative_path_and_missing_parents(
    backbone: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_medusa(backbone, num_heads=1).save_pretrained("out/run 1/heads")
    MedusaModel.from_pretrained("out/run 1/heads")


def test_a_backbone_of_a_relative_path_is_found_from_elsewhere(
    backbone: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone.save_pretrained(tmp_path / "own" / "model")
    monkeypatch.chdir(tmp_path / "own")
    loaded = AutoModelForCausalLM.from_pretrained("model", dtype="auto").eval()
    tiny_medusa(loaded, num_heads=2).save_pretrained("heads")
    monkeypatch.chdir(tmp_path)
    assert len(MedusaModel.from_pretrained("own/heads").heads) == 2


def test_the_tokenizer_beside_heads_loads_without_a_warning(tmp_path: Path) -> None:
    """In a fresh process, since transformers says it once."""
    backbone = AutoModelForCausalLM.from_pretrained(save_tiny_chat_model(tmp_path / "model")).eval()
    tiny_medusa(backbone, num_heads=1).save_pretrained(tmp_path / "heads", byte_tokenizer())
    code = (
        "import sys; from transformers import AutoTokenizer; from medusa import MedusaModel; "
        "AutoTokenizer.from_pretrained(sys.argv[1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "heads")], capture_output=True, text=True, check=True
    )
    assert "model of type" not in done.stderr


def test_atomic_directory_can_be_read_by_others(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    with atomic_directory(tmp_path / "made") as work:
        (work / "file").write_text("x")
    assert (tmp_path / "made").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("text", ["", "{", "\x00\x01"])
def test_config_that_is_not_json(saved: Path, text: str) -> None:
    (saved / CONFIG_FILE).write_text(text)
    with pytest.raises(ValueError, match=f"{CONFIG_FILE} is not JSON"):
        MedusaModel.from_pretrained(saved)


def test_config_that_is_not_text(saved: Path) -> None:
    (saved / CONFIG_FILE).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=f"{CONFIG_FILE} is not JSON"):
        MedusaModel.from_pretrained(saved)


@pytest.mark.parametrize("text", ["[]", "3", '"medusa"'])
def test_config_of_something_else(saved: Path, text: str) -> None:
    (saved / CONFIG_FILE).write_text(text)
    with pytest.raises(ValueError, match="holds no Medusa heads"):
        MedusaModel.from_pretrained(saved)


def test_directory_of_a_plain_model(backbone: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match=r"holds no Medusa heads.*attach"):
        MedusaModel.from_pretrained(backbone.config._name_or_path)


def test_checkpoint_of_a_newer_version(saved: Path) -> None:
    change_config(saved, medusa_format_version=99)
    with pytest.raises(ValueError, match=r"newer medusa-heads.*99"):
        MedusaModel.from_pretrained(saved)


@pytest.mark.parametrize(
    ("entry", "value", "message"),
    [
        ("medusa_format_version", "2", "format 2"),
        ("medusa_num_heads", "2", "num_heads is '2'"),
        ("medusa_num_heads", -1, "num_heads is -1"),
        ("medusa_num_layers", None, "num_layers is None"),
        ("medusa_projection", "mine", "projection is 'mine'"),
        ("medusa_root_conditioned", "no", "root_conditioned is 'no'"),
        ("medusa_embedding_scale", "raw", "embedding_scale is 'raw', but these heads see no tokens"),
        ("hidden_size", "32", "hidden_size 32"),
        ("backbone_fingerprint", [1.0], "another LM head"),
    ],
)
def test_config_entries_of_the_wrong_kind(saved: Path, entry: str, value: object, message: str) -> None:
    change_config(saved, **{entry: value})
    with pytest.raises(ValueError, match=message):
        MedusaModel.from_pretrained(saved)


@pytest.mark.parametrize("name", [CONFIG_FILE, HEADS_FILE])
def test_missing_files_are_named(saved: Path, name: str) -> None:
    (saved / name).unlink()
    with pytest.raises(ValueError, match=name):
        MedusaModel.from_pretrained(saved)


def test_config_that_says_nothing(saved: Path) -> None:
    (saved / CONFIG_FILE).write_text("{}")
    with pytest.raises(ValueError, match="does not say whose heads"):
        MedusaModel.from_pretrained(saved)


def test_path_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no-such/dir.*neither a directory nor a repository"):
        MedusaModel.from_pretrained(tmp_path / "no-such" / "dir")


@pytest.mark.parametrize("path", ["", None])
def test_checkpoint_that_names_no_backbone(backbone: PreTrainedModel, saved: Path, path: str | None) -> None:
    change_config(saved, base_model_name_or_path=path)
    with pytest.raises(ValueError, match=r"does not name its backbone.*backbone="):
        MedusaModel.from_pretrained(saved)
    MedusaModel.from_pretrained(saved, backbone=backbone)


def test_backbone_that_is_gone(saved: Path, tmp_path: Path) -> None:
    change_config(saved, base_model_name_or_path=str(tmp_path / "gone" / "away"))
    with pytest.raises(ValueError, match=r"cannot load the backbone.*gone/away"):
        MedusaModel.from_pretrained(saved)


@pytest.mark.parametrize(("entry", "value"), [("hidden_size", 64), ("vocab_size", 98)])
def test_backbone_of_another_size(saved: Path, entry: str, value: int) -> None:
    other = LlamaForCausalLM(
        LlamaConfig(
            **{"hidden_size": 32, "vocab_size": VOCAB, "intermediate_size": 48, entry: value},
            num_hidden_layers=1,
            num_attention_heads=4,
        )
    ).double()
    expected = {"hidden_size": 32, "vocab_size": VOCAB}[entry]
    with pytest.raises(ValueError, match=f"{entry} {expected}, this one has {value}"):
        MedusaModel.from_pretrained(saved, backbone=other)


def test_backbone_of_the_same_shape_with_other_weights(saved: Path) -> None:
    with pytest.raises(ValueError, match="another LM head"):
        MedusaModel.from_pretrained(saved, backbone=tiny_model("llama", seed=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_same_backbone_in_another_dtype_is_welcome(saved: Path, dtype: torch.dtype) -> None:
    loaded = MedusaModel.from_pretrained(saved, backbone=tiny_model("llama").to(dtype))
    assert loaded.heads[0][1].weight.dtype == dtype
