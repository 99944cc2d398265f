"""Self-distillation: let the backbone answer the prompts, so that heads learn what it would really say."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa.backbone import Backbone
from medusa.progress import progress_bar

from .answer import answer
from .answer_file import AnswerFile
from .hidden_states import record, recording_directory
from .prompts import Prompt, next_prompt


@dataclass(frozen=True)
class DistillSettings:
    """What the answers depend on; kept beside them, so that no file mixes two kinds of answers."""

    backbone: str
    max_new_tokens: int
    chat_template: str
    recorded: bool
    top_logprobs: int = 0


def distill(
    backbone: Backbone,
    tokenizer: Any,
    prompts: list[Prompt],
    out: Path,
    max_new_tokens: int = 512,
    batch_size: int = 16,
    recorded: bool = False,
    top_logprobs: int = 0,
) -> int:
    """Answer the prompts greedily in batches and append the answers as they come; answered ids are skipped.

    The turns of a chat are answered one after another, the earlier answers being the backbone's own. Every turn gives a
    row of `out`: the chat so far, its token ids as produced, and where the answer starts. That is what serving sees,
    also where a template renders earlier turns differently once others follow.

    Args:
        backbone: who answers.
        tokenizer: its tokenizer.
        prompts: what to answer.
        out: JSONL file, created or continued. A prompt that leaves no room for an answer is named beside it.
        max_new_tokens: longest answer.
        batch_size: at most so many prompts are answered together, those of similar length.
        recorded: also record the hidden states of the answers, which the backbone computes anyway.
        top_logprobs: also store the log-probabilities of the k likeliest tokens at every token of the answers.

    Returns:
        How many turns were answered now.

    Raises:
        ValueError: `out` was made with other settings.
    """
    name = str(backbone.model.config._name_or_path)
    settings = DistillSettings(name, max_new_tokens, str(tokenizer.chat_template), recorded, top_logprobs)
    ends = end_tokens(backbone)
    total = sum(1 + len(prompt.follow_ups) for prompt in prompts)
    with AnswerFile(out, settings) as file, progress_bar("answering", total) as advance:
        before = len(file.answered)
        turn = prompts
        while turn:
            missing = [prompt for prompt in turn if prompt.row_id not in file.answered]
            advance(len(turn) - len(missing))
            for batch in batches(fitting(backbone, missing, file), batch_size):
                answers, states = answer(backbone, [p.input_ids for p in batch], max_new_tokens, ends, advance)
                if recorded:
                    record(recording_directory(out), {p.row_id: h for p, h in zip(batch, states, strict=True)})
                rows = [answer_row(tokenizer, p, ids) for p, ids in zip(batch, answers, strict=True)]
                if top_logprobs:
                    for row, hidden in zip(rows, states, strict=True):
                        row["top_logprobs"] = likeliest(backbone, hidden, top_logprobs)
                file.add(rows)
            going_on = [prompt for prompt in turn if prompt.follow_ups and prompt.row_id in file.answered]
            turn = [next_prompt(tokenizer, prompt, file.answered[prompt.row_id]) for prompt in going_on]
        return len(file.answered) - before


def fitting(backbone: Backbone, prompts: list[Prompt], file: AnswerFile) -> list[Prompt]:
    """The prompts that leave room for an answer; the others are recorded as failures."""
    longest = math.inf if backbone.context_length is None else backbone.context_length - 1
    for prompt in prompts:
        if len(prompt.input_ids) > longest:
            file.fail(
                prompt.row_id, f"the prompt has {len(prompt.input_ids)} tokens, the context {backbone.context_length}"
            )
    return [prompt for prompt in prompts if len(prompt.input_ids) <= longest]


def batches(prompts: list[Prompt], batch_size: int) -> list[list[Prompt]]:
    """Prompts by length in equal batches: a small last one would take nearly as long as a full one."""
    if not prompts:
        return []
    ordered = sorted(prompts, key=lambda prompt: len(prompt.input_ids))
    size = math.ceil(len(ordered) / math.ceil(len(ordered) / batch_size))
    return [ordered[start : start + size] for start in range(0, len(ordered), size)]


def end_tokens(backbone: Backbone) -> set[int]:
    """Tokens that end an answer, from the backbone's generation config."""
    assert backbone.model.generation_config is not None
    ends = backbone.model.generation_config.eos_token_id
    return set() if ends is None else {ends} if isinstance(ends, int) else set(ends)


def answer_row(tokenizer: Any, prompt: Prompt, answer_ids: list[int]) -> dict[str, Any]:
    """The row of an answered turn."""
    text = tokenizer.decode(answer_ids, skip_special_tokens=True)
    return {
        "id": prompt.row_id,
        "messages": [*prompt.messages, {"role": "assistant", "content": text}],
        "input_ids": [*prompt.input_ids, *answer_ids],
        "answer_start": len(prompt.input_ids),
    }


@torch.inference_mode()
def likeliest(backbone: Backbone, hidden: Tensor, count: int) -> dict[str, list[list[Any]]]:
    """The likeliest tokens at every token of an answer, from its states [T, D]: ids and logprobs, [T, k] each."""
    found = backbone.logits(hidden.to(backbone.lm_weight.device)).float().log_softmax(dim=-1).topk(count)
    return {"ids": found.indices.tolist(), "logprobs": [[round(x, 5) for x in row] for row in found.values.tolist()]}
