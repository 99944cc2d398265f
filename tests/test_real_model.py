"""On SmolLM2-135M-Instruct itself; scripts/test.sh prepares it."""

from pathlib import Path

import pytest
import torch

from medusa import MedusaConfig, MedusaModel
from medusa.inference import MedusaDecoder
from medusa.inference.benchmark import plain_generate
from medusa.loading import load_backbone, load_tokenizer

MODEL = Path(__file__).parent.parent / ".demo" / "model"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (MODEL / "config.json").exists(), reason="run scripts/prepare_demo_model.py .demo/model"),
]
QUESTIONS = ("Why do leaves fall in autumn?", "Write a Python function that adds two numbers.", "What is 12 times 12?")


def test_greedy_equals_generate_in_fp32() -> None:
    """`medusa verify CHECKPOINT --dtype float32` does the same for more prompts and with trained heads."""
    model = MedusaModel.attach(load_backbone(str(MODEL)), MedusaConfig(num_heads=3, projection="shared"))
    decoder = MedusaDecoder(model, tree=[(0,), (1,), (0, 0), (0, 0, 0)])
    tokenizer = load_tokenizer(str(MODEL))
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")["input_ids"]
        result = decoder.generate(prompt, max_new_tokens=24)
        assert result.sequences[0, prompt.shape[1] :].tolist() == plain_generate(model.model, prompt, 24)
        assert torch.equal(result.sequences[:, : prompt.shape[1]], prompt)
