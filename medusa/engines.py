"""What serving engines take of Medusa heads: which heads, by which tensor names, and what they do with them.

D hidden, V vocabulary.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from .materialise import full_projection
from .stored_heads import StoredHeads
from .tensor_stream import PlannedTensor

Projections = Literal["each", "one", "none"]


@dataclass(frozen=True)
class Engine:
    """A reader of heads other than this package."""

    title: str
    weights_file: str
    uses: str
    """What it does with the heads."""
    ignores: str
    """What of the checkpoint it does not use."""


ENGINES = {
    "reference": Engine(
        "the reference implementation",
        "medusa_lm_head.pt",
        "the heads; a tree only where medusa_generate(medusa_choices=...) is given medusa_choices.json",
        "the tree, unless it is given; heads' confidence. Its typical acceptance does not keep the distribution",
    ),
    "vllm": Engine(
        "vLLM (up to 0.32)",
        "model.safetensors",
        "the first num_speculative_tokens heads, the likeliest token of each: a chain. The output keeps the "
        "backbone's distribution",
        "the tree, typical acceptance",
    ),
    "tgi": Engine(
        "TGI",
        "medusa_lm_head.safetensors",
        "the first --speculate heads, the likeliest token of each: a chain; none in batches of more than 128 tokens",
        "the tree, typical acceptance",
    ),
    "tensorrt-llm": Engine(
        "TensorRT-LLM (engines built with its TensorRT backend)",
        "medusa_lm_head.safetensors",
        "the heads and, given as --medusa_choices, the tree in medusa_choices.json; greedy decoding only",
        "typical acceptance, the heads' confidence",
    ),
}
ALL_ENGINES = ("native", *ENGINES)
TREE_NODES = 64
"""Root included: TensorRT-LLM's max_draft_len is 63, as are the reference's trees."""


def check_engine(name: str) -> None:
    """Refuse an unknown engine.

    Raises:
        ValueError: with those that are known.
    """
    if name not in ALL_ENGINES:
        raise ValueError(f"there is no export to {name!r}; allowed: {', '.join(ALL_ENGINES)}")


def refuse(engine: str, stored: StoredHeads, has_bias: bool) -> None:
    """Refuse heads that an engine cannot run as they were trained.

    Raises:
        ValueError: with the reason, and what to do.
    """
    title, config = ENGINES[engine].title, stored.config
    if config.root_conditioned or config.sequential:
        option = "root_conditioned" if config.root_conditioned else "sequential"
        raise ValueError(
            f"{title} feeds heads the hidden state alone, but those of {stored.directory} also see tokens "
            f"(heads.{option} is true), so every guess would be wrong. Train plain heads for it: "
            f"heads.{option}=false in the recipe or on the command line of `medusa train`"
        )
    if has_bias:
        raise ValueError(
            f"the projection of these heads has a bias, as that of a backbone whose LM head has one; {title} has no "
            "place for it, so its heads would guess other tokens. Decode such a model with medusa.inference"
        )
    if engine == "reference" and config.num_layers > 1:
        raise ValueError(
            f"{title} uses one residual block over and over where medusa_num_layers is above 1 ([ResBlock] * n), and "
            f"these heads have {config.num_layers} different ones. Train heads for it with heads.num_layers=1"
        )


def projections(engine: str, stored: StoredHeads) -> Projections:
    """Whether the engine is given a projection for each head, one for all, or none since it uses the LM head."""
    config = stored.config
    if config.projection == "own":
        return "each"
    if engine == "vllm":
        return "one"
    # TGI's second loader shares the LM head, and knows heads of one block only.
    return "none" if engine == "tgi" and config.draft_vocab is None and config.num_layers == 1 else "each"


def planned_tensors(
    engine: str, stored: StoredHeads, shared: Tensor | None, num_heads: int, dtype: torch.dtype
) -> dict[str, PlannedTensor]:
    """The tensors of the first `num_heads` heads under the names that the engine reads.

    Args:
        engine: a key of ENGINES.
        stored: the heads.
        shared: the shared projection, [Vd, D], where they have no projections of their own.
        num_heads: how many to write.
        dtype: of what is written.
    """
    config, width, rows = stored.config, stored.hidden_size, stored.vocab_size
    vllm = engine == "vllm"
    planned: dict[str, PlannedTensor] = {}
    for k in range(num_heads):
        for layer in range(config.num_layers):
            here = f"blocks.{k}.layers.{layer}" if vllm else f"{k}.{layer}.linear"
            for name, shape in (("weight", (width, width)), ("bias", (width,))):
                read = partial(stored.tensor, f"{k}.{layer}.linear.{name}")
                planned[f"{here}.{name}"] = PlannedTensor(shape, dtype, read)
    written = projections(engine, stored)
    for k in range({"each": num_heads, "one": 1, "none": 0}[written]):
        name = f"{k}.{config.num_layers}.weight"
        there = {"one": "lm_head.weight", "each": f"lm_heads.{k}.weight"}[written] if vllm else name
        planned[there] = PlannedTensor((rows, width), dtype, partial(_projection, stored, shared, name))
    return planned


def _projection(stored: StoredHeads, shared: Tensor | None, name: str) -> Tensor:
    """A projection over the whole vocabulary, [V, D]."""
    weight = stored.tensor(name) if shared is None else shared
    return full_projection(weight, stored.config.draft_vocab, stored.vocab_size)


def engine_config(engine: str, stored: StoredHeads, base_model: str, num_heads: int) -> dict[str, Any]:
    """The config.json for an engine. Never with `architectures` (TGI would drop the heads) or more head counts."""
    entries: dict[str, Any] = {
        "medusa_num_heads": num_heads,
        "medusa_num_layers": stored.config.num_layers,
        "base_model_name_or_path": base_model,
        "hidden_size": stored.hidden_size,
        "vocab_size": stored.vocab_size,
        "medusa_fc_bias": True,
    }
    if engine != "reference":  # whose own loader takes an unknown model_type for a damaged configuration
        entries = {"model_type": "medusa", **entries}
    if engine == "vllm":
        entries["original_lm_head"] = projections(engine, stored) == "one"
    if engine == "tensorrt-llm":
        entries |= {"num_medusa_heads": num_heads, "num_medusa_layers": stored.config.num_layers}
    return entries


def remarks(engine: str, stored: StoredHeads, num_heads: int) -> list[str]:
    """What a user of this engine should know about these heads."""
    found = []
    if engine == "reference" and num_heads != 5:
        found.append(
            f"branch v0.1 builds the {num_heads} heads that config.json says; branch main always builds 5, so pass "
            f"it a tree of at most {min(num_heads, 5)} levels (medusa_choices.json is one)"
        )
    if engine == "tgi" and projections(engine, stored) == "none":
        found.append("the heads share the LM head: TGI fails to find projections of their own, then takes the LM head")
    if projections(engine, stored) == "each" and stored.config.projection == "shared":
        found.append("the shared projection is written once for each head, since this engine has no shared one")
    if stored.config.draft_vocab is not None:
        found.append(
            f"the draft vocabulary of {len(stored.config.draft_vocab)} tokens is spread over all {stored.vocab_size}: "
            "the other rows are the mean of its rows and cannot win; the engine computes all of them"
        )
    return found
