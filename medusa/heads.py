"""The heads. Shapes: P positions, K heads, D hidden, V vocabulary, Vd draft vocabulary (V where there is none)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .config import MedusaConfig


@dataclass(frozen=True)
class LogitTransform:
    """What a backbone does to the output of its LM head: `softcap * tanh(scale * x / softcap)`."""

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        """Apply it to logits of any shape."""
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits


class ResBlock(nn.Module):
    """`h + SiLU(W x + b)`, W and b zero at first: an exact identity in h (Cai et al. 2024, section 3.1.1).

    x is h, or h with the root's embedding behind it.
    """

    def __init__(self, hidden_size: int, root_conditioned: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size * (2 if root_conditioned else 1), hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor, root_embedding: Tensor | None = None) -> Tensor:
        """[P, D] (and [P, D]) -> [P, D]."""
        x = hidden if root_embedding is None else torch.cat([hidden, root_embedding], dim=-1)
        return hidden + F.silu(self.linear(x))


class MedusaHead(nn.Sequential):
    """L residual blocks and, where the projection is its own, a vocabulary projection.

    The modules are numbered as in the reference checkpoints: `{l}.linear.weight`, `{l}.linear.bias`, `{L}.weight`.
    """

    def __init__(self, config: MedusaConfig, hidden_size: int, vocab_size: int, projection_bias: bool) -> None:
        blocks: list[nn.Module] = [
            ResBlock(hidden_size, root_conditioned=config.root_conditioned and layer == 0)
            for layer in range(config.num_layers)
        ]
        if config.projection == "own":
            blocks.append(nn.Linear(hidden_size, vocab_size, bias=projection_bias))
        super().__init__(*blocks)
        self.num_layers = config.num_layers
        self.root_conditioned = config.root_conditioned

    def features(self, hidden: Tensor, root_embedding: Tensor | None) -> Tensor:
        """What the projection sees. [P, D] -> [P, D]."""
        for layer in range(self.num_layers):
            first = layer == 0 and self.root_conditioned
            hidden = self[layer](hidden, root_embedding) if first else self[layer](hidden)
        return hidden


class MedusaHeads(nn.ModuleList):
    """K heads over one backbone.

    The shared projection, the embedding of the root and the draft vocabulary are buffers taken from the backbone:
    they follow the heads to their device and are never trained or saved.
    """

    draft_ids: Tensor | None
    shared_weight: Tensor | None
    shared_bias: Tensor | None
    root_table: Tensor | None
    unknown: Tensor | None

    def __init__(
        self,
        config: MedusaConfig,
        lm_weight: Tensor,
        lm_bias: Tensor | None,
        embedding: Tensor,
        transform: LogitTransform,
    ) -> None:
        """Build heads that start as copies of the LM head.

        Args:
            config: their architecture.
            lm_weight: weight of the LM head, [V, D].
            lm_bias: its bias, [V], or None.
            embedding: the backbone's input embedding, [V, D]; kept (not copied) when the heads see the root.
            transform: what the backbone does to its LM head's output.

        Raises:
            ValueError: the draft vocabulary has an id that the LM head lacks.
        """
        vocab_size, hidden_size = lm_weight.shape
        if config.draft_vocab is not None and config.draft_vocab[-1] >= vocab_size:
            raise ValueError(
                f"the draft vocabulary holds token id {config.draft_vocab[-1]}, but the backbone's LM head has "
                f"{vocab_size} rows; choose ids from 0 to {vocab_size - 1}"
            )
        draft_ids = None if config.draft_vocab is None else torch.tensor(config.draft_vocab, device=lm_weight.device)
        weight = lm_weight.detach() if draft_ids is None else lm_weight.detach()[draft_ids]
        bias = None if lm_bias is None else lm_bias.detach() if draft_ids is None else lm_bias.detach()[draft_ids]

        super().__init__(
            MedusaHead(config, hidden_size, len(weight), bias is not None) for _ in range(config.num_heads)
        )
        self.config = config
        self.transform = transform
        own = config.projection == "own"
        self.register_buffer("draft_ids", draft_ids, persistent=False)
        self.register_buffer("shared_weight", None if own else weight, persistent=False)
        self.register_buffer("shared_bias", None if own else bias, persistent=False)
        self.register_buffer("unknown", None, persistent=False)
        self.register_buffer("root_table", embedding.detach() if config.root_conditioned else None, persistent=False)
        self.to(device=lm_weight.device, dtype=lm_weight.dtype)
        if own:
            with torch.no_grad():
                for k in range(config.num_heads):
                    own_weight, own_bias = self.projection(k)
                    own_weight.copy_(weight)
                    if own_bias is not None and bias is not None:
                        own_bias.copy_(bias)

    @property
    def draft_size(self) -> int:
        """Vd: how many tokens a head chooses from."""
        return len(self.projection(0)[0])

    def limit_tokens(self, known_tokens: int) -> None:
        """Never guess ids from `known_tokens` on: they are padding of the vocabulary."""
        ids = self.to_vocab(torch.arange(self.draft_size, device=self.projection(0)[0].device))
        unknown = (ids >= known_tokens).nonzero()[:, 0]
        self.unknown = unknown if len(unknown) else None

    def head(self, k: int) -> MedusaHead:
        """Head k."""
        head = self[k]
        assert isinstance(head, MedusaHead)
        return head

    def projection(self, k: int) -> tuple[Tensor, Tensor | None]:
        """Weight [Vd, D] and bias [Vd] of head k's vocabulary projection."""
        if self.shared_weight is not None:
            return self.shared_weight, self.shared_bias
        linear = self.head(k)[self.config.num_layers]
        assert isinstance(linear, nn.Linear)
        return linear.weight, linear.bias

    def features(self, hidden: Tensor, root: Tensor) -> Tensor:
        """What each head's projection sees: hidden [P, D] and root ids [P] -> [K, P, D]."""
        hidden = hidden.to(next(self.parameters()).dtype)  # a packed backbone computes in fp32 whatever its heads are
        embedding = None
        if self.root_table is not None:
            # Embeddings are tens of times smaller than final hidden states; at unit size the heads learn from them.
            embedding = F.rms_norm(F.embedding(root, self.root_table).to(hidden.dtype), hidden.shape[-1:])
        return torch.stack([head.features(hidden, embedding) for head in map(self.head, range(len(self)))])

    def forward(self, hidden: Tensor, root: Tensor) -> Tensor:
        """Logits of every head over the draft vocabulary: hidden [P, D] and root ids [P] -> [K, P, Vd]."""
        features = self.features(hidden, root)
        if self.shared_weight is not None:
            logits = self.project(features, 0)
        else:
            logits = torch.stack([self.project(features[k], k) for k in range(len(self))])
        logits = self.transform(logits)
        return logits if self.unknown is None else logits.index_fill(-1, self.unknown, -torch.inf)

    def project(self, features: Tensor, k: int) -> Tensor:
        """Head k's vocabulary projection, before the transform: [..., D] -> [..., Vd].

        While fp32 heads train on a half-precision backbone, a shared projection is of another type than the features.
        """
        weight, bias = self.projection(k)
        return F.linear(features, weight.to(features.dtype), None if bias is None else bias.to(features.dtype))

    def to_draft(self, token_ids: Tensor) -> Tensor:
        """Vocabulary ids -> indices in the draft vocabulary; -100 where there is none (and for negative ids)."""
        if self.draft_ids is None:
            return torch.where(token_ids >= 0, token_ids, -100)
        index = torch.searchsorted(self.draft_ids, token_ids.contiguous()).clamp(max=len(self.draft_ids) - 1)
        return torch.where(self.draft_ids[index] == token_ids, index, -100)

    def to_vocab(self, draft_index: Tensor) -> Tensor:
        """Indices in the draft vocabulary -> vocabulary ids."""
        return draft_index if self.draft_ids is None else self.draft_ids[draft_index]
