"""What a caller asks for. transformers prepares it, so that every option of `generate` means what it means there."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor, SuppressTokensLogitsProcessor
from transformers.generation.stopping_criteria import MaxLengthCriteria, StopStringCriteria

from medusa.backbone import Backbone

from .refusals import check_mode, check_options, check_prompt, check_shapes


@dataclass
class Row:
    """One text being written."""

    ids: Tensor
    """Room for the whole text, [prompt + limit]; filled up to `length`."""
    length: int
    """Tokens so far, prompt included."""
    prompt: Tensor
    """The prompt without padding, [T]: what the backbone reads."""
    limit: int
    """Most new tokens."""
    processors: LogitsProcessorList
    """Processors and warpers, in the order in which `generate` applies them."""
    criteria: StoppingCriteriaList
    """When to stop, apart from the limit."""
    do_sample: bool
    keep_scores: bool = False
    keep_logits: bool = False
    scores: list[Tensor] = field(default_factory=list)
    """Processed scores that each new token was chosen from, [V] each."""
    logits: list[Tensor] = field(default_factory=list)
    """The backbone's own logits there, [V] each."""
    finish_reason: str | None = None
    """`stop`, `length`, or None while it goes on."""

    def __post_init__(self) -> None:
        self.start = self.length
        """Length of the prompt in `ids`."""

    @classmethod
    def greedy(cls, prompt: Tensor, limit: int) -> "Row":
        """A prompt [T] to continue greedily, with nothing asked for but a limit."""
        room = torch.cat([prompt, prompt.new_zeros(limit)])
        return cls(room, len(prompt), prompt, limit, LogitsProcessorList(), StoppingCriteriaList(), do_sample=False)

    @property
    def context(self) -> Tensor:
        """The text so far as processors and criteria see it, [1, length]."""
        return self.ids[None, : self.length]

    @property
    def new_tokens(self) -> int:
        """How many tokens were written."""
        return self.length - self.start

    def emit(self, token: int, scores: Tensor, logits: Tensor) -> None:
        """Append a token chosen from `scores` [V], and see whether it ends the text."""
        self.ids[self.length] = token
        self.length += 1
        if self.keep_scores:
            self.scores.append(scores)
        if self.keep_logits:
            self.logits.append(logits.float())
        kept = tuple(self.scores) if self.keep_scores else None
        if self.criteria and bool(self.criteria(self.context, kept).any()):
            self.finish_reason = "stop"
        elif self.new_tokens >= self.limit:
            self.finish_reason = "length"


@dataclass(frozen=True)
class Request:
    """A call of `generate`, as transformers hands it to the decoding loop."""

    input_ids: Tensor
    """[B, T], repeated for `num_return_sequences` already."""
    attention_mask: Tensor
    """[B, T], 0 at padding."""
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig

    @classmethod
    def of(
        cls,
        input_ids: Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        model_inputs: dict[str, Any],
    ) -> "Request":
        """From the arguments of a decoding loop; newer versions of transformers drop a mask that hides nothing."""
        mask = model_inputs.get("attention_mask")
        return cls(input_ids, torch.ones_like(input_ids) if mask is None else mask, processors, criteria, config)

    def rows(self, backbone: Backbone, known_tokens: int) -> list[Row]:
        """One row for each text. Processors see the prompt as it stands in `input_ids`, padding included.

        Ids from `known_tokens` on are never emitted.

        Raises:
            ValueError: a prompt is empty, too long for the backbone or holds unknown ids.
        """
        check_mode(self.config)
        limit = self.config.max_length - self.input_ids.shape[1]
        context = backbone.context_length
        unknown = list(range(known_tokens, backbone.vocab_size))
        own = [SuppressTokensLogitsProcessor(unknown, self.input_ids.device.type)] if unknown else []
        rows = []
        for i, (ids, mask) in enumerate(zip(self.input_ids, self.attention_mask, strict=True)):
            prompt = ids[mask.bool()]
            check_prompt(backbone, prompt, f"row {i}: " if len(self.input_ids) > 1 else "")
            room = limit if context is None else min(limit, context - len(prompt))
            row = Row(
                ids=torch.cat([ids, ids.new_zeros(room)]),
                length=len(ids),
                prompt=prompt,
                limit=room,
                processors=LogitsProcessorList([*own, *(_for_row(processor, i) for processor in self.processors)]),
                criteria=StoppingCriteriaList(c for c in self.criteria if not isinstance(c, MaxLengthCriteria)),
                do_sample=bool(self.config.do_sample),
                keep_scores=bool(self.config.return_dict_in_generate and self.config.output_scores),
                keep_logits=bool(self.config.return_dict_in_generate and self.config.output_logits),
            )
            rows.append(row)
        return rows


def _for_row(processor: Any, row: int) -> Any:
    """The prefix-constrained processor asks by row number, and is shown one row at a time."""
    if not isinstance(processor, PrefixConstrainedLogitsProcessor):
        return processor
    allowed = processor._prefix_allowed_tokens_fn
    return PrefixConstrainedLogitsProcessor(lambda _, text: allowed(row, text), num_beams=1)


def prepare(
    backbone: Backbone,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    generation_config: GenerationConfig | Sequence[GenerationConfig] | None,
    stopping_criteria: Sequence[Any] | None,
    options: dict[str, Any],
) -> list[Request]:
    """Let `generate` prepare a call, and stop before it decodes.

    Padded prompts are prepared one by one, so that processors see what they would see of that prompt alone; so are
    rows with a configuration each.

    Args:
        backbone: whose `generate`.
        input_ids: [B, T].
        attention_mask: [B, T] or None, as in `generate`.
        generation_config: for all rows, or one for each.
        stopping_criteria: the caller's own.
        options: everything else that `generate` takes.

    Raises:
        ValueError: `generate` refuses the call, or it asks for something that heads cannot give.
    """
    check_options(options)
    check_shapes(input_ids, attention_mask)
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    for i, (ids, keep) in enumerate(zip(input_ids, mask, strict=True)):
        check_prompt(backbone, ids[keep.bool()], f"row {i}: " if len(input_ids) > 1 else "")
    model = backbone.model
    assert isinstance(model, GenerationMixin)
    options = dict(options)
    tokenizer, stop_strings = options.pop("tokenizer", None), options.pop("stop_strings", None)
    criteria = list(stopping_criteria or ())

    def run(ids: Tensor, mask: Tensor | None, config: GenerationConfig | None, extra: dict[str, Any]) -> Request:
        own, off = _stop_strings(config or model.generation_config, stop_strings, tokenizer)
        rest = {**options, **extra}
        if config is not None:  # `generate` takes a configuration or its fields, not both
            config = copy.deepcopy(config)
            rest = config.update(**rest)
        rest |= off
        result = model.generate(
            input_ids=ids,
            attention_mask=mask,
            generation_config=config,
            custom_generate=_take,
            stopping_criteria=StoppingCriteriaList([*criteria, *own]),
            **rest,
        )
        assert isinstance(result, Request)
        return result

    if isinstance(generation_config, Sequence):
        if len(generation_config) != len(input_ids):
            raise ValueError(
                f"{len(generation_config)} generation configs for {len(input_ids)} rows; give one for each"
            )
        return [
            run(ids[None, keep.bool()], None, config, {})
            for ids, keep, config in zip(input_ids, mask, generation_config, strict=True)
        ]
    if attention_mask is not None:  # `generate` warns of padding on the right, which is as good here
        order = attention_mask.bool().int().argsort(dim=1, stable=True)
        input_ids, attention_mask = input_ids.gather(1, order), attention_mask.gather(1, order)
    whole = run(input_ids, attention_mask, generation_config, {})
    if whole.attention_mask.all():
        return [whole]
    return [_alone(whole, i, run, options.get("prefix_allowed_tokens_fn")) for i in range(len(whole.input_ids))]


def _alone(
    whole: Request,
    i: int,
    run: Callable[[Tensor, Tensor | None, GenerationConfig, dict[str, Any]], Request],
    prefix_allowed_tokens: Callable[[int, Tensor], list[int]] | None,
) -> Request:
    """Row i of a padded batch, prepared again without its padding and with as many new tokens."""
    ids = whole.input_ids[i][whole.attention_mask[i].bool()]
    padding = whole.input_ids.shape[1] - len(ids)
    if len(ids) == 0:
        raise ValueError(
            f"row {i} holds nothing but the pad token, which counts as padding where no attention_mask is given; pass "
            "attention_mask, or give at least one other token"
        )
    config = copy.deepcopy(whole.config)
    extra: dict[str, Any] = {"max_new_tokens": config.max_length - whole.input_ids.shape[1], "num_return_sequences": 1}
    config.max_length = None
    if config.min_length and not config.min_new_tokens:
        extra["min_length"] = max(config.min_length - padding, 0)
    if prefix_allowed_tokens is not None:
        extra["prefix_allowed_tokens_fn"] = lambda _, text: prefix_allowed_tokens(i, text)
    if whole.config._pad_token_tensor is not None:
        extra["pad_token_id"] = int(whole.config._pad_token_tensor)  # found already; spares a warning for each row
    return run(ids[None], torch.ones_like(ids)[None], config, extra)


def _stop_strings(config: GenerationConfig, given: Any, tokenizer: Any) -> tuple[list[Any], dict[str, Any]]:
    """`generate` does not hand its tokenizer on to a custom loop, so the criterion for stop strings is made here.

    Returns the criterion, and the option that tells `generate` not to make one.
    """
    strings = config.stop_strings if given is None else given
    if strings is None:
        return [], {}
    if tokenizer is None:
        raise ValueError(f"stop_strings={strings!r} needs the tokenizer; pass tokenizer= to generate")
    criterion = StopStringCriteria(tokenizer=tokenizer, stop_strings=strings)
    return [criterion], {} if config.stop_strings is None else {"stop_strings": None}


def _take(
    model: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    **model_inputs: Any,
) -> Request:
    """A decoding loop, as far as `generate` can tell, that returns what it was given."""
    return Request.of(input_ids, logits_processor, stopping_criteria, generation_config, model_inputs)
