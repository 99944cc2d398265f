"""The file that answers are appended to: whole lines, by id, of one kind; and beside it what failed and why."""

import json
import os
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from .chat import Message

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class AnswerFile:
    """Appends answers and failures; what it has written survives the end of the process."""

    def __init__(self, out: Path, settings: "DataclassInstance") -> None:
        """Create or continue a file.

        Raises:
            ValueError: it holds answers that were made with other settings.
        """
        check_settings(out, settings)
        self.answered = answered_chats(out)
        """The chats answered so far, by row id."""
        self.failed: set[str] = set()
        """Row ids that failed in this run."""
        self.failures = failures_file(out)
        forget_failures(self.failures, set(self.answered))
        self._out = out.open("a", encoding="utf-8")

    def __enter__(self) -> "AnswerFile":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._out.close()
        forget_failures(self.failures, set(self.answered))

    def add(self, rows: list[dict[str, Any]]) -> None:
        """Append rows, each with `id` and `messages`."""
        self._out.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        self._out.flush()
        os.fsync(self._out.fileno())
        self.answered.update((row["id"], row["messages"]) for row in rows)

    def fail(self, row_id: str, reason: str) -> None:
        """Record that there is no answer; the next run asks again."""
        self.failed.add(row_id)
        with self.failures.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"id": row_id, "reason": reason}, ensure_ascii=False) + "\n")


def failures_file(out: Path) -> Path:
    """Where the failures of a file of answers stand."""
    return out.with_suffix(".failures.jsonl")


def forget_failures(file: Path, answered: set[str]) -> None:
    """Keep the last reason of each row that still has no answer; no file where all have one."""
    if not file.exists():
        return
    last = {row["id"]: row for row in map(json.loads, whole_lines(file)) if row["id"] not in answered}
    if not last:
        file.unlink()
        return
    partial = file.with_suffix(".partial")
    partial.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in last.values()), encoding="utf-8")
    partial.replace(file)


def check_settings(out: Path, settings: "DataclassInstance") -> None:
    """Start `out`, or make sure that it holds the same kind of answers.

    Raises:
        ValueError: the settings that differ.
    """
    file = out.with_suffix(".settings.json")
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(asdict(settings), indent=2) + "\n")
        return
    # What an older version did not know it did as the default does.
    defaults = {field.name: field.default for field in fields(settings) if field.default is not MISSING}
    stored = defaults | json.loads(file.read_text()) if file.exists() else {}
    different = [
        f"{name} {stored.get(name)!r} instead of {value!r}"
        for name, value in asdict(settings).items()
        if stored.get(name) != value
    ]
    if different:
        raise ValueError(f"{out} holds answers made with {'; '.join(different)}; choose another file, or remove it")


def answered_chats(out: Path) -> dict[str, list[Message]]:
    """Chats in a file of answers, by id. A last line that a crash tore is cut off the file."""
    return {row["id"]: row.get("messages", []) for row in map(json.loads, whole_lines(out))}


def whole_lines(file: Path) -> list[str]:
    """The lines of a file that is appended to; a torn last one is cut off."""
    if not file.exists():
        return []
    data = file.read_bytes()
    end = data.rfind(b"\n") + 1
    if end < len(data):
        with file.open("r+b") as opened:
            opened.truncate(end)
    return [line for line in data[:end].decode("utf-8").split("\n") if line.strip()]
