"""Find the parts of any Hugging Face causal language model, without knowing its architecture.

B batch, T sequence, D hidden, V vocabulary.
"""

import inspect

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from .heads import LogitTransform

ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
PROBE_LENGTH = 4


class Backbone:
    """A frozen view of a causal LM: decoder (final norm included), LM head, logit transform, input embedding.

    The parts are found through the interface every Hugging Face model has, then proved on a few tokens: LM head and
    transform applied to the decoder's output must give the model's own logits.
    """

    lm_weight: Tensor
    """Weight of the LM head, [V, D]."""
    lm_bias: Tensor | None
    """Bias of the LM head, [V], or None."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Take `model` apart.

        Raises:
            ValueError: the model has recurrent layers, no LM head or no decoder apart from it, or computes its logits
                in an unknown way.
        """
        refuse_recurrent(model)
        head = model.get_output_embeddings()
        if not isinstance(head, nn.Module) or getattr(head, "weight", None) is None:
            raise ValueError(
                f"{type(model).__name__} has no LM head; Medusa needs a causal language model: load it with "
                "AutoModelForCausalLM"
            )
        embedding = model.get_input_embeddings()
        assert isinstance(embedding, nn.Module)
        self.model = model
        self.decoder: nn.Module = model.get_decoder()
        if self.decoder is head:
            raise ValueError(
                f"{type(model).__name__} gives its LM head as its decoder, so its hidden states cannot be found; this "
                "architecture is not supported. Use plain `generate` for this one"
            )
        self.lm_head = head
        self.embedding = embedding
        self.lm_weight, self.lm_bias = dense_parameters(head, self.root_table)
        # transformers renamed the decoder's argument (past_key_values -> cache) between 5.16 and 5.24.
        renamed = "cache" in inspect.signature(self.decoder.forward).parameters
        self._cache_argument = "cache" if renamed else "past_key_values"
        self.transform = self._find_transform()

    @property
    def root_table(self) -> Tensor:
        """Weight of the input embedding, [V, D]."""
        weight = self.embedding.weight
        assert isinstance(weight, Tensor)
        return weight

    @property
    def hidden_size(self) -> int:
        """D, the width of what the LM head reads."""
        return self.lm_weight.shape[1]

    @property
    def vocab_size(self) -> int:
        """V, taken from the LM head: configurations count padding differently."""
        return self.lm_weight.shape[0]

    @property
    def num_layers(self) -> int:
        """How many layers keep keys and values."""
        return int(self.model.config.get_text_config(decoder=True).num_hidden_layers)

    @property
    def context_length(self) -> int | None:
        """The longest sequence the backbone was built for, or None where its configuration does not say."""
        length = getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        return int(length) if length else None

    @property
    def rope_switch(self) -> int | None:
        """The longest sequence before LongRoPE changes the frequencies of all positions, or None without LongRoPE."""
        rope = getattr(self.model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
        return int(rope["original_max_position_embeddings"]) if rope.get("rope_type") == "longrope" else None

    def logits(self, hidden: Tensor) -> Tensor:
        """Final hidden states [..., D] -> the backbone's logits [..., V]."""
        logits = self.lm_head(hidden)
        assert isinstance(logits, Tensor)
        return self.transform(logits)

    def hidden(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Final hidden states of whole sequences, no cache: [B, T] -> [B, T, D]."""
        hidden = self.decoder(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
        assert isinstance(hidden, Tensor)
        return hidden

    def extend(
        self,
        input_ids: Tensor,
        cache: Cache,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Final hidden states of tokens behind cached text; they join the cache. [B, T] -> [B, T, D].

        `attention_mask` [B, cached + T] is False on padding.
        """
        output = self.decoder(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=attention_mask,
            use_cache=True,
            **{self._cache_argument: cache},
        )
        assert isinstance(output.last_hidden_state, Tensor)
        return output.last_hidden_state

    def check_ids(self, input_ids: Tensor) -> None:
        """Refuse token ids that the backbone has no embedding for.

        Raises:
            ValueError: an id is negative or too large.
        """
        rows = len(self.root_table)
        bad = input_ids[(input_ids < 0) | (input_ids >= rows)]
        if len(bad):
            raise ValueError(
                f"token id {int(bad[0])} is outside the backbone's vocabulary (0 to {rows - 1}); "
                "was the text tokenized with another model's tokenizer?"
            )

    @torch.no_grad()
    def _find_transform(self) -> LogitTransform:
        """Explain the model's logits by its LM head: nothing, a scale, or the softcap of its configuration."""
        device = self.lm_weight.device
        ids = torch.arange(1, PROBE_LENGTH + 1, device=device).remainder(len(self.root_table))[None]
        was_training = self.model.training
        self.model.eval()
        expected = self.model(input_ids=ids, use_cache=False).logits.float()
        raw = self.lm_head(self.hidden(ids)).float()
        self.model.train(was_training)
        softcap = getattr(self.model.config.get_text_config(decoder=True), "final_logit_softcapping", None)
        scale = float((raw * expected).sum() / (raw * raw).sum()) if raw.any() else 1.0
        for transform in (
            LogitTransform(),
            LogitTransform(softcap=None if softcap is None else float(softcap)),
            LogitTransform(scale=scale),
        ):
            error = (transform(raw) - expected).norm() / expected.norm().clamp(min=1e-12)
            if error < (1e-4 if self.lm_weight.dtype in (torch.float32, torch.float64) else 2e-2):
                return transform
        raise ValueError(
            f"{type(self.model).__name__} does not compute its logits from its decoder's output by an LM head with a "
            "scale or softcap, so heads on its hidden states would be wrong; this architecture is not supported"
        )


@torch.no_grad()
def dense_parameters(head: nn.Module, embedding: Tensor) -> tuple[Tensor, Tensor | None]:
    """Weight [V, D] and bias [V] of an LM head. Of a quantised one, whatever its format, what it does to unit vectors.

    Args:
        head: the LM head.
        embedding: the input embedding, [rows, D]; says on what device and in which type a quantised head computes.
    """
    weight, bias = head.weight, head.bias if isinstance(head.bias, Tensor) else None
    assert isinstance(weight, Tensor)
    if type(weight) in (Tensor, nn.Parameter) and weight.is_floating_point():
        return weight, bias
    unit = torch.eye(embedding.shape[1], dtype=embedding.dtype, device=embedding.device)
    offset = head(torch.zeros_like(unit[:1]))  # [1, V]
    return (head(unit) - offset).T.contiguous(), None if bias is None else offset[0]


def refuse_recurrent(model: PreTrainedModel) -> None:
    """Refuse models whose state cannot be rolled back after a rejected guess.

    Raises:
        ValueError: the model has recurrent, linear-attention or chunked layers, named in the message.
    """
    # Where layers have types, these decide: a hybrid class with attention layers alone keeps no state.
    layers = getattr(model.config.get_text_config(decoder=True), "layer_types", None)
    strange = set(layers or (["recurrent state"] if model._is_stateful else [])) - ATTENTION_LAYERS
    if strange:
        what = ", ".join(sorted(strange))
        raise ValueError(
            f"{type(model).__name__} has layers that tree verification cannot roll back ({what}); Medusa needs a model "
            "whose layers are all full or sliding-window attention. Use plain `generate` for this one"
        )
