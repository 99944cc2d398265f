"""One tiny configuration of every architecture that the decoder promises, and of some that it must refuse."""

from typing import Any

from tiny import COMMON, VOCAB
from transformers import AutoConfig, PreTrainedConfig

UNTIED = {**COMMON, "tie_word_embeddings": False}  # tied, many random models only repeat their last token
GROUPED = {**UNTIED, "num_key_value_heads": 2}
TIED = {**GROUPED, "tie_word_embeddings": True}
WIDE = {**GROUPED, "head_dim": 16}  # heads * head_dim is twice the hidden size
GPT = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}

WINDOW = {"sliding_window": 8}
MIXED = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
FULL = {"layer_types": ["full_attention", "full_attention"]}
EXPERTS = {
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "experts_implementation": "eager",  # the default one knows no float64
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 4,
    "v_head_dim": 6,  # half a key's size
    "n_group": 1,
    "topk_group": 1,
}
LONG = {
    "original_max_position_embeddings": 4,
    "rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "factor": 8.0},
}
SHARED = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 8,
    "num_kv_shared_layers": 2,  # the last two layers read the keys and values of the first two
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "arcee": {**GROUPED, "head_dim": 8},
    "codegen": {**GPT, "rotary_dim": 4},
    "cohere": {**TIED, "logit_scale": 0.25},
    "cohere2": {**TIED, **MIXED, "logit_scale": 0.25},
    "deepseek_v3": {**UNTIED, **EXPERTS, **LATENT, "n_routed_experts": 4, "first_k_dense_replace": 1},
    "ernie4_5": WIDE,
    "exaone4": {**GROUPED, **MIXED},
    "falcon": UNTIED,
    "falcon_grouped": {**UNTIED, "model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon_multi_head": {**UNTIED, "model_type": "falcon", "multi_query": False, "parallel_attn": False, "bias": True},
    "gemma": WIDE,
    "gemma2": {**WIDE, **MIXED, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    "gemma3_text": {**WIDE, **MIXED, "final_logit_softcapping": 5.0},
    "gemma3n_text": {**WIDE, **SHARED, "activation_sparsity_pattern": [0.5] * 4},
    "gemma4_text": {**WIDE, **SHARED, "global_head_dim": 8},
    "glm4": WIDE,
    "gpt2": {**GPT, "tie_word_embeddings": True},
    "gpt_bigcode": GPT,
    "gpt_bigcode_multi_head": {**GPT, "model_type": "gpt_bigcode", "multi_query": False},
    "gpt_neox": UNTIED,
    "gpt_oss": {**WIDE, **MIXED, **EXPERTS, "num_local_experts": 4},
    "gptj": {**GPT, "rotary_dim": 4},
    "granite": {**TIED, "logits_scaling": 8.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5},
    "granitemoehybrid": {**GROUPED, **FULL, "num_local_experts": 0, "mamba_n_heads": 4},
    "helium": {**GROUPED, "head_dim": 8},
    "hunyuan_v1_dense": WIDE,
    "hunyuan_v1_moe": {**WIDE, **EXPERTS, "num_experts": 4, "moe_topk": 2},
    "lfm2": {**GROUPED, **FULL},
    "llama": GROUPED,
    "llama_tied": {**TIED, "model_type": "llama", "head_dim": 16, "attention_bias": True},
    "ministral": {**GROUPED, **MIXED, "head_dim": 8},
    "mistral": {**GROUPED, **WINDOW},
    "mixtral": {**GROUPED, **WINDOW, **EXPERTS, "num_local_experts": 4},
    "nemotron": WIDE,
    "olmo2": GROUPED,
    "olmo3": {**GROUPED, **MIXED},
    "opt": {**UNTIED, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "opt_projected": {**UNTIED, "model_type": "opt", "ffn_dim": 48, "word_embed_proj_dim": 16},
    "phi": UNTIED,
    "phi3": {**GROUPED, **WINDOW},
    "phi3_long": {**GROUPED, **LONG, "model_type": "phi3"},
    "qwen2": GROUPED,
    "qwen2_window": {**GROUPED, **MIXED, "model_type": "qwen2", "use_sliding_window": True},
    "qwen3": WIDE,
    "qwen3_moe": {**WIDE, **EXPERTS, "num_experts": 4},
    "seed_oss": WIDE,
    "smollm3": {**TIED, "no_rope_layers": [1, 0]},
    "smollm3_window": {**TIED, **MIXED, "model_type": "smollm3", "use_sliding_window": True, "no_rope_layers": [0, 1]},
    "stablelm": GROUPED,
    "starcoder2": {**GROUPED, **WINDOW},
}
"""Fields of each configuration; the row's name is the model type where the fields do not say it."""

MAMBA = {"mamba_d_state": 4, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
STATES = {"vocab_size": VOCAB, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 1}
RECURRENT: dict[str, dict[str, Any]] = {
    "bamba": {**GROUPED, **MAMBA, "attn_layer_indices": [1]},
    "falcon_h1": {**GROUPED, **MAMBA, "mamba_d_ssm": 64},
    "granitemoehybrid": {**GROUPED, **MAMBA, "layer_types": ["linear_attention", "full_attention"]},
    "jamba": {**GROUPED, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "use_mamba_kernels": False},
    "lfm2": {**GROUPED, "layer_types": ["conv", "full_attention"]},
    "llama4_text": {**GROUPED, "num_local_experts": 2, "layer_types": ["chunked_attention", "full_attention"]},
    "mamba": STATES,
    "mamba2": {**STATES, "num_heads": 4, "head_dim": 8, "n_groups": 1},
    "minimax": {**GROUPED, "num_local_experts": 2, "layer_types": ["linear_attention", "full_attention"]},
    "nemotron_h": {**GROUPED, **MAMBA},
    "olmo_hybrid": {**GROUPED, **DELTA},
    "qwen3_5_text": {**WIDE, **DELTA},
    "qwen3_next": {**WIDE, **DELTA, **EXPERTS, "num_experts": 2, "shared_expert_intermediate_size": 8},
    "recurrent_gemma": {**GROUPED, "num_hidden_layers": 3, "attention_window_size": 8, "lru_width": 32},
    "rwkv": {"vocab_size": VOCAB, "hidden_size": 16, "attention_hidden_size": 16, "num_hidden_layers": 2},
    "zamba2": {**GROUPED, **MAMBA, "layer_types": ["linear_attention", "hybrid"]},
}
"""Some layers keep a state, or see chunks, and could not forget a rejected guess."""

CACHE_ORDER: dict[str, dict[str, Any]] = {
    "bloom": {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 1, "n_head": 4},
    "falcon": {**UNTIED, "alibi": True},
    "gpt_neo": {**COMMON, "num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "mpt": {"vocab_size": VOCAB, "d_model": 32, "n_layers": 1, "n_heads": 4, "max_seq_len": 64},
}
"""Positions or windows go by the order in the cache."""

STRANGE: dict[str, dict[str, Any]] = {
    "modernbert-decoder": UNTIED,  # its `get_decoder` is the LM head
    "openai-gpt": GPT,  # has no cache
}
"""Attention models that do not follow the interface of the others."""


def config_of(name: str, fields: dict[str, Any]) -> PreTrainedConfig:
    """A fresh configuration: models write into theirs."""
    config = AutoConfig.for_model(**{"model_type": name, **fields})
    assert isinstance(config, PreTrainedConfig)
    return config
