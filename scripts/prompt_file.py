"""Prompts for the scripts that measure."""

from pathlib import Path
from typing import Any

import torch

from medusa.inference.questions import read_questions

OWN_PROMPTS = Path(__file__).parent / "demo_prompts.jsonl"


def encode(tokenizer: Any, question: str) -> torch.Tensor:
    """Token ids of a question in the chat template, [1, T]."""
    chat = [{"role": "user", "content": question}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    assert isinstance(ids, torch.Tensor)
    return ids


def read_prompts(file: Path, per_category: int, tokenizer: Any) -> list[torch.Tensor]:
    """The first turns of the first questions of every category, [T] each."""
    return [encode(tokenizer, q.turns[0])[0] for q in read_questions(file, per_category, turns=1)]
