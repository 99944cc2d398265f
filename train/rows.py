"""From a chat file to tokenized rows with labels."""

import hashlib
import json
from pathlib import Path
from typing import Any

from .chat import ReadReport, RowError, messages_of, read_jsonl
from .supervision import IGNORE, TrainingRow, supervise


def load_rows(file: str | Path, tokenizer: Any, max_length: int) -> tuple[list[TrainingRow], ReadReport]:
    """Read, tokenize and label a JSONL file.

    A row that `medusa distill` wrote carries its token ids and where the answer starts: those are used as they are,
    since they are what the backbone really produced.

    Returns:
        The usable rows, and how many were dropped and why.

    Raises:
        ValueError: the file is missing or holds no usable row, or the tokenizer's template cannot be supervised.
    """
    rows: list[TrainingRow] = []
    report = ReadReport()
    for line, row in read_jsonl(file):
        try:
            ids, labels = _recorded(row) or supervise(tokenizer, messages_of(row))
            ids, labels = ids[:max_length], labels[:max_length]
            if all(label == IGNORE for label in labels):
                raise RowError(f"no answer token within the first {max_length} tokens (data.max_length)")
        except RowError as error:
            report.dropped.append((line, str(error)))
            continue
        rows.append(TrainingRow(row_id(row), ids, labels))
        report.kept += 1
    if not rows:
        raise ValueError(f"{file} holds no row to learn from: {report.summary()}")
    return rows, report


def prompts_of(rows: list[TrainingRow]) -> list[list[int]]:
    """What stands before the first answer of each row."""
    return [row.input_ids[: next(i for i, label in enumerate(row.labels) if label != IGNORE)] for row in rows]


def row_id(row: dict[str, Any]) -> str:
    """The row's own id, or a hash of what it holds."""
    if "id" in row:
        return str(row["id"])
    return hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()[:16]


def _recorded(row: Any) -> tuple[list[int], list[int]] | None:
    if not isinstance(row, dict) or "input_ids" not in row:
        return None
    ids, start = row["input_ids"], row.get("answer_start")
    if not isinstance(ids, list) or not isinstance(start, int) or not 0 < start < len(ids):
        raise RowError("'input_ids' must come with 'answer_start', a position inside them")
    return ids, [IGNORE] * start + ids[start:]
