"""A key-value cache that takes a whole candidate tree and keeps the accepted path.

B batch, H key-value heads, S capacity, T new positions, Dh head size.
"""

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

GROWTH = 256
"""A layer grows by at least this many positions, and by a quarter of what it holds."""


class TreeCacheLayer(CacheLayerMixin):
    """Keys and values of one layer in a buffer that is allocated ahead and written in place.

    Sliding-window layers keep every position too: which of them a node sees is the attention mask's business, and
    a rejected guess must not have pushed anything out.
    """

    is_sliding = False

    def __init__(self, capacity: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.capacity = capacity
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the buffers in the shape of the first keys [B, H, T, Dh] and values."""
        self.device = key_states.device
        self.keys = key_states.new_empty((*key_states.shape[:-2], self.capacity, key_states.shape[-1]))
        self.values = value_states.new_empty((*value_states.shape[:-2], self.capacity, value_states.shape[-1]))
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append T positions; returns views of all the keys and values so far, [B, H, length, Dh]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[-2]
        if end > self.capacity:
            self._grow(end)
        assert self.keys is not None
        assert self.values is not None
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def _grow(self, needed: int) -> None:
        assert self.keys is not None
        assert self.values is not None
        self.capacity = max(needed, self.capacity + max(GROWTH, self.capacity // 4))
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_empty((*old.shape[:-2], self.capacity, old.shape[-1]))
            new[:, :, : self.length] = old[:, :, : self.length]
            setattr(self, name, new)

    def keep(self, start: int, rows: Tensor) -> None:
        """Keep positions `start + rows` (ascending) right behind `start` and forget everything else after it.

        RoPE is in the keys already, so a row may move. The cost depends on how many rows there are, not on `start`.
        """
        end = start + len(rows)
        if self.is_initialized:
            assert self.keys is not None
            assert self.values is not None
            source = rows + start
            self.keys[:, :, start:end] = self.keys[:, :, source]
            self.values[:, :, start:end] = self.values[:, :, source]
        self.length = end

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(How many keys the next pass sees, index of the first)."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """How many positions are cached."""
        return self.length

    def get_max_length(self) -> int:
        """-1: no limit."""
        return -1


class TreeCache(Cache):
    """One `TreeCacheLayer` for every layer of the backbone."""

    def __init__(self, num_layers: int, capacity: int) -> None:
        """Prepare room for `capacity` positions; memory is taken at the first pass."""
        self.tree_layers = [TreeCacheLayer(capacity) for _ in range(num_layers)]
        super().__init__(layers=list(self.tree_layers))

    @property
    def length(self) -> int:
        """How many positions are cached."""
        return self.get_seq_length()

    def keep(self, start: int, rows: Tensor) -> None:
        """Commit the accepted rows of the tree whose pass began at `start`; see `TreeCacheLayer.keep`."""
        if torch.equal(rows, torch.arange(len(rows), device=rows.device)):
            for layer in self.tree_layers:
                layer.length = start + len(rows)
            return
        for layer in self.tree_layers:
            layer.keep(start, rows.to(layer.device) if layer.is_initialized else rows)
