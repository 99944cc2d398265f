"""What to write for tokens outside the draft vocabulary, where an engine knows none: top-1 accuracy of several fills.

Usage: python scripts/compare_fills.py CHECKPOINT --data HELDOUT
For plain heads with a draft vocabulary. Prints a table and one line of JSON.
"""

import argparse
import json

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from medusa import MedusaConfig, MedusaModel
from medusa.loading import load_tokenizer
from medusa.materialise import full_projection
from medusa.train.evaluate import accuracy, judge_file


def filled(model: MedusaModel, projection: Tensor) -> MedusaModel:
    """The same heads with a full projection [V, D] of their own."""
    config = MedusaConfig(num_heads=len(model.heads), num_layers=model.config.num_layers)
    full = MedusaModel.attach_parts(model.backbone, config)
    blocks = {name: tensor for name, tensor in model.heads.state_dict().items() if ".linear." in name}
    rows = {f"{k}.{config.num_layers}.weight": projection for k in range(config.num_heads)}
    full.heads.load_state_dict(blocks | rows)
    return full


@torch.no_grad()
def main() -> None:
    """Measure the checkpoint as it is, and with each fill."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("--data", required=True, help="held-out chats")
    arguments = parser.parse_args()
    model = MedusaModel.from_pretrained(arguments.checkpoint, dtype=torch.float32)
    vocab, lm_weight = model.config.draft_vocab, model.backbone.lm_weight
    if vocab is None or model.config.projection == "own" or model.config.root_conditioned or model.config.sequential:
        parser.error("give plain heads with a draft vocabulary and a shared projection")
    draft = model.heads.projection(0)[0]
    zeros = torch.zeros_like(lm_weight).index_copy(0, torch.tensor(vocab), draft)
    fills = {"mean of the draft rows": full_projection(draft, vocab, len(lm_weight)), "zeros": zeros}
    models = {"draft vocabulary, as trained": model}
    models |= {name: filled(model, projection) for name, projection in fills.items()}
    models["rows of the LM head"] = filled(model, lm_weight)
    tokenizer, found = load_tokenizer(arguments.checkpoint), {}
    for name, which in models.items():
        found[name] = accuracy(judge_file(which, tokenizer, arguments.data, 2048, recorded=False)).top1
    table = Table("other tokens get", *(f"head {k}" for k in range(len(model.heads))), title="top-1")
    for name, shares in found.items():
        table.add_row(name, *(f"{share:.4f}" for share in shares))
    Console().print(table)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
