"""The tree of the search against trees grown in every step, of one size and of a size chosen per step.

Usage: python scripts/time_trees.py CHECKPOINT [--prompts N] [--new-tokens N] [--dtype D] [--pack-weights]
       [--nodes N] [--prompt-file FILE]
FILE is JSONL with `prompt` or `turns` (the first is asked). Prompts are decoded in turns, greedily. Prints a table and
one line of JSON. Tokens per step = tokens emitted by verify passes / verify passes, roots included.
"""

import argparse
import json
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from medusa import MedusaModel
from medusa.inference import DynamicTree, MedusaDecoder
from medusa.inference.layout import TreeLayout
from medusa.inference.propose import Candidates
from medusa.inference.proposer import DecodingState
from medusa.loading import load_tokenizer
from medusa.progress import progress_bar

PROMPTS = Path(__file__).parent / "demo_prompts.jsonl"
WARM_UP = 8


class CountingDecoder(MedusaDecoder):
    """Counts how many steps had how many nodes."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.steps_of_size: Counter[int] = Counter()

    def propose(self, state: DecodingState) -> tuple[Candidates, TreeLayout]:
        """As in `MedusaDecoder`."""
        candidates, layout = super().propose(state)
        self.steps_of_size[layout.num_nodes] += 1
        return candidates, layout


@dataclass
class Variant:
    """One decoder and what it took for each prompt."""

    decoder: CountingDecoder
    new_tokens: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)

    def run(self, prompt: Tensor, new_tokens: int) -> None:
        """Decode one prompt, [1, T]."""
        started = time.perf_counter()
        result = self.decoder.generate(prompt, max_new_tokens=new_tokens)
        self.seconds.append(time.perf_counter() - started)
        self.new_tokens.append(result.stats.new_tokens)
        self.steps.append(result.stats.steps)
        self.answers.append(result.sequences[0, prompt.shape[1] :].tolist())

    @property
    def speeds(self) -> list[float]:
        """Tokens per second of each prompt, prefill included."""
        return [tokens / seconds for tokens, seconds in zip(self.new_tokens, self.seconds, strict=True)]

    def figures(self, baseline: "Variant") -> dict[str, Any]:
        """What it took, and compared with `baseline` prompt by prompt."""
        ratios = [own / other for own, other in zip(self.speeds, baseline.speeds, strict=True)]
        sizes = self.decoder.steps_of_size
        return {
            "tokens_per_step": round((sum(self.new_tokens) - len(self.steps)) / max(sum(self.steps), 1), 3),
            "tokens_per_second": round(median(self.speeds), 2),
            "ratio": round(median(ratios), 3),
            "identical": sum(a == b for a, b in zip(self.answers, baseline.answers, strict=True)),
            "mean_nodes": round(sum(size * count for size, count in sizes.items()) / max(sizes.total(), 1), 2),
            "steps_of_size": dict(sorted(sizes.items())),
        }


def read_prompts(file: Path, count: int, checkpoint: str) -> list[Tensor]:
    """`count` prompts spread over the file, as token ids [1, T]."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    tokenizer = load_tokenizer(checkpoint)
    chosen = rows[:: max(len(rows) // count, 1)][:count]
    asked = [row["prompt"] if "prompt" in row else row["turns"][0] for row in chosen]
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt"
        )["input_ids"]
        for prompt in asked
    ]


def make_variants(model: MedusaModel, pack_weights: bool, nodes: int | None) -> dict[str, Variant]:
    """The decoders to compare; the fixed dynamic tree is as large as the searched one."""
    assert model.searched_tree is not None
    static = CountingDecoder(
        model, tree="auto" if nodes is None else model.searched_tree.best(nodes), pack_weights=pack_weights
    )
    chosen = CountingDecoder(model, tree="dynamic", pack_weights=pack_weights)
    assert isinstance(chosen.tree, DynamicTree)
    size = max(static.tree.num_nodes, 2)
    one_size = replace(chosen.tree, sizes=(size,), seconds=None, tokens_per_second=None)
    fixed = CountingDecoder(model, tree=one_size, pack_weights=pack_weights)
    return {
        f"searched, {static.tree.num_nodes} nodes": Variant(static),
        f"dynamic, {size} nodes": Variant(fixed),
        "dynamic, size per step": Variant(chosen),
    }


def main() -> None:
    """Compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--pack-weights", action="store_true")
    parser.add_argument("--nodes", type=int, help="size of the searched tree; unsaid: the fastest here")
    parser.add_argument("--prompt-file", type=Path, default=PROMPTS)
    arguments = parser.parse_args()
    model = MedusaModel.from_pretrained(arguments.checkpoint, dtype=arguments.dtype)
    if model.searched_tree is None:
        raise SystemExit("search a tree first: medusa tree CHECKPOINT --data FILE")
    console = Console()
    if model.searched_tree.calibration is None:
        console.print("the tree was searched without a calibration; search it again for better dynamic trees")
    prompts = read_prompts(arguments.prompt_file, arguments.prompts, arguments.checkpoint)
    variants = make_variants(model, arguments.pack_weights, arguments.nodes)
    for variant in variants.values():
        variant.decoder.generate(prompts[0], max_new_tokens=WARM_UP)
        variant.decoder.steps_of_size.clear()
    with progress_bar("decoding", len(prompts)) as advance:
        for turn, prompt in enumerate(prompts):
            order = list(variants.values())
            for variant in order[turn % len(order) :] + order[: turn % len(order)]:
                variant.run(prompt, arguments.new_tokens)
            advance(1)

    baseline = next(iter(variants.values()))
    figures = {name: variant.figures(baseline) for name, variant in variants.items()}
    table = Table("tree", "tokens per step", "tokens/s", "ratio", "nodes", "identical", title=f"{len(prompts)} prompts")
    for name, found in figures.items():
        columns = ("tokens_per_step", "tokens_per_second", "ratio", "mean_nodes", "identical")
        table.add_row(name, *(str(found[column]) for column in columns))
    console.print(table)
    dynamic = variants["dynamic, size per step"].decoder.tree
    assert isinstance(dynamic, DynamicTree)
    assert dynamic.seconds is not None
    milliseconds = {
        size: round(1000 * seconds, 2) for size, seconds in zip(dynamic.sizes, dynamic.seconds, strict=True)
    }
    print(
        json.dumps(
            {
                "prompts": len(prompts),
                "new_tokens": arguments.new_tokens,
                "dtype": str(model.backbone.lm_weight.dtype).removeprefix("torch."),
                "packed": arguments.pack_weights,
                "threads": torch.get_num_threads(),
                "step_milliseconds": milliseconds,
                "variants": figures,
            }
        )
    )


if __name__ == "__main__":
    main()
