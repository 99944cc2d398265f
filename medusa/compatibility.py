"""Which backbone heads were made for, and how another one differs from it. D hidden, V vocabulary."""

import hashlib
import warnings
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from .backbone import Backbone

SIZES = ("hidden_size", "vocab_size")
SHAPES = (
    "model_type",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
)
"""Of a backbone's configuration: where these differ it is another model, whose hidden states say nothing to heads."""
BEHAVIOUR = (
    "rope_parameters",
    "rope_theta",
    "rope_scaling",
    "sliding_window",
    "use_sliding_window",
    "tie_word_embeddings",
    "final_logit_softcapping",
)
"""Where these differ the hidden states may still be near enough to guess from."""


class HasTemplate(Protocol):
    """The part of a Hugging Face tokenizer that is compared."""

    chat_template: str | None


def fingerprint(weight: Tensor) -> list[float]:
    """A few entries of the LM head, spread over it: enough to tell one backbone from another in any dtype."""
    flat = weight.detach().flatten()
    entries = torch.linspace(0, len(flat) - 1, steps=min(32, len(flat)), dtype=torch.float64).long()
    return [round(value, 6) for value in flat[entries.to(flat.device)].float().tolist()]


def architecture(config: PreTrainedConfig) -> dict[str, Any]:
    """What a backbone's configuration says of its shape and behaviour, under the names that most models use."""
    text = config.get_text_config(decoder=True)
    entries = text.to_dict()
    found: dict[str, Any] = {}
    for name in (*SHAPES, *BEHAVIOUR):
        own_name = text.attribute_map.get(name, name)
        if own_name in entries:
            _flatten(name, entries[own_name], found)
    return found


def _flatten(name: str, value: Any, into: dict[str, Any]) -> None:
    """Nested entries under dotted names, so that a difference in one of them is named."""
    if isinstance(value, dict):
        for key, inner in value.items():
            _flatten(f"{name}.{key}", inner, into)
    else:
        into[name] = list(value) if isinstance(value, tuple) else value


def backbone_facts(backbone: Backbone) -> dict[str, Any]:
    """Entries of a checkpoint's config.json that tell later which backbone the heads are for."""
    return {
        "hidden_size": backbone.hidden_size,
        "vocab_size": backbone.vocab_size,
        "backbone_fingerprint": fingerprint(backbone.lm_weight),
        "backbone_architecture": architecture(backbone.model.config),
    }


def template_fact(tokenizer: HasTemplate) -> dict[str, str]:
    """The entry of config.json that tells later which chat template the heads learned; none without a template."""
    if not tokenizer.chat_template:
        return {}
    return {"chat_template_sha256": hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest()}


def check_backbone(directory: Path, entries: dict[str, Any], backbone: Backbone) -> None:
    """Refuse a backbone that the heads were not made for; warn of one that merely behaves otherwise.

    Args:
        directory: where the heads are.
        entries: of their config.json. What an older checkpoint does not say is not compared.
        backbone: what they shall run on.

    Raises:
        ValueError: sizes, architecture or LM head differ; every difference is named with both values.
    """
    wrong, doubtful = backbone_differences(directory, entries, backbone)
    if wrong:
        raise ValueError(
            f"{directory} was made for another backbone, so its guesses would be wrong: {'; '.join(wrong)}; "
            f"use {_made_for(entries)}"
        )
    if doubtful:
        warnings.warn(
            f"{directory} was made for a backbone with {'; '.join(doubtful)}; fewer guesses may be right than with "
            f"{_made_for(entries)}",
            stacklevel=3,
        )


def backbone_differences(directory: Path, entries: dict[str, Any], backbone: Backbone) -> tuple[list[str], list[str]]:
    """How a backbone differs from the one in config.json: what makes guesses wrong, and what may make fewer right.

    Raises:
        ValueError: an entry of config.json is of another kind than this project writes.
    """
    sizes = {"hidden_size": backbone.hidden_size, "vocab_size": backbone.vocab_size}
    wrong = [
        _difference(name, entries[name], sizes[name]) for name in SIZES if entries.get(name, sizes[name]) != sizes[name]
    ]
    if wrong and entries.get("hidden_size", backbone.hidden_size) == backbone.hidden_size:
        wrong[0] += " (the vocabulary was padded or extended)"
    if not wrong:
        wrong += lm_head_differences(directory, entries, backbone.lm_weight)
    known, found = entries.get("backbone_architecture", {}), architecture(backbone.model.config)
    if not isinstance(known, dict):
        raise ValueError(f"{directory}/config.json: backbone_architecture is {known!r}, not a list of entries")
    differ = [name for name in known if name in found and known[name] != found[name]]
    wrong += [_difference(name, known[name], found[name]) for name in differ if name in SHAPES]
    return wrong, [_difference(name, known[name], found[name]) for name in differ if name not in SHAPES]


def lm_head_differences(directory: Path, entries: dict[str, Any], lm_weight: Tensor) -> list[str]:
    """Whether an LM head [V, D] is another one than config.json remembers: [] or one line that says where.

    Raises:
        ValueError: the entry of config.json is no list of numbers.
    """
    known, found = entries.get("backbone_fingerprint", []), fingerprint(lm_weight)
    if not isinstance(known, list) or not all(isinstance(value, int | float) for value in known):
        raise ValueError(f"{directory}/config.json: backbone_fingerprint is {known!r}, not a list of numbers")
    if known and len(known) != len(found):
        return [f"another LM head (fingerprint of {len(known)} values, this one has {len(found)})"]
    for place, (old, new) in enumerate(zip(known, found, strict=False)):
        if not abs(old - new) <= 1e-4 + 0.02 * abs(old):
            return [f"another LM head (value {place} of its fingerprint is {old}, here {new})"]
    return []


def warn_of_template(directory: Path, entries: dict[str, Any], tokenizer: HasTemplate, whose: str) -> None:
    """Warn where chats are written otherwise than those that the heads learned from.

    Args:
        directory: where the heads are.
        entries: of their config.json.
        tokenizer: what writes the chats.
        whose: where the tokenizer was loaded from.
    """
    known, found = entries.get("chat_template_sha256"), template_fact(tokenizer).get("chat_template_sha256")
    if known is not None and known != found:
        what = "has no chat template" if found is None else f"has another chat template (sha256 {found[:12]})"
        warnings.warn(
            f"the tokenizer of {whose} {what} than the one that the heads of {directory} learned with "
            f"(sha256 {str(known)[:12]}); fewer of their guesses may be right",
            stacklevel=3,
        )


def _made_for(entries: dict[str, Any]) -> str:
    name = entries.get("base_model_name_or_path")
    return repr(name) if name else "the one that the heads were trained on"


def _difference(name: str, known: Any, found: Any) -> str:
    return f"{name} {_short(known)}, this one has {_short(found)}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
