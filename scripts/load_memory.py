"""How much memory loading and exporting large heads takes beside their file.

Usage: python scripts/load_memory.py [--hidden 4096] [--vocab 32000] [--heads 5] [--work DIRECTORY]
Writes random bf16 heads of a 7B model's shape (1.5 GB) on a backbone with one small layer, and does each thing in a
process of its own. The peak is what a process held at most beyond what it held before, pages of mapped files included
(Linux's VmHWM): an export maps two such files. Prints a table and one line of JSON.
"""

import argparse
import json
import multiprocessing
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from medusa import MedusaConfig, MedusaModel
from medusa.checkpoint import HEADS_FILE
from medusa.export import export

MIB = 2**20


def status(field: str) -> int:
    """A field of this process's memory, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def peak_of(action: Callable[[], object]) -> int:
    """Bytes held at most during `action` beyond those held before."""
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    action()
    return status("VmHWM") - before


def prepare(work: Path, hidden: int, vocab: int, heads: int) -> int:
    """Write a backbone and heads; returns the size of the heads' file."""
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden,
        vocab_size=vocab,
        num_hidden_layers=1,
        num_attention_heads=hidden // 128,
        num_key_value_heads=hidden // 128,
        dtype=torch.bfloat16,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(work / "backbone")
    backbone = AutoModelForCausalLM.from_pretrained(work / "backbone", dtype="auto")
    model = MedusaModel.attach(backbone, MedusaConfig(num_heads=heads))
    for parameter in model.heads.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    model.save_pretrained(work / "heads")
    return (work / "heads" / HEADS_FILE).stat().st_size


def load(work: Path) -> int:
    """Peak of loading the heads onto a backbone that is loaded already."""
    backbone = AutoModelForCausalLM.from_pretrained(work / "backbone", dtype="auto")
    for parameter in backbone.parameters():
        parameter.sum()  # it is in memory now
    return peak_of(lambda: MedusaModel.from_pretrained(work / "heads", backbone=backbone))


def export_to_vllm(work: Path) -> int:
    """Peak of an export, its check included."""
    return peak_of(lambda: export(work / "heads", "vllm", work / "vllm"))


def main() -> None:
    """Measure both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--heads", type=int, default=5)
    parser.add_argument("--work", type=Path, help="where to write; a temporary directory otherwise")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.work) as folder:
        work = Path(folder)

        def alone(action: Callable[..., int], *options: object) -> int:
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                return pool.submit(action, *options).result()

        size = alone(prepare, work, arguments.hidden, arguments.vocab, arguments.heads)
        peaks = {"load": alone(load, work), "export to vllm": alone(export_to_vllm, work)}
    table = Table("", "peak, MiB", "of the file", title=f"heads of {size / MIB:.0f} MiB")
    for name, peak in peaks.items():
        table.add_row(name, f"{peak / MIB:.0f}", f"{peak / size:.2f}")
    Console().print(table)
    print(json.dumps({"file_bytes": size, "peak_bytes": peaks}))


if __name__ == "__main__":
    main()
