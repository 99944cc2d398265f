"""Self-distillation: let the backbone answer the prompts, so that heads learn what it would really say."""

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa.backbone import Backbone
from medusa.progress import progress_bar

from .answer import answer
from .chat import Message, ReadReport, RowError, messages_of, read_jsonl
from .hidden_states import record, recording_directory
from .rows import row_id

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True)
class Prompt:
    """One question to the backbone."""

    id: str
    messages: list[Message]
    input_ids: list[int]


@dataclass(frozen=True)
class DistillSettings:
    """What the answers depend on; kept beside them, so that no file mixes two kinds of answers."""

    backbone: str
    max_new_tokens: int
    chat_template: str
    recorded: bool


def read_prompts(file: str | Path, tokenizer: Any, limit: int | None = None) -> tuple[list[Prompt], ReadReport]:
    """Read prompts: rows with a `prompt`, or chats, of which the part before the first assistant turn is used.

    Raises:
        ValueError: no row can be used, or an id stands twice.
    """
    prompts: dict[str, Prompt] = {}
    report = ReadReport()
    for line, row in read_jsonl(file):
        if limit is not None and len(prompts) >= limit:
            break
        try:
            if isinstance(row, dict) and isinstance(row.get("prompt"), str):
                messages = [{"role": "user", "content": row["prompt"]}]
            else:
                messages = messages_of(row)
                answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
                messages = messages[: answers[0]] if answers else messages
        except RowError as error:
            report.dropped.append((line, str(error)))
            continue
        name = row_id(row)
        if name in prompts:
            raise ValueError(
                f"{file}, line {line}: id {name!r} stands twice; answers are kept by id, so give each its own"
            )
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        prompts[name] = Prompt(name, messages, list(ids))
        report.kept += 1
    if not prompts:
        raise ValueError(f"{file} holds no prompt: {report.summary()}")
    return list(prompts.values()), report


def distill(
    backbone: Backbone,
    tokenizer: Any,
    prompts: list[Prompt],
    out: Path,
    max_new_tokens: int = 512,
    batch_size: int = 16,
    recorded: bool = False,
) -> int:
    """Answer the prompts greedily in batches and append the answers as they come; answered ids are skipped.

    Every row of `out` holds the chat, its token ids as produced, and where the answer starts.

    Args:
        backbone: who answers.
        tokenizer: its tokenizer.
        prompts: what to answer.
        out: JSONL file, created or continued.
        max_new_tokens: longest answer.
        batch_size: at most so many prompts are answered together, those of similar length.
        recorded: also record the hidden states of the answers, which the backbone computes anyway.

    Returns:
        How many prompts were answered now.

    Raises:
        ValueError: `out` was made with other settings.
    """
    settings = DistillSettings(
        str(backbone.model.config._name_or_path), max_new_tokens, str(tokenizer.chat_template), recorded
    )
    check_settings(out, settings)
    ends = end_tokens(backbone)
    done = answered_ids(out)
    missing = sorted((p for p in prompts if p.id not in done), key=lambda p: len(p.input_ids))
    if not missing:
        return 0
    # Equal batches: a small last one would take nearly as long as a full one.
    size = math.ceil(len(missing) / math.ceil(len(missing) / batch_size))
    with progress_bar("answering", len(prompts), len(prompts) - len(missing)) as advance, out.open("a") as file:
        for start in range(0, len(missing), size):
            batch = missing[start : start + size]
            answers, states = answer(backbone, [p.input_ids for p in batch], max_new_tokens, ends, advance)
            if recorded:
                record(recording_directory(out), {p.id: h for p, h in zip(batch, states, strict=True)})
            file.writelines(_line(tokenizer, p, ids) for p, ids in zip(batch, answers, strict=True))
            file.flush()
            os.fsync(file.fileno())
    return len(missing)


def end_tokens(backbone: Backbone) -> set[int]:
    """Tokens that end an answer, from the backbone's generation config."""
    assert backbone.model.generation_config is not None
    ends = backbone.model.generation_config.eos_token_id
    return set() if ends is None else {ends} if isinstance(ends, int) else set(ends)


def _line(tokenizer: Any, prompt: Prompt, answer_ids: list[int]) -> str:
    text = tokenizer.decode(answer_ids, skip_special_tokens=True)
    row = {
        "id": prompt.id,
        "messages": [*prompt.messages, {"role": "assistant", "content": text}],
        "input_ids": [*prompt.input_ids, *answer_ids],
        "answer_start": len(prompt.input_ids),
    }
    return json.dumps(row, ensure_ascii=False) + "\n"


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
    stored = json.loads(file.read_text()) if file.exists() else {}
    different = [
        f"{name} {stored.get(name)!r} instead of {value!r}"
        for name, value in asdict(settings).items()
        if stored.get(name) != value
    ]
    if different:
        raise ValueError(f"{out} holds answers made with {'; '.join(different)}; choose another file, or remove it")


def answered_ids(out: Path) -> set[str]:
    """Ids in a file of answers. A last line that a crash tore is cut off the file."""
    if not out.exists():
        return set()
    text = out.read_text(encoding="utf-8", errors="replace")
    complete = text[: text.rfind("\n") + 1]
    if complete != text:
        out.write_text(complete, encoding="utf-8")
    return {json.loads(line)["id"] for line in complete.split("\n") if line.strip()}
