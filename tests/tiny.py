"""Tiny random models of several architectures, and heads that guess right."""

import random
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from medusa import CandidateTree, MedusaConfig, MedusaModel

VOCAB = 97
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED = {**COMMON, "num_key_value_heads": 2}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**GROUPED),
    "mistral": MistralConfig(**GROUPED, sliding_window=8),
    "qwen3": Qwen3Config(**GROUPED, head_dim=16),
    "gpt2": GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=256, bos_token_id=1, eos_token_id=2
    ),
    "gpt_neox": GPTNeoXConfig(**COMMON),
    "phi": PhiConfig(**COMMON),
    "gemma3": Gemma3TextConfig(
        **{**GROUPED, "num_hidden_layers": 4},
        head_dim=16,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"] * 2,
        final_logit_softcapping=5.0,
    ),
}


SCALED: dict[str, PreTrainedConfig] = {
    "cohere": CohereConfig(**GROUPED, logit_scale=0.25),
    "granite": GraniteConfig(**GROUPED, logits_scaling=8.0, embedding_multiplier=2.0, residual_multiplier=0.5),
}
"""Models that multiply their LM head's output by a constant."""


def tiny_model(name: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> PreTrainedModel:
    """A `random_model` of one of the configurations above."""
    return random_model({**CONFIGS, **SCALED}[name], dtype, seed)


def random_model(config: PreTrainedConfig, dtype: torch.dtype = torch.float64, seed: int = 0) -> PreTrainedModel:
    """A random model, with weights large enough that its argmax changes from position to position."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(deepcopy(config)).to(dtype).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if path.endswith("bias"):  # they start at zero, where no test would miss them; large ones drown the text
                parameter.normal_(std=0.1)
            elif parameter.dim() > 1:
                parameter.normal_(std=0.3)
    assert model.generation_config is not None
    model.generation_config.eos_token_id = None
    return model


@cache
def shared_model(name: str, dtype: torch.dtype = torch.float64, attention: str = "sdpa") -> PreTrainedModel:
    """One `tiny_model` for all tests that only read it."""
    model = tiny_model(name, dtype)
    model.set_attn_implementation(attention)
    return model


def tiny_medusa(model: PreTrainedModel, seed: int = 0, **config: Any) -> MedusaModel:
    """`model` with heads whose weights are random, biases included: they guess nonsense, each its own."""
    medusa = MedusaModel.attach(model, MedusaConfig(**config))
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in medusa.heads.parameters():
            parameter.normal_(std=0.3)
    return medusa


def prompt_of(length: int, seed: int = 0) -> Tensor:
    """A random prompt, [1, length]."""
    return torch.randint(3, VOCAB, (1, length), generator=torch.Generator().manual_seed(100 * seed + length))


def hf_greedy(model: PreTrainedModel, prompt: Tensor, new_tokens: int, **options: Any) -> Tensor:
    """What plain greedy decoding gives, prompt included, [1, T]."""
    sequences = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=new_tokens,
        pad_token_id=0,
        **options,
    )
    assert isinstance(sequences, Tensor)
    return sequences


class GuidedHeads(nn.Module):
    """Stands in for heads: knows the true text and puts the right token of every head at a chosen rank.

    It finds its place in the text by the hidden state it is given, so it also proves that this is the hidden state of
    an accepted token and that the root is the token after it.
    """

    def __init__(self, medusa: MedusaModel, texts: list[Tensor], rank: Callable[[int, int], int]) -> None:
        """Know `texts` ([1, T] each); `rank(t, k)` places head k's right token when the last cached token is t."""
        super().__init__()
        self.config, self.vocab = medusa.config, medusa.backbone.vocab_size
        self.texts = [text[0].tolist() for text in texts]
        self.rank = rank
        with torch.no_grad():
            self.hidden = [medusa.backbone.hidden(text)[0] for text in texts]

    @property
    def draft_size(self) -> int:
        return self.vocab

    def to_vocab(self, draft_index: Tensor) -> Tensor:
        return draft_index

    def forward(self, hidden: Tensor, root: Tensor) -> Tensor:
        return torch.cat([self.guess(*pair) for pair in zip(hidden, root, strict=True)], dim=1)

    def forward_one(self, k: int, hidden: Tensor, path: Tensor) -> Tensor:
        """Of sequential heads: whoever is shown a wrong path guesses token 0."""
        rows = []
        for own, tokens in zip(hidden, path, strict=True):
            t, text = self.place(own)
            right = tokens.tolist() == text[t + 1 : t + 2 + k]
            rows.append(self.guess(own, tokens[0])[k, 0] if right else -torch.arange(self.vocab).double())
        return torch.stack(rows)

    def place(self, hidden: Tensor) -> tuple[int, list[int]]:
        """Which position the hidden state is of, and of which text."""
        errors = [(known - hidden).norm(dim=-1) for known in self.hidden]
        n = min(range(len(errors)), key=lambda n: float(errors[n].min()))
        t, text = int(errors[n].argmin()), self.texts[n]
        error = errors[n][t] / self.hidden[n][t].norm()
        assert error < 1e-3, "not the hidden state of an accepted token"
        return t, text

    def guess(self, hidden: Tensor, root: Tensor) -> Tensor:
        """Logits for one row, [K, 1, V]."""
        t, text = self.place(hidden)
        assert text[t + 1] == int(root), "the root is not the token after the hidden state"
        logits = torch.empty(self.config.num_heads, 1, self.vocab)
        for k in range(self.config.num_heads):
            right = text[t + 2 + k] if t + 2 + k < len(text) else 0
            order = [token for token in range(self.vocab) if token != right]
            order.insert(self.rank(t, k), right)
            logits[k, 0, order] = -torch.arange(self.vocab, dtype=logits.dtype)
        return logits


def guide(medusa: MedusaModel, texts: list[Tensor], rank: Callable[[int, int], int] = lambda t, k: 0) -> MedusaModel:
    """Replace the heads by `GuidedHeads`, perfect ones by default."""
    medusa.heads = GuidedHeads(medusa, texts, rank)  # type: ignore[assignment]
    return medusa


def random_tree(seed: int, nodes: int = 12, depth: int = 4, width: int = 3) -> CandidateTree:
    """A tree that grows by a random child of a random node."""
    generator = random.Random(seed)
    paths: list[tuple[int, ...]] = [()]
    while len(paths) < nodes:
        path = (*generator.choice(paths), generator.randrange(width))
        if len(path) <= depth and path not in paths:
            paths.append(path)
    return CandidateTree.from_paths(paths[1:])
