"""What a caller and a backbone's generation config ask for, checked before any work is done."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from medusa.backbone import Backbone

CHANGES_GREEDY: dict[str, tuple[object, ...]] = {
    "repetition_penalty": (None, 1.0),
    "no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1.0),
    "bad_words_ids": (None,),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "suppress_tokens": (None,),
    "begin_suppress_tokens": (None,),
    "sequence_bias": (None,),
    "exponential_decay_length_penalty": (None,),
    "guidance_scale": (None, 1.0),
    "num_beams": (None, 1),
    "penalty_alpha": (None, 0, 0.0),
}
"""Fields of a generation config that change greedy decoding, with the values that leave it alone."""


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Refuse a generation config that plain `generate` would obey and this decoder would not.

    Raises:
        ValueError: the field and its value.
    """
    config = model.generation_config
    assert config is not None
    for name, neutral in CHANGES_GREEDY.items():
        value = getattr(config, name, None)
        if value not in neutral:
            raise ValueError(
                f"the backbone's generation config sets {name}={value!r}, which this version does not apply, so the "
                f"output would differ from generate's; set model.generation_config.{name} = {neutral[-1]!r}"
            )


def end_tokens(model: PreTrainedModel, eos_token_id: int | Sequence[int] | None) -> set[int]:
    """The ids that end an answer: the caller's, or else the generation config's."""
    assert model.generation_config is not None
    ids = model.generation_config.eos_token_id if eos_token_id is None else eos_token_id
    if ids is None:
        return set()
    return {int(ids)} if isinstance(ids, int) else {int(i) for i in ids}


def check_input(backbone: Backbone, input_ids: Tensor, max_new_tokens: int, do_sample: bool) -> Tensor:
    """Check a request; returns the prompt, [T].

    Raises:
        ValueError: what is wrong with it.
    """
    if do_sample:
        raise ValueError("do_sample=True: this version decodes greedily only; leave do_sample at False")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
    if input_ids.dim() != 2 or len(input_ids) != 1 or input_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"input_ids has shape {tuple(input_ids.shape)} and dtype {input_ids.dtype}; this version decodes one row "
            "of token ids, shape [1, length], dtype int64"
        )
    prompt = input_ids[0]
    if len(prompt) == 0:
        raise ValueError("the prompt is empty; give at least one token, such as the tokenizer's BOS token")
    backbone.check_ids(prompt)
    if backbone.context_length is not None and len(prompt) >= backbone.context_length:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens, but the backbone's context holds {backbone.context_length}, "
            f"answer included; shorten the prompt to at most {backbone.context_length - 1}"
        )
    return prompt.long()
