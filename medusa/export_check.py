"""Read an export as its engine would, and compare every head's logits with ours. P positions, D hidden, Vd draft."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .backbone import Backbone
from .config import MedusaConfig
from .engine_rules import EngineError, EngineHeads, read_as
from .model import MedusaModel
from .stored_heads import StoredHeads

POSITIONS = 32
TOLERANCE = 1e-5


@dataclass(frozen=True)
class ExportCheck:
    """How the heads that the engine has compare with ours."""

    difference: float
    """Largest difference of logits, as a share of the largest logit, in fp32."""
    same_guess: list[float]
    """For each head, the share of hidden states at which its likeliest token is the same."""


@torch.no_grad()
def check_export(
    engine: str,
    directory: Path,
    stored: StoredHeads,
    shared: Tensor | None,
    num_heads: int,
    dtype: torch.dtype,
) -> ExportCheck:
    """Compare the heads in `directory`, read by the engine's rules, with the stored ones.

    Args:
        engine: whose rules.
        directory: what was written for it.
        stored: our heads.
        shared: our shared projection, [Vd, D], where they have none of their own.
        num_heads: how many were written.
        dtype: that they were written in; ours are rounded to it, too.

    Raises:
        ValueError: the engine would stop, drop something, or compute other logits.
    """
    try:
        read = read_as(engine, directory, num_heads)
    except EngineError as error:
        raise ValueError(f"the export to {engine} would not run: {error}") from error
    if read.dropped:
        raise ValueError(f"{engine} would drop {', '.join(read.dropped)} without saying so")
    hidden = torch.randn(POSITIONS, stored.hidden_size, generator=torch.Generator().manual_seed(0))
    vocab = stored.config.draft_vocab
    ids = torch.arange(stored.vocab_size) if vocab is None else torch.tensor(vocab)
    differences, same = [], []
    for k in range(num_heads):
        ours = our_logits(stored, shared, k, hidden, dtype)
        theirs = read.logits(k, hidden, None if shared is None else shared.to(dtype))
        difference = float((theirs[:, ids] - ours).abs().max() / ours.abs().max())
        if not difference <= TOLERANCE:
            raise ValueError(
                f"head {k} as {engine} reads it gives other logits than ours (by {difference:.2g} of the largest)"
            )
        guesses = theirs.argmax(dim=-1)
        if not torch.isin(guesses, ids).all():
            raise ValueError(f"head {k} as {engine} reads it guesses tokens that are not in the draft vocabulary")
        differences.append(difference)
        same.append(float((guesses == ids[ours.argmax(dim=-1)]).float().mean()))
    return ExportCheck(max(differences), same)


def our_logits(stored: StoredHeads, shared: Tensor | None, k: int, hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Head k before the backbone's scale or softcap, which change no order: hidden [P, D] -> [P, Vd] in fp32."""
    head = stored.head(k).to(dtype).float()
    features = head.features(hidden)
    if shared is None:
        logits = head[stored.config.num_layers](features)
        assert isinstance(logits, Tensor)
        return logits
    return features @ shared.to(dtype).float().T


def model_of(backbone: Backbone, read: EngineHeads) -> MedusaModel:
    """The heads that an engine has, as heads of ours: to measure them on text."""
    config = MedusaConfig(num_heads=len(read.blocks), num_layers=len(read.blocks[0]))
    model = MedusaModel.attach_parts(backbone, config)
    for k, blocks in enumerate(read.blocks):
        head, state = model.heads.head(k), {}
        for layer, (weight, bias) in enumerate(blocks):
            state[f"{layer}.linear.weight"] = weight
            state[f"{layer}.linear.bias"] = torch.zeros(len(weight)) if bias is None else bias
        projection = read.projections[k]
        if projection is not None:  # else the copy of the LM head that it starts with
            state[f"{config.num_layers}.weight"] = projection
        head.load_state_dict({**head.state_dict(), **state})
    return model
