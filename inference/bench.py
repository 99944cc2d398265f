"""Ways to decode greedily, measured side by side in one process.

Every prompt goes through every method in turn, the order changing from prompt to prompt, so that a slow moment of the
machine hits all of them. Times are of the answer alone: the prompt's tokens are not counted, their prefill is.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from .decoder import MedusaDecoder
from .questions import Question
from .result import DecodingStats

BASELINE = "generate"
"""The method that others are compared with: `generate` as people run it, eager with a dynamic cache."""
WARM_UP = 8


@dataclass(frozen=True)
class Answer:
    """What a method wrote, and when."""

    tokens: list[int]
    arrivals: list[float]
    """Seconds from the call to each token; tokens that are accepted together arrive together."""
    steps: int | None = None
    """Verify passes after the prefill, where there are steps."""
    accepted: list[int] = field(default_factory=list)
    """Accepted candidates of each step, the root not counted."""

    @property
    def seconds(self) -> float:
        """From the call to the last token."""
        return self.arrivals[-1]


Method = Callable[[Tensor, int], Answer]
"""Continues a prompt [1, T] greedily by at most so many tokens."""


@dataclass(frozen=True)
class Measurement:
    """One answer of one method."""

    method: str
    question: Question
    turn: int
    repeat: int
    answer: Answer


@dataclass
class Bench:
    """What was measured."""

    measurements: list[Measurement] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    """Methods that broke off, and why; what they had measured before is kept."""


class _Clock(BaseStreamer):
    """A streamer that notes when tokens come. The first call brings the prompt."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.arrivals: list[float] = []
        self.calls = 0

    def put(self, value: Tensor) -> None:
        """Take note of new tokens."""
        self.calls += 1
        if self.calls > 1:
            self.arrivals += [time.perf_counter() - self.started] * value.numel()

    def end(self) -> None:
        """Nothing to do."""


def generate_method(model: PreTrainedModel, options: dict[str, Any]) -> Method:
    """`generate` of transformers, with some options of its own."""
    assert isinstance(model, GenerationMixin)

    def run(prompt: Tensor, new_tokens: int) -> Answer:
        clock = _Clock()
        output = model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=new_tokens,
            do_sample=False,
            streamer=clock,
            **options,
        )
        assert isinstance(output, Tensor)
        return Answer(output[0, prompt.shape[1] :].tolist(), clock.arrivals)

    return run


def decoder_method(decoder: MedusaDecoder) -> Method:
    """Our decoder, whatever proposes."""

    def run(prompt: Tensor, new_tokens: int) -> Answer:
        started = time.perf_counter()
        stats = DecodingStats()
        tokens: list[int] = []
        arrivals: list[float] = []
        for block in decoder.stream(prompt, max_new_tokens=new_tokens, do_sample=False, stats=stats):
            tokens += block
            arrivals += [time.perf_counter() - started] * len(block)
        return Answer(tokens, arrivals, stats.steps, stats.accepted)

    return run


def run_bench(
    methods: dict[str, Method],
    questions: list[Question],
    encode: Callable[[list[tuple[str, str]], str], Tensor],
    decode: Callable[[list[int]], str],
    new_tokens: int,
    longest: int,
    repeats: int,
    advance: Callable[[int], None],
) -> Bench:
    """Measure all methods; Ctrl-C ends early and keeps what was measured.

    Args:
        methods: by name; the baseline must be there.
        questions: asked turn by turn. All methods get the baseline's answers as history, so that prompts are the same.
        encode: (turns and answers so far, next turn) -> prompt [1, T].
        decode: token ids -> text.
        new_tokens: longest answer.
        longest: prompts of more tokens are left out.
        repeats: how often everything is asked.
        advance: told of every prompt that is done.
    """
    bench = Bench()
    working = dict(methods)
    try:
        for name, method in methods.items():
            _try(bench, working, name, method, encode([], questions[0].turns[0])[:, :64], WARM_UP)
        for repeat in range(repeats):
            for number, question in enumerate(questions):
                history: list[tuple[str, str]] = []
                for turn, text in enumerate(question.turns):
                    prompt = encode(history, text)
                    if prompt.shape[1] > longest:
                        break
                    for name in _in_turn(list(working), number + repeat):
                        answer = _try(bench, working, name, methods[name], prompt, new_tokens)
                        if answer is not None:
                            bench.measurements.append(Measurement(name, question, turn, repeat, answer))
                            if name == BASELINE:
                                baseline = answer
                    history.append((text, decode(baseline.tokens)))
                advance(1)
    except KeyboardInterrupt:
        bench.failures["(all)"] = "stopped by Ctrl-C; what was measured before is kept"
    return bench


def _in_turn(names: list[str], start: int) -> Iterator[str]:
    """All names, each of them first once in a while."""
    shift = start % max(len(names), 1)
    yield from names[shift:] + names[:shift]


def _try(
    bench: Bench, working: dict[str, Method], name: str, method: Method, prompt: Tensor, new_tokens: int
) -> Answer | None:
    """Run a method; one that fails is reported, and left out from then on. Without the baseline nothing can go on."""
    try:
        return method(prompt, new_tokens)
    except Exception as error:
        if name == BASELINE:
            raise
        bench.failures[name] = f"{type(error).__name__}: {error}"
        del working[name]
        return None
