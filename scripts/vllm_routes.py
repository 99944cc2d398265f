"""The ways into vLLM: which heads, who drafts, over HTTP or inside this process."""

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_server import serving
from vllm_simulation import Counts

PROPOSER = "medusa.inference.vllm_proposer.MedusaProposer"
Question = tuple[Sequence[int], int]
"""A prompt, and how many tokens the answer has."""


@dataclass(frozen=True)
class Route:
    """A way into vLLM."""

    name: str
    heads: str
    """Directory of the checkpoint."""
    depth: int
    proposer: bool = True
    """Whether our proposer drafts, or vLLM's own Medusa."""
    options: Sequence[str] = ()
    """More of the server's command line."""
    drafts_are_cut: bool = False
    """Whether the budget of a step cuts drafts: texts are the same then, what is counted is less."""

    @property
    def speculative(self) -> dict[str, object]:
        """The speculative configuration."""
        method = {"method": "custom_class", "model": PROPOSER}
        if not self.proposer:
            method = {"method": "medusa", "model": self.heads}
        return {**method, "num_speculative_tokens": self.depth}

    @property
    def additional(self) -> dict[str, object]:
        """The additional configuration."""
        return {"medusa_heads": self.heads} if self.proposer else {}


@dataclass(frozen=True)
class Asked:
    """What came back."""

    answers: list[list[int]]
    counts: Counts
    cached_tokens: int = 0
    """Tokens of prompts that the prefix cache had."""


def ask_server(route: Route, target: Path, questions: Sequence[Question], rounds: int) -> Asked:
    """Serve `target` over HTTP and ask all questions at once, again for each round."""
    log = target.parent / f"{route.name.replace(' ', '-')}.log"
    options = [*route.options, "--additional-config", json.dumps(route.additional)]
    with serving(target, free_port(), log, options, route.speculative) as vllm:
        answers = [answer for _ in range(rounds) for answer in vllm.complete_all(questions)]
        return Asked(answers, vllm.counts(), vllm.cached_tokens())


def ask_offline(route: Route, target: Path, questions: Sequence[Question]) -> Asked:
    """Load `target` into this process and give it all questions at once."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(target),
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        skip_tokenizer_init=True,
        disable_log_stats=False,
        speculative_config=route.speculative,
        additional_config=route.additional,
    )
    outputs = llm.generate(
        [{"prompt_token_ids": list(prompt)} for prompt, _ in questions],
        [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for _, n in questions],
        use_tqdm=False,
    )
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    drafts = metrics["vllm:spec_decode_num_drafts"].value
    accepted = metrics["vllm:spec_decode_num_accepted_tokens_per_pos"].values
    return Asked([list(output.outputs[0].token_ids) for output in outputs], Counts(drafts, list(accepted)))


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
