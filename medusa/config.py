"""What a set of Medusa heads looks like, independent of any backbone."""

from collections.abc import Sequence
from dataclasses import dataclass

PROJECTIONS = ("own", "shared")
EMBEDDING_SCALES = ("unit", "raw")


@dataclass(frozen=True, kw_only=True)
class MedusaConfig:
    """Architecture of the heads.

    Raises:
        ValueError: a field is out of its range.
    """

    num_heads: int = 4
    """K. Head k (0-based) predicts the token at t+2+k from the hidden state at t."""
    num_layers: int = 1
    """L. Residual blocks per head."""
    projection: str = "own"
    """`own`: every head has a vocabulary projection, copied from the LM head. `shared`: all use the frozen LM head."""
    draft_vocab: Sequence[int] | None = None
    """Token ids that the heads may propose (ascending, unique); None is the whole vocabulary."""
    root_conditioned: bool = False
    """Whether a head also sees the embedding of the root, the token the backbone chose for t+1."""
    sequential: bool = False
    """Whether head k also sees the embeddings of all tokens before its own: the root and the guesses of heads 0 to k-1
    (Hydra, Ankner et al. 2024). Better guesses, for a small pass of each head after the one before it."""
    embedding_scale: str = "unit"
    """How large are the embeddings of tokens that heads see. `unit`: their root mean square is 1. `raw`: as the
    backbone stores them, tens of times smaller than hidden states; published Hydra heads were trained so."""
    projection_bias: bool = False
    """Whether projections of the heads' own have biases even where the LM head has none; these start at zero."""

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_layers"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"MedusaConfig.{name} is {value!r}; it must be a whole number of at least 1")
        if self.projection not in PROJECTIONS:
            raise ValueError(f"MedusaConfig.projection is {self.projection!r}; allowed: {', '.join(PROJECTIONS)}")
        for name in ("root_conditioned", "sequential", "projection_bias"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ValueError(f"MedusaConfig.{name} is {value!r}; it must be true or false")
        if self.sequential and self.root_conditioned:
            raise ValueError(
                "MedusaConfig.root_conditioned and MedusaConfig.sequential are both true; sequential heads see the "
                "root as they are, leave root_conditioned out"
            )
        if self.embedding_scale not in EMBEDDING_SCALES:
            allowed = ", ".join(EMBEDDING_SCALES)
            raise ValueError(f"MedusaConfig.embedding_scale is {self.embedding_scale!r}; allowed: {allowed}")
        if self.embedding_scale == "raw" and not self.sees_tokens:
            raise ValueError(
                "MedusaConfig.embedding_scale is 'raw', but these heads see no tokens; leave it out, or set "
                "root_conditioned or sequential"
            )
        if self.projection_bias and self.projection == "shared":
            raise ValueError(
                "MedusaConfig.projection_bias is true, but the heads share the LM head; leave it out, or set "
                "projection to own"
            )
        if self.draft_vocab is not None:
            ids = tuple(int(i) for i in self.draft_vocab)
            if not ids or list(ids) != sorted(set(ids)) or ids[0] < 0:
                raise ValueError(
                    "MedusaConfig.draft_vocab must hold token ids in ascending order, each once, none negative; "
                    f"got {len(ids)} ids starting {list(ids[:5])}"
                )
            object.__setattr__(self, "draft_vocab", ids)

    @property
    def sees_tokens(self) -> bool:
        """Whether heads see any token behind the hidden state."""
        return self.root_conditioned or self.sequential

    def tokens_seen(self, k: int) -> int:
        """How many tokens behind the hidden state head k sees."""
        return k + 1 if self.sequential else int(self.root_conditioned)
