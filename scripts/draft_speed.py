"""What a draft model brings: acceptance, tokens per step and speed, beside what the formula predicts.

Usage: python scripts/draft_speed.py MODEL DRAFT [--prompts FILE] [--per-category N] [--new-tokens N] [--drafts N ...]
Decodes greedily, or at --temperature. Prints a table and one line of JSON.
"""

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from prompt_file import OWN_PROMPTS, encode, read_questions
from rich.console import Console
from rich.table import Table
from torch import Tensor

from medusa.inference import DraftModel, DraftStats, MedusaDecoder
from medusa.inference.draft_model import ModelDrafting
from medusa.model import load_backbone, load_tokenizer
from medusa.progress import progress_bar


@torch.inference_mode()
def decode(decoder: MedusaDecoder, prompt: Tensor, new_tokens: int, options: dict[str, Any]) -> tuple[int, DraftStats]:
    """Tokens that steps emitted for one prompt [1, T], and what drafting was like."""
    (request,) = decoder.prepare(prompt, new_tokens, **options)
    (row,) = request.rows(decoder.backbone, decoder.known_tokens)
    state = decoder.prefill([row], torch.Generator(decoder.device).manual_seed(0))
    assert isinstance(state.drafting, ModelDrafting)
    while state.rows:
        decoder.step(state)
    return row.new_tokens - 1, state.drafting.stats
