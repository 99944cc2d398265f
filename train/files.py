"""Where rows of data come from: JSONL, JSON arrays, Parquet, Arrow and CSV, one file or many, or the hub."""

import glob
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .chat import RowError, read_jsonl

TABLES = {".parquet": "parquet", ".arrow": "arrow", ".csv": "csv"}
SUFFIXES = (".jsonl", ".json", *TABLES)
HUB = "hub:"
BOM = b"\xef\xbb\xbf"


def read_rows(source: str | Path) -> Iterator[tuple[str, Any]]:
    """Yield where each row stands, such as `line 3`, and the row; for one that cannot be read, a RowError.

    Args:
        source: a file; a folder, whose data files are read in the order of their names; a glob such as
            `data/*.parquet`; or a dataset of the hub, `hub:USER/NAME` or `hub:USER/NAME:SPLIT` (train if unsaid),
            which is streamed.

    Raises:
        ValueError: there is no such file or dataset, or it is not what its name says.
    """
    if str(source).startswith(HUB):
        yield from _read_hub(str(source).removeprefix(HUB))
        return
    files = _files(Path(source))
    for file in files:
        where = f"{file.name} " if len(files) > 1 else ""
        if file.suffix in TABLES:
            rows, unit = _read_table(TABLES[file.suffix], {"data_files": str(file)}, str(file)), "row"
        elif _is_array(file):
            rows, unit = _read_array(file), "row"
        else:
            rows, unit = read_jsonl(file), "line"
        for number, row in rows:
            yield f"{where}{unit} {number}", row


def _files(source: Path) -> list[Path]:
    if source.is_file():
        return [source]
    if source.is_dir():
        found = sorted(file for file in source.rglob("*") if file.suffix in SUFFIXES and file.is_file())
    else:
        found = sorted(Path(name) for name in glob.glob(str(source), recursive=True) if Path(name).is_file())
    if not found:
        raise ValueError(
            f"there is no data file {source}; give a file or a folder of {', '.join(SUFFIXES)}, a glob, or "
            f"{HUB}USER/NAME"
        )
    return found


def _is_array(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(1024).removeprefix(BOM).lstrip().startswith(b"[")


def _read_array(file: Path) -> Iterator[tuple[int, Any]]:
    """Rows of a JSON array that is never held as a whole; where it breaks off, a RowError behind the last whole row."""
    import ijson

    number = 0
    with file.open("rb") as opened:
        if opened.read(len(BOM)) != BOM:
            opened.seek(0)
        try:
            for number, row in enumerate(ijson.items(opened, "item", use_float=True), start=1):
                yield number, row
        except (ijson.JSONError, UnicodeDecodeError) as error:
            reason = " ".join(str(error).split())
            yield number + 1, RowError(f"the array breaks off behind row {number} ({reason})")


def _read_hub(name: str) -> Iterator[tuple[str, Any]]:
    repository, _, split = name.partition(":")
    for number, row in _read_table(repository, {}, f"{HUB}{repository}", split or "train"):
        yield f"row {number}", row


def _read_table(kind: str, files: dict[str, str], source: str, split: str = "train") -> Iterator[tuple[int, Any]]:
    """Rows of what `datasets` reads; fields that are null are left out, as tables have all fields in all rows."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError

    try:
        table = load_dataset(kind, **files, split=split, streaming=True)
        for number, row in enumerate(table, start=1):
            yield number, {name: value for name, value in row.items() if value is not None}
    except (OSError, ValueError, DatasetGenerationError, DatasetNotFoundError) as error:
        raise ValueError(f"{source} cannot be read: {error}") from error
