"""The verify pass as one compiled graph, for one row.

Its shapes do not change: N nodes, and a key-value buffer whose size and filled length are symbols in the graph. So it
is compiled once for every N in use, whatever the prompt, the length of the text and the room taken for it. B is 1;
N nodes, C capacity of the cache, L positions that the cache shows, H key-value heads, Dh head size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from medusa.backbone import Backbone
from medusa.tree import CandidateTree

from .cache import TreeCache
from .layout import TreeLayout
from .tree_attention import TreePass, traced
from .verify import positions, prefill


class _Layer(CacheLayerMixin):
    """A layer of a `TreeCache` as the graph sees it: where to write is a tensor, not a number to specialise on."""

    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor, place: Tensor, shown: int) -> None:
        self.keys, self.values = keys, values
        self.place, self.shown = place, shown
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """There already."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write N positions; returns all that are shown, [1, H, L, Dh]."""
        assert self.keys is not None
        assert self.values is not None
        self.keys.index_copy_(2, self.place, key_states)
        self.values.index_copy_(2, self.place, value_states)
        return self.keys[:, :, : self.shown], self.values[:, :, : self.shown]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(L, 0)."""
        return self.shown, 0

    def get_seq_length(self) -> int:
        """Positions are given, so nobody needs it."""
        return 0

    def get_max_length(self) -> int:
        """-1: no limit."""
        return -1


class CompiledVerify:
    """Takes the place of `verify` for one row."""

    def __init__(self, backbone: Backbone) -> None:
        """Prepare; the first pass of each size compiles its graph, which takes from half a minute to some minutes."""
        self.backbone = backbone
        self._graph = torch.compile(self._run, fullgraph=True, dynamic=False)

    @torch.inference_mode()
    def warm_up(self, sizes: Sequence[int]) -> None:
        """Make the graph of every size now."""
        device = self.backbone.lm_weight.device
        # More room than is filled, as in a request: a graph made for a full buffer would be good for full ones alone.
        prompt = torch.zeros(4, dtype=torch.long, device=device)
        cache = TreeCache(self.backbone.num_layers, 2 * (len(prompt) + max(sizes)))
        prefill(self.backbone, [prompt], cache)
        for size in sizes:
            layout = TreeLayout.of(CandidateTree.chain(size - 1), device)
            self(torch.zeros(1, size, dtype=torch.long, device=device), layout, cache)

    def __call__(self, tokens: Tensor, layout: TreeLayout, cache: TreeCache) -> tuple[Tensor, Tensor]:
        """As `verify`: tokens [1, N] -> hidden states [1, N, D] and logits [1, N, V]."""
        nodes = layout.num_nodes
        length = cache.lengths.longest
        cache.reserve(length + nodes)
        buffers = [buffer for layer in cache.tree_layers for buffer in (layer.keys, layer.values) if buffer is not None]
        for buffer in buffers:
            torch._dynamo.maybe_mark_dynamic(buffer, 2)
        # The graph reads L from a size, since sizes may be symbols.
        shown = torch.empty(length + nodes, 0)
        torch._dynamo.maybe_mark_dynamic(shown, 0)
        lengths = torch.tensor([length], device=tokens.device)
        where = positions(self.backbone, lengths, layout)
        hidden, logits = self._graph(
            tokens.clamp(min=0), where, lengths, layout.depths, layout.ancestors, shown, buffers
        )
        return hidden, logits

    def _run(
        self,
        tokens: Tensor,
        where: Tensor,
        lengths: Tensor,
        depths: Tensor,
        ancestors: Tensor,
        shown: Tensor,
        buffers: list[Tensor],
    ) -> tuple[Tensor, Tensor]:
        place = lengths[0] + torch.arange(tokens.shape[1], device=tokens.device)
        pairs = zip(buffers[::2], buffers[1::2], strict=True)
        cache = Cache(layers=[_Layer(keys, values, place, shown.shape[0]) for keys, values in pairs])
        traced.tree_pass = TreePass(TreeLayout(depths, depths, ancestors, [], 0), lengths)
        hidden = self.backbone.extend(tokens, cache, where)
        traced.tree_pass = None
        return hidden, self.backbone.logits(hidden)


def check_sizes(sizes: Sequence[int]) -> None:
    """Refuse more sizes than the compiler keeps graphs of one function.

    Raises:
        ValueError: there are too many.
    """
    limit = torch._dynamo.config.recompile_limit
    if len(sizes) > limit:
        raise ValueError(
            f"compile=True makes one graph for each of the {len(sizes)} sizes {sizes} of the tree, and torch keeps "
            f"{limit}; give fewer sizes"
        )


def why_not_compile(device: torch.device) -> str | None:
    """Why graphs cannot be compiled on this machine, or None if they can."""
    if device.type != "cpu":
        return None
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "there is no C++ compiler on this machine (install g++, or set CXX)"
    return None
