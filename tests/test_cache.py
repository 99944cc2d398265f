"""The cache, against lists of rows."""

import random

import pytest
import torch
from torch import Tensor

from medusa.inference.cache import GROWTH, Lengths, TreeCache, TreeCacheLayer

HEADS, SIZE = 2, 3


class SlowText:
    """One row of one layer in a list; nothing is written in place."""

    def __init__(self) -> None:
        self.positions: list[Tensor] = []
        self.last: list[Tensor] = []

    def append(self, states: Tensor) -> None:
        self.last = list(states.unbind(dim=1))

    def keep(self, path: list[int]) -> None:
        self.positions += [self.last[node] for node in path]

    def tensor(self) -> Tensor:
        return torch.stack(self.positions + self.last, dim=1)


@pytest.mark.parametrize("capacity", [1, 8, 1000])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_random_steps_match_a_list(seed: int, rows: int, capacity: int) -> None:
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    cache = TreeCache(num_layers=2, capacity=capacity, rows=rows)
    slow = [[(SlowText(), SlowText()) for _ in range(rows)] for _ in range(2)]

    def append(new: int) -> None:
        for layer, texts in enumerate(slow):
            keys = torch.randn(rows, HEADS, new, SIZE, generator=generator)
            values = torch.randn(rows, HEADS, new, SIZE, generator=generator)
            seen = cache.update(keys, values, layer)
            for b, pair in enumerate(texts):
                for text, written, shown in zip(pair, (keys, values), seen, strict=True):
                    text.append(written[b])
                    expected = text.tensor()
                    assert torch.equal(shown[b, :, : expected.shape[1]], expected)

    for step in range(40):
        new = choose.randint(1, 20 if step == 0 else 12)
        append(new)
        paths = [sorted(choose.sample(range(new), choose.randint(0, min(new, 5)))) for _ in range(rows)]
        if choose.random() < 0.3:
            paths = [list(range(len(path))) for path in paths]  # chains, which do not move
        cache.keep(paths)
        for texts in slow:
            for pair, path in zip(texts, paths, strict=True):
                for text in pair:
                    text.keep(path)
        assert cache.lengths.rows == [len(texts[0].positions) for texts in slow[0]]
        assert cache.get_seq_length() == max(cache.lengths.rows)
        if rows > 1 and step == 20:
            kept = [2, 0]
            cache.select(kept)
            slow = [[texts[b] for b in kept] for texts in slow]
            rows = 2
    append(1)  # compares everything that is left


def layer_of(capacity: int, rows: int = 1) -> TreeCacheLayer:
    return TreeCacheLayer(Lengths(rows), capacity)


def test_keep_copies_positions_that_overlap() -> None:
    """They move to the left over one another: each must be read before it is overwritten."""
    cache = TreeCache(num_layers=1, capacity=16)
    states = torch.arange(10.0).view(1, 1, 10, 1)
    cache.update(states[:, :, :2], states[:, :, :2] + 100, 0)
    cache.keep([[0, 1]])
    cache.update(states[:, :, 2:], states[:, :, 2:] + 100, 0)
    cache.keep([[1, 2, 3, 5, 7]])
    keys, values = cache.update(torch.full((1, 1, 1, 1), -1.0), torch.full((1, 1, 1, 1), -2.0), 0)
    assert keys.flatten().tolist() == [0, 1, 3, 4, 5, 7, 9, -1]
    assert values.flatten().tolist() == [100, 101, 103, 104, 105, 107, 109, -2]


def test_a_pass_that_is_not_kept_leaves_nothing() -> None:
    cache = TreeCache(num_layers=1, capacity=4)
    cache.update(torch.ones(1, 1, 3, 1), torch.ones(1, 1, 3, 1), 0)
    cache.keep([[]])
    keys, _ = cache.update(torch.zeros(1, 1, 2, 1), torch.zeros(1, 1, 2, 1), 0)
    assert keys.flatten().tolist() == [0, 0]


def test_memory_is_taken_once_where_it_fits() -> None:
    cache = TreeCache(num_layers=1, capacity=50)
    keys, _ = cache.update(torch.zeros(1, 2, 40, 3), torch.zeros(1, 2, 40, 3), 0)
    cache.keep([list(range(40))])
    start = keys.data_ptr()
    for _ in range(10):
        keys, _ = cache.update(torch.zeros(1, 2, 1, 3), torch.zeros(1, 2, 1, 3), 0)
        cache.keep([[0]])
        assert keys.data_ptr() == start
    assert cache.tree_layers[0].capacity == 50


def test_growth_comes_in_chunks() -> None:
    cache = TreeCache(num_layers=1, capacity=4)
    cache.update(torch.ones(1, 2, 4, 3), torch.ones(1, 2, 4, 3), 0)
    cache.keep([[0, 1, 2, 3]])
    keys, _ = cache.update(torch.ones(1, 2, 1, 3), torch.ones(1, 2, 1, 3), 0)
    layer = cache.tree_layers[0]
    assert layer.capacity >= 4 + GROWTH
    assert keys.shape[2] == 5
    assert keys.all(), "what was cached before it grew is lost"
    cache.keep([[0]])
    cache.update(torch.ones(1, 2, 5000, 3), torch.ones(1, 2, 5000, 3), 0)
    assert layer.capacity == 5005


def test_keys_and_values_may_differ_in_size() -> None:
    keys, values = layer_of(capacity=2).update(torch.randn(1, 2, 5, 3), torch.randn(1, 2, 5, 7))
    assert keys.shape == (1, 2, 5, 3)
    assert values.shape == (1, 2, 5, 7)


def test_what_no_row_has_written_is_finite() -> None:
    """It is masked, but a masked NaN would still spoil the sum over values."""
    cache = TreeCache(num_layers=1, capacity=64, rows=2)
    cache.update(torch.ones(2, 1, 5, 1), torch.ones(2, 1, 5, 1), 0)
    cache.keep([[0], [0, 1, 2, 3, 4]])
    keys, values = cache.update(torch.ones(2, 1, 3, 1), torch.ones(2, 1, 3, 1), 0)
    assert keys.isfinite().all()
    assert values.isfinite().all()


def test_nothing_cached_yet() -> None:
    cache = TreeCache(num_layers=2, capacity=4)
    assert cache.get_seq_length() == 0
    cache.keep([[]])
    assert cache.get_seq_length() == 0
    assert cache.layers[0].get_mask_sizes(3) == (3, 0)
