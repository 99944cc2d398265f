"""Prompts for the benchmark scripts."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

OWN_PROMPTS = Path(__file__).parent / "demo_prompts.jsonl"


def read_questions(file: Path, per_category: int) -> list[str]:
    """The first questions of every category in a JSONL file with `prompt` or `turns` (first turn), and `category`."""
    found: dict[str, list[str]] = defaultdict(list)
    for line in file.read_text().splitlines():
        row = json.loads(line)
        questions = found[row.get("category", "")]
        if len(questions) < per_category:
            questions.append(row["turns"][0] if "turns" in row else row["prompt"])
    return [question for questions in found.values() for question in questions]


def encode(tokenizer: Any, question: str) -> torch.Tensor:
    """Token ids of a question in the chat template, [1, T]."""
    chat = [{"role": "user", "content": question}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    assert isinstance(ids, torch.Tensor)
    return ids
