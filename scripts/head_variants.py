"""What each kind of head gains from the same training time.

Usage: python scripts/head_variants.py MODEL TRAIN EVAL [--seconds N] [--only NAME ...] [--out DIRECTORY]
TRAIN and EVAL are files that `medusa distill` wrote. Hidden states are computed once, into DIRECTORY/cache. Every
variant first trains for a few steps, which tells how many it can take in N seconds, and then from the start for so
many. Prints a table and one line of JSON: top-1 of each head and expected tokens per step on EVAL with the best trees
of 4, 8, 16 and 63 nodes (tokens emitted / verify passes, roots included).
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from medusa import MedusaModel
from medusa.loading import load_tokenizer
from medusa.train import load_config, train
from medusa.train.evaluate import accuracy, judge_file
from medusa.train.supervision import IGNORE
from medusa.tree_search import search_tree_for_decoding

CONFIG = Path(__file__).parent.parent / "configs" / "demo.yaml"
NODES = (4, 8, 16, 63)
HEADS = 4
FEW_STEPS = 12
WARM_UP = 4
DRAFT = "heads.draft_vocab_size=8192"
VARIANTS = {
    "plain, shared, all tokens": ["heads.projection=shared", "heads.draft_vocab_size=null"],
    "plain, shared": [DRAFT, "heads.projection=shared"],
    "plain, own": [DRAFT, "heads.projection=own"],
    "root, shared": [DRAFT, "heads.projection=shared", "heads.root_conditioned=true"],
    "root, own": [DRAFT, "heads.projection=own", "heads.root_conditioned=true"],
    "root, shared, soft": [
        DRAFT,
        "heads.projection=shared",
        "heads.root_conditioned=true",
        "optimization.soft_labels=0.5",
    ],
    "sequential, shared": [DRAFT, "heads.projection=shared", "heads.sequential=true"],
    "sequential, shared, 2 layers": [
        DRAFT,
        "heads.projection=shared",
        "heads.sequential=true",
        "heads.num_layers=2",
    ],
    "sequential, own": [DRAFT, "heads.projection=own", "heads.sequential=true"],
}
"""The draft vocabulary, where there is one, holds the 8,192 most frequent tokens of the training answers."""


@dataclass(frozen=True)
class Gain:
    """What a variant came to."""

    steps: int
    top1: list[float]
    tokens_per_step: list[float]
    """With the best trees of NODES nodes."""


def train_for(seconds: float, base: list[str], options: list[str], directory: Path) -> tuple[Path, int]:
    """Train for about so many seconds; returns the checkpoint and the steps."""
    plain = [*base, "heads.root_conditioned=false", "heads.sequential=false", *options]
    first = [f"output.dir={directory / 'first'}", f"optimization.max_steps={FEW_STEPS}", "output.log_every=1"]
    train(load_config(CONFIG, [*plain, *first]))
    lines = [json.loads(line) for line in (directory / "first" / "metrics.jsonl").read_text().splitlines()]
    # A pair is a position and a head.
    rates = [line["positions_per_second"] / line["pairs"] * HEADS for line in lines if "pairs" in line][WARM_UP:]
    steps = max(1, round(seconds * median(rates)))
    rest = [f"output.dir={directory / 'run'}", f"optimization.max_steps={steps}", "optimization.epochs=1000"]
    return train(load_config(CONFIG, [*plain, *rest])), steps


def judged(checkpoint: Path, file: str, steps: int) -> Gain:
    """Measure trained heads."""
    model = MedusaModel.from_pretrained(checkpoint)
    found = judge_file(model, load_tokenizer(str(checkpoint)), file, 2048, recorded=False)
    searched = search_tree_for_decoding(found.ranks, found.targets[:, 0] == IGNORE, max(NODES))
    return Gain(steps, accuracy(found).top1, [round(searched.tokens_per_step(size), 3) for size in NODES])


def main() -> None:
    """Train and judge every variant."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("train")
    parser.add_argument("eval")
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--out", type=Path, default=Path("head_variants"))
    arguments = parser.parse_args()
    base = [f"backbone.path={Path(arguments.model).resolve()}", f"data.train={arguments.train}"]
    base += [f"heads.num_heads={HEADS}", f"cache.dir={arguments.out / 'cache'}", "data.recorded=false"]
    base += ["data.eval=null", "backbone.dtype=float32"]
    gains: dict[str, Gain] = {}
    for name in arguments.only:
        directory = arguments.out / name.replace(", ", "-").replace(" ", "_")
        checkpoint, steps = train_for(arguments.seconds, base, VARIANTS[name], directory)
        gains[name] = judged(checkpoint, arguments.eval, steps)
    table = Table("heads", "steps", "top-1 of each", *(f"{size} nodes" for size in NODES))
    for name, gain in gains.items():
        accuracies = " ".join(f"{share:.2f}" for share in gain.top1)
        table.add_row(name, str(gain.steps), accuracies, *(f"{value:.2f}" for value in gain.tokens_per_step))
    Console().print(table)
    print(json.dumps({name: gain.__dict__ for name, gain in gains.items()}))


if __name__ == "__main__":
    main()
