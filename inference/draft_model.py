"""Trees that are filled by a smaller model: speculative decoding (Leviathan et al. 2023; Chen et al. 2023).

B rows, N nodes, n nodes of one level, V the target's vocabulary, Vd what the draft may propose.
"""

import copy
import itertools
import time
import warnings
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from medusa.backbone import Backbone
from medusa.model import Tokenizer
from medusa.tree import CandidateTree

from .accept import NO_TOKEN
from .cache import TreeCache
from .draft_stats import DraftStats
from .draws import Draws
from .layout import TreeLayout
from .propose import Candidates, Drawn
from .proposer import DecodingState
from .refusals import check_rope_switch
from .request import Row
from .tree_attention import install
from .verify import check_tree_attention, prefill, verify, verify_nodes
from .vocabulary import check_same_vocabulary, known_ids
from .walk import Path
from .warp import draft_scores

AUTO_MOST = 7
"""The most drafts when their number follows the acceptance: torch keeps 8 compiled graphs, and one is for none."""


class DraftModel:
    """A smaller causal LM with the target's token ids drafts, token by token, what the target then checks at once."""

    def __init__(
        self,
        draft: PreTrainedModel,
        num_drafts: int | Literal["auto"] = 4,
        tree: CandidateTree | Sequence[Sequence[int]] | None = None,
        tokenizers: tuple[Tokenizer, Tokenizer] | None = None,
    ) -> None:
        """Prepare to draft.

        Args:
            draft: the smaller model, on the target's device; its type of numbers may be another.
            num_drafts: length k of the chain that a step drafts. "auto": what pays by the formula, from the request's
                own acceptance and times so far; 0, which is plain decoding, where nothing does. Times differ from run
                to run, so a seed then no longer gives the same text, only the same distribution.
            tree: draft this tree instead of a chain, level by level. Siblings are drawn without replacement; a rank
                only says how many there are.
            tokenizers: the target's and the draft's, to be compared. They must be given where the LM heads were padded
                to different sizes.

        Raises:
            ValueError: an argument is not allowed, the tokenizers differ, or the draft cannot draft trees.
        """
        if num_drafts != "auto" and (not isinstance(num_drafts, int) or num_drafts < 1):
            raise ValueError(
                f"num_drafts is {num_drafts!r}; allowed: 1 or more, or 'auto'. For none, decode with plain `generate`"
            )
        if tree is not None and num_drafts == "auto":
            raise ValueError("num_drafts='auto' changes the length of a chain; leave it out to draft a tree")
        if tree is not None and not isinstance(tree, CandidateTree):
            tree = CandidateTree.from_paths(tree)
        if tree is not None and not tree.paths:
            raise ValueError("the tree is a root alone, so nothing would be drafted; give at least one path")
        install()
        self.draft = Backbone(draft)
        self.adapts = num_drafts == "auto"
        self.tree = tree or CandidateTree.chain(AUTO_MOST if num_drafts == "auto" else num_drafts)
        context = self.draft.context_length
        if context is not None and self.depth >= context:
            raise ValueError(
                f"{self.depth} drafts a step do not fit the draft's context of {context} tokens; ask for fewer"
            )
        check_tree_attention(self.draft)
        if tokenizers is not None:
            check_same_vocabulary(*tokenizers)
        self.shared_ids = None if tokenizers is None else known_ids(tokenizers[0])
        self.vocab_size = self.known_tokens = self.draft.vocab_size

    def for_target(self, target: Backbone, known_tokens: int) -> "DraftModel":
        """The same proposer, for this target.

        Args:
            target: whose distribution is kept.
            known_tokens: ids from here on are never proposed.

        Raises:
            ValueError: the two are on different devices, or their vocabularies have different sizes and no tokenizers
                were compared.
        """
        device, own = target.lm_weight.device, self.draft.lm_weight.device
        if device != own:
            raise ValueError(f"the draft is on {own}, the target on {device}; move one: draft.to('{device}')")
        if self.shared_ids is None and self.draft.vocab_size != target.vocab_size:
            raise ValueError(
                f"the draft's vocabulary has {self.draft.vocab_size} ids, the target's {target.vocab_size}; if one is "
                "only padded, give tokenizers=(the target's, the draft's), else use a draft with the same tokenizer"
            )
        sizes = [sum(p.numel() for p in backbone.model.parameters()) for backbone in (self.draft, target)]
        if sizes[0] > sizes[1]:
            warnings.warn(
                f"the draft has {sizes[0]:,} parameters, the target {sizes[1]:,}; the text stays right, but a draft "
                "larger than its target only slows it down",
                stacklevel=3,
            )
        fitted = copy.copy(self)
        fitted.vocab_size = target.vocab_size
        fitted.known_tokens = min(known_tokens, self.draft.vocab_size, self.shared_ids or known_tokens)
        if fitted.known_tokens < max(self.tree.top_k, 1):
            raise ValueError(
                f"the tree has {self.tree.top_k} siblings, but there are {fitted.known_tokens} tokens only"
            )
        return fitted

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many nodes a step may have."""
        return tuple(range(1, self.tree.num_nodes + 1)) if self.adapts else (self.tree.num_nodes,)

    @property
    def depth(self) -> int:
        """The most drafts that a step can accept."""
        return self.tree.depth

    def start(self, rows: list[Row]) -> "ModelDrafting":
        """Cache the prompts.

        Raises:
            ValueError: a text may grow beyond what the draft can read.
        """
        return ModelDrafting(self, rows)


class ModelDrafting:
    """The draft's cache of one request. It holds each row's text as far as the draft has read it."""

    def __init__(self, proposer: DraftModel, rows: list[Row]) -> None:
        self.proposer = proposer
        self.draft = proposer.draft
        self.stats = DraftStats()
        texts = [len(row.prompt) + row.limit for row in rows]
        context = self.draft.context_length
        if context is not None and max(texts) > context:
            raise ValueError(
                f"prompt and answer may take {max(texts)} tokens, but the draft's context holds {context}; lower "
                "max_new_tokens or use a draft with a longer context"
            )
        check_rope_switch(self.draft, [len(row.prompt) for row in rows], texts, proposer.depth)
        self.cache = TreeCache(self.draft.num_layers, max(texts) + proposer.tree.num_nodes, len(rows))
        prefill(self.draft, [self._readable(row.prompt) for row in rows], self.cache)
        self.rows = rows
        self.read = list(self.cache.lengths.rows)
        """Text that the draft has read, roots included, before it goes into a tree; [B]."""
        self.k = 0
        self.draft_seconds = 0.0
        self.proposed_at = 0.0

    def propose(self, state: DecodingState) -> tuple[Candidates, TreeLayout]:
        """Draft a tree behind every row's root, one pass a level."""
        started = self._now()
        self.rows = state.rows
        self.k = self.stats.best_k(self.proposer.depth) if self.proposer.adapts else self.proposer.depth
        tree = CandidateTree.chain(self.k) if self.proposer.adapts else self.proposer.tree
        layout = layout_of(tree, state.root.device)
        candidates = self._draft(state, layout) if self.k else Candidates(state.root[:, None])
        self.proposed_at = self._now()
        self.draft_seconds = self.proposed_at - started
        return candidates, layout

    def commit(self, paths: list[Path]) -> None:
        """Keep the accepted drafts, as far as they were read: those of the last level were not."""
        accepted = [len(p) - 1 for p, row in zip(paths, self.rows, strict=True) if row.finish_reason is None]
        self.stats.count_step(self.k, accepted, self.draft_seconds, self._now() - self.proposed_at)
        drafted = [length - read for length, read in zip(self.cache.lengths.rows, self.read, strict=True)]
        self.cache.rewind(self.read)
        # Node 1 stands right behind the root, which is text already.
        kept = [[node - 1 for node in path[1:] if node <= count] for path, count in zip(paths, drafted, strict=True)]
        self.cache.keep(kept)
        self.read = list(self.cache.lengths.rows)

    def select(self, rows: list[int]) -> None:
        """Go on with these rows alone."""
        self.cache.select(rows)
        self.read = list(self.cache.lengths.rows)

    def _draft(self, state: DecodingState, layout: TreeLayout) -> Candidates:
        """Fill the tree: each level is drawn from what a pass over the level above it gives."""
        logits = self._catch_up()[:, None]  # [B, 1, V of the draft]
        text = torch.tensor(self.read, device=state.root.device) - 1  # before the roots
        tokens = torch.full((len(state.rows), layout.num_nodes), NO_TOKEN, device=state.root.device)
        tokens[:, 0] = state.root
        greedy = torch.tensor([not row.do_sample for row in state.rows], device=tokens.device)
        levels, all_q = depth_ranges(layout), []
        for level, below in itertools.pairwise(levels):
            q = self._distributions(state.rows, logits)  # [B, n, V]
            all_q.append(q)
            for i, node in enumerate(level):
                children = layout.children[0][node]
                tokens[:, children] = draw_drafts(q[:, i], len(children), greedy, state.draws)
            if below != levels[-1]:
                logits = verify_nodes(self.draft, tokens[:, list(below)], layout, below, text, self.cache)
                self.cache.keep([list(range(len(below)))] * len(state.rows))
        if bool(greedy.all()):
            return Candidates(tokens)
        # Nodes are numbered level by level, so the children of each node were drawn from the q of its own number.
        return Candidates(tokens, Drawn(torch.cat(all_q, dim=1), torch.arange(layout.num_nodes, device=tokens.device)))

    def _catch_up(self) -> Tensor:
        """Read what each row's text has behind the cache, its root last; returns the logits after it, [B, V]."""
        unread = [
            self._readable(row.ids[row.start + read - len(row.prompt) : row.length])
            for row, read in zip(self.rows, self.cache.lengths.rows, strict=True)
        ]
        counts = [len(tokens) for tokens in unread]
        layout = layout_of(CandidateTree.chain(max(counts) - 1), unread[0].device)
        _, logits = verify(self.draft, pad_sequence(unread, batch_first=True), layout, self.cache)
        self.cache.keep([list(range(count)) for count in counts])
        self.read = list(self.cache.lengths.rows)
        return logits[torch.arange(len(counts)), torch.tensor(counts) - 1]

    def _readable(self, ids: Tensor) -> Tensor:
        """Ids that the draft's shorter table has no row for are read as its last: a poor guess, but no wrong text."""
        return ids.clamp(max=len(self.draft.root_table) - 1)

    def _distributions(self, rows: list[Row], logits: Tensor) -> Tensor:
        """What drafts are drawn from, over the target's vocabulary: [B, n, V of the draft] -> [B, n, V]."""
        known = self.proposer.known_tokens
        scores = logits[..., :known]
        q = draft_scores(rows, scores if scores.dtype == torch.float64 else scores.float()).softmax(dim=-1)
        # What underflows is not drawn: acceptance could not bring the rest of q to 1 once its siblings are rejected.
        q = q.masked_fill(q < torch.finfo(q.dtype).tiny, 0.0)
        return torch.nn.functional.pad(q, (0, self.proposer.vocab_size - known))

    def _now(self) -> float:
        device = self.draft.lm_weight.device
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return time.perf_counter()


@lru_cache(maxsize=64)
def layout_of(tree: CandidateTree, device: torch.device) -> TreeLayout:
    """The tree laid out, once for all steps."""
    return TreeLayout.of(tree, device)


def depth_ranges(layout: TreeLayout) -> list[range]:
    """The nodes of each depth; they follow each other."""
    depths = layout.depths[0].tolist()
    return [range(depths.index(d), depths.index(d) + depths.count(d)) for d in range(depths[-1] + 1)]


def draw_drafts(q: Tensor, count: int, greedy: Tensor, draws: Draws) -> Tensor:
    """Draw from q without replacement, or take the likeliest tokens.

    Args:
        q: [B, V].
        count: C, how many.
        greedy: bool [B], rows that take the likeliest.
        draws: the dice.

    Returns:
        Tokens in the order in which they were drawn, [B, C]; -1 where nothing is left of q.
    """
    drawn = []
    for _ in range(count):
        left = q.sum(dim=-1, keepdim=True) > 0
        token = q.argmax(dim=-1)
        if not bool(greedy.all()):
            token = torch.where(greedy, token, draws.categorical(torch.where(left, q, 1.0)))
        drawn.append(torch.where(left[:, 0], token, NO_TOKEN))
        q = q.scatter(1, token[:, None], 0.0)
    if not drawn:
        return torch.empty(len(q), 0, dtype=torch.long, device=q.device)
    return torch.stack(drawn, dim=1)
