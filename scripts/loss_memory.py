"""Peak memory of a training step of the heads: the plain loss, and the one that makes logits in chunks.

Usage: python scripts/loss_memory.py [--projection own|shared] [--soft-labels 0.5]
Each is measured in a process of its own: what the step adds to the process's peak. Prints one line of JSON.
"""

import argparse
import json
import resource
import subprocess
import sys

import torch

from medusa import MedusaConfig
from medusa.heads import LogitTransform, MedusaHeads
from medusa.train import loss as loss_module
from medusa.train.loss import HeadLoss


def main() -> None:
    """Measure both, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--positions", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--projection", default="own")
    parser.add_argument("--soft-labels", type=float, default=0.0)
    parser.add_argument("--only", choices=["plain", "chunked"], help="measure one, in this process")
    arguments = parser.parse_args()
    if arguments.only is not None:
        print(json.dumps(step(arguments)))
        return
    figures = {}
    for kind in ("plain", "chunked"):
        command = [sys.executable, __file__, *sys.argv[1:], "--only", kind]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        figures[kind] = json.loads(done.stdout)
    shares = {key: round(figures["chunked"][key] / figures["plain"][key], 3) for key in figures["plain"]}
    print(json.dumps({**figures, "chunked/plain": shares}))


def step(arguments: argparse.Namespace) -> dict[str, float]:
    """Gigabytes that forward and backward add to the peak, and the loss."""
    if arguments.only == "plain":
        loss_module.CHUNK_ENTRIES = 2**62
    torch.manual_seed(0)
    weight = torch.randn(arguments.vocabulary, arguments.hidden) / arguments.hidden**0.5
    config = MedusaConfig(num_heads=arguments.heads, projection=arguments.projection)
    heads = MedusaHeads(config, weight, None, weight, LogitTransform())
    loss_of = HeadLoss(heads, 0.8, arguments.soft_labels, lm_head=(weight, None))
    hidden = torch.randn(arguments.positions, arguments.hidden)
    targets = torch.randint(arguments.vocabulary, (arguments.positions, arguments.heads))
    for parameter in heads.parameters():
        parameter.grad = torch.zeros_like(parameter).add_(0)  # gradients of the weights are there in any case
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    loss, _ = loss_of(hidden, targets[:, 0], targets)
    loss.backward()
    added = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / 1e9
    return {"gigabytes": round(added, 3), "loss": round(loss.item(), 2)}


if __name__ == "__main__":
    main()
