"""Write heads for a serving engine, read them back by the engine's own rules, and only then put them in place."""

import json
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import GenerationConfig

from .checkpoint import ADAPTER_FOLDER, BACKBONE_FOLDER, CONFIG_FILE, atomic_directory
from .engines import ENGINES, TREE_NODES, check_engine, engine_config, planned_tensors, refuse, remarks
from .export_check import ExportCheck, check_export
from .export_native import check_native, plan_native
from .export_plan import ExportPlan
from .export_published import as_native
from .loading import load_tokenizer, local_directory
from .model import MedusaModel
from .stored_heads import StoredHeads, open_heads
from .tree import CandidateTree
from .tree_search import TREE_FILE, SearchedTree

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "chat_template.jinja",
    "additional_chat_templates",
    "generation_config.json",
)
CHOICES_FILE = "medusa_choices.json"
CHECKPOINT_FACTS = ("tokenizer_size", "backbone_fingerprint", "backbone_architecture", "chat_template_sha256")
"""Entries of a native config.json that no engine reads, and that tell later which backbone the heads are for."""


@dataclass(frozen=True)
class Export:
    """What was written, or would be."""

    engine: str
    out: str
    num_heads: int
    dtype: str
    files: dict[str, int]
    """Bytes of the weights, and of what is copied beside them."""
    uses: str
    ignores: str
    remarks: list[str]
    check: ExportCheck | None
    """None before anything is written, and for native exports, which are compared bit by bit."""


def export(
    checkpoint: str | Path,
    engine: str,
    out: Path | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    dtype: str = "auto",
    num_heads: int | None = None,
) -> Export:
    """Write a checkpoint for a serving engine, tensor by tensor, and check it before it counts.

    Args:
        checkpoint: directory or hub id of a native checkpoint, or of heads that another project wrote.
        engine: native, reference, vllm, tgi or tensorrt-llm.
        out: where to; `CHECKPOINT-ENGINE` where none is given.
        overwrite: replace a directory that is there, once the new one is complete.
        dry_run: say what would be written, and write nothing.
        dtype: of the heads: float32, bfloat16, float16; auto is as they are.
        num_heads: write the first so many; None is all.

    Raises:
        ValueError: the checkpoint is damaged, the engine cannot run such heads or would read others than ours, or the
            directory cannot be written.
    """
    check_engine(engine)
    directory = local_directory(checkpoint)
    target = Path(os.path.abspath(out or f"{str(checkpoint).rstrip('/')}-{engine}"))
    refuse_target(target, directory, overwrite)
    with as_native(directory, TOKENIZER_FILES) as directory, open_heads(directory) as stored:
        count = head_count(stored, num_heads)
        kind = stored_dtype(stored, dtype)
        if engine == "native":
            shared, plan = None, plan_native(stored, count, kind)
        else:
            if (directory / ADAPTER_FOLDER).is_dir():
                raise ValueError(
                    f"{directory} holds an adapter of the backbone beside the heads, and engines load the backbone "
                    f"without it. Fold it first: medusa merge {directory} --out NEW, then export NEW"
                )
            refuse(engine, stored, stored.has_bias)
            shared = shared_projection(engine, stored)
            plan = plan_engine(engine, stored, shared, count, kind)
        found = None if dry_run else write(engine, plan, stored, shared, target, count, kind)
    facts = ENGINES.get(engine)
    return Export(
        engine,
        str(target),
        count,
        str(kind).removeprefix("torch."),
        plan.sizes(),
        "everything" if facts is None else facts.uses,
        "nothing" if facts is None else facts.ignores,
        plan.remarks,
        found,
    )


def refuse_target(target: Path, directory: Path, overwrite: bool) -> None:
    """Refuse a directory that would be lost.

    Raises:
        ValueError: it exists and may not be replaced, or holds the checkpoint or lies in it.
    """
    source = directory.resolve()
    if target.resolve() == source or target.resolve() in source.parents or source in target.resolve().parents:
        raise ValueError(f"--out {target} and the checkpoint {directory} lie in each other; name another directory")
    if target.exists() and not overwrite:
        raise ValueError(f"{target} exists; name another directory, or give --overwrite to replace it")
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target} is a file; name a directory")


def head_count(stored: StoredHeads, num_heads: int | None) -> int:
    """How many heads to write.

    Raises:
        ValueError: there are not so many.
    """
    there = stored.config.num_heads
    if num_heads is not None and not 1 <= num_heads <= there:
        raise ValueError(f"--heads is {num_heads}; {stored.directory} has {there} heads, take 1 to {there}")
    return num_heads or there


def stored_dtype(stored: StoredHeads, dtype: str) -> torch.dtype:
    """The type to write.

    Raises:
        ValueError: it is unknown.
    """
    if dtype == "auto":
        return stored.dtype
    if dtype not in DTYPES:
        raise ValueError(f"--dtype is {dtype!r}; allowed: auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def shared_projection(engine: str, stored: StoredHeads) -> Tensor | None:
    """The LM head's rows that the heads share, [Vd, D]; None where each has its own.

    Raises:
        ValueError: the backbone cannot be loaded or is another one, or its LM head has a bias.
    """
    if stored.config.projection == "own":
        return None
    weight, bias = MedusaModel.from_pretrained(stored.directory).heads.projection(0)
    refuse(engine, stored, bias is not None)
    return weight.detach()


def plan_engine(
    engine: str, stored: StoredHeads, shared: Tensor | None, num_heads: int, dtype: torch.dtype
) -> ExportPlan:
    """Everything that will be written for an engine."""
    directory, notes = stored.directory, remarks(engine, stored, num_heads)
    merged = directory / BACKBONE_FOLDER
    base = os.path.abspath(merged) if merged.is_dir() else stored.entries.get("base_model_name_or_path")
    if not base:
        raise ValueError(f"{directory}/config.json does not name the backbone (base_model_name_or_path)")
    if os.path.isabs(base):
        notes.append(f"config.json names the backbone by a path of this machine, {base}; change it where that differs")
    kept = {name: stored.entries[name] for name in CHECKPOINT_FACTS if name in stored.entries}
    config = engine_config(engine, stored, base, num_heads) | kept
    texts = {CONFIG_FILE: json.dumps(config, indent=2) + "\n"}
    if engine in ("reference", "tensorrt-llm"):
        texts[CHOICES_FILE] = json.dumps(choices(stored, num_heads, notes)) + "\n"
    tensors = planned_tensors(engine, stored, shared, num_heads, dtype)
    copies = [directory / name for name in TOKENIZER_FILES if (directory / name).exists()]
    return ExportPlan(ENGINES[engine].weights_file, tensors, texts, copies, notes, base)


def choices(stored: StoredHeads, num_heads: int, notes: list[str]) -> list[list[int]]:
    """The searched tree as the list of paths that TensorRT-LLM and the reference call `medusa_choices`."""
    tree = CandidateTree.chain(num_heads)
    if (stored.directory / TREE_FILE).exists():
        tree = SearchedTree.load(stored.directory).best(TREE_NODES)
    else:
        notes.append(f"{CHOICES_FILE} is a plain chain: no tree was searched for these heads (medusa tree)")
    return [list(path) for path in tree.paths if len(path) <= num_heads]


def write(
    engine: str,
    plan: ExportPlan,
    stored: StoredHeads,
    shared: Tensor | None,
    target: Path,
    num_heads: int,
    dtype: torch.dtype,
) -> ExportCheck | None:
    """Write what is planned beside `target`, check it, and put it there.

    Raises:
        ValueError: the disk is full or forbids it, or what was written is not what the engine needs.
    """
    try:
        with atomic_directory(target) as work:
            plan.write(work)
            for item in plan.copies:
                if item.is_dir():
                    shutil.copytree(item, work / item.name)
                else:
                    shutil.copy(item, work / item.name)
            if engine == "native":
                check_native(work, stored, num_heads, dtype)
                return None
            add_missing_files(work, plan.backbone)
            return check_export(engine, work, stored, shared, num_heads, dtype)
    except OSError as error:
        raise ValueError(f"cannot write {target}: {error}; what was there before is still there") from error


def add_missing_files(work: Path, backbone: str | None) -> None:
    """Take from the backbone what the checkpoint lacks: its tokenizer, and how it wants to generate."""
    assert backbone is not None, "an engine's plan names the backbone"
    if not (work / "tokenizer_config.json").exists():
        with suppress(ValueError):  # it has none: whoever serves it so gives token ids
            load_tokenizer(backbone).save_pretrained(str(work))
    if not (work / "generation_config.json").exists():
        with suppress(OSError):  # it has none: engines use their own defaults, as they do for the backbone alone
            GenerationConfig.from_pretrained(backbone).save_pretrained(work)
