"""Hit rates and what is known of them, against counts by hand and published intervals."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from medusa.hit_rates import (
    RATES_FILE,
    HitRates,
    count_hit_rates,
    load_hit_rates,
    one_hot_ranks,
    save_hit_rates,
    wilson,
)
from medusa.tree_search import MISS

RANKS = torch.tensor([[0, 1], [0, MISS], [2, 0], [MISS, 0]])


def test_heads_are_judged_where_the_heads_before_were_right() -> None:
    rates = count_hit_rates(RANKS, one_hot_ranks(RANKS, 3), 0.0)
    assert rates.reached == (4, 3)
    assert rates.hits == ((2, 0, 1), (1, 1, 0))
    assert rates.rate(0, 0) == 0.5
    assert rates.rate(1, 1) == pytest.approx(1 / 3)
    nowhere = torch.full((4, 2), MISS)
    assert count_hit_rates(nowhere, one_hot_ranks(nowhere, 3), 0.0).rate(1, 0) == 0


def test_expected_hits_are_means_of_probabilities() -> None:
    acceptance = F.softmax(torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(0)), dim=-1)
    rates = count_hit_rates(RANKS, acceptance, 0.7)
    assert rates.temperature == 0.7
    assert rates.rate(0, 1) == pytest.approx(float(acceptance[:, 0, 1].mean()), abs=1e-4)
    assert rates.rate(1, 1) == pytest.approx(float(acceptance[:3, 1, 1].mean()), abs=1e-4)


@pytest.mark.parametrize(
    ("hits", "count", "low", "high"),
    [(0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (1, 29, 0.0061, 0.1718), (81, 263, 0.2553, 0.3662)],
)
def test_wilson_intervals_are_the_published_ones(hits: int, count: int, low: float, high: float) -> None:
    """The last two are of Newcombe (1998), table I, method 3."""
    assert wilson(hits, count) == pytest.approx((low, high), abs=5e-4)


def test_nothing_seen_is_nothing_known() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
    assert HitRates(0.0, (0,), ((0.0,),)).interval(0, 0) == (0.0, 1.0)


def test_round_trip_and_damage(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no hit rates.*medusa tree"):
        load_hit_rates(tmp_path)
    rates = [count_hit_rates(RANKS, one_hot_ranks(RANKS, 3), temperature) for temperature in (0.0, 0.7)]
    save_hit_rates(rates, tmp_path)
    assert load_hit_rates(tmp_path) == rates
    for content in ("", "3", '[{"temperature": 0}]', '[{"temperature": 0, "reached": 1, "hits": 2}]'):
        (tmp_path / RATES_FILE).write_text(content)
        with pytest.raises(ValueError, match=f"{RATES_FILE} does not hold hit rates"):
            load_hit_rates(tmp_path)
