"""A key-value cache that takes a whole candidate tree for every row and keeps the accepted paths.

B rows, H key-value heads, C capacity, T new positions, Dh head size.
"""

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

GROWTH = 256
"""A layer grows by at least this many positions, and by a quarter of what it holds."""


class Lengths:
    """How much text each row has cached; shared by all layers."""

    def __init__(self, rows: int) -> None:
        self.rows = [0] * rows

    @property
    def longest(self) -> int:
        """Length of the longest row."""
        return max(self.rows)

    @property
    def uniform(self) -> bool:
        """Whether all rows are equally long, so that they can be written as one block."""
        return min(self.rows) == self.longest


class TreeCacheLayer(CacheLayerMixin):
    """Keys and values of one layer in a buffer that is allocated ahead and written in place.

    Each row's text starts at position 0; a pass writes its positions right behind the text, over what an earlier pass
    left there. They count as text once `TreeCache.keep` says so. Sliding-window layers keep every position too: which
    of them a node sees is the attention mask's business, and a rejected guess must not have pushed anything out.
    """

    is_sliding = False

    def __init__(self, lengths: Lengths, capacity: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lengths = lengths
        self.capacity = capacity

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the buffers in the shape of the first keys [B, H, T, Dh] and values."""
        self.device = key_states.device
        # Zeros: what no row has written yet is masked, but 0 times an arbitrary NaN would still be NaN.
        self.keys = key_states.new_zeros((*key_states.shape[:-2], self.capacity, key_states.shape[-1]))
        self.values = value_states.new_zeros((*value_states.shape[:-2], self.capacity, value_states.shape[-1]))
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write T positions behind each row's text; returns views of all keys and values, [B, H, longest + T, Dh]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new = key_states.shape[-2]
        end = self.lengths.longest + new
        self.reserve(end)
        assert self.keys is not None
        assert self.values is not None
        if self.lengths.uniform:
            self.keys[:, :, end - new : end] = key_states
            self.values[:, :, end - new : end] = value_states
        else:
            starts = torch.tensor(self.lengths.rows, device=self.device)
            place = starts[:, None] + torch.arange(new, device=self.device)  # [B, T]
            rows = torch.arange(len(place), device=self.device)[:, None]
            self.keys[rows, :, place] = key_states.transpose(1, 2)
            self.values[rows, :, place] = value_states.transpose(1, 2)
        return self.keys[:, :, :end], self.values[:, :, :end]

    def reserve(self, needed: int) -> None:
        """Make room for so many positions."""
        if needed <= self.capacity:
            return
        old_capacity = self.capacity
        self.capacity = max(needed, self.capacity + max(GROWTH, self.capacity // 4))
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_zeros((*old.shape[:-2], self.capacity, old.shape[-1]))
            new[:, :, :old_capacity] = old
            setattr(self, name, new)

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy positions `source` [B, W] of each row to `target` [B, W]. RoPE is in the keys already."""
        assert self.keys is not None
        assert self.values is not None
        source, target = source.to(self.device), target.to(self.device)
        rows = torch.arange(len(source), device=self.device)[:, None]
        self.keys[rows, :, target] = self.keys[rows, :, source]
        self.values[rows, :, target] = self.values[rows, :, source]

    def select(self, rows: Tensor) -> None:
        """Keep only these rows."""
        assert self.keys is not None
        assert self.values is not None
        rows = rows.to(self.device)
        self.keys, self.values = self.keys[rows], self.values[rows]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(How many keys the next pass sees, index of the first)."""
        return self.lengths.longest + query_length, 0

    def get_seq_length(self) -> int:
        """Length of the longest row's text."""
        return self.lengths.longest

    def get_max_length(self) -> int:
        """-1: no limit."""
        return -1


class TreeCache(Cache):
    """One `TreeCacheLayer` for every layer of the backbone."""

    def __init__(self, num_layers: int, capacity: int, rows: int = 1) -> None:
        """Prepare room for `capacity` positions of each row; memory is taken at the first pass."""
        self.lengths = Lengths(rows)
        self.tree_layers = [TreeCacheLayer(self.lengths, capacity) for _ in range(num_layers)]
        super().__init__(layers=list(self.tree_layers))

    def reserve(self, positions: int) -> None:
        """Make room for so many positions in every layer."""
        for layer in self.tree_layers:
            layer.reserve(positions)

    def keep(self, paths: list[list[int]]) -> None:
        """Count the accepted positions of the last pass as text, moved together, and forget the others.

        Args:
            paths: for each row the positions to keep, ascending, counted from the end of its text. What this costs
                depends on how long they are, not on the text.
        """
        lengths = self.lengths.rows
        if any(path[-1:] != [len(path) - 1] for path in paths if path):
            width = max(map(len, paths))
            # A short path is filled up with positions that stay where they are.
            source = torch.tensor([[*path, *range(len(path), width)] for path in paths])
            start = torch.tensor(lengths)[:, None]
            for layer in self.tree_layers:
                if layer.is_initialized:
                    layer.move(start + source, start + torch.arange(width))
        self.lengths.rows = [length + len(path) for length, path in zip(lengths, paths, strict=True)]

    def rewind(self, lengths: list[int]) -> None:
        """Count only so much of each row as text; what stands behind is free, and can still be kept."""
        self.lengths.rows = list(lengths)

    def select(self, rows: list[int]) -> None:
        """Keep only these rows; the others' memory is given back."""
        for layer in self.tree_layers:
            if layer.is_initialized:
                layer.select(torch.tensor(rows))
        self.lengths.rows = [self.lengths.rows[row] for row in rows]
