"""Fold the LoRA adapter of a Medusa-2 checkpoint into its backbone. T tokens, V vocabulary."""

from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel
from torch import Tensor

from .checkpoint import ADAPTER_FOLDER, read_config
from .loading import load_backbone, load_tokenizer, local_directory
from .model import MedusaModel

PROBE_LENGTH = 64
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4}
HALF_TOLERANCE = 0.05
"""Folding rounds the sum to the backbone's dtype."""


@dataclass(frozen=True)
class MergeReport:
    """How the folded backbone compares with backbone and adapter side by side, on some tokens."""

    relative_difference: float
    """Of the logits, as norms."""
    greedy_agreement: float
    """Share of places at which both find the same token likeliest."""


def merge(checkpoint: str, out: Path, dtype: str = "auto") -> MergeReport:
    """Write a checkpoint whose backbone holds the adapter; `out/backbone` loads without the heads, too.

    Args:
        checkpoint: directory or hub id of a checkpoint with an adapter.
        out: a directory that does not exist yet.
        dtype: of the backbone and the heads.

    Raises:
        ValueError: there is no adapter, `out` exists, or the logits differ by more than rounding.
    """
    directory = local_directory(checkpoint)
    if not (directory / ADAPTER_FOLDER).is_dir():
        raise ValueError(f"{directory} holds no adapter to fold; only Medusa-2 checkpoints made with LoRA do")
    if out.exists():
        raise ValueError(f"{out} exists; name a new directory")
    apart = load_backbone(read_config(directory).get("base_model_name_or_path"), dtype)
    expected = probe(PeftModel.from_pretrained(apart, str(directory / ADAPTER_FOLDER)).eval())
    model = MedusaModel.from_pretrained(directory, dtype)
    found = probe(model.model)
    difference = float((found - expected).norm() / expected.norm())
    if not difference < TOLERANCE.get(model.backbone.lm_weight.dtype, HALF_TOLERANCE):
        raise ValueError(
            f"folding the adapter of {directory} changes the logits by {difference:.2g} of their size; nothing was "
            "written. Fold in float32 (--dtype float32), or serve backbone and adapter side by side"
        )
    agreement = float((found.argmax(dim=-1) == expected.argmax(dim=-1)).float().mean())
    model.save_pretrained(out, load_tokenizer(str(directory)), with_backbone=True)
    return MergeReport(difference, agreement)


@torch.no_grad()
def probe(model: torch.nn.Module) -> Tensor:
    """Logits after some tokens from all over the vocabulary, [T, V]."""
    embedding = model.get_input_embeddings().weight  # type: ignore[operator]
    ids = torch.linspace(0, len(embedding) - 1, PROBE_LENGTH, dtype=torch.float64).long()[None]
    logits: Tensor = model(input_ids=ids.to(embedding.device), use_cache=False).logits[0]
    return logits.float()
