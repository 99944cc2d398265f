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


def supervise(tokenizer: Any, messages: list[Message]) -> tuple[list[int], list[int]]:
    """Tokenize a chat with its template and label the assistant's tokens.

    Uses the template's own generation tags where it has them; else every assistant turn is found by rendering the chat
    up to it with the generation prompt, and through it.

    Returns:
        Token ids and labels, [T] each.

    Raises:
        RowError: there is no assistant turn.
        ValueError: the template is missing, or rewrites earlier turns so that they are not what serving would see.
    """
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template; use one that has, or set tokenizer.chat_template")
    if not tokenizer.is_fast:
        raise ValueError(f"{type(tokenizer).__name__} cannot map tokens to text; a fast tokenizer is needed")
    if not any(message["role"] == "assistant" for message in messages):
        raise RowError("the chat has no assistant turn, so there is nothing to learn from")
    if re.search(r"\{%-?\s*generation\s*-?%\}", tokenizer.chat_template):
        encoded = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        ids, written = list(encoded["input_ids"]), list(encoded["assistant_masks"])
        if not any(written):
            raise ValueError("the chat template's generation tags mark no token of a chat with an assistant turn")
    else:
        ids, written = _by_prefixes(tokenizer, messages)
    return ids, [token if flag else IGNORE for token, flag in zip(ids, written, strict=True)]


def _by_prefixes(tokenizer: Any, messages: list[Message]) -> tuple[list[int], list[bool]]:
    """Token ids, and for each whether it lies in an assistant turn."""
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    # The template has written the special tokens already; a second BOS would not be what serving sees.
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    written = [False] * len(ids)
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = tokenizer.apply_chat_template(messages[:turn], tokenize=False, add_generation_prompt=True)
        through = tokenizer.apply_chat_template(messages[: turn + 1], tokenize=False)
        if not (text.startswith(before) and text.startswith(through)):
            raise ValueError(
                f"the chat template renders turn {turn + 1} differently once later turns follow (it rewrites history, "
                "as templates with thinking blocks do), so training text would differ from serving; give chats that "
                "end with that turn, or a template with {% generation %} tags"
            )
        span = [i for i, (start, end) in enumerate(offsets) if start >= len(before) and end <= len(through)]
        while span and _after_end_of_turn(text, offsets, ids, special, span):
            span.pop()
        for i in span:
            written[i] = True
    return ids, written


def _after_end_of_turn(
    text: str, offsets: list[tuple[int, int]], ids: list[int], special: set[int], span: list[int]
) -> bool:
    """Whether the span's last token is white space behind a special token: the template's, not the model's."""
    start, end = offsets[span[-1]]
    return ids[span[-1]] not in special and not text[start:end].strip() and any(ids[i] in special for i in span[:-1])
