"""Hidden states on disk give the heads that the backbone gives; what is damaged, stale or too large is named."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from training import run

from medusa.backbone import Backbone
from medusa.checkpoint import HEADS_FILE
from medusa.loading import load_backbone, load_tokenizer
from medusa.train import hidden_states as hidden_module
from medusa.train import state_cache as cache_module
from medusa.train.hidden_states import LiveHiddenStates, RecordedHiddenStates
from medusa.train.rows import load_rows
from medusa.train.state_cache import cached_states
from medusa.train.supervision import TrainingRow


@pytest.fixture(scope="module")
def backbone(model_path: Path) -> Backbone:
    return Backbone(load_backbone(str(model_path)))


@pytest.fixture(scope="module")
def rows(model_path: Path, data: Path) -> list[TrainingRow]:
    return load_rows(data, load_tokenizer(str(model_path)), 512)[0]


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "SHARD_BYTES", 4096)


def shards(directory: Path) -> list[Path]:
    return sorted(directory.rglob("shard-*.safetensors"))


def assert_right(states: RecordedHiddenStates, backbone: Backbone, rows: list[TrainingRow]) -> None:
    for found, expected in zip(states.of(rows), LiveHiddenStates(backbone).of(rows), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_training_from_the_cache_is_training(
    model_path: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same heads; and a second run never runs the backbone, but for the rows that are checked."""
    live = load_file(run(model_path, data, tmp_path / "live") / HEADS_FILE)
    overrides = (f"cache.dir={tmp_path / 'cache'}", f"data.eval={data}")
    cached = load_file(run(model_path, data, tmp_path / "cached", *overrides) / HEADS_FILE)
    for name in live:
        torch.testing.assert_close(cached[name], live[name], rtol=1e-3, atol=1e-5)
    seen = []
    original = hidden_module.LiveHiddenStates.of
    monkeypatch.setattr(
        hidden_module.LiveHiddenStates, "of", lambda self, rows: seen.append(len(rows)) or original(self, rows)
    )
    again = load_file(run(model_path, data, tmp_path / "again", *overrides) / HEADS_FILE)
    assert all(torch.equal(again[name], cached[name]) for name in cached)
    assert sum(seen) == 2 * cache_module.CHECKED_ROWS  # for the training rows and for the held-out ones


def tear(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))


def other_key(file: Path) -> None:
    save_file(load_file(file), file, metadata={"key": "another"})


@pytest.mark.parametrize(
    ("harm", "message"), [(tear, "is damaged"), (flip, "checksum"), (other_key, "other data"), (Path.unlink, "")]
)
def test_bad_shards_are_named_and_written_again(
    backbone: Backbone,
    rows: list[TrainingRow],
    tmp_path: Path,
    harm: Callable[[Path], None],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cached_states(tmp_path, backbone, rows, Accelerator())
    files = shards(tmp_path)
    assert len(files) > 3
    times = [file.stat().st_mtime_ns for file in files]
    harm(files[1])
    capsys.readouterr()
    assert_right(cached_states(tmp_path, backbone, rows, Accelerator()), backbone, rows)
    assert message in capsys.readouterr().out
    changed = [file for file, before in zip(files, times, strict=True) if file.stat().st_mtime_ns != before]
    assert changed == [files[1]]


def test_states_of_another_backbone_are_found_out(
    backbone: Backbone, rows: list[TrainingRow], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Reports T15-T18: shapes and checksums fit, only the logits tell."""
    cached_states(tmp_path, backbone, rows, Accelerator())
    for file in shards(tmp_path):
        tensors = {name: 1.1 * tensor for name, tensor in load_file(file).items()}
        key = cache_module.content_key(backbone, rows)
        save_file(tensors, file, metadata={"key": key, "sha256": cache_module.checksum(tensors)})
    assert_right(cached_states(tmp_path, backbone, rows, Accelerator()), backbone, rows)
    assert "are not this backbone's" in capsys.readouterr().out


def test_other_weights_and_other_labels_have_other_folders(
    backbone: Backbone, rows: list[TrainingRow], model_path: Path
) -> None:
    other = Backbone(load_backbone(str(model_path)))
    with torch.no_grad():
        next(other.decoder.parameters())[0, 0] += 0.01
    key = cache_module.content_key(backbone, rows)
    assert cache_module.content_key(other, rows) != key
    assert cache_module.content_key(backbone, rows[:-1]) != key
    assert cache_module.content_key(backbone, list(rows)) == key


def test_a_disk_that_is_too_small_is_told_before(
    backbone: Backbone, rows: list[TrainingRow], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(ValueError, match=r"take 0\.00 GB.*cache.dir"):
        cached_states(tmp_path, backbone, rows, Accelerator())
    assert not shards(tmp_path)


def test_a_disk_that_fills_up_keeps_what_was_written(
    backbone: Backbone, rows: list[TrainingRow], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = cache_module.save_file

    def full(tensors, file, metadata):  # type: ignore[no-untyped-def]
        if "00002" in file.name:
            raise OSError(28, "No space left on device")
        original(tensors, file, metadata)

    monkeypatch.setattr(cache_module, "save_file", full)
    with pytest.raises(ValueError, match=r"shard-00002.*No space left.*disk full"):
        cached_states(tmp_path, backbone, rows, Accelerator())
    assert [file.name for file in shards(tmp_path)] == ["shard-00000.safetensors", "shard-00001.safetensors"]


def test_two_rows_of_one_id_are_refused(backbone: Backbone, tmp_path: Path) -> None:
    rows = [TrainingRow("a", [1, 2, 3], [-100, 2, 3]), TrainingRow("a", [1, 2, 4], [-100, 2, 4])]
    with pytest.raises(ValueError, match="two rows have the id 'a'"):
        cached_states(tmp_path, backbone, rows, Accelerator())
