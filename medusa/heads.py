"""The heads. Shapes: P positions, K heads, D hidden, V vocabulary, Vd draft vocabulary (V where there is none)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .config import MedusaConfig
from .tensor_stream import ALIGNMENT


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

    x is h, or h with embeddings of tokens behind it. The first block of a sequential head learns its skip connection
    too, `R x + r` instead of h (Ankner et al. 2024); R starts as the identity in h.
    """

    def __init__(self, hidden_size: int, tokens_seen: int = 0, learned_skip: bool = False) -> None:
        super().__init__()
        inputs = hidden_size * (1 + tokens_seen)
        self.linear = nn.Linear(inputs, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.res_connection = nn.Linear(inputs, hidden_size) if learned_skip else None
        if self.res_connection is not None:
            nn.init.eye_(self.res_connection.weight)
            nn.init.zeros_(self.res_connection.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[P, (1 + tokens seen) D] -> [P, D]."""
        skip = x[:, : self.linear.out_features] if self.res_connection is None else self.res_connection(x)
        return skip + F.silu(self.linear(x))


class MedusaHead(nn.Sequential):
    """L residual blocks and, where the projection is its own, a vocabulary projection.

    The modules are numbered as in the reference checkpoints: `{l}.linear.weight`, `{l}.linear.bias`, `{L}.weight`.
    """

    def __init__(self, config: MedusaConfig, k: int, hidden_size: int, vocab_size: int, projection_bias: bool) -> None:
        blocks: list[nn.Module] = [ResBlock(hidden_size, config.tokens_seen(k), learned_skip=config.sequential)]
        blocks += [ResBlock(hidden_size) for _ in range(1, config.num_layers)]
        if config.projection == "own":
            blocks.append(nn.Linear(hidden_size, vocab_size, bias=projection_bias))
        super().__init__(*blocks)
        self.num_layers = config.num_layers

    def features(self, x: Tensor) -> Tensor:
        """What the projection sees. [P, (1 + tokens seen) D] -> [P, D]."""
        for layer in range(self.num_layers):
            x = self[layer](x)
        return x


class MedusaHeads(nn.ModuleList):
    """K heads over one backbone.

    The shared projection, the embedding of tokens and the draft vocabulary are buffers taken from the backbone:
    they follow the heads to their device and are never trained or saved.
    """

    draft_ids: Tensor | None
    shared_weight: Tensor | None
    shared_bias: Tensor | None
    token_table: Tensor | None
    unknown: Tensor | None

    def __init__(
        self,
        config: MedusaConfig,
        lm_weight: Tensor,
        lm_bias: Tensor | None,
        embedding: Tensor,
        transform: LogitTransform,
        empty: bool = False,
    ) -> None:
        """Build heads that start as copies of the LM head.

        Args:
            config: their architecture.
            lm_weight: weight of the LM head, [V, D].
            lm_bias: its bias, [V], or None.
            embedding: the backbone's input embedding, [V, D]; kept (not copied) when the heads see tokens.
            transform: what the backbone does to its LM head's output.
            empty: weights take no memory until `load` gives them.

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

        with torch.device("meta" if empty else lm_weight.device):
            super().__init__(
                MedusaHead(config, k, hidden_size, len(weight), bias is not None or config.projection_bias)
                for k in range(config.num_heads)
            )
        self.config = config
        self.transform = transform
        own = config.projection == "own"
        self.register_buffer("draft_ids", draft_ids, persistent=False)
        self.register_buffer("shared_weight", None if own else weight, persistent=False)
        self.register_buffer("shared_bias", None if own else bias, persistent=False)
        self.register_buffer("unknown", None, persistent=False)
        self.register_buffer("token_table", embedding.detach() if config.sees_tokens else None, persistent=False)
        self.to(dtype=lm_weight.dtype)
        if own and not empty:
            with torch.no_grad():
                for k in range(config.num_heads):
                    own_weight, own_bias = self.projection(k)
                    own_weight.copy_(weight)
                    if own_bias is not None:
                        own_bias.copy_(torch.zeros_like(own_bias) if bias is None else bias)

    def load(self, tensors: dict[str, Tensor], like: Tensor) -> None:
        """Take weights in the type and on the device of `like`.

        Those that have both are taken as they are, not copied: tensors of a mapped file stay there until they are read,
        and the file never changes when they do. But matrix products round in another way where a tensor does not begin
        at a multiple of `ALIGNMENT`, so such tensors, which only others' files hold, are copied.
        """
        ready = {name: tensor.to(like) for name, tensor in tensors.items()}
        misplaced = {name: tensor.clone() for name, tensor in ready.items() if tensor.data_ptr() % ALIGNMENT}
        self.load_state_dict(ready | misplaced, assign=True)

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

    def features(self, hidden: Tensor, root: Tensor, following: Tensor | None = None) -> Tensor:
        """What each head's projection sees.

        Args:
            hidden: [P, D].
            root: ids of the roots, [P].
            following: ids of the tokens behind the roots, [P, K-1]; sequential heads need them, others do not look.

        Returns:
            [K, P, D].
        """
        path = root[:, None] if following is None else torch.cat([root[:, None], following], dim=1)
        hidden, embedded = self._inputs(hidden, path)
        return torch.stack([self._features(k, hidden, embedded) for k in range(len(self))])

    def forward(self, hidden: Tensor, root: Tensor, following: Tensor | None = None) -> Tensor:
        """Logits of every head over the draft vocabulary: arguments as for `features` -> [K, P, Vd]."""
        features = self.features(hidden, root, following)
        if self.shared_weight is not None:
            return self._logits(self.project(features, 0))
        return self._logits(torch.stack([self.project(features[k], k) for k in range(len(self))]))

    def forward_one(self, k: int, hidden: Tensor, path: Tensor) -> Tensor:
        """Logits of head k alone: hidden [P, D] and the tokens from the root on, [P, k+1] -> [P, Vd]."""
        hidden, embedded = self._inputs(hidden, path)
        return self._logits(self.project(self._features(k, hidden, embedded), k))

    def _inputs(self, hidden: Tensor, path: Tensor) -> tuple[Tensor, Tensor | None]:
        """Hidden states [P, D] in the heads' type, and the embeddings of tokens [P, J] where heads see any, [P, J, D].

        A packed backbone computes in fp32 whatever its heads are.
        """
        hidden = hidden.to(next(self.parameters()).dtype)
        if self.token_table is None:
            return hidden, None
        embedded = F.embedding(path, self.token_table).to(hidden.dtype)
        if self.config.embedding_scale == "raw":
            return hidden, embedded
        # Embeddings are tens of times smaller than final hidden states; at unit size the heads learn from them.
        return hidden, F.rms_norm(embedded, hidden.shape[-1:])

    def _features(self, k: int, hidden: Tensor, embedded: Tensor | None) -> Tensor:
        """What the projection of head k sees, [P, D]."""
        seen = self.config.tokens_seen(k)
        if embedded is None or seen == 0:
            return self.head(k).features(hidden)
        assert embedded.shape[1] >= seen, f"head {k} sees {seen} tokens and is given {embedded.shape[1]}"
        return self.head(k).features(torch.cat([hidden, embedded[:, :seen].flatten(1)], dim=1))

    def _logits(self, projected: Tensor) -> Tensor:
        """The backbone's transform, and nothing for ids that are padding of the vocabulary; any shape [..., Vd]."""
        logits = self.transform(projected)
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
