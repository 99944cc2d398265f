"""Tiny random models of several architectures, and heads that guess right."""

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

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


def tiny_model(name: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> PreTrainedModel:
    """A random model, with weights large enough that its argmax changes from position to position."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.3)
    assert model.generation_config is not None
    model.generation_config.eos_token_id = None
    return model
