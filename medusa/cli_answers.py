"""Prompts in, answers out as they come: what `generate` and `chat` do with a decoder."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from rich.console import Console
from torch import Tensor

from medusa.inference import DecodingStats, MedusaDecoder
from medusa.inference.detokenizer import Detokenizer
from medusa.inference.refusals import check_prompt
from medusa.progress import progress_bar
from medusa.train.answer_file import answered_chats, check_settings
from medusa.train.prompts import Prompt, read_prompts

from .cli_common import note

Message = dict[str, str]
ACCEPTED = "green"
"""How a text shows what the heads guessed."""


@dataclass(frozen=True)
class Piece:
    """Some text of an answer."""

    text: str
    accepted: bool
    """Whether heads guessed the tokens that complete it; the others are the backbone's own."""


@dataclass(frozen=True)
class Speaker:
    """A decoder, its tokenizer, and how answers are chosen."""

    decoder: MedusaDecoder
    tokenizer: Any
    max_new_tokens: int
    options: dict[str, Any]
    """Options of `generate`: do_sample, temperature, stop_strings, ..."""
    generator: torch.Generator | None = None
    system: str | None = None
    """System message of chats that have none of their own."""

    def ids(self, messages: list[Message]) -> Tensor:
        """Token ids of a chat, up to where the answer starts, [1, T].

        Raises:
            ValueError: the template does not take these messages.
        """
        if self.system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system}, *messages]
        try:
            encoded = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ValueError(f"the chat template does not take these messages ({roles}): {error}") from error
        ids = encoded["input_ids"]
        assert isinstance(ids, Tensor)
        return ids

    def stream(self, messages: list[Message], stats: DecodingStats) -> Iterator[Piece]:
        """Answer a chat; `stats` is filled on the way."""
        detokenizer = Detokenizer(self.tokenizer)
        for block in self.decoder.stream(
            self.ids(messages),
            self.max_new_tokens,
            generator=self.generator,
            stats=stats,
            tokenizer=self.tokenizer,
            **self.options,
        ):
            yield Piece(detokenizer.add(block[:-1]), accepted=True)
            yield Piece(detokenizer.add(block[-1:]), accepted=False)
        yield Piece(detokenizer.end(), accepted=False)

    def answer(self, chats: list[list[Message]]) -> list[tuple[str, DecodingStats]]:
        """Answer several chats together."""
        prompts = [self.ids(messages)[0] for messages in chats]
        longest = max(map(len, prompts))
        ids = torch.zeros(len(prompts), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for i, prompt in enumerate(prompts):
            ids[i, longest - len(prompt) :] = prompt
            mask[i, longest - len(prompt) :] = 1
        result = self.decoder.generate(
            ids, self.max_new_tokens, mask, generator=self.generator, tokenizer=self.tokenizer, **self.options
        )
        answers = []
        for row, stats in zip(result.sequences[:, longest:].tolist(), result.row_stats, strict=True):
            detokenizer = Detokenizer(self.tokenizer)
            answers.append((detokenizer.add(row[: stats.new_tokens]) + detokenizer.end(), stats))
        return answers


def give_template(tokenizer: Any) -> None:
    """Let a tokenizer without a chat template take prompts as plain text, and say so."""
    if tokenizer.chat_template is not None:
        return
    note("this tokenizer has no chat template, so prompts are continued as plain text")
    adds_bos = tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    start = "{{ bos_token }}" if adds_bos else ""
    texts = "{% for message in messages %}{{ message['content'] }}{{ '' if loop.last else '\n\n' }}{% endfor %}"
    tokenizer.chat_template = start + texts


def say(console: Console, pieces: Iterator[Piece], mark: bool, said: list[Piece]) -> None:
    """Print an answer while it comes, and keep in `said` what was printed."""
    for piece in pieces:
        if console.is_terminal:
            console.out(piece.text, end="", style=ACCEPTED if mark and piece.accepted else None, highlight=False)
        else:  # to the letter: rich drops control characters
            console.file.write(piece.text)
        console.file.flush()
        said.append(piece)
    console.print()


def text_of(said: list[Piece]) -> str:
    """The text of some pieces."""
    return "".join(piece.text for piece in said)


def summary(stats: DecodingStats, stopped: bool = False) -> str:
    """One line on an answer; `stopped` says that the user stopped it."""
    end = ", stopped" if stopped else ", cut at the limit" if stats.finish_reason == "length" else ""
    return (
        f"{stats.new_tokens} tokens, {stats.tokens_per_step:.2f} per step, {stats.tokens_per_second:.1f} a second{end}"
    )


def figures_of(stats: DecodingStats) -> dict[str, Any]:
    """What is kept of an answer's statistics."""
    return {
        "new_tokens": stats.new_tokens,
        "tokens_per_step": round(stats.tokens_per_step, 3),
        "tokens_per_second": round(stats.tokens_per_second, 2),
        "finish_reason": stats.finish_reason,
    }


@dataclass(frozen=True)
class AnswerSettings:
    """What the answers of a file depend on, apart from chance."""

    checkpoint: str
    max_new_tokens: int
    system: str | None
    options: dict[str, Any]
    acceptance: str
    chat_template: str


def answer_file(speaker: Speaker, checkpoint: str, source: Path, out: Path, batch_size: int) -> dict[str, Any]:
    """Answer the prompts of a JSONL file in batches, in their order; answers are appended to `out` as they come.

    Prompts whose ids are in `out` already are skipped.

    Raises:
        ValueError: a prompt cannot be used, or `out` was made with other settings.
    """
    prompts, report = read_prompts(source, speaker.tokenizer)
    note(f"{source}: {report.summary()}")
    for prompt in prompts:
        check_prompt(speaker.decoder.backbone, speaker.ids(prompt.messages)[0], f"{source}, id {prompt.id!r}: ")
    settings = AnswerSettings(
        checkpoint,
        speaker.max_new_tokens,
        speaker.system,
        speaker.options,
        str(speaker.decoder.acceptance),
        speaker.tokenizer.chat_template,
    )
    check_settings(out, settings)
    done = answered_chats(out)
    missing = [prompt for prompt in prompts if prompt.id not in done]
    new_tokens = 0
    with (
        progress_bar("answering", len(prompts), len(prompts) - len(missing)) as advance,
        out.open("a", encoding="utf-8") as file,
    ):
        for start in range(0, len(missing), batch_size):
            batch = missing[start : start + batch_size]
            answers = speaker.answer([prompt.messages for prompt in batch])
            file.writelines(_line(prompt, *answer) for prompt, answer in zip(batch, answers, strict=True))
            file.flush()
            os.fsync(file.fileno())
            new_tokens += sum(stats.new_tokens for _, stats in answers)
            advance(len(batch))
    return {"prompts": len(prompts), "answered": len(missing), "new_tokens": new_tokens, "out": str(out)}


def _line(prompt: Prompt, text: str, stats: DecodingStats) -> str:
    figures = figures_of(stats)
    del figures["tokens_per_second"]  # of a batch, whose rows share their time
    row = {"id": prompt.id, "messages": [*prompt.messages, {"role": "assistant", "content": text}], **figures}
    return json.dumps(row, ensure_ascii=False) + "\n"


def converse(speaker: Speaker, mark: bool) -> None:
    """Chat in the terminal until the input ends."""
    console = Console()
    note("/reset starts a new chat, /exit or Ctrl-D leaves, Ctrl-C stops an answer")
    history: list[Message] = []
    while (line := _ask(console)) is not None:
        match line.strip():
            case "":
                continue
            case "/exit":
                return
            case "/reset":
                history = []
                note("a new chat")
                continue
        question = {"role": "user", "content": line}
        stats = DecodingStats()
        said: list[Piece] = []
        stopped = False
        try:
            say(console, speaker.stream([*history, question], stats), mark, said)
        except KeyboardInterrupt:
            stopped = True
            console.print()
        except ValueError as error:  # the chat has outgrown the context, or the template refuses it: both can be mended
            note(f"error: {error}\n/reset starts a new chat")
            continue
        if said:  # a question without any answer would stand before another question, which templates refuse
            history += [question, {"role": "assistant", "content": text_of(said)}]
        note(summary(stats, stopped))


def _ask(console: Console) -> str | None:
    """The next line of the user; None where the input ends."""
    while True:
        try:
            return console.input("[bold]> [/]")
        except EOFError:
            console.print()
            return None
        except KeyboardInterrupt:
            console.print("\nCtrl-D leaves", style="dim")
