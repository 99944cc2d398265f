"""The cache, against a list of rows."""

import random

import pytest
import torch
from torch import Tensor

from medusa.inference.cache import GROWTH, TreeCache, TreeCacheLayer

SHAPE = (1, 2, 3)  # batch, key-value heads, head size


class SlowLayer:
    """Rows in a list; nothing is written in place."""

    def __init__(self) -> None:
        self.rows: list[Tensor] = []

    def append(self, states: Tensor) -> None:
        self.rows += states.unbind(dim=2)

    def keep(self, start: int, rows: list[int]) -> None:
        self.rows = self.rows[:start] + [self.rows[start + row] for row in rows]

    def tensor(self) -> Tensor:
        return torch.stack(self.rows, dim=2)


def states(positions: int, generator: torch.Generator) -> Tensor:
    batch, heads, size = SHAPE
    return torch.randn(batch, heads, positions, size, generator=generator)


@pytest.mark.parametrize("capacity", [1, 8, 1000])
@pytest.mark.parametrize("seed", range(4))
def test_random_steps_match_a_list(seed: int, capacity: int) -> None:
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    cache = TreeCache(num_layers=2, capacity=capacity)
    slow = [(SlowLayer(), SlowLayer()) for _ in range(2)]
    seen: list[tuple[Tensor, Tensor]] = []

    def append(positions: int) -> None:
        seen.clear()
        for layer, (slow_keys, slow_values) in enumerate(slow):
            keys, values = states(positions, generator), states(positions, generator)
            slow_keys.append(keys)
            slow_values.append(values)
            seen.append(cache.update(keys, values, layer))
        for (keys, values), (slow_keys, slow_values) in zip(seen, slow, strict=True):
            assert torch.equal(keys, slow_keys.tensor())
            assert torch.equal(values, slow_values.tensor())

    append(choose.randint(1, 20))
    for _ in range(40):
        start, nodes = cache.length, choose.randint(1, 16)
        append(nodes)
        kept = sorted(choose.sample(range(nodes), choose.randint(0, min(nodes, 5))))
        if choose.random() < 0.3:
            kept = list(range(len(kept)))  # a chain, which does not move
        cache.keep(start, torch.tensor(kept, dtype=torch.long))
        for slow_keys, slow_values in slow:
            slow_keys.keep(start, kept)
            slow_values.keep(start, kept)
        assert cache.length == start + len(kept)
        assert all(layer.length == cache.length for layer in cache.layers)
    append(1)  # compares everything that is left


def test_keep_copies_rows_that_overlap() -> None:
    """Rows move to the left over one another: each must be read before it is overwritten."""
    layer = TreeCacheLayer(capacity=16)
    rows = torch.arange(10.0).view(1, 1, 10, 1)
    layer.update(rows, rows + 100)
    layer.keep(2, torch.tensor([1, 2, 3, 5, 7]))
    keys, values = layer.update(torch.full((1, 1, 1, 1), -1.0), torch.full((1, 1, 1, 1), -2.0))
    assert keys.flatten().tolist() == [0, 1, 3, 4, 5, 7, 9, -1]
    assert values.flatten().tolist() == [100, 101, 103, 104, 105, 107, 109, -2]


def test_memory_is_taken_once_where_it_fits() -> None:
    layer = TreeCacheLayer(capacity=50)
    keys, _ = layer.update(torch.zeros(1, 2, 40, 3), torch.zeros(1, 2, 40, 3))
    start = keys.data_ptr()
    for _ in range(10):
        keys, _ = layer.update(torch.zeros(1, 2, 1, 3), torch.zeros(1, 2, 1, 3))
        assert keys.data_ptr() == start
    assert layer.capacity == 50


def test_growth_comes_in_chunks() -> None:
    layer = TreeCacheLayer(capacity=4)
    layer.update(torch.ones(1, 2, 4, 3), torch.ones(1, 2, 4, 3))
    keys, _ = layer.update(torch.ones(1, 2, 1, 3), torch.ones(1, 2, 1, 3))
    assert layer.capacity >= 4 + GROWTH
    assert keys.shape[2] == 5
    assert keys.all(), "what was cached before it grew is lost"
    layer.update(torch.ones(1, 2, 5000, 3), torch.ones(1, 2, 5000, 3))
    assert layer.capacity == 5005


def test_keys_and_values_may_differ_in_size() -> None:
    layer = TreeCacheLayer(capacity=2)
    keys, values = layer.update(torch.randn(1, 2, 5, 3), torch.randn(1, 2, 5, 7))
    assert keys.shape == (1, 2, 5, 3)
    assert values.shape == (1, 2, 5, 7)


def test_nothing_cached_yet() -> None:
    cache = TreeCache(num_layers=2, capacity=4)
    assert cache.length == 0
    cache.keep(0, torch.tensor([], dtype=torch.long))
    assert cache.length == 0
    assert cache.layers[0].get_mask_sizes(3) == (3, 0)
