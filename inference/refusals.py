"""What cannot be decoded with heads, refused by name before any work is done. B rows, T prompt length."""

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.configuration_utils import GenerationMode

from medusa.backbone import Backbone

SUPPORTED_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
REFUSED_OPTIONS = ("inputs_embeds", "past_key_values", "cache", "assistant_model", "negative_prompt_ids")


def check_options(options: dict[str, object]) -> None:
    """Refuse options of `generate` that bring a state of their own.

    Raises:
        ValueError: the option.
    """
    for name in REFUSED_OPTIONS:
        if options.get(name) is not None:
            raise ValueError(f"{name} is not supported when decoding with heads; leave it out, or use plain `generate`")


def check_mode(config: GenerationConfig) -> None:
    """Refuse ways of decoding that do not go token by token.

    Raises:
        ValueError: the mode, by name.
    """
    mode = config.get_generation_mode()
    if mode not in SUPPORTED_MODES:
        raise ValueError(
            f"this generation config asks for {mode.value.replace('_', ' ')}; decoding with heads is greedy search or "
            "sampling: leave num_beams at 1 and penalty_alpha and assistants out, or use plain `generate`"
        )
    if config.do_sample and config.top_p is not None and not 0 <= config.top_p <= 1:
        raise ValueError(f"top_p is {config.top_p}; it must be between 0 and 1")  # `generate` would ignore it
    for name in ("output_attentions", "output_hidden_states"):
        if config.return_dict_in_generate and getattr(config, name):
            raise ValueError(f"{name}=True is not supported when decoding with heads; use plain `generate`")


def check_shapes(input_ids: Tensor, attention_mask: Tensor | None) -> None:
    """Refuse prompts that are not a matrix of ids.

    Raises:
        ValueError: the shape, the type, or a prompt without tokens.
    """
    if input_ids.dim() != 2 or input_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"input_ids has shape {tuple(input_ids.shape)} and dtype {input_ids.dtype}; give token ids of shape "
            "[rows, length], dtype int64"
        )
    if input_ids.numel() == 0:
        raise ValueError("the prompt is empty; give at least one token, such as the tokenizer's BOS token")
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, input_ids {tuple(input_ids.shape)}; "
            "they must be the same"
        )
    if attention_mask is not None and not attention_mask.bool().any(dim=1).all():
        row = int(attention_mask.bool().any(dim=1).logical_not().nonzero()[0])
        raise ValueError(f"row {row}: attention_mask is all zeros, so its prompt is empty; give at least one token")


def check_prompt(backbone: Backbone, prompt: Tensor, where: str) -> None:
    """Refuse a prompt [T] that the backbone cannot continue.

    Raises:
        ValueError: it is empty, fills the context, or holds ids that the backbone lacks.
    """
    backbone.check_ids(prompt)
    context = backbone.context_length
    if context is not None and len(prompt) >= context:
        raise ValueError(
            f"{where}the prompt has {len(prompt)} tokens, but the backbone's context holds {context}, answer included; "
            f"shorten the prompt to at most {context - 1}"
        )


def check_rope_switch(backbone: Backbone, prompts: list[int], texts: list[int], depth: int) -> None:
    """Refuse rows that would be cached with some of LongRoPE's frequencies and read with others.

    A pass takes those of its furthest position, which may be a guess that is never accepted, or belong to another row.

    Args:
        backbone: whose frequencies.
        prompts: lengths of the prompts that share passes.
        texts: how long each may grow.
        depth: how far a tree reaches past its root.

    Raises:
        ValueError: the text may grow past the switch, or some rows are past it and some are not.
    """
    switch = backbone.rope_switch
    furthest = max(texts) - 1 + depth
    if switch is not None and min(prompts) <= switch < furthest:
        raise ValueError(
            f"prompt, answer and tree may take {furthest} tokens, which crosses position {switch}, where this model's "
            "LongRoPE changes the frequencies of all positions; lower max_new_tokens or decode prompts on either side "
            "of it apart, or use plain `generate`"
        )


def check_one_row(rows: int, what: str) -> None:
    """Refuse to stream a batch.

    Raises:
        ValueError: there are several rows.
    """
    if rows > 1:
        raise ValueError(f"{what} takes one prompt, and this call has {rows} rows; use generate without a streamer")
