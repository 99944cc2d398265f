"""A vLLM server for one check, and what it counts."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families
from vllm_simulation import Counts

START_SECONDS = 600


@dataclass
class Server:
    """A server that answers."""

    client: httpx.Client
    depth: int

    def complete(self, prompt: Sequence[int], new_tokens: int) -> list[int]:
        """Greedy answer of exactly so many tokens."""
        question = {
            "model": "target",
            "prompt": list(prompt),
            "max_tokens": new_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        reply = self.client.post("/v1/completions", json=question).raise_for_status().json()
        tokens: list[int] = reply["choices"][0]["token_ids"]
        return tokens

    def complete_all(self, questions: Sequence[tuple[Sequence[int], int]]) -> list[list[int]]:
        """Answers to questions that are asked all at once."""
        with ThreadPoolExecutor(len(questions)) as threads:
            return list(threads.map(lambda question: self.complete(*question), questions))

    def metric(self, name: str) -> dict[str, float]:
        """A counter's values, by its label `position` (empty where it has none)."""
        text = self.client.get("/metrics").raise_for_status().text
        samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
        return {sample.labels.get("position", ""): sample.value for sample in samples if sample.name == name}

    def cached_tokens(self) -> int:
        """How many tokens of prompts were found in the prefix cache."""
        return int(self.metric("vllm:prefix_cache_hits_total").get("", 0))

    def counts(self) -> Counts:
        """What drafts gave since the server started."""
        drafts = self.metric("vllm:spec_decode_num_drafts_total").get("", 0)
        accepted = self.metric("vllm:spec_decode_num_accepted_tokens_per_pos_total")
        return Counts(int(drafts), [int(accepted.get(str(position), 0)) for position in range(self.depth)])


@contextmanager
def serving(
    model: Path, port: int, log: Path, options: Sequence[str], speculative: dict[str, object]
) -> Iterator[Server]:
    """Start a server, wait until it answers, stop it at the end.

    Raises:
        RuntimeError: it ended or does not answer; the end of its log is in the message.
    """
    depth = speculative["num_speculative_tokens"]
    assert isinstance(depth, int)
    arguments = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    arguments += ["--served-model-name", "target", "--host", "127.0.0.1", "--port", str(port)]
    arguments += ["--speculative-config", json.dumps(speculative), *options]
    with log.open("w") as output:
        process = subprocess.Popen(arguments, stdout=output, stderr=subprocess.STDOUT, env=os.environ)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=START_SECONDS) as client:
            _wait(client, process, log)
            yield Server(client, depth)
    finally:
        process.terminate()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()


def _wait(client: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            if client.get("/health").is_success:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    raise RuntimeError(f"vLLM does not answer; its log {log} ends in\n{log.read_text()[-3000:]}")
