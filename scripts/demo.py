"""The whole path on a real model: distil, train heads, measure them, search a tree, decode faster.

Run it through scripts/demo.sh, which makes the environment first.
"""

import argparse
import hashlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from demo_split import split_prompts
from prepare_demo_model import prepare
from prompt_file import encode
from rich.columns import Columns
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from torch.nn.utils.rnn import pad_sequence

from medusa import MedusaModel
from medusa.backbone import Backbone
from medusa.inference import MedusaDecoder
from medusa.inference.benchmark import Summary, compare
from medusa.inference.equivalence import explain
from medusa.loading import load_backbone, load_tokenizer
from medusa.progress import progress_bar
from medusa.train import load_config, train
from medusa.train.distill import distill
from medusa.train.evaluate import HeadAccuracy, accuracy, judge_file
from medusa.train.prompts import read_prompts
from medusa.train.supervision import IGNORE
from medusa.tree_search import search_tree_for_decoding

ROOT = Path(__file__).parent.parent
NODES = 16
"""Size of the tree of the fp32 check, where outputs must be identical."""
CHECKED_TOKENS = 64
"""Longest answer there."""
SHOWN = 2
"""How many answers in bf16 are shown."""
EXPLAINED = 1
"""How many of these are looked at for why they differ, which takes as long as decoding plainly."""
STARTED = time.perf_counter()
console = Console()


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=512, help="how many prompts to train on")
    parser.add_argument("--steps", type=int, help="train for at most so many steps")
    parser.add_argument("--new-tokens", type=int, default=128, help="longest answer")
    parser.add_argument("--decode", type=int, default=4, help="how many prompts to decode both ways")
    parser.add_argument("--check", type=int, default=32, help="how many prompts to compare token by token in fp32")
    parser.add_argument("--work", type=Path, default=ROOT / ".demo", help="where everything is kept for the next run")
    arguments = parser.parse_args()
    model_path = arguments.work / "model"
    with console.status("preparing SmolLM2-135M-Instruct"):
        prepare(model_path)
    splits = split_prompts(arguments.prompts)
    work = arguments.work / content_key(splits, arguments.new_tokens)
    answers = distil_answers(model_path, work, splits, arguments.new_tokens)
    checkpoint = train_heads(model_path, work, answers, arguments.steps)
    found = measure_heads(checkpoint, model_path, answers["calibration"])

    tokenizer = load_tokenizer(str(model_path))
    prompts = [encode(tokenizer, row["prompt"]) for row in splits["test"]]
    exact = check_exact(checkpoint, prompts[: arguments.check], min(arguments.new_tokens, CHECKED_TOKENS))
    fast = decode(checkpoint, prompts[: arguments.decode], arguments.new_tokens)
    report(model_path, found, exact, fast)


def stage(title: str) -> None:
    """A heading, with the time since the start."""
    console.rule(f"{title}  ({time.perf_counter() - STARTED:.0f} s)")


def content_key(*parts: Any) -> str:
    """Directory name for what depends on `parts`."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def distil_answers(
    model_path: Path, work: Path, splits: dict[str, list[dict[str, str]]], new_tokens: int
) -> dict[str, Path]:
    """Let the model answer the prompts itself."""
    stage("1  the model answers the training prompts")
    tokenizer = load_tokenizer(str(model_path))
    backbone = Backbone(load_backbone(str(model_path), torch.float32))
    work.mkdir(parents=True, exist_ok=True)
    questions = work / "prompts.jsonl"
    questions.write_text("".join(json.dumps(row) + "\n" for row in splits["train"] + splits["calibration"]))
    prompts, _ = read_prompts(questions, tokenizer)
    answered = work / "answers.jsonl"
    distill(backbone, tokenizer, prompts, answered, new_tokens, batch_size=192, recorded=True)
    files = {}
    with answered.open(encoding="utf-8") as lines:
        rows = {json.loads(line)["id"]: line for line in lines}
    for name in ("train", "calibration"):
        files[name] = work / f"{name}.jsonl"
        files[name].write_text("".join(rows[row["id"]] for row in splits[name]))
    return files


def train_heads(model_path: Path, work: Path, answers: dict[str, Path], steps: int | None) -> Path:
    """Train with configs/demo.yaml."""
    stage("2  heads learn to guess ahead")
    overrides = {
        "backbone.path": model_path,
        "data.train": answers["train"],
        "data.eval": answers["calibration"],
        "output.dir": work / f"run-{content_key((ROOT / 'configs' / 'demo.yaml').read_text(), steps)}",
    }
    if steps is not None:
        overrides["optimization.max_steps"] = steps
    return train(load_config(ROOT / "configs" / "demo.yaml", [f"{key}={value}" for key, value in overrides.items()]))


def measure_heads(checkpoint: Path, model_path: Path, calibration: Path) -> HeadAccuracy:
    """Accuracy on held-out prompts, and the best tree of every size for these heads."""
    stage("3  how good are they, and which tree suits them")
    model = MedusaModel.from_pretrained(checkpoint, dtype=torch.float32)
    judged = judge_file(model, load_tokenizer(str(model_path)), str(calibration), 2048, recorded=True)
    searched = search_tree_for_decoding(
        judged.ranks, judged.targets[:, 0] == IGNORE, max_nodes=64, log_confidence=judged.log_confidence
    )
    searched.save(checkpoint)
    found = accuracy(judged)
    table = Table("head", "top-1", "top-5", "top-10", "positions", title="accuracy on held-out prompts")
    for row in found.table():
        table.add_row(*row)
    console.print(table)
    return found


@dataclass(frozen=True)
class ExactCheck:
    """What came of decoding the held-out prompts in fp32."""

    prompts: int
    identical: int
    """Answers that equal those of `generate` token for token."""
    tokens_per_step: float
    seconds: float
    plain_seconds: float


def check_exact(checkpoint: Path, prompts: list[torch.Tensor], new_tokens: int) -> ExactCheck:
    """Decode all held-out prompts as one batch in fp32, where outputs must be identical, with and without heads."""
    stage("4  decoding prompts it never trained on, float32")
    model = MedusaModel.from_pretrained(checkpoint, dtype=torch.float32)
    assert model.searched_tree is not None
    decoder = MedusaDecoder(model, tree=model.searched_tree.best(NODES))
    ids = pad_sequence([prompt[0] for prompt in prompts], batch_first=True, padding_side="left")
    mask = pad_sequence([torch.ones_like(prompt[0]) for prompt in prompts], batch_first=True, padding_side="left")
    options = {"attention_mask": mask, "max_new_tokens": new_tokens, "do_sample": False}
    started = time.perf_counter()
    with console.status(f"{len(prompts)} prompts without heads"):
        plain = model.model.generate(ids, **options)
    between = time.perf_counter()
    with console.status(f"{len(prompts)} prompts with heads"):
        result = decoder.generate(ids, **options)
    same = (result.sequences == plain).all(dim=1) if result.sequences.shape == plain.shape else torch.zeros(1)
    return ExactCheck(
        len(prompts),
        int(same.sum()),
        result.stats.tokens_per_step,
        time.perf_counter() - between,
        between - started,
    )


def decode(checkpoint: Path, prompts: list[torch.Tensor], new_tokens: int) -> tuple[Summary, MedusaDecoder]:
    """Decode in bf16 with the tree that is fastest here, weights packed if that pays, and without heads."""
    stage("5  decoding prompts it never trained on, one by one, bfloat16")
    model = MedusaModel.from_pretrained(checkpoint, dtype=torch.bfloat16)
    with console.status("timing trees on this machine"):
        decoder = MedusaDecoder(model, tree="auto", pack_weights="auto")
    with progress_bar("decoding, bfloat16", len(prompts)) as advance:
        return compare(decoder, prompts, new_tokens, advance), decoder


def report(model_path: Path, found: HeadAccuracy, exact: ExactCheck, fast: tuple[Summary, MedusaDecoder]) -> None:
    """Print the table, two answers, what differs in bf16, and one line of JSON."""
    stage("result")
    fast_runs, fast_decoder = fast
    packed = fast_decoder.backbone is not fast_decoder.model.backbone
    ratio = fast_runs.tokens_per_second / fast_runs.plain_tokens_per_second
    table = Table("", "fp32, one batch", "bf16, one by one")
    table.add_row("prompts", str(exact.prompts), str(len(fast_runs.comparisons)))
    table.add_row("tree nodes", str(NODES), str(fast_decoder.tree.num_nodes))
    table.add_row("weights packed for this CPU", "no", "yes" if packed else "no")
    table.add_row("tokens per step", f"{exact.tokens_per_step:.2f}", f"{fast_runs.tokens_per_step:.2f}")
    table.add_row("tokens/s without heads", "-", f"{fast_runs.plain_tokens_per_second:.1f}")
    table.add_row("tokens/s with heads", "-", f"{fast_runs.tokens_per_second:.1f}")
    table.add_row("ratio", f"{exact.plain_seconds / exact.seconds:.2f}", f"{ratio:.2f}")
    table.add_row(
        "outputs identical",
        f"{exact.identical} of {exact.prompts}",
        f"{fast_runs.identical} of {len(fast_runs.comparisons)}",
    )
    console.print(table)

    tokenizer = load_tokenizer(str(model_path))
    for comparison in fast_runs.comparisons[:SHOWN]:
        answers = {"without heads": comparison.plain, "with heads": comparison.medusa}
        panels = [
            Panel(tokenizer.decode(tokens, skip_special_tokens=True), title=title, width=58)
            for title, tokens in answers.items()
        ]
        question = tokenizer.decode(comparison.prompt[0], skip_special_tokens=True)
        console.print(question.strip(), style="bold", markup=False, highlight=False)
        console.print(Columns(panels))
    for number, run in enumerate(fast_runs.comparisons[:EXPLAINED]):
        difference = explain(fast_decoder.model.backbone, run.prompt, run.plain, run.medusa)
        if difference is not None and difference.choice is not None:
            choice = difference.choice
            console.print(
                f"bf16, prompt {number}: parts at token {difference.place}, {choice.margin:.2g} below the best score; "
                f"rounding moves scores by {choice.rounding:.2g} there"
                + ("" if difference.explained else ", which does NOT explain the answer"),
                style="dim",
                highlight=False,
            )
    figures = {
        "tokens_per_step": round(fast_runs.tokens_per_step, 3),
        "tokens_per_second": round(fast_runs.tokens_per_second, 2),
        "baseline_tokens_per_second": round(fast_runs.plain_tokens_per_second, 2),
        "ratio": round(ratio, 3),
        "identical": exact.identical == exact.prompts,
        "checked_prompts": exact.prompts,
        "identical_bf16": fast_runs.identical,
        "top1": found.top1,
        "tree_nodes": fast_decoder.tree.num_nodes,
        "weights_packed": packed,
        f"tokens_per_step_{NODES}_nodes": round(exact.tokens_per_step, 3),
        "prompts": len(fast_runs.comparisons),
        "threads": torch.get_num_threads(),
        "seconds": round(time.perf_counter() - STARTED),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("stopped; the same command goes on where it was") from None
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
