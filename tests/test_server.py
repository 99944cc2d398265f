"""Answers from a server that does everything a server can do wrong."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chat_server import ChatServer, chat_server
from console import medusa

from medusa.train.answer_file import failures_file
from medusa.train.prompts import Prompt, Shard, read_prompts
from medusa.train.rows import load_rows
from medusa.train.server import Server, ServerSettings, distill_from_server

SETTINGS = ServerSettings("tiny", 8)


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with chat_server() as running:
        yield running


def patience(server: ChatServer, **changes: Any) -> Server:
    return replace(Server(server.url, concurrency=4, deadline=1.0, retries=1, first_wait=0.01), **changes)


def questions(*texts: str) -> list[Prompt]:
    return [Prompt(text, [{"role": "user", "content": text}], []) for text in texts]


def rows_of(out: Path) -> dict[str, dict[str, Any]]:
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len({row["id"] for row in rows}) == len(rows), "an id stands twice"
    return {row["id"]: row for row in rows}


def reasons_of(out: Path) -> dict[str, str]:
    file = failures_file(out)
    return {row["id"]: row["reason"] for row in map(json.loads, file.read_text().splitlines())} if file.exists() else {}


def test_every_failure_is_named_and_mended_by_the_next_run(server: ChatServer, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    good = ["fine 1", "broken-once 1", "busy-once 1", "date-once 1", "fine 2"]
    bad = {
        "hang": "no answer within 1 s (tried 2 times)",
        "broken": "status 500: out of memory (tried 2 times)",
        "garbage": "no chat completion: '<html>not JSON' (tried 2 times)",
        "shapeless": "no chat completion",
        "cut-off": "RemoteProtocolError",
        "long": "status 400: context length exceeded",
        "empty": "the answer is empty",
    }
    prompts = questions(*good, *bad)
    assert distill_from_server(patience(server), SETTINGS, prompts, out) == len(good)
    assert set(rows_of(out)) == set(good)
    assert set(reasons_of(out)) == set(bad)
    for name, reason in bad.items():
        assert reason in reasons_of(out)[name]
    assert server.asked["long"] == server.asked["empty"] == 1  # asking again at once would change nothing
    assert server.asked["broken"] == 2
    server.healthy = True
    assert distill_from_server(patience(server), SETTINGS, prompts, out) == len(bad)
    assert set(rows_of(out)) == {*good, *bad}
    assert not failures_file(out).exists()
    asked = server.asked.total()
    assert distill_from_server(patience(server), SETTINGS, prompts, out) == 0
    assert server.asked.total() == asked


def test_retry_after_is_obeyed(server: ChatServer, tmp_path: Path) -> None:
    started = time.monotonic()
    assert distill_from_server(patience(server), SETTINGS, questions("busy-once"), tmp_path / "o.jsonl") == 1
    assert time.monotonic() - started >= 0.2


def test_truncated_answers_are_kept_or_dropped(server: ChatServer, tmp_path: Path) -> None:
    kept, dropped = tmp_path / "kept.jsonl", tmp_path / "dropped.jsonl"
    assert distill_from_server(patience(server), SETTINGS, questions("truncated"), kept) == 1
    assert rows_of(kept)["truncated"]["finish_reasons"] == ["length"]
    strict = replace(SETTINGS, keep_truncated=False)
    assert distill_from_server(patience(server), strict, questions("truncated"), dropped) == 0
    assert "cut at 8 tokens" in reasons_of(dropped)["truncated"]


def test_turns_are_answered_one_after_another(server: ChatServer, tmp_path: Path) -> None:
    file, out = tmp_path / "chats.jsonl", tmp_path / "answers.jsonl"
    chat = [("system", "be kind"), ("user", "one"), ("assistant", "FOREIGN"), ("user", "two"), ("user", "three")]
    file.write_text(json.dumps({"id": "c", "messages": [{"role": r, "content": t} for r, t in chat]}) + "\n")
    prompts, _ = read_prompts(file, None, turns=None)
    assert distill_from_server(patience(server), SETTINGS, prompts, out) == 1
    said = [message["content"] for message in rows_of(out)["c"]["messages"]]
    assert said == ["be kind", "one", "one!", "two", "two!", "three", "three!"]
    assert [len(body["messages"]) for body in server.bodies] == [2, 4, 6]
    prompts, _ = read_prompts(file, None, turns=2)
    assert [len(prompt.follow_ups) for prompt in prompts] == [1]


def test_answers_out_of_order_and_at_most_so_many_at_a_time(server: ChatServer, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    prompts = questions("late 0", *(f"fine {i}" for i in range(20)))
    assert distill_from_server(patience(server, concurrency=3), SETTINGS, prompts, out) == 21
    assert list(rows_of(out)) != [prompt.id for prompt in prompts]
    assert server.most <= 3
    lines = out.read_text().splitlines(keepends=True)
    out.write_text("".join(lines[7:]) + lines[0][: len(lines[0]) // 2])  # some lost, the last one torn
    assert distill_from_server(patience(server), SETTINGS, prompts, out) == 7
    assert set(rows_of(out)) == {prompt.id for prompt in prompts}


def test_options_key_and_logprobs_go_along(server: ChatServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "answers.jsonl"
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    settings = ServerSettings("tiny", 8, temperature=0.7, top_p=0.9, seed=3, top_logprobs=2)
    assert distill_from_server(patience(server), settings, questions("fine"), out) == 1
    (body,) = server.bodies
    wanted = {"model": "tiny", "max_tokens": 8, "temperature": 0.7, "top_p": 0.9, "seed": 3, "top_logprobs": 2}
    assert body | wanted == body
    assert server.keys == {"Bearer secret"}
    likely = [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -0.5}]
    assert rows_of(out)["fine"]["top_logprobs"] == [[likely]]
    assert "secret" not in "".join(file.read_text() for file in tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"temperature 0.7 instead of 0.0"):
        distill_from_server(patience(server), SETTINGS, questions("fine"), out)


def test_a_refused_key_stops_the_run_and_keeps_what_is_finished(server: ChatServer, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    prompts = questions("fine", "key", "late")
    with pytest.raises(ValueError, match=r"401: the key is refused \(wrong key\)"):
        distill_from_server(patience(server, concurrency=1), SETTINGS, prompts, out)
    assert set(rows_of(out)) == {"fine"}


def test_nobody_listens(tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    nobody = Server("http://127.0.0.1:9/v1", retries=1, first_wait=0.01)
    assert distill_from_server(nobody, SETTINGS, questions("fine"), out) == 0
    assert "ConnectError" in reasons_of(out)["fine"]
    with pytest.raises(ValueError, match="must begin with http"):
        distill_from_server(Server("localhost:8000"), SETTINGS, questions("fine"), out)


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"fine {i}"}) + "\n" for i in range(12)))
    return file


def command(server: ChatServer, prompts: Path, out: Path, *options: str) -> list[str]:
    given = ["--server", server.url, "--model", "tiny", "--prompts", str(prompts), "--out", str(out), *options]
    return ["distill", *given, "--json"]


def test_shards_are_the_whole(server: ChatServer, prompts_file: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole.jsonl", [tmp_path / f"part{i}.jsonl" for i in (1, 2)]
    medusa(*command(server, prompts_file, whole))
    for i, part in enumerate(parts, start=1):
        medusa(*command(server, prompts_file, part, "--shard", f"{i}/2"))
    one, two = map(rows_of, parts)
    assert one
    assert two
    assert not set(one) & set(two)
    assert one | two == rows_of(whole)
    merged = tmp_path / "merged.jsonl"
    merged.write_bytes(b"".join(part.read_bytes() for part in parts))  # cat
    assert rows_of(merged) == rows_of(whole)


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "1/0", "a/b", "-1/2", ""])
def test_no_shard(text: str) -> None:
    with pytest.raises(ValueError, match="must be i/n"):
        Shard.parse(text)


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_killed_and_continued(server: ChatServer, tmp_path: Path, sent: signal.Signals) -> None:
    file, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    names = [f"late {i}" for i in range(12)]
    file.write_text("".join(json.dumps({"id": name, "prompt": name}) + "\n" for name in names))
    line = [sys.executable, "-m", "medusa", *command(server, file, out, "--concurrency", "2")]
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ)
    while server.asked.total() < 6:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(sent)
    assert process.wait(20) == (130 if sent == signal.SIGINT else -sent)
    finished = len(out.read_text().splitlines())
    assert 2 <= finished < len(names)
    server.healthy = True
    figures = json.loads(medusa(*command(server, file, out)))
    assert figures["answered"] == len(names) - finished
    assert set(rows_of(out)) == set(names)


def test_bad_command_lines(server: ChatServer, prompts_file: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "o.jsonl")
    given = ["distill", "--prompts", str(prompts_file), "--out", out]
    for options in ([], ["--server", server.url], ["--server", server.url, "--model", "m", "--record"]):
        with pytest.raises(AssertionError, match="ended with 1"):
            medusa(*given, *options)


def test_training_reads_the_answers(server: ChatServer, tmp_path: Path) -> None:
    from chatml import byte_tokenizer

    out = tmp_path / "answers.jsonl"
    distill_from_server(patience(server), replace(SETTINGS, top_logprobs=2), questions("fine 1", "fine 2"), out)
    rows, report = load_rows(out, byte_tokenizer(), 100)
    assert report.kept == 2
    assert byte_tokenizer().decode([label for label in rows[0].labels if label >= 0]).startswith(f"{rows[0].id}!")
