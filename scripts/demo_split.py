"""Which of our own prompts the demo trains on, and which it never sees in training."""

import hashlib
import json
from collections import defaultdict

from prompt_file import OWN_PROMPTS

HELD_OUT = 4
"""Prompts of each category to calibrate the tree on, and as many again to decode at the end."""


def split_prompts(count: int) -> dict[str, list[dict[str, str]]]:
    """Fixed held-out prompts of every category, and `count` others, one category after the other."""
    by_category: dict[str, list[dict[str, str]]] = defaultdict(list)
    for line in OWN_PROMPTS.read_text().splitlines():
        row = json.loads(line)
        by_category[row["category"]].append(row)
    for rows in by_category.values():
        rows.sort(key=lambda row: hashlib.sha256(row["id"].encode()).hexdigest())
    in_turn = [row for rank in zip(*by_category.values(), strict=True) for row in rank]
    held = HELD_OUT * len(by_category)
    if not 1 <= count <= len(in_turn) - 2 * held:
        raise SystemExit(f"--prompts is {count}; there are 1 to {len(in_turn) - 2 * held} to train on")
    return {"test": in_turn[:held], "calibration": in_turn[held : 2 * held], "train": in_turn[2 * held :][:count]}
