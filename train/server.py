"""Answers from an OpenAI-compatible server (vLLM, TGI, SGLang, ...). Needs httpx, the extra `server`."""

import asyncio
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from json import JSONDecodeError
from pathlib import Path
from typing import Any

import httpx

from medusa.progress import progress_bar

from .answer_file import AnswerFile
from .chat import Message
from .prompts import Prompt

FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0
"""Seconds between tries: doubled each time, from the first to the longest."""
KEYS = ("MEDUSA_API_KEY", "OPENAI_API_KEY")
"""Environment variables that may hold the server's key."""
FATAL = {401: "the key is refused", 403: "access is refused", 404: "there is no such path or model"}
TRY_AGAIN = (408, 425, 429)
"""Statuses besides 5xx that may go away."""


@dataclass(frozen=True)
class ServerSettings:
    """What the answers depend on."""

    model: str
    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    top_logprobs: int = 0
    keep_truncated: bool = True

    def body(self, messages: list[Message]) -> dict[str, Any]:
        """The request for one answer."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "max_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
        }
        if self.seed is not None:
            body["seed"] = self.seed
        if self.top_logprobs:
            body |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        return body


@dataclass(frozen=True)
class Server:
    """Where to ask, and with how much patience."""

    url: str
    """Up to and with /v1."""
    concurrency: int = 32
    deadline: float = 300.0
    """Seconds for one request, from sending it to the last byte of the answer."""
    retries: int = 5
    first_wait: float = FIRST_WAIT


@dataclass(frozen=True)
class Reply:
    """One answer."""

    text: str
    finish_reason: str | None
    top_logprobs: list[list[dict[str, Any]]] | None
    """For every token of the answer the likeliest ones, `token` and `logprob` each, as the server names them."""


class NoAnswerError(Exception):
    """Why there is no answer to one request."""


class MayPassError(NoAnswerError):
    """A failure that another try may mend, perhaps after so many seconds."""

    def __init__(self, reason: str, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.wait = wait


def distill_from_server(server: Server, settings: ServerSettings, prompts: list[Prompt], out: Path) -> int:
    """Have a server answer the prompts, all turns of a chat one after another, and append every finished chat to `out`.

    What fails is recorded beside `out` with its reason and asked again by the next run. Ctrl-C keeps what is finished.

    Returns:
        How many chats were answered now.

    Raises:
        ValueError: `out` was made with other settings, or the server refuses the key, the path or the model.
    """
    with AnswerFile(out, settings) as file, progress_bar("answering", len(prompts)) as advance:
        before = len(file.answered)
        missing = [prompt for prompt in prompts if prompt.id not in file.answered]
        advance(len(prompts) - len(missing))
        asyncio.run(answer_all(server, settings, missing, file, advance))
        return len(file.answered) - before


async def answer_all(
    server: Server, settings: ServerSettings, prompts: list[Prompt], file: AnswerFile, advance: Callable[[int], None]
) -> None:
    """Answer prompts, so many at a time; answers are written in the order in which they come."""
    key = next((os.environ[name] for name in KEYS if os.environ.get(name)), None)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    limits = httpx.Limits(max_connections=server.concurrency)
    waiting = iter(prompts)
    async with httpx.AsyncClient(headers=headers, timeout=None, limits=limits) as client:
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(server.concurrency, len(prompts))):
                    group.create_task(work(client, server, settings, waiting, file, advance))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None


async def work(
    client: httpx.AsyncClient,
    server: Server,
    settings: ServerSettings,
    waiting: Iterator[Prompt],
    file: AnswerFile,
    advance: Callable[[int], None],
) -> None:
    """Take one prompt after another until none is left."""
    for prompt in waiting:
        try:
            file.add([await answer_chat(client, server, settings, prompt)])
        except NoAnswerError as error:
            file.fail(prompt.id, str(error))
        advance(1)


async def answer_chat(
    client: httpx.AsyncClient, server: Server, settings: ServerSettings, prompt: Prompt
) -> dict[str, Any]:
    """All turns of a chat, as the row that is kept.

    Raises:
        NoAnswerError: to one of them.
    """
    messages = list(prompt.messages)
    reasons: list[str | None] = []
    logprobs: list[list[list[dict[str, Any]]] | None] = []
    for turn in range(1 + len(prompt.follow_ups)):
        if turn:
            messages.append(prompt.follow_ups[turn - 1])
        try:
            reply = await ask_patiently(client, server, settings, messages)
        except NoAnswerError as error:
            raise NoAnswerError(f"turn {turn + 1}: {error}") from error
        messages.append({"role": "assistant", "content": reply.text})
        reasons.append(reply.finish_reason)
        logprobs.append(reply.top_logprobs)
    row: dict[str, Any] = {"id": prompt.id, "messages": messages, "finish_reasons": reasons}
    return row | {"top_logprobs": logprobs} if settings.top_logprobs else row


async def ask_patiently(
    client: httpx.AsyncClient, server: Server, settings: ServerSettings, messages: list[Message]
) -> Reply:
    """Ask until there is an answer, with longer and longer pauses, or as long as the server says.

    Raises:
        NoAnswerError: the last failure.
    """
    for attempt in range(server.retries + 1):
        try:
            return await ask(client, server, settings, messages)
        except MayPassError as error:
            if attempt == server.retries:
                raise NoAnswerError(f"{error} (tried {attempt + 1} times)") from error
            pause = min(LONGEST_WAIT, server.first_wait * 2**attempt)
            await asyncio.sleep(max(error.wait, pause * random.uniform(0.5, 1)))  # not all at the same moment
    raise AssertionError("the last try returns or raises")


async def ask(client: httpx.AsyncClient, server: Server, settings: ServerSettings, messages: list[Message]) -> Reply:
    """Ask once.

    Raises:
        NoAnswerError: there is no usable answer.
        ValueError: no request will ever be answered.
    """
    url = server.url.rstrip("/") + "/chat/completions"
    try:
        async with asyncio.timeout(server.deadline):
            response = await client.post(url, json=settings.body(messages))
    except TimeoutError:
        raise MayPassError(f"no answer within {server.deadline:g} s") from None
    except httpx.InvalidURL as error:
        raise ValueError(
            f"--server {server.url!r} is no URL ({error}); give one such as http://host:8000/v1"
        ) from error
    except httpx.UnsupportedProtocol as error:
        raise ValueError(f"--server {server.url!r} must begin with http:// or https://") from error
    except httpx.RequestError as error:
        raise MayPassError(f"{type(error).__name__}: {error}") from error
    said = " ".join(response.text.split())[:200]
    if response.status_code in FATAL:
        reason = FATAL[response.status_code]
        raise ValueError(
            f"{url} answers {response.status_code}: {reason} ({said}); check --server, --model {settings.model!r} and "
            f"the key in {' or '.join(KEYS)}"
        )
    if response.status_code in TRY_AGAIN or response.status_code >= 500:
        raise MayPassError(f"status {response.status_code}: {said}", seconds(response.headers.get("Retry-After")))
    if response.status_code != 200:
        raise NoAnswerError(f"status {response.status_code}: {said}")
    reply = read_reply(response, settings.top_logprobs > 0)
    if not reply.text.strip():
        raise NoAnswerError("the answer is empty")
    if reply.finish_reason == "length" and not settings.keep_truncated:
        raise NoAnswerError(f"the answer is cut at {settings.max_new_tokens} tokens")
    return reply


def read_reply(response: httpx.Response, with_logprobs: bool) -> Reply:
    """The first choice of a chat completion.

    Raises:
        MayPassError: it is no chat completion.
        NoAnswerError: it has no log-probabilities, which were asked for.
    """
    try:
        choice = response.json()["choices"][0]
        text = choice["message"]["content"] or ""
        reason = choice.get("finish_reason")
        content = (choice.get("logprobs") or {}).get("content") if with_logprobs else None
    except (JSONDecodeError, UnicodeDecodeError, LookupError, TypeError, AttributeError) as error:
        raise MayPassError(f"no chat completion: {' '.join(response.text.split())[:200]!r}") from error
    if not isinstance(text, str):
        raise MayPassError(f"the content of the message is no text: {text!r:.200}")
    if not with_logprobs:
        return Reply(text, reason, None)
    if not content:
        raise NoAnswerError("the server gives no log-probabilities; leave --top-logprobs out")
    try:
        return Reply(text, reason, [[pair(entry) for entry in token["top_logprobs"]] for token in content])
    except (LookupError, TypeError) as error:
        raise MayPassError(f"log-probabilities of another shape: {content[0]!r:.200}") from error


def pair(entry: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a likely token."""
    return {"token": entry["token"], "logprob": entry["logprob"]}


def seconds(retry_after: str | None) -> float:
    """A Retry-After header in seconds; 0 where it is missing or a date, at most the longest pause."""
    try:
        return min(LONGEST_WAIT, max(0.0, float(retry_after or 0)))
    except ValueError:
        return 0.0
