"""Decode with heads, one candidate tree a step: propose -> verify -> accept -> commit."""

import asyncio
import time
import warnings
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from medusa.backbone import Backbone
from medusa.model import MedusaModel
from medusa.packed_linear import pack_linears
from medusa.tree import CandidateTree

from .accept import Blockwise, Typical
from .cache import TreeCache
from .compiled import CompiledVerify, check_sizes, why_not_compile
from .draws import CertainDraws, RandomDraws, dice
from .dynamic_tree import DynamicTree
from .head_proposer import HeadProposer
from .layout import TreeLayout
from .propose import Candidates, Proposal
from .proposer import DecodingState, Proposer
from .refusals import check_one_row, check_rope_switch
from .request import Request, Row, prepare
from .result import DecodingStats, GenerationResult, gather
from .tree_attention import install
from .tree_choice import propose_with_heads
from .verify import check_tree_attention, prefill, verify
from .walk import Path, walk_blockwise, walk_exact, walk_typical


class MedusaDecoder:
    """Decoding that checks several guesses in one pass and emits what plain decoding would.

    Nothing of a request is kept here or on the model, so threads can share both. A decoder is also a decoding loop for
    transformers: `backbone.generate(**inputs, custom_generate=decoder)`.
    """

    def __init__(
        self,
        model: MedusaModel | PreTrainedModel,
        tree: str | CandidateTree | DynamicTree | Sequence[Sequence[int]] = "auto",
        acceptance: Literal["exact", "typical"] | Typical | Blockwise = "exact",
        proposal: Proposal | Literal["auto"] = "auto",
        pack_weights: bool | Literal["auto"] = False,
        compile: bool = False,
        proposer: Proposer | None = None,
    ) -> None:
        """Prepare to decode.

        Args:
            model: backbone and heads; with a `proposer` of another kind, the backbone alone will do.
            tree: a `CandidateTree`, a list of rank paths, or "auto": of the trees searched for these heads, the one
                with the best tokens per second on this machine, measured now. "dynamic", or a `DynamicTree`: in each
                step the nodes that the heads are surest of, as many as pay by what steps take on this machine.
            acceptance: "exact" keeps the backbone's distribution; "typical", or a `Typical` with options of its own,
                accepts more when sampling and does not. A `Blockwise` accepts by the criteria of blockwise parallel
                decoding, of which one is exact.
            proposal: where siblings come from when sampling: "top_k" the heads' likeliest tokens, "sampled" drawn
                from the heads without replacement, "mixed" the likeliest and one drawn from the rest. All are exact.
                "auto" is "sampled", which accepts most, where acceptance is exact and the tree is not dynamic.
            pack_weights: verify with a packed copy of half-precision weights; see `medusa.packed_linear`. "auto", with
                tree="auto" or "dynamic": where they can be packed and that is faster here.
            compile: compile the verify pass and the heads, for single prompts. The first step then takes long, and
                batches stay eager. Without a C++ compiler on a CPU it says so once and stays eager.
            proposer: fills the trees in place of the heads; `tree` and `proposal` are then not looked at.

        Raises:
            ValueError: an argument is not allowed, the tree does not fit the heads, or the backbone cannot verify
                trees.
        """
        if isinstance(acceptance, str) and acceptance not in ("exact", "typical"):
            raise ValueError(
                f"acceptance is {acceptance!r}; allowed: 'exact', 'typical', a Typical(...) or a Blockwise(...)"
            )
        self.acceptance = Typical() if acceptance == "typical" else acceptance
        install()
        self.model = model
        self.plain = model.backbone if isinstance(model, MedusaModel) else Backbone(model)
        self.known_tokens = model.known_tokens if isinstance(model, MedusaModel) else self.plain.vocab_size
        self.backbone = self.plain
        self.proposer: Proposer
        why_eager = why_not_compile(self.device) if compile else None
        if why_eager is not None:
            warnings.warn(f"compile=True, but {why_eager}; the decoder runs uncompiled", stacklevel=2)
        compiles = compile and why_eager is None
        if proposer is None:
            if not isinstance(model, MedusaModel):
                raise ValueError(
                    f"{type(model).__name__} carries no heads; give a MedusaModel, or something else that proposes: "
                    "proposer="
                )
            if self.acceptance != "exact":
                if proposal not in ("auto", "top_k"):
                    raise ValueError(f"proposal={proposal!r} is for exact acceptance; {acceptance!r} takes 'top_k'")
                proposal = "top_k"
            self.backbone, self.proposer = propose_with_heads(model, tree, proposal, pack_weights, compiles)
        else:
            if pack_weights is True:
                self.backbone = Backbone(pack_linears(self.plain.model))
            check_tree_attention(self.backbone)
            self.proposer = proposer.for_target(self.plain, self.known_tokens)
        if isinstance(self.acceptance, Blockwise) and self.acceptance.min_block > self.proposer.depth + 1:
            raise ValueError(
                f"min_block is {self.acceptance.min_block}, but a step emits at most {self.proposer.depth + 1} tokens; "
                "lower it, or give a deeper tree"
            )
        self._compiled = CompiledVerify(self.backbone) if compiles else None
        if compile:
            check_sizes(self.proposer.sizes)

    @property
    def device(self) -> torch.device:
        """Where the heads and the end of the backbone are."""
        return self.backbone.lm_weight.device

    @property
    def tree(self) -> CandidateTree | DynamicTree:
        """The tree that the heads fill.

        Raises:
            ValueError: something else proposes.
        """
        if not isinstance(self.proposer, HeadProposer):
            raise ValueError(f"this decoder has no tree of its own: {type(self.proposer).__name__} makes one a step")
        return self.proposer.tree

    def warm_up(self) -> None:
        """Compile the verify pass of every size now, and not in the first step that needs it."""
        if self._compiled is not None:
            self._compiled.warm_up(self.proposer.sizes)

    def generate(
        self,
        input_ids: Tensor,
        max_new_tokens: int | None = None,
        attention_mask: Tensor | None = None,
        generation_config: GenerationConfig | Sequence[GenerationConfig] | None = None,
        streamer: BaseStreamer | None = None,
        generator: torch.Generator | None = None,
        seed: int | None = None,
        **options: Any,
    ) -> GenerationResult:
        """Continue prompts, as `generate` of transformers would.

        Args:
            input_ids: the prompts' token ids, [B, T].
            max_new_tokens: emit at most so many for each.
            attention_mask: [B, T], 0 at padding, which may stand anywhere.
            generation_config: as in transformers, or one for each row.
            streamer: is given tokens as they are accepted; for one prompt.
            generator: the dice, on the model's device; torch's global ones if None.
            seed: instead of a generator.
            options: everything else that `generate` takes (do_sample, temperature, eos_token_id, logits_processor,
                stopping_criteria, stop_strings with tokenizer, num_return_sequences, output_scores, ...).

        Raises:
            ValueError: an argument is out of its range or not supported, or a prompt does not fit the backbone.
        """
        requests = self._prepare(input_ids, max_new_tokens, attention_mask, generation_config, options)
        groups = [request.rows(self.backbone, self.known_tokens) for request in requests]
        rows = [row for group in groups for row in group]
        # Each prompt may be a request of its own, with its own number of answers.
        answers = torch.tensor(list(map(len, groups)) if len(groups) == len(input_ids) else len(rows) // len(input_ids))
        prompts = input_ids.to(self.device).repeat_interleave(answers.to(self.device), dim=0)
        if streamer is None:
            stats = self._write(rows, dice(generator, seed, self.device))
        else:
            check_one_row(len(rows), "a streamer")
            streamer.put(input_ids.cpu())
            stats = [DecodingStats()]
            for block in self._blocks(rows[0], stats[0], dice(generator, seed, self.device)):
                streamer.put(torch.tensor(block))
            streamer.end()
        return gather(prompts, rows, stats, requests[0].config)

    def stream(
        self,
        input_ids: Tensor,
        max_new_tokens: int | None = None,
        attention_mask: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        generator: torch.Generator | None = None,
        seed: int | None = None,
        stats: DecodingStats | None = None,
        **options: Any,
    ) -> Iterator[list[int]]:
        """Like `generate` for one prompt, but yields the tokens of each step as they are accepted.

        `stats` is filled on the way. Closing the iterator early frees the cache.
        """
        requests = self._prepare(input_ids, max_new_tokens, attention_mask, generation_config, options)
        rows = [row for request in requests for row in request.rows(self.backbone, self.known_tokens)]
        check_one_row(len(rows), "stream()")
        filled = DecodingStats() if stats is None else stats
        return self._blocks(rows[0], filled, dice(generator, seed, self.device))

    async def astream(self, input_ids: Tensor, **options: Any) -> AsyncIterator[list[int]]:
        """`stream` for `async for`; each step runs in a thread, so the event loop goes on meanwhile."""
        blocks = self.stream(input_ids, **options)
        try:
            while (block := await asyncio.to_thread(next, blocks, None)) is not None:
                yield block
        finally:
            blocks.close()  # type: ignore[attr-defined]

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        generator: torch.Generator | None = None,
        **model_inputs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Decode what `generate` of transformers has prepared: `backbone.generate(..., custom_generate=decoder)`.

        Raises:
            ValueError: `model` is not the decoder's backbone, or the call asks for what heads cannot give.
        """
        if model is not self.plain.model:
            raise ValueError("these heads belong to another model; call generate of the backbone that carries them")
        request = Request.of(input_ids, logits_processor, stopping_criteria, generation_config, model_inputs)
        rows = request.rows(self.backbone, self.known_tokens)
        stats = self._write(rows, dice(generator, None, self.device))
        result = gather(input_ids, rows, stats, generation_config)
        if not generation_config.return_dict_in_generate:
            return result.sequences
        fields: dict[str, Any] = {"sequences": result.sequences, "scores": result.scores, "logits": result.logits}
        return GenerateDecoderOnlyOutput(**fields)

    def _prepare(
        self,
        input_ids: Tensor,
        max_new_tokens: int | None,
        attention_mask: Tensor | None,
        generation_config: GenerationConfig | Sequence[GenerationConfig] | None,
        options: dict[str, Any],
    ) -> list[Request]:
        if max_new_tokens is not None:
            options = {**options, "max_new_tokens": max_new_tokens}
        ids = input_ids.to(self.device)
        mask = None if attention_mask is None else attention_mask.to(self.device)
        criteria = options.pop("stopping_criteria", None)
        return prepare(self.plain, ids, mask, generation_config, criteria, options)

    def _write(self, rows: list[Row], generator: torch.Generator | None) -> list[DecodingStats]:
        """Write all rows to their ends."""
        stats = [DecodingStats() for _ in rows]
        for _ in self._steps(rows, stats, generator):
            pass
        return stats

    def _blocks(self, row: Row, stats: DecodingStats, generator: torch.Generator | None) -> Iterator[list[int]]:
        """Write one row; yields each step's new tokens."""
        before = row.length
        for _ in self._steps([row], [stats], generator):
            yield row.ids[before : row.length].tolist()
            before = row.length

    @torch.inference_mode()
    def _steps(self, rows: list[Row], stats: list[DecodingStats], generator: torch.Generator | None) -> Iterator[None]:
        """Prefill, then step until every row has ended; after each, rows and stats hold what is new."""
        started = time.perf_counter()
        state = self.prefill(rows, generator)
        for row, own in zip(rows, stats, strict=True):
            own.count_prefill(row, time.perf_counter() - started)
        yield
        stats_of = {id(row): own for row, own in zip(rows, stats, strict=True)}
        while state.rows:
            active = state.rows
            started = time.perf_counter()
            self.step(state)
            for row in active:
                stats_of[id(row)].count_step(row, time.perf_counter() - started)
            yield

    def prefill(self, rows: list[Row], generator: torch.Generator | None = None) -> DecodingState:
        """Cache the prompts and choose the first roots; room for the whole texts and one tree is taken at once."""
        lengths = [len(row.prompt) + row.limit for row in rows]
        check_rope_switch(self.backbone, [len(row.prompt) for row in rows], lengths, self.proposer.depth)
        capacity = max(lengths) + self.proposer.sizes[-1]
        cache = TreeCache(self.backbone.num_layers, capacity, len(rows))
        hidden, logits = prefill(self.backbone, [row.prompt for row in rows], cache)
        draws = RandomDraws(generator) if any(row.do_sample for row in rows) else CertainDraws()
        root = TreeLayout.of(CandidateTree(()), self.device)
        state = DecodingState(rows, cache, hidden, rows[0].ids[:0], generator, draws, self.proposer.start(rows))
        empty = Candidates(root.depths.new_zeros(len(rows), 1))
        self.accept(state, empty, logits[:, None], root)
        return self._carry_on(state, hidden)

    def step(self, state: DecodingState) -> None:
        """Advance every row by one verify pass; rows that end leave the state."""
        candidates, layout = self.propose(state)
        hidden, logits = self.verify(candidates.tokens, layout, state.cache)
        paths = self.accept(state, candidates, logits, layout)
        self.commit(state, hidden, paths)

    def verify(self, tokens: Tensor, layout: TreeLayout, cache: TreeCache) -> tuple[Tensor, Tensor]:
        """Run the backbone over the tree: tokens [B, N] -> hidden states [B, N, D], logits [B, N, V]."""
        if self._compiled is not None and len(tokens) == 1:
            return self._compiled(tokens, layout, cache)
        return verify(self.backbone, tokens, layout, cache)

    def propose(self, state: DecodingState) -> tuple[Candidates, TreeLayout]:
        """Fill the tree behind every row's root; returns it with its topology."""
        return state.drafting.propose(state)

    def accept(self, state: DecodingState, candidates: Candidates, logits: Tensor, layout: TreeLayout) -> list[Path]:
        """Emit what is accepted of a verified tree, logits [B, N, V], and the next roots to the rows."""
        if isinstance(self.acceptance, Typical):
            return walk_typical(state.rows, candidates, logits, layout, self.acceptance, state.draws)
        if isinstance(self.acceptance, Blockwise):
            return walk_blockwise(state.rows, candidates, logits, layout, self.acceptance, state.draws)
        return walk_exact(state.rows, candidates, logits, layout, state.draws)

    def commit(self, state: DecodingState, hidden: Tensor, paths: list[Path]) -> None:
        """Keep the accepted nodes of each row; hidden [B, N, D] is what their passes gave."""
        state.cache.keep(paths)
        state.drafting.commit(paths)
        self._carry_on(state, hidden[torch.arange(len(paths)), [path[-1] for path in paths]])

    def _carry_on(self, state: DecodingState, hidden: Tensor) -> DecodingState:
        """Drop the rows that have ended; hidden [B, D] is what the next roots were chosen from."""
        going = [i for i, row in enumerate(state.rows) if row.finish_reason is None]
        if not going:
            state.rows = []
            return state
        if len(going) < len(state.rows):
            state.rows = [state.rows[i] for i in going]
            state.cache.select(going)
            state.drafting.select(going)
            hidden = hidden[going]
        state.hidden = hidden
        state.root = torch.stack([row.ids[row.length - 1] for row in state.rows])
        return state
