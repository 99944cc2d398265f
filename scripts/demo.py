"""The whole path on a real model: distil, train heads, measure them, search a tree, decode faster.

Run it through scripts/demo.sh, which makes the environment first.
"""

import argparse
import hashlib
import json
import os
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from prepare_demo_model import prepare
from rich.columns import Columns
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from medusa import MedusaModel
from medusa.backbone import Backbone
from medusa.inference import MedusaDecoder
from medusa.inference.benchmark import Summary, compare, top2_margin
from medusa.model import load_backbone, load_tokenizer
from medusa.progress import progress_bar
from medusa.train import load_config, train
from medusa.train.distill import distill, read_prompts
from medusa.train.evaluate import HeadAccuracy, accuracy, judge_file
from medusa.train.supervision import IGNORE
from medusa.tree_search import search_tree_for_decoding

ROOT = Path(__file__).parent.parent
PROMPTS = ROOT / "scripts" / "demo_prompts.jsonl"
HELD_OUT = 4
"""Prompts of each category to calibrate the tree on, and as many again to decode at the end."""
NODES = 16
"""Size of the tree of the fp32 check, where outputs must be identical."""
CHECKED_PROMPTS, CHECKED_TOKENS = 6, 96
"""How many prompts are decoded there, and new tokens of each."""
console = Console()


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=448, help="how many prompts to train on")
    parser.add_argument("--steps", type=int, help="train for at most so many steps")
    parser.add_argument("--new-tokens", type=int, default=128, help="longest answer")
    parser.add_argument("--decode", type=int, default=6, help="how many prompts to decode both ways")
    parser.add_argument("--work", type=Path, default=ROOT / ".demo", help="where everything is kept for the next run")
    arguments = parser.parse_args()
    started = time.perf_counter()

    model_path = arguments.work / "model"
    with console.status("preparing SmolLM2-135M-Instruct"):
        prepare(model_path)
    splits = split_prompts(arguments.prompts)
    work = arguments.work / content_key(splits, arguments.new_tokens, arguments.steps)
    answers = distil_answers(model_path, work, splits, arguments.new_tokens)
    checkpoint = train_heads(model_path, work, answers, arguments.steps)
    found = measure_heads(checkpoint, model_path, answers["calibration"])

    prompts = [encode(model_path, row["prompt"]) for row in splits["test"][: arguments.decode]]
    exact = decode(
        checkpoint, torch.float32, prompts[:CHECKED_PROMPTS], min(arguments.new_tokens, CHECKED_TOKENS), nodes=NODES
    )
    fast = decode(checkpoint, torch.bfloat16, prompts, arguments.new_tokens, nodes=None)
    report(model_path, found, exact, fast, time.perf_counter() - started)


def split_prompts(count: int) -> dict[str, list[dict[str, str]]]:
    """Fixed held-out prompts of every category, and `count` others, one category after the other."""
    by_category: dict[str, list[dict[str, str]]] = defaultdict(list)
    for line in PROMPTS.read_text().splitlines():
        row = json.loads(line)
        by_category[row["category"]].append(row)
    for rows in by_category.values():
        rows.sort(key=lambda row: hashlib.sha256(row["id"].encode()).hexdigest())
    in_turn = [row for rank in zip(*by_category.values(), strict=True) for row in rank]
    held = HELD_OUT * len(by_category)
    if not 1 <= count <= len(in_turn) - 2 * held:
        raise SystemExit(f"--prompts is {count}; there are 1 to {len(in_turn) - 2 * held} to train on")
    return {"test": in_turn[:held], "calibration": in_turn[held : 2 * held], "train": in_turn[2 * held :][:count]}


def content_key(*parts: Any) -> str:
    """Directory name for what depends on `parts` and on the recipe."""
    recipe = (ROOT / "configs" / "demo.yaml").read_text()
    return hashlib.sha256(json.dumps([recipe, *parts], sort_keys=True).encode()).hexdigest()[:12]


def distil_answers(
    model_path: Path, work: Path, splits: dict[str, list[dict[str, str]]], new_tokens: int
) -> dict[str, Path]:
    """Let the model answer the prompts itself."""
    console.rule("1  the model answers the training prompts")
    tokenizer = load_tokenizer(str(model_path))
    backbone = Backbone(load_backbone(str(model_path), torch.float32))
    work.mkdir(parents=True, exist_ok=True)
    questions = work / "prompts.jsonl"
    questions.write_text("".join(json.dumps(row) + "\n" for row in splits["train"] + splits["calibration"]))
    prompts, _ = read_prompts(questions, tokenizer)
    answered = work / "answers.jsonl"
    distill(backbone, tokenizer, prompts, answered, new_tokens, batch_size=192, recorded=True)
    files = {}
    rows = {json.loads(line)["id"]: line for line in answered.read_text().splitlines(keepends=True)}
    for name in ("train", "calibration"):
        files[name] = work / f"{name}.jsonl"
        files[name].write_text("".join(rows[row["id"]] for row in splits[name]))
    return files


def train_heads(model_path: Path, work: Path, answers: dict[str, Path], steps: int | None) -> Path:
    """Train with configs/demo.yaml."""
    console.rule("2  heads learn to guess ahead")
    overrides = {
        "backbone.path": model_path,
        "data.train": answers["train"],
        "data.eval": answers["calibration"],
        "output.dir": work / "run",
    }
    if steps is not None:
        overrides["optimization.max_steps"] = steps
    return train(load_config(ROOT / "configs" / "demo.yaml", [f"{key}={value}" for key, value in overrides.items()]))


def measure_heads(checkpoint: Path, model_path: Path, calibration: Path) -> HeadAccuracy:
    """Accuracy on held-out prompts, and the best tree of every size for these heads."""
    console.rule("3  how good are they, and which tree suits them")
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


def encode(model_path: Path, prompt: str) -> torch.Tensor:
    """Token ids of a question, [1, T]."""
    encoded = load_tokenizer(str(model_path)).apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt"
    )
    ids = encoded["input_ids"]
    assert isinstance(ids, torch.Tensor)
    return ids


def decode(
    checkpoint: Path, dtype: torch.dtype, prompts: list[torch.Tensor], new_tokens: int, nodes: int | None
) -> tuple[Summary, MedusaDecoder]:
    """Decode with and without heads: a tree of `nodes` nodes, or the fastest one here, weights packed if that pays."""
    name = str(dtype).removeprefix("torch.")
    console.rule(f"4  decoding prompts it never trained on, {name}")
    model = MedusaModel.from_pretrained(checkpoint, dtype=dtype)
    assert model.searched_tree is not None
    if nodes is not None:
        decoder = MedusaDecoder(model, tree=model.searched_tree.best(nodes))
    else:
        with console.status("timing trees on this machine"):
            decoder = MedusaDecoder(model, tree="auto", pack_weights="auto")
    with progress_bar(f"decoding, {name}", len(prompts)) as advance:
        return compare(decoder, prompts, new_tokens, advance), decoder


def report(
    model_path: Path,
    found: HeadAccuracy,
    exact: tuple[Summary, MedusaDecoder],
    fast: tuple[Summary, MedusaDecoder],
    seconds: float,
) -> None:
    """Print the table, two answers, what differs in bf16, and one line of JSON."""
    console.rule("result")
    table = Table("", "fp32", "bf16")
    (exact_runs, exact_decoder), (fast_runs, fast_decoder) = exact, fast
    packed = fast_decoder.backbone is not fast_decoder.model.backbone
    both = (exact_runs, fast_runs)
    table.add_row("tree nodes", *(str(d.tree.num_nodes) for d in (exact_decoder, fast_decoder)))
    table.add_row("weights packed for this CPU", "no", "yes" if packed else "no")
    table.add_row("tokens per step", *(f"{s.tokens_per_step:.2f}" for s in both))
    table.add_row("tokens/s without heads", *(f"{s.plain_tokens_per_second:.1f}" for s in both))
    table.add_row("tokens/s with heads", *(f"{s.tokens_per_second:.1f}" for s in both))
    table.add_row("ratio", *(f"{s.tokens_per_second / s.plain_tokens_per_second:.2f}" for s in both))
    table.add_row("outputs identical", *(f"{s.identical} of {len(s.comparisons)}" for s in both))
    console.print(table)

    tokenizer = load_tokenizer(str(model_path))
    for comparison in fast_runs.comparisons[:2]:
        answers = {"without heads": comparison.plain, "with heads": comparison.medusa}
        panels = [
            Panel(tokenizer.decode(tokens, skip_special_tokens=True), title=title, width=58)
            for title, tokens in answers.items()
        ]
        question = tokenizer.decode(comparison.prompt[0], skip_special_tokens=True)
        console.print(question.strip(), style="bold", markup=False, highlight=False)
        console.print(Columns(panels))
    for number, comparison in enumerate(fast_runs.comparisons):
        if not comparison.identical:
            place = comparison.first_difference
            text = torch.cat([comparison.prompt, torch.tensor([comparison.plain[:place]], dtype=torch.long)], dim=1)
            margin = top2_margin(fast_decoder.model.model, text)
            console.print(
                f"bf16, prompt {number}: differs from token {place} on, where the two likeliest tokens are "
                f"{margin:.1f} roundings apart",
                style="dim",
                highlight=False,
            )
    figures = {
        "tokens_per_step": round(fast_runs.tokens_per_step, 3),
        "tokens_per_second": round(fast_runs.tokens_per_second, 2),
        "baseline_tokens_per_second": round(fast_runs.plain_tokens_per_second, 2),
        "ratio": round(fast_runs.tokens_per_second / fast_runs.plain_tokens_per_second, 3),
        "identical": exact_runs.identical == len(exact_runs.comparisons),
        "identical_bf16": fast_runs.identical,
        "top1": found.top1,
        "tree_nodes": fast_decoder.tree.num_nodes,
        "weights_packed": packed,
        f"tokens_per_step_{NODES}_nodes": round(exact_runs.tokens_per_step, 3),
        "ratio_fp32": round(exact_runs.tokens_per_second / exact_runs.plain_tokens_per_second, 3),
        "prompts": len(fast_runs.comparisons),
        "threads": torch.get_num_threads(),
        "seconds": round(seconds),
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
