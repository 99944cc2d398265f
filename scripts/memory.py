"""How much memory decoding with heads adds to plain decoding, at several lengths.

Usage: python scripts/memory.py CHECKPOINT [--lengths 256 4096]
Counts what stays alive while decoding: parameters, buffers, and keys and values. Prints a table and one line of JSON.
"""

import argparse
import json

import torch
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache

from medusa import MedusaModel
from medusa.inference import MedusaDecoder
from medusa.inference.request import Row

MIB = 2**20


def tensors_bytes(tensors: list[torch.Tensor]) -> int:
    """Bytes of distinct storages."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


@torch.inference_mode()
def main() -> None:
    """Compare the caches and the weights of both ways."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 4096])
    parser.add_argument("--nodes", type=int, default=16)
    arguments = parser.parse_args()
    model = MedusaModel.from_pretrained(arguments.checkpoint)
    assert model.searched_tree is not None, "search a tree first: medusa tree CHECKPOINT --data FILE"
    decoder = MedusaDecoder(model, tree=model.searched_tree.best(arguments.nodes))
    backbone = tensors_bytes([*model.model.parameters(), *model.model.buffers()])
    everything = tensors_bytes([*model.parameters(), *model.buffers()])
    results = []
    for length in arguments.lengths:
        prompt = torch.arange(length) % model.backbone.vocab_size
        plain_cache = DynamicCache(config=model.model.config)
        model.backbone.extend(prompt[None], plain_cache)
        plain = tensors_bytes([t for layer in plain_cache.layers for t in (layer.keys, layer.values)])
        state = decoder.prefill([Row.greedy(prompt, 2)])
        decoder.step(state)
        ours = tensors_bytes(
            [t for layer in state.cache.tree_layers for t in (layer.keys, layer.values) if t is not None]
        )
        position = plain // length
        results.append(
            {
                "length": length,
                "plain_cache": plain,
                "tree_cache": ours,
                "extra_positions": (ours - plain) // position,
                "allowed_positions": arguments.nodes + 2,
                "heads": everything - backbone,
            }
        )
    table = Table("length", "plain cache MiB", "tree cache MiB", "extra positions", "heads MiB", "backbone MiB")
    for r in results:
        table.add_row(
            str(r["length"]),
            f"{r['plain_cache'] / MIB:.1f}",
            f"{r['tree_cache'] / MIB:.1f}",
            f"{r['extra_positions']} (tree {arguments.nodes} + answer 2)",
            f"{r['heads'] / MIB:.1f}",
            f"{backbone / MIB:.1f}",
        )
    Console().print(table)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
