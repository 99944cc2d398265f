"""Many short generations in one process: does memory stay flat?

Usage: python scripts/soak.py [--generations N]
Runs on a tiny random model, in batches of several sizes, greedy and sampled, streams left unfinished among them. Prints
the resident memory on the way and one line of JSON; exit status 1 if it grew by more than 5% after the first tenth.
"""

import argparse
import gc
import json
import random

import psutil
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from medusa import CandidateTree, MedusaConfig, MedusaModel
from medusa.inference import MedusaDecoder


def resident() -> float:
    """Resident memory of this process, MiB."""
    gc.collect()
    return float(psutil.Process().memory_info().rss) / 2**20


def main() -> None:
    """Generate and watch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--generations", type=int, default=10_000)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    model = MedusaModel.attach(LlamaForCausalLM(config).eval(), MedusaConfig(num_heads=3))
    tree = CandidateTree.from_paths([(0,), (1,), (0, 0), (0, 0, 0)])
    decoders = [MedusaDecoder(model, tree), MedusaDecoder(model, tree, proposal="mixed")]
    choose = random.Random(0)
    readings = []
    for count in range(arguments.generations + 1):
        if count % max(arguments.generations // 10, 1) == 0:
            readings.append(resident())
            print(f"{count} generations: {readings[-1]:.1f} MiB", flush=True)
        decoder = choose.choice(decoders)
        ids = torch.randint(1, 256, (choose.randint(1, 4), choose.randint(1, 40)))
        sample = {"do_sample": choose.random() < 0.5, "pad_token_id": 0}
        if len(ids) == 1 and choose.random() < 0.3:
            next(decoder.stream(ids, max_new_tokens=8, **sample))
        else:
            decoder.generate(ids, max_new_tokens=choose.randint(1, 8), **sample)
    grown = readings[-1] / readings[1] - 1
    print(json.dumps({"generations": arguments.generations, "mib": readings, "grown": round(grown, 4)}))
    raise SystemExit(grown > 0.05)


if __name__ == "__main__":
    main()
