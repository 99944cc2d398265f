"""What the Hydra repository wrote: `hydra_lm_head.pt`. Its plain heads (architecture `mlp`) become sequential heads.

Head i sees the hidden state and, behind it, the embeddings of the root and of the guesses of heads 0 to i-1 as the
backbone stores them. Its first block has a skip connection of its own, its projection a bias. Heads trained with
`grounded_heads` false see the hidden state alone; they are plain heads with a bias.
"""

import re
from pathlib import Path
from typing import Any

from torch import Tensor

from .compatibility import fingerprint

BLOCK = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.((?:linear|res_connection)\.(?:weight|bias))")
PROJECTION = re.compile(r"hydra_lm_head\.(\d+)\.(weight|bias)")
EMBEDDING = "input_embed_fn.weight"
"""The backbone's input embedding, which lies beside the heads."""
ONLY_OF = {"prefix_embeding_layer.": "prefix-mlp", "cross_attn.": "cross-attn", "attn.": "eagle-attn"}
"""Which architecture has tensors whose names start so."""
WHY_NOT = {
    "prefix-mlp": "a decoder layer of their own over the hidden states, with its own keys and values (Hydra++)",
    "cross-attn": "an attention layer over the hidden states of the whole text",
    "eagle-attn": "a decoder layer that reads its own output (EAGLE)",
}


def is_hydra(names: set[str], entries: dict[str, Any]) -> bool:
    """Whether the Hydra repository wrote these tensors, or config.json says so."""
    marked = "hydra_head_arch" in entries or EMBEDDING in names
    return marked or any(name.startswith(("hydra_mlp.", "hydra_lm_head.")) for name in names)


def check_hydra(found: dict[str, Tensor], entries: dict[str, Any], directory: Path) -> None:
    """Refuse what cannot be decoded as it was trained.

    Raises:
        ValueError: another architecture, heads on an inner layer, or a missing or unknown tensor, with its name.
    """
    arch = _architecture(set(found), entries)
    if arch != "mlp":
        raise ValueError(
            f"{directory} holds Hydra heads of the architecture {arch!r}, which need "
            f"{WHY_NOT.get(arch, 'a layer that is not known here')}; that is not built. Those of the architecture "
            "'mlp' load; or train sequential heads (configs/hydra.yaml)"
        )
    offset = entries.get("hidden_state_offset", 0)
    if offset != 0:
        raise ValueError(
            f"{directory} holds Hydra heads that see the hidden states {offset} layers before the last "
            "(hidden_state_offset); heads here see the last ones, so every guess would be wrong"
        )
    expected = _expected(found, directory)
    missing = [name for name in expected if name not in found]
    if missing:
        raise ValueError(f"{directory} lacks {', '.join(missing)} of its Hydra heads; copy or download it again")
    unknown = sorted(set(found) - set(expected) - {EMBEDDING})
    if unknown:
        raise ValueError(f"{directory} holds {', '.join(unknown)}, which no Hydra head of the architecture 'mlp' has")


def _architecture(names: set[str], entries: dict[str, Any]) -> str:
    """What the tensors say, else what config.json says."""
    for prefix, arch in ONLY_OF.items():
        if any(name.startswith(prefix) for name in names):
            return arch
    if any(re.fullmatch(r"hydra_lm_head\.\d+\.1\.weight", name) for name in names):
        return "prefix-mlp"  # behind dropout, as it alone has them, and without its layer
    return str(entries.get("hydra_head_arch", "mlp"))


def _expected(found: dict[str, Tensor], directory: Path) -> list[str]:
    """The names of every tensor that as many heads and blocks as are found here have."""
    blocks = [(int(match[1]), int(match[2])) for name in found if (match := BLOCK.fullmatch(name))]
    projections = [int(match[1]) for name in found if (match := PROJECTION.fullmatch(name))]
    if not blocks:
        raise ValueError(f"{directory} holds no blocks of Hydra heads (hydra_mlp.0.0.linear.weight, ...)")
    heads = 1 + max(*projections, *(i for i, _ in blocks))
    sequential = sees_tokens(found)
    names = []
    for i in range(heads):
        for j in range(hydra_layers(set(found))):
            parts = ("linear", "res_connection") if sequential and j == 0 else ("linear",)
            names += [f"hydra_mlp.{i}.{j}.{part}.{kind}" for part in parts for kind in ("weight", "bias")]
        names += [f"hydra_lm_head.{i}.{kind}" for kind in ("weight", "bias")]
    return names


def hydra_layers(names: set[str]) -> int:
    """L, the blocks of each head."""
    return 1 + max(int(match[2]) for name in names if (match := BLOCK.fullmatch(name)))


def sees_tokens(found: dict[str, Tensor]) -> bool:
    """Whether the heads see tokens (`grounded_heads`): their first blocks then take more than they give."""
    first = found.get("hydra_mlp.0.0.linear.weight")
    return any(".res_connection." in name for name in found) or (first is not None and len(first) != first.shape[-1])


def from_hydra(name: str, layers: int) -> str | None:
    """The native name of a tensor; None for the backbone's embedding."""
    if match := BLOCK.fullmatch(name):
        return f"{match[1]}.{match[2]}.{match[3]}"
    if match := PROJECTION.fullmatch(name):
        return f"{match[1]}.{layers}.{match[2]}"
    return None


def check_embedding(stored: Tensor, embedding: Tensor, directory: Path) -> None:
    """Refuse a backbone with another input embedding than the one that lies beside the heads.

    Raises:
        ValueError: they differ by more than the rounding of half precision.
    """
    same = stored.shape == embedding.shape and all(
        abs(a - b) <= 1e-4 + 0.02 * abs(b) for a, b in zip(fingerprint(stored), fingerprint(embedding), strict=True)
    )
    if not same:
        raise ValueError(
            f"{directory}: {EMBEDDING}, shape {tuple(stored.shape)}, is not the input embedding of this backbone, "
            f"shape {tuple(embedding.shape)}, so the heads' guesses would be wrong; use the backbone that they were "
            "trained on"
        )
