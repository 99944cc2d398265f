"""Decode with heads, one candidate tree a step: propose -> verify -> accept -> commit."""

import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from medusa.backbone import Backbone
from medusa.model import MedusaModel
from medusa.packed_linear import can_pack, pack_linears
from medusa.tree import CandidateTree

from .accept import accept_greedy
from .cache import TreeCache
from .generation_options import check_input, end_tokens, refuse_unsupported
from .layout import TreeLayout
from .propose import propose
from .tree_attention import install
from .tree_choice import choose_tree
from .verify import check_tree_attention, prefill, verify


@dataclass
class DecodingState:
    """What one step hands to the next."""

    cache: TreeCache
    hidden: Tensor
    """Hidden state that the root was chosen from, [D]."""
    root: Tensor
    """Id of the token that the backbone chose next, a scalar; emitted already, not yet in the cache."""


@dataclass
class DecodingStats:
    """What a generation took."""

    new_tokens: int = 0
    steps: int = 0
    """Verify passes."""
    accepted: list[int] = field(default_factory=list)
    """Accepted candidates of each step, the root not counted."""
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    finish_reason: str = "length"
    """`stop` after an end token, `length` at max_new_tokens or the end of the context."""

    @property
    def tokens_per_step(self) -> float:
        """Tokens emitted by verify passes / verify passes, roots included; the prefill's own token is not counted."""
        return (self.new_tokens - 1) / self.steps if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """New tokens / time for them, prefill included."""
        seconds = self.prefill_seconds + self.decode_seconds
        return self.new_tokens / seconds if seconds else 0.0


@dataclass(frozen=True)
class GenerationResult:
    """Prompt and answer, and what they took."""

    sequences: Tensor
    """[1, prompt + new tokens]"""
    stats: DecodingStats


class MedusaDecoder:
    """Greedy decoding that checks several guesses in one pass and emits what plain greedy decoding would."""

    def __init__(
        self,
        model: MedusaModel,
        tree: str | CandidateTree | Sequence[Sequence[int]] = "auto",
        acceptance: str = "exact",
        pack_weights: bool | Literal["auto"] = False,
    ) -> None:
        """Prepare to decode.

        Args:
            model: backbone and heads.
            tree: a `CandidateTree`, a list of rank paths, or "auto": of the trees searched for these heads, the one
                with the best tokens per second on this machine, measured now.
            acceptance: "exact". Sampling and typical acceptance are not there yet.
            pack_weights: verify with a packed copy of half-precision weights; see `medusa.packed_linear`. "auto", with
                tree="auto": where they can be packed and that is faster here.

        Raises:
            ValueError: an argument is not allowed, the tree does not fit the heads, or the backbone cannot verify
                trees.
        """
        if acceptance != "exact":
            raise ValueError(f"acceptance is {acceptance!r}; this version knows 'exact' (greedy) only")
        install()
        self.model = model
        plain = [model.backbone] if pack_weights is not True else []
        packed = pack_weights is True or (pack_weights == "auto" and tree == "auto" and can_pack(model.model) is None)
        backbones = plain + ([Backbone(pack_linears(model.model))] if packed else [])
        for backbone in backbones:
            check_tree_attention(backbone)
        self.backbone = backbones[0]
        self.tree = self._resolve(tree, backbones)
        self.tree.check_heads(model.config.num_heads, model.heads.draft_size)
        self.layout = TreeLayout.of(self.tree, self.device)

    @property
    def device(self) -> torch.device:
        """Where the heads and the end of the backbone are."""
        return self.backbone.lm_weight.device

    def _resolve(self, tree: str | CandidateTree | Sequence[Sequence[int]], backbones: list[Backbone]) -> CandidateTree:
        if isinstance(tree, CandidateTree):
            return tree
        if not isinstance(tree, str):
            return CandidateTree.from_paths(tree)
        if tree != "auto":
            raise ValueError(f"tree is {tree!r}; allowed: 'auto', a CandidateTree, or a list of rank paths")
        if self.model.searched_tree is None:
            warnings.warn(
                "no tree was searched for these heads, so the decoder checks one chain of best guesses; "
                "`medusa tree CHECKPOINT --data FILE` finds a better one",
                stacklevel=3,
            )
            return CandidateTree.chain(self.model.config.num_heads)
        choice = choose_tree(self.model, backbones, self.model.searched_tree)
        self.backbone = choice.backbone
        return choice.tree

    def generate(
        self,
        input_ids: Tensor,
        max_new_tokens: int = 256,
        do_sample: bool = False,
        eos_token_id: int | Sequence[int] | None = None,
    ) -> GenerationResult:
        """Continue a prompt greedily.

        Args:
            input_ids: the prompt's token ids, [1, T].
            max_new_tokens: emit at most so many.
            do_sample: must be False in this version.
            eos_token_id: stop after one of these; by default those of the backbone's generation config.

        Raises:
            ValueError: an argument is out of its range, the prompt does not fit the backbone, or its generation
                config changes greedy decoding in a way that is not supported.
        """
        stats = DecodingStats()
        blocks = list(self.stream(input_ids, max_new_tokens, do_sample, eos_token_id, stats))
        new = torch.tensor([token for block in blocks for token in block], dtype=torch.long, device=input_ids.device)
        return GenerationResult(torch.cat([input_ids[0], new])[None], stats)

    @torch.inference_mode()
    def stream(
        self,
        input_ids: Tensor,
        max_new_tokens: int = 256,
        do_sample: bool = False,
        eos_token_id: int | Sequence[int] | None = None,
        stats: DecodingStats | None = None,
    ) -> Iterator[list[int]]:
        """Like `generate`, but yields the tokens of each step as they are accepted. `stats` is filled on the way."""
        stats = DecodingStats() if stats is None else stats
        prompt = check_input(self.backbone, input_ids, max_new_tokens, do_sample).to(self.device)
        refuse_unsupported(self.model.model)  # a packed view has a copy of the generation config
        ends = end_tokens(self.model.model, eos_token_id)
        limit = max_new_tokens
        if self.backbone.context_length is not None:
            limit = min(limit, self.backbone.context_length - len(prompt))

        started = time.perf_counter()
        state = self.prefill(prompt, limit)
        block = [int(state.root)]
        stats.prefill_seconds = time.perf_counter() - started
        while True:
            block = block[: limit - stats.new_tokens]
            end = next((i for i, token in enumerate(block) if token in ends), None)
            if end is not None:
                block = block[: end + 1]
                stats.finish_reason = "stop"
            stats.new_tokens += len(block)
            yield block
            if end is not None or stats.new_tokens >= limit:
                return
            started = time.perf_counter()
            block = self.step(state)
            stats.steps += 1
            stats.accepted.append(len(block) - 1)
            stats.decode_seconds += time.perf_counter() - started

    def prefill(self, prompt: Tensor, max_new_tokens: int) -> DecodingState:
        """Cache a prompt [T] and choose the first root; room for `max_new_tokens` and one tree is taken at once."""
        cache = TreeCache(self.backbone.num_layers, len(prompt) + max_new_tokens + self.tree.num_nodes)
        hidden, logits = prefill(self.backbone, prompt, cache)
        return DecodingState(cache, hidden, logits.argmax())

    def step(self, state: DecodingState) -> list[int]:
        """Advance `state` by one verify pass; returns the accepted candidates and the bonus token."""
        start = state.cache.length
        tokens = propose(self.model.heads, state.hidden, state.root, self.layout)
        hidden, logits = verify(self.backbone, tokens, self.layout, state.cache)
        path, bonus = accept_greedy(tokens, logits, self.layout)
        state.cache.keep(start, path)
        state.hidden, state.root = hidden[path[-1]], bonus
        return [*tokens[path[1:]].tolist(), int(bonus)]
