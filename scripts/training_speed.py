"""How many supervised positions a second the heads learn from, hidden states given.

Usage: python scripts/training_speed.py MODEL [--draft-vocab N] [--projection shared|own]
Prints one line of JSON; --draft-vocab 0 is the full vocabulary.
"""

import argparse
import json
import time

import torch

from medusa import MedusaConfig, MedusaModel
from medusa.loading import load_backbone
from medusa.train.loss import HeadLoss


def main() -> None:
    """Time optimizer steps on random hidden states."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--draft-vocab", type=int, default=4096)
    parser.add_argument("--projection", default="shared")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--positions", type=int, default=320, help="of one step")
    parser.add_argument("--steps", type=int, default=12)
    arguments = parser.parse_args()
    backbone = load_backbone(arguments.model, torch.float32)
    backbone.requires_grad_(False)
    config = MedusaConfig(
        num_heads=arguments.heads,
        projection=arguments.projection,
        draft_vocab=range(arguments.draft_vocab) if arguments.draft_vocab else None,
        root_conditioned=True,
    )
    model = MedusaModel.attach(backbone, config)
    loss_of = HeadLoss(model.heads, head_decay=0.8)
    optimizer = torch.optim.AdamW(model.heads.parameters(), lr=1e-4)
    vocabulary = model.heads.draft_size
    hidden = torch.randn(arguments.positions, model.backbone.hidden_size)
    targets = torch.randint(vocabulary, (arguments.positions, arguments.heads))
    times = []
    for _ in range(arguments.steps):
        started = time.perf_counter()
        loss, _ = loss_of(hidden, targets[:, 0], targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - started)
    seconds = sorted(times)[len(times) // 2]
    print(json.dumps({"vocabulary": vocabulary, "positions_per_second": round(arguments.positions / seconds)}))


if __name__ == "__main__":
    main()
