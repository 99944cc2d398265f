"""What is asked while distilling: the user's turns of chats, and which of them are this machine's."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .chat import Message, ReadReport, RowError, messages_of
from .files import read_rows
from .rows import row_id


@dataclass(frozen=True)
class Prompt:
    """One question to the backbone, and what the user says next."""

    id: str
    messages: list[Message]
    input_ids: list[int]
    """The messages in the template, generation prompt included; empty where a server applies the template."""
    follow_ups: tuple[Message, ...] = ()
    """The user's later turns."""
    turn: int = 1

    @property
    def row_id(self) -> str:
        """The id of its answer: the chat's, from the second turn on with the turn's number."""
        return self.id if self.turn == 1 else f"{self.id}#{self.turn}"


@dataclass(frozen=True)
class Shard:
    """Part `index` (from 1) of `count` disjoint parts of the prompts; a prompt's id alone says which one it is in."""

    index: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> "Shard":
        """Read `i/n`.

        Raises:
            ValueError: it is something else.
        """
        index, _, count = text.partition("/")
        if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
            raise ValueError(f"--shard {text!r} must be i/n with 1 <= i <= n, for example 2/4")
        return cls(int(index), int(count))

    def __contains__(self, name: str) -> bool:
        return int(hashlib.sha256(name.encode()).hexdigest(), 16) % self.count == self.index - 1


def read_prompts(
    file: str | Path, tokenizer: Any | None, limit: int | None = None, turns: int | None = 1
) -> tuple[list[Prompt], ReadReport]:
    """Read prompts: rows with a `prompt`, or chats, whose own answers are left out.

    Args:
        file: JSONL file.
        tokenizer: whose template makes token ids of the first turn; None to make none.
        limit: read the first so many usable rows only.
        turns: use the first so many user turns of a chat; None for all.

    Raises:
        ValueError: no row can be used, or an id stands twice.
    """
    prompts: dict[str, Prompt] = {}
    report = ReadReport()
    for place, row in read_rows(file):
        if limit is not None and len(prompts) >= limit:
            break
        try:
            if isinstance(row, dict) and isinstance(row.get("prompt"), str):
                messages = [{"role": "user", "content": row["prompt"]}]
            else:
                messages = messages_of(row)
        except RowError as error:
            report.dropped.append((place, str(error)))
            continue
        name = row_id(row)
        if name in prompts:
            raise ValueError(f"{file}, {place}: id {name!r} stands twice; answers are kept by id, so give each its own")
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        first = messages[: answers[0]] if answers else messages
        later = [message for message in messages[len(first) :] if message["role"] == "user"]
        ids = [] if tokenizer is None else prompt_ids(tokenizer, first)
        prompts[name] = Prompt(name, first, ids, tuple(later if turns is None else later[: turns - 1]))
        report.kept += 1
    if not prompts:
        raise ValueError(f"{file} holds no prompt: {report.summary()}")
    return list(prompts.values()), report


def next_prompt(tokenizer: Any, prompt: Prompt, answered: list[Message]) -> Prompt:
    """The user's next turn, behind the chat with the backbone's own answers."""
    messages = [*answered, prompt.follow_ups[0]]
    return Prompt(prompt.id, messages, prompt_ids(tokenizer, messages), prompt.follow_ups[1:], prompt.turn + 1)


def prompt_ids(tokenizer: Any, messages: list[Message]) -> list[int]:
    """Token ids of a chat up to where the answer starts."""
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"])
