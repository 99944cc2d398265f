"""Which tokens of a chat the model itself wrote. T tokens.

One label list in token coordinates: label[j] is id[j] where the assistant wrote token j, else IGNORE. The assistant's
text and its end-of-turn token count; headers, other turns and whatever the template puts after a turn do not.
"""

import re
from dataclasses import dataclass
from typing import Any

from .chat import Message, RowError

IGNORE = -100


@dataclass(frozen=True)
class TrainingRow:
    """A tokenized chat."""

    id: str
    input_ids: list[int]
    labels: list[int]


Supervised = tuple[list[int], list[int]]
"""Token ids and labels, [T] each."""


def supervise(tokenizer: Any, messages: list[Message], tools: list[Any] | None = None) -> list[Supervised]:
    """Tokenize a chat with its template and label the assistant's tokens.

    Uses the template's own generation tags where it has them; else every assistant turn is found by rendering the chat
    up to it with the generation prompt, and through it.

    Args:
        tokenizer: its template is used.
        messages: the chat.
        tools: functions that the template shows.

    Returns:
        The chat as one row. If the template renders turns differently once others follow (as those with thinking blocks
        do), a row for each assistant turn, up to it, with the ids that serving would see; only that turn is labelled.

    Raises:
        RowError: there is no assistant turn, or what the template makes of one does not begin with its prompt.
        ValueError: the template is missing.
    """
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template; use one that has, or set tokenizer.chat_template")
    if not tokenizer.is_fast:
        raise ValueError(f"{type(tokenizer).__name__} cannot map tokens to text; a fast tokenizer is needed")
    turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise RowError("the chat has no assistant turn, so there is nothing to learn from")
    whole = _render(tokenizer, messages, tools)
    if all(whole.startswith(text) for turn in turns for text in _around(tokenizer, messages, turn, tools)):
        return [_supervise_turns(tokenizer, messages, turns, tools)]
    return [_supervise_turns(tokenizer, messages[: turn + 1], [turn], tools) for turn in turns]


def _render(tokenizer: Any, messages: list[Message], tools: list[Any] | None, prompt: bool = False) -> str:
    return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=prompt))


def _around(tokenizer: Any, messages: list[Message], turn: int, tools: list[Any] | None) -> tuple[str, str]:
    """The chat up to a turn with the prompt for it, and through it."""
    before = _render(tokenizer, messages[:turn], tools, prompt=True)
    return before, _render(tokenizer, messages[: turn + 1], tools)


def _supervise_turns(tokenizer: Any, messages: list[Message], turns: list[int], tools: list[Any] | None) -> Supervised:
    """Label some assistant turns of a chat whose template leaves them as they were."""
    text = _render(tokenizer, messages, tools)
    # The template has written the special tokens already; a second BOS would not be what serving sees.
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = list(encoded["input_ids"]), encoded["offset_mapping"]
    written = [False] * len(ids)
    tagged = _tagged(tokenizer, messages, tools, ids)
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    for turn in turns:
        before, through = _around(tokenizer, messages, turn, tools)
        if not (text.startswith(before) and text.startswith(through)):
            raise RowError(
                f"the chat template renders turn {turn + 1} in another way than its prompt begins, so what would be "
                "learned is not what serving sees"
            )
        span = [i for i, (start, end) in enumerate(offsets) if start >= len(before) and end <= len(through)]
        if tagged is not None:
            span = [i for i in span if tagged[i]]
        while span and _after_end_of_turn(text, offsets, ids, special, span):
            span.pop()
        for i in span:
            written[i] = True
    return ids, [token if flag else IGNORE for token, flag in zip(ids, written, strict=True)]


def _tagged(tokenizer: Any, messages: list[Message], tools: list[Any] | None, ids: list[int]) -> list[int] | None:
    """What the template's own generation tags mark; None if it has none.

    Raises:
        ValueError: they mark nothing.
    """
    if not re.search(r"\{%-?\s*generation\s*-?%\}", tokenizer.chat_template):
        return None
    encoded = tokenizer.apply_chat_template(messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True)
    marked = list(encoded["assistant_masks"])
    if not any(marked):
        raise ValueError("the chat template's generation tags mark no token of a chat with an assistant turn")
    assert list(encoded["input_ids"]) == ids, "the template's text gives other tokens than the template itself"
    return marked


def _after_end_of_turn(
    text: str, offsets: list[tuple[int, int]], ids: list[int], special: set[int], span: list[int]
) -> bool:
    """Whether the span's last token is white space behind a special token: the template's, not the model's."""
    start, end = offsets[span[-1]]
    return ids[span[-1]] not in special and not text[start:end].strip() and any(ids[i] in special for i in span[:-1])
