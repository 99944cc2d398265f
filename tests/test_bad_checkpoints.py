"""Checkpoints that are damaged, wrong or hostile: each is one ValueError that names the file and what to do."""

import json
import os
import pickle
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import VOCAB, shared_model, tiny_medusa
from torch import Tensor
from transformers import PreTrainedModel

from medusa import MedusaModel
from medusa.checkpoint import CONFIG_FILE, HEADS_FILE
from medusa.stored_heads import open_heads
from medusa.weight_files import INDEX

KINDS = ("native", "reference", "sharded")
SHARD = "model-2.safetensors"
FLIPS = 60


@pytest.fixture
def backbone() -> PreTrainedModel:
    return shared_model("llama")


@pytest.fixture
def native(backbone: PreTrainedModel, tmp_path: Path) -> Path:
    tiny_medusa(backbone, num_heads=2).save_pretrained(tmp_path / "native")
    return tmp_path / "native"


@pytest.fixture(params=KINDS)
def weights(request: pytest.FixtureRequest, native: Path) -> Path:
    """A file of weights in a checkpoint of each kind."""
    if request.param == "native":
        return native / HEADS_FILE
    directory = native.with_name(request.param)
    directory.mkdir()
    tensors = load_file(native / HEADS_FILE)
    if request.param == "reference":
        save_file(tensors, directory / HEADS_FILE)
        return directory / HEADS_FILE
    return write_shards(directory, tensors)


def write_shards(directory: Path, tensors: dict[str, Tensor]) -> Path:
    """Heads in two shards; returns the second."""
    parts = {f"model-{k + 1}.safetensors": {n: t for n, t in tensors.items() if n.startswith(f"{k}.")} for k in (0, 1)}
    for file, part in parts.items():
        save_file(part, directory / file)
    places = {name: file for file, part in parts.items() for name in part}
    (directory / INDEX).write_text(json.dumps({"weight_map": places}))
    return directory / SHARD


def load(directory: Path, backbone: PreTrainedModel) -> MedusaModel:
    return MedusaModel.from_pretrained(directory, backbone=backbone)


def in_header(change: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    """Change the header, and its length with it."""

    def plant(whole: bytes) -> bytes:
        size = int.from_bytes(whole[:8], "little")
        header = json.loads(whole[8 : 8 + size])
        change(header)
        raw = json.dumps(header).encode()
        return len(raw).to_bytes(8, "little") + raw + whole[8 + size :]

    return plant


def header_length(whole: bytes) -> int:
    return int.from_bytes(whole[:8], "little")


def offsets(begin: int, end: int) -> Callable[[bytes], bytes]:
    """Move where the data of the last tensor begins and ends."""

    def change(header: dict[str, Any]) -> None:
        last = max((e for n, e in header.items() if n != "__metadata__"), key=lambda entry: entry["data_offsets"][1])
        last["data_offsets"] = [last["data_offsets"][0] + begin, last["data_offsets"][1] + end]

    return in_header(change)


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "nothing left": lambda whole: b"",
    "cut in the length": lambda whole: whole[:7],
    "nothing behind the length": lambda whole: whole[:8],
    "cut in the header": lambda whole: whole[: 8 + header_length(whole) // 2],
    "one byte of the header missing": lambda whole: whole[: 7 + header_length(whole)],
    "no data": lambda whole: whole[: 8 + header_length(whole)],
    "cut in the data": lambda whole: whole[: (8 + header_length(whole) + len(whole)) // 2],
    "one byte missing": lambda whole: whole[:-1],
    "one byte more": lambda whole: whole + b"\0",
    "header longer than the file": lambda whole: (len(whole) + 1).to_bytes(8, "little") + whole[8:],
    "header of 16 exabytes": lambda whole: b"\xff" * 8 + whole[8:],
    "header of no length": lambda whole: bytes(8) + whole[8:],
    "header that is no JSON": lambda whole: whole[:8] + b"x" + whole[9:],
    "header that is no text": lambda whole: whole[:9] + b"\xff" + whole[10:],
    "offsets beyond the data": offsets(4096, 4096),
    "negative offset": offsets(-(10**9), 0),
    "tensors that overlap": offsets(-4, -4),
    "a hole before the last tensor": offsets(4, 4),
    "an end before the beginning": offsets(0, -(10**6)),
    "an unknown type": in_header(
        lambda header: header[next(iter(header.keys() - {"__metadata__"}))].update(dtype="F99")
    ),
    "a shape that does not fit": in_header(
        lambda header: header[next(iter(header.keys() - {"__metadata__"}))].update(shape=[10**18, 10**18])
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_named(backbone: PreTrainedModel, weights: Path, damage: str) -> None:
    load(weights.parent, backbone)
    weights.write_bytes(DAMAGE[damage](weights.read_bytes()))
    with pytest.raises(ValueError, match=rf"{weights} is damaged \(.*\); copy or download it again"):
        load(weights.parent, backbone)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_named_by_export(native: Path, damage: str) -> None:
    (native / HEADS_FILE).write_bytes(DAMAGE[damage]((native / HEADS_FILE).read_bytes()))
    with pytest.raises(ValueError, match=f"{HEADS_FILE} is damaged"), open_heads(native):
        pass


def refusals(file: Path, size: int, backbone: PreTrainedModel) -> list[str]:
    """What loading says of single wrong bytes among the first `size`; no other error escapes."""
    whole, dice, messages = file.read_bytes(), random.Random(0), []
    for _ in range(FLIPS):
        flipped = bytearray(whole)
        place = dice.randrange(size)
        flipped[place] = dice.choice([dice.randrange(256), flipped[place] ^ 1 << dice.randrange(8), *b'0"]{:,'])
        file.write_bytes(flipped)
        try:
            load(file.parent, backbone)
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_flipped_bytes_of_a_header(backbone: PreTrainedModel, weights: Path) -> None:
    messages = refusals(weights, 8 + header_length(weights.read_bytes()), backbone)
    assert len(messages) > FLIPS // 2
    assert [message for message in messages if str(weights.parent) not in message] == []


@pytest.mark.filterwarnings("ignore")
def test_flipped_bytes_of_a_pickle(backbone: PreTrainedModel, native: Path, tmp_path: Path) -> None:
    (tmp_path / "pt").mkdir()
    file = tmp_path / "pt" / "medusa_lm_head.pt"
    torch.save(load_file(native / HEADS_FILE), file, _use_new_zipfile_serialization=False)
    messages = refusals(file, 800, backbone)  # of the zip format, checksums would catch all
    assert len(messages) > FLIPS // 3
    assert [message for message in messages if str(tmp_path) not in message] == []


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("1.0.linear.bias", torch.full((32,), torch.nan), r"tensor 1\.0\.linear\.bias holds NaN"),
        ("1.1.weight", torch.full((VOCAB, 32), -torch.inf), r"tensor 1\.1\.weight holds NaN or infinity"),
        ("1.0.linear.bias", None, r"(missing|lacks) 1\.0\.linear\.bias"),
        ("1.0.linear.weight", None, r"missing 1\.0\.linear\.weight|heads \[1\], which have no blocks"),
        ("1.1.weight", None, r"(missing|lacks) 1\.1\.weight"),
        ("1.1.weight", torch.ones(32, VOCAB), r"1\.1\.weight.*transposed; store 1\.1\.weight\.T"),
        (
            "1.1.weight",
            torch.ones(VOCAB + 31, 32),
            r"1\.1\.weight.* vocabulary was padded or extended; use the backbone",
        ),
        ("1.0.linear.weight", torch.ones(32, 32, dtype=torch.int32), r"1\.0\.linear\.weight is of type int32"),
        ("1.0.linear.weight", torch.ones(32, 32).to(torch.float8_e4m3fn), r"is of type float8_e4m3fn"),
        ("1.0.linear.weight", torch.ones(32, 32, dtype=torch.complex64), r"is of type complex64"),
        ("1.0.linear.weight", torch.tensor(1.0), r"1\.0\.linear\.weight"),
        ("1.1.weight", torch.ones(32), r"1\.1\.weight"),
        ("1.0.linear.bias", torch.tensor(1.0), r"1\.0\.linear\.bias has shape \(\)"),
        ("7.1.weight", torch.ones(VOCAB, 32), r"unexpected 7\.1\.weight|heads \[7\], which have no blocks"),
        ("999999999.0.linear.weight", torch.ones(32, 32), "999999999"),
    ],
)
def test_a_wrong_tensor_is_named(
    backbone: PreTrainedModel, weights: Path, name: str, tensor: Tensor | None, message: str
) -> None:
    changed = {**load_file(weights), name: tensor}
    save_file({name: tensor for name, tensor in changed.items() if tensor is not None}, weights)
    with pytest.raises(ValueError, match=message) as caught:
        load(weights.parent, backbone)
    assert str(weights.parent) in str(caught.value)


def test_a_tensor_in_two_shards_is_named(backbone: PreTrainedModel, native: Path, tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    tensors = load_file(native / HEADS_FILE)
    shard = write_shards(tmp_path / "s", tensors)
    save_file({**load_file(shard), "0.1.weight": tensors["0.1.weight"]}, shard)
    with pytest.raises(ValueError, match=rf"{SHARD} holds 0\.1\.weight, which another shard holds too"):
        load(tmp_path / "s", backbone)


@pytest.mark.parametrize(
    "index",
    [
        "",
        "[]",
        "3",
        "{}",
        '{"weight_map": null}',
        '{"weight_map": [1]}',
        '{"weight_map": {"a": 1, "b": "x"}}',
        "[" * 10**5,
    ],
    ids=lambda text: text[:20],
)
def test_an_index_that_is_none_is_named(backbone: PreTrainedModel, tmp_path: Path, index: str) -> None:
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(ValueError, match=rf"{INDEX} is (no index of shards|not JSON).*download"):
        load(tmp_path, backbone)


@pytest.mark.parametrize("place", ["../out.safetensors", "link.safetensors", "folder/out.safetensors", "", "a\0b"])
def test_an_index_that_leads_outside_is_refused(
    backbone: PreTrainedModel, native: Path, tmp_path: Path, place: str
) -> None:
    """By dots, by a link to a file, by a link to a folder."""
    tensors = load_file(native / HEADS_FILE)
    (tmp_path / "outside").mkdir()
    (tmp_path / "s").mkdir()
    write_shards(tmp_path / "s", tensors)
    for file in (tmp_path / "outside" / "out.safetensors", tmp_path / "out.safetensors"):
        save_file(tensors, file)
    (tmp_path / "s" / "link.safetensors").symlink_to(tmp_path / "out.safetensors")
    (tmp_path / "s" / "folder").symlink_to(tmp_path / "outside")
    (tmp_path / "s" / INDEX).write_text(json.dumps({"weight_map": {"0.1.weight": place}}))
    with pytest.raises(ValueError, match=rf"{INDEX} (names .* (lies outside|is not there)|is no index of shards)"):
        load(tmp_path / "s", backbone)


class Opened:
    """Makes a file when it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.proof,)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "pytorch_model.bin"])
@pytest.mark.parametrize("way", ["zip", "pickle"])
def test_code_beside_tensors_does_not_run(backbone: PreTrainedModel, tmp_path: Path, file: str, way: str) -> None:
    (tmp_path / "evil").mkdir()
    state = {"0.0.linear.weight": torch.ones(32, 32), "more": Opened(tmp_path / "ran")}
    if way == "zip":
        torch.save(state, tmp_path / "evil" / file)
    else:
        (tmp_path / "evil" / file).write_bytes(pickle.dumps(Opened(tmp_path / "ran"), protocol=2))
    with pytest.raises(ValueError, match=rf"{file} is a pickle that runs code.*was not opened; ask its author"):
        load(tmp_path / "evil", backbone)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("entry", "value", "message"),
    [
        (
            "medusa_num_heads",
            10**9,
            r"medusa_num_heads is 1000000000, the file has 2: missing 2\.0\.linear\.weight, .* and more",
        ),
        ("medusa_num_layers", 10**9, r"medusa_num_layers is 1000000000, the file has 1: missing 0\.1\.linear\.weight"),
        ("medusa_num_heads", 1, r"unexpected 1\.0\.linear\.weight"),
        ("medusa_num_heads", None, "num_heads is None"),
        ("tokenizer_size", "many", "tokenizer_size is 'many', not a count"),
        ("tokenizer_size", None, "tokenizer_size is None, not a count"),
        ("tokenizer_size", -3, "tokenizer_size is -3, not a count"),
    ],
)
def test_a_configuration_that_counts_wrong_is_named(
    backbone: PreTrainedModel, native: Path, entry: str, value: object, message: str
) -> None:
    """Before so many heads are built."""
    entries = json.loads((native / CONFIG_FILE).read_text())
    (native / CONFIG_FILE).write_text(json.dumps({**entries, entry: value}))
    with pytest.raises(ValueError, match=message):
        load(native, backbone)


def test_a_native_configuration_without_counts_is_refused(backbone: PreTrainedModel, native: Path) -> None:
    entries = json.loads((native / CONFIG_FILE).read_text())
    del entries["medusa_num_heads"]
    (native / CONFIG_FILE).write_text(json.dumps(entries))
    with pytest.raises(ValueError, match="holds no Medusa heads"):
        load(native, backbone)


@pytest.mark.parametrize(
    "ids",
    [torch.full((4,), 0.5), torch.ones(2, 2, dtype=torch.long), torch.tensor(3), torch.tensor([5, 3, 4, 50])],
    ids=str,
)
def test_a_draft_vocabulary_that_is_none_is_named(backbone: PreTrainedModel, tmp_path: Path, ids: Tensor) -> None:
    tiny_medusa(backbone, num_heads=1, draft_vocab=(0, 3, 4, 50)).save_pretrained(tmp_path / "heads")
    file = tmp_path / "heads" / HEADS_FILE
    save_file({**load_file(file), "draft_vocab": ids}, file)
    for read in (lambda: load(file.parent, backbone), lambda: open_heads(file.parent).__enter__()):
        with pytest.raises(ValueError, match="draft_vocab must"):
            read()


@pytest.mark.parametrize(
    "ids",
    [torch.full((VOCAB,), 0.5), torch.arange(5), torch.ones(2, 2, dtype=torch.long), torch.tensor(3)],
    ids=["f", "5", "2d", "0d"],
)
def test_a_token_map_that_does_not_fit_is_named(
    backbone: PreTrainedModel, native: Path, tmp_path: Path, ids: Tensor
) -> None:
    tensors = load_file(native / HEADS_FILE)
    names = {"linear.weight": "blocks.0.layers.0.weight", "linear.bias": "blocks.0.layers.0.bias"}
    (tmp_path / "v").mkdir()
    stored = {new: tensors[f"0.0.{old}"] for old, new in names.items()} | {"token_map": ids}
    for more in ({"lm_heads.0.weight": tensors["0.1.weight"]}, {}):
        save_file({**stored, **more}, tmp_path / "v" / "model.safetensors")
        with pytest.raises(ValueError, match=r"token_map (must be a list|has )"):
            load(tmp_path / "v", backbone)


@contextmanager
def someone_else() -> Iterator[None]:
    """Root may read everything, so root becomes nobody for a while."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("locked", ["directory", "weights", CONFIG_FILE, INDEX])
def test_what_may_not_be_read_is_named(backbone: PreTrainedModel, weights: Path, locked: str) -> None:
    """In a folder that is open to all: pytest's own is closed to others."""
    with tempfile.TemporaryDirectory() as work:
        Path(work).chmod(0o755)
        directory = Path(shutil.copytree(weights.parent, Path(work) / "heads"))
        target = {"directory": directory, "weights": directory / weights.name}.get(locked, directory / locked)
        if not target.exists():
            pytest.skip(f"this kind has no {locked}")
        mode = target.stat().st_mode
        target.chmod(0)
        with someone_else(), pytest.raises(ValueError, match=r"cannot read .*Permission denied") as caught:
            load(directory, backbone)
        target.chmod(mode)
    assert str(directory) in str(caught.value)
