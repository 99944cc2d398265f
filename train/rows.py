"""From a chat file to tokenized rows with labels."""

import hashlib
import json
import warnings
from pathlib import Path
from typing import Any

from .chat import ReadReport, RowError, messages_of, tools_of
from .files import read_rows
from .supervision import IGNORE, Supervised, TrainingRow, supervise

ALMOST_ALL = 0.98


def load_rows(
    source: str | Path, tokenizer: Any, max_length: int, stop_on_error: bool = False
) -> tuple[list[TrainingRow], ReadReport]:
    """Read, tokenize and label data.

    A row that `medusa distill` wrote carries its token ids and where the answer starts: those are used as they are,
    since they are what the backbone really produced. A row with `text` alone is learned as it is, without a template.

    Args:
        source: as for `read_rows`.
        tokenizer: the backbone's.
        max_length: rows are cut after so many tokens.
        stop_on_error: let a row that cannot be used be an error.

    Returns:
        The usable rows, and how many were dropped and why.

    Raises:
        ValueError: there is no such data or no usable row in it, the tokenizer has no template, or, with
            `stop_on_error`, a row cannot be used.
    """
    rows: list[TrainingRow] = []
    named: set[str] = set()
    report = ReadReport()
    for place, row in read_rows(source):
        try:
            parts = [_cut(part, max_length) for part in _labelled(tokenizer, row)]
            parts = [part for part in parts if any(label != IGNORE for label in part[1])]
            if not parts:
                raise RowError(f"no answer token within the first {max_length} tokens (data.max_length)")
            name = row_id(row)
            if "id" in row and name in named:
                raise RowError(f"id {name!r} stands twice; hidden states are kept by id, so give each row its own")
        except RowError as error:
            if stop_on_error:
                raise ValueError(
                    f"{source}, {place}: {error} (data.on_error is stop; drop leaves such rows out)"
                ) from error
            report.dropped.append((place, str(error)))
            continue
        named.add(name)
        names = [name, *(f"{name}#{number}" for number in range(2, len(parts) + 1))]
        rows += [TrainingRow(own, *part) for own, part in zip(names, parts, strict=True)]
        report.kept += 1
    if not rows:
        raise ValueError(f"{source} holds no row to learn from: {report.summary()}")
    return rows, report


def _labelled(tokenizer: Any, row: Any) -> list[Supervised]:
    """Token ids and labels of a row."""
    recorded = _recorded(row)
    if recorded is not None:
        return [recorded]
    if isinstance(row, dict) and isinstance(row.get("text"), str) and not {"messages", "conversations"} & set(row):
        ids = list(tokenizer(row["text"])["input_ids"])
        return [(ids, list(ids))]
    messages = messages_of(row)
    return supervise(tokenizer, messages, tools_of(row))


def _cut(part: Supervised, max_length: int) -> Supervised:
    ids, labels = part
    return ids[:max_length], labels[:max_length]


def coverage(rows: list[TrainingRow]) -> str:
    """How much of the rows is learned; warns where it is nearly all, as it is when prompts are learned by mistake."""
    tokens = sum(len(row.labels) for row in rows)
    learned = sum(label != IGNORE for row in rows for label in row.labels)
    if learned > ALMOST_ALL * tokens:
        warnings.warn(
            f"{learned} of {tokens} tokens are learned, prompts and headers too: that is right for plain text only; "
            "look at the rows with `medusa inspect FILE --tokenizer MODEL`",
            stacklevel=2,
        )
    return f"{learned} of {tokens} tokens are learned ({learned / tokens:.0%})"


def prompts_of(rows: list[TrainingRow]) -> list[list[int]]:
    """What stands before the first answer of each row."""
    return [row.input_ids[: next(i for i, label in enumerate(row.labels) if label != IGNORE)] for row in rows]


def row_id(row: dict[str, Any]) -> str:
    """The row's own id, or a hash of what it holds."""
    if "id" in row:
        return str(row["id"])
    return hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()[:16]


def _recorded(row: Any) -> Supervised | None:
    if not isinstance(row, dict) or "input_ids" not in row:
        return None
    ids, start = row["input_ids"], row.get("answer_start")
    if not isinstance(ids, list) or not isinstance(start, int) or not 0 < start < len(ids):
        raise RowError("'input_ids' must come with 'answer_start', a position inside them")
    return ids, [IGNORE] * start + ids[start:]
