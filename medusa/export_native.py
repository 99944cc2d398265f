"""A native checkpoint again: fewer heads, or of another type."""

import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch

from .calibration import Calibration
from .checkpoint import CONFIG_FILE, DRAFT_VOCAB, HEADS_FILE
from .export_plan import ExportPlan
from .stored_heads import StoredHeads, open_heads
from .tensor_stream import PlannedTensor
from .tree_search import TREE_FILE, SearchedTree

EVALUATION_FILE = "evaluation.json"


def plan_native(stored: StoredHeads, num_heads: int, dtype: torch.dtype) -> ExportPlan:
    """The first `num_heads` heads in `dtype`, and everything else in the checkpoint that still holds for them."""
    names = [name for name in stored.shapes if int(name.split(".")[0]) < num_heads]
    tensors = {name: PlannedTensor(stored.shapes[name], dtype, partial(stored.tensor, name)) for name in names}
    if stored.config.draft_vocab is not None:
        ids = torch.tensor(stored.config.draft_vocab)
        tensors[DRAFT_VOCAB] = PlannedTensor(tuple(ids.shape), ids.dtype, lambda: ids)
    texts = {CONFIG_FILE: json.dumps(stored.entries | {"medusa_num_heads": num_heads}, indent=2) + "\n"}
    directory, written = stored.directory, {HEADS_FILE, CONFIG_FILE}
    if num_heads < stored.config.num_heads:
        written |= {TREE_FILE, EVALUATION_FILE}
        if (directory / TREE_FILE).exists():
            texts[TREE_FILE] = json.dumps(asdict(cut_tree(SearchedTree.load(directory), num_heads))) + "\n"
    copies = [item for item in sorted(directory.iterdir()) if item.name not in written]
    return ExportPlan(HEADS_FILE, tensors, texts, copies, [])


def cut_tree(tree: SearchedTree, num_heads: int) -> SearchedTree:
    """The tree without the nodes of later heads; how often the others are accepted does not change."""
    kept = [node for node, path in enumerate(tree.paths) if len(path) <= num_heads]
    calibration = tree.calibration
    if calibration is not None:
        calibration = Calibration(calibration.powers[:num_heads], calibration.offsets[:num_heads])
    paths, gains = tuple(tree.paths[node] for node in kept), tuple(tree.gains[node] for node in kept)
    return replace(tree, paths=paths, gains=gains, calibration=calibration)


def check_native(directory: Path, stored: StoredHeads, num_heads: int, dtype: torch.dtype) -> None:
    """Read the heads back and compare them bit by bit.

    Raises:
        ValueError: a tensor reads back differently.
    """
    with open_heads(directory) as written:
        expected = replace(stored.config, num_heads=num_heads)
        if written.config != expected:
            raise ValueError(f"{directory} reads back as {written.config}, not as {expected}: disk fault?")
        for name in written.shapes:
            if not torch.equal(written.tensor(name), stored.tensor(name).to(dtype)):
                raise ValueError(f"head tensor {name} reads back differently from {directory}: disk fault?")
