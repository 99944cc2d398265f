"""Keys and values of many texts that grow together, one token each at a time.

n rows, H key-value heads, S width, T new columns, Dh head size.
"""

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class BatchCacheLayer(CacheLayerMixin):
    """Keys and values of one layer in a buffer that is allocated once and written in place.

    All texts end at the same column, so shorter ones start later. Sliding-window layers keep every column too: the
    attention mask hides what is out of reach.
    """

    is_sliding = False

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows, self.width = rows, width
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate in the shape of some keys [n, H, T, Dh] and values; zeros, as masked columns count 0 times."""
        self.device = key_states.device
        self.keys = key_states.new_zeros(self.rows, key_states.shape[1], self.width, key_states.shape[3])
        self.values = value_states.new_zeros(self.rows, value_states.shape[1], self.width, value_states.shape[3])
        self.is_initialized = True

    def write(self, rows: Tensor, end: int, key_states: Tensor, value_states: Tensor) -> None:
        """Put texts of T columns into `rows` so that they end at column `end`."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        start = end - key_states.shape[-2]
        self.keys[rows, :, start:end] = key_states
        self.values[rows, :, start:end] = value_states

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append T columns to the first rows; returns views of all that these hold, [n, H, length, Dh]."""
        assert self.keys is not None
        assert self.values is not None
        rows, end = len(key_states), self.length + key_states.shape[-2]
        self.keys[:rows, :, self.length : end] = key_states
        self.values[:rows, :, self.length : end] = value_states
        self.length = end
        return self.keys[:rows, :, :end], self.values[:rows, :, :end]

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy rows over others."""
        assert self.keys is not None
        assert self.values is not None
        self.keys[target, :, : self.length] = self.keys[source, :, : self.length]
        self.values[target, :, : self.length] = self.values[source, :, : self.length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(How many columns the next pass sees, index of the first)."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """How many columns are filled."""
        return self.length

    def get_max_length(self) -> int:
        """-1: no limit that a mask needs to know."""
        return -1


class BatchCache(Cache):
    """One `BatchCacheLayer` for every layer of the backbone."""

    def __init__(self, num_layers: int, rows: int, width: int, length: int) -> None:
        """Prepare room for `rows` texts of up to `width` columns, the first `length` of which `write` fills."""
        self.batch_layers = [BatchCacheLayer(rows, width) for _ in range(num_layers)]
        super().__init__(layers=list(self.batch_layers))
        for layer in self.batch_layers:
            layer.length = length

    def write(self, rows: Tensor, texts: Cache) -> None:
        """Put texts that were read elsewhere into `rows`, against the last filled column."""
        for layer, text in zip(self.batch_layers, texts.layers, strict=True):
            assert isinstance(text, CacheLayerMixin)
            assert text.keys is not None
            assert text.values is not None
            layer.write(rows, layer.length, text.keys, text.values)

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy rows over others in every layer."""
        for layer in self.batch_layers:
            layer.move(source, target)
