"""A local OpenAI-compatible server that can be told to misbehave."""

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HANG = 30.0
"""Seconds; longer than any deadline in the tests."""


class ChatServer(ThreadingHTTPServer):
    """Answers `<question>!`; how depends on the question's first word."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: Counter[str] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.healthy = False
        """From now on all questions are answered."""
        self.now = self.most = 0
        """Requests in work: now, and the most so far."""
        self.lock = threading.Lock()
        self.released = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: ChatServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question = body["messages"][-1]["content"]
        with self.server.lock:
            self.server.asked[question] += 1
            self.server.bodies.append(body)
            self.server.keys.add(self.headers["Authorization"])
            self.server.now += 1
            self.server.most = max(self.server.most, self.server.now)
        try:
            self.behave(question.split()[0], self.server.asked[question], question, body)
        finally:
            with self.server.lock:
                self.server.now -= 1

    def behave(self, how: str, times: int, question: str, body: dict[str, Any]) -> None:
        reply = f"{question}!"
        match "fine" if self.server.healthy else how:
            case "hang":
                self.server.released.wait(HANG)
            case "broken":
                self.send(500, "out of memory")
            case "broken-once" if times == 1:
                self.send(503, "loading")
            case "busy-once" if times == 1:
                self.send(429, "slow down", {"Retry-After": "0.2"})
            case "date-once" if times == 1:
                self.send(429, "slow down", {"Retry-After": "Fri, 31 Dec 1999 23:59:59 GMT"})
            case "garbage":
                self.send(200, "<html>not JSON")
            case "shapeless":
                self.send(200, json.dumps({"choices": []}))
            case "long":
                self.send(400, "context length exceeded")
            case "key":
                self.send(401, "wrong key")
            case "cut-off":
                self.send_response(200)
                self.send_header("Content-Length", "1000")
                self.end_headers()
                self.wfile.write(b'{"choices": [')
            case "empty":
                self.choice("", "stop", body)
            case "truncated":
                self.choice(reply, "length", body)
            case "late":
                time.sleep(0.3)
                self.choice(reply, "stop", body)
            case _:
                self.choice(reply, "stop", body)

    def choice(self, text: str, reason: str, body: dict[str, Any]) -> None:
        choice: dict[str, Any] = {"message": {"role": "assistant", "content": text}, "finish_reason": reason}
        if body.get("logprobs"):
            likely = [{"token": t, "logprob": -0.5, "bytes": None} for t in "ab"[: body["top_logprobs"]]]
            choice["logprobs"] = {"content": [{"token": "a", "logprob": -0.5, "top_logprobs": likely}]}
        self.send(200, json.dumps({"choices": [choice]}))

    def send(self, status: int, text: str, headers: dict[str, str] | None = None) -> None:
        data = text.encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextmanager
def chat_server() -> Iterator[ChatServer]:
    """A server in a thread."""
    server = ChatServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.released.set()
        server.shutdown()
        server.server_close()
        thread.join()
