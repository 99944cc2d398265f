"""Rows of data, in any of a few shapes, to lists of messages."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Message = dict[str, Any]
"""`role` and `content`, and whatever else the chat template reads: `tool_calls`, `reasoning_content`, ..."""
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "system": "system",
}
ROLES = ("system", "developer", "user", "assistant", "tool")


class RowError(ValueError):
    """A row that cannot be used; the others can."""


@dataclass
class ReadReport:
    """What became of a file's rows."""

    kept: int = 0
    dropped: list[tuple[str, str]] = field(default_factory=list)
    """Where the row stands, and the reason."""

    def summary(self) -> str:
        """One line, with the first reasons."""
        text = f"{self.kept} rows kept, {len(self.dropped)} dropped"
        reasons = "; ".join(f"{place}: {reason}" for place, reason in self.dropped[:3])
        return text + (f" ({reasons}{'; ...' if len(self.dropped) > 3 else ''})" if reasons else "")


def read_jsonl(file: str | Path) -> Iterator[tuple[int, Any]]:
    """Yield line numbers (from 1) and parsed lines; a line that is no JSON gives a RowError in its place.

    Raises:
        ValueError: there is no such file, or it is not text.
    """
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"there is no data file {path}")
    with path.open(encoding="utf-8-sig") as lines:
        try:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    try:
                        yield number, json.loads(line)
                    except json.JSONDecodeError as error:
                        yield number, RowError(f"not JSON ({error})")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 text: {error}") from error


def messages_of(row: Any) -> list[Message]:
    """The messages of one row; content is never altered.

    OpenAI (`messages`), ShareGPT (`conversations`), Alpaca (`instruction`, `output`) or `prompt`, `completion`.

    A chat that starts with the assistant is kept from its first user turn on.

    Raises:
        RowError: the row has another shape; the message names the field.
    """
    if isinstance(row, RowError):
        raise row
    if not isinstance(row, dict):
        raise RowError(f"a row must be a JSON object, this is {type(row).__name__}")
    if "messages" in row:
        messages = [_message(turn, "role", "content", "messages") for turn in _list(row, "messages")]
    elif "conversations" in row:
        messages = [_message(turn, "from", "value", "conversations") for turn in _list(row, "conversations")]
    elif "instruction" in row and "output" in row:
        given = [_text(row, "instruction"), _text(row, "input") if row.get("input") else ""]
        messages = [
            {"role": "user", "content": "\n\n".join(part for part in given if part)},
            {"role": "assistant", "content": _text(row, "output")},
        ]
    elif "prompt" in row and "completion" in row:
        messages = [
            {"role": "user", "content": _text(row, "prompt")},
            {"role": "assistant", "content": _text(row, "completion")},
        ]
    else:
        raise RowError(f"the row has neither 'messages' nor 'conversations'; its fields: {', '.join(row) or 'none'}")
    system = [message for message in messages[:1] if message["role"] in ("system", "developer")]
    turns = messages[len(system) :]
    while turns and turns[0]["role"] != "user":
        turns = turns[1:]
    if not turns:
        raise RowError("the chat has no user turn")
    return system + turns


def _text(row: dict[str, Any], name: str) -> str:
    text = row[name]
    if not isinstance(text, str):
        raise RowError(f"'{name}' must be text, this is {type(text).__name__}")
    return text


def _list(row: dict[str, Any], name: str) -> list[Any]:
    turns = row[name]
    if not isinstance(turns, list) or not turns:
        raise RowError(f"'{name}' must be a list of turns that is not empty")
    return turns


def _message(turn: Any, role_field: str, text_field: str, where: str) -> Message:
    if not isinstance(turn, dict) or role_field not in turn or text_field not in turn:
        raise RowError(f"a turn in '{where}' lacks '{role_field}' or '{text_field}'")
    role, text = turn[role_field], turn[text_field]
    role = SHAREGPT_ROLES.get(role) if role_field == "from" else role
    if role not in ROLES:
        known = SHAREGPT_ROLES if role_field == "from" else ROLES
        raise RowError(f"unknown role {turn[role_field]!r} in '{where}'; known: {', '.join(known)}")
    if not isinstance(text, str) and not (text is None and turn.get("tool_calls")):
        raise RowError(f"'{text_field}' in '{where}' must be text, this is {type(text).__name__}")
    if role_field == "from":
        return {"role": role, "content": text}
    # A table gives every turn all fields, null where a turn has none.
    others = {name: value for name, value in turn.items() if name not in ("role", "content") and value is not None}
    return {"role": role, "content": text, **others}


def tools_of(row: dict[str, Any]) -> list[Any] | None:
    """The functions that the assistant could call, for the chat template; tables often hold them as JSON text.

    Raises:
        RowError: they are no list.
    """
    tools = row.get("tools")
    try:
        tools = json.loads(tools) if isinstance(tools, str) else tools
    except json.JSONDecodeError as error:
        raise RowError(f"'tools' is text that is not JSON ({error})") from error
    if tools is not None and not isinstance(tools, list):
        raise RowError(f"'tools' must be a list, this is {type(tools).__name__}")
    return tools or None
