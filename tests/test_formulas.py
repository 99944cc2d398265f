"""The formulas give the figures of the papers, and the choice of k follows them."""

import itertools

import pytest
import torch

from medusa.inference import DraftStats
from medusa.inference.draft_stats import FIRST_TRY, RETRY
from medusa.inference.formulas import acceptance, expected_tokens, overlap, speedup

EXAMPLES = [(0.8, 4, 3.36), (0.9, 5, 4.69), (0.5, 4, 1.94), (1, 4, 5), (0, 4, 1)]


def test_worked_example_of_four_drafts() -> None:
    p, q = torch.tensor([0.85, 0.40, 0.30, 0.10]), torch.tensor([0.70, 0.35, 0.25, 0.30])
    assert acceptance(p, q).tolist() == pytest.approx([1, 1, 1, 1 / 3])
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    assert float(overlap(p, q)) == pytest.approx(0.6)
    assert float(overlap(p, q)) == pytest.approx(1 - float((p - q).abs().sum()) / 2)
    assert float(overlap(p, q)) == pytest.approx(float((q * acceptance(p, q)).sum()))


@pytest.mark.parametrize(("alpha", "k", "tokens"), EXAMPLES)
def test_expected_tokens(alpha: float, k: int, tokens: float) -> None:
    assert expected_tokens(alpha, k) == pytest.approx(tokens, abs=5e-3)


def test_speedup_and_what_it_refuses() -> None:
    assert speedup(0.8, 4, 0.1) == pytest.approx(3.3616 / 1.4)
    assert speedup(0.8, 4, 0.1, 1.2) == pytest.approx(3.3616 / 1.6)
    assert speedup(0.8, 0, 0.1) == 1
    with pytest.raises(ValueError, match=r"alpha is 1\.5"):
        expected_tokens(1.5, 2)
    with pytest.raises(ValueError, match="k is -1"):
        expected_tokens(0.5, -1)
    with pytest.raises(ValueError, match=r"the costs are 0\.1 and 0"):
        speedup(0.5, 2, 0.1, 0)


def run(accepts: bool, draft_seconds: float, steps: int, stats: DraftStats | None = None) -> DraftStats:
    """A request whose plain pass takes 1 s, and each draft verified 0.01 s more."""
    stats = stats or DraftStats()
    for _ in range(steps):
        k = stats.best_k(7)
        stats.count_step(k, [k if accepts else 0], k * draft_seconds, 1 + 0.01 * k)
    return stats


def test_k_follows_acceptance_and_cost() -> None:
    good = run(accepts=True, draft_seconds=0.1, steps=20)
    assert good.levels[:2] == [0, FIRST_TRY]
    assert good.levels[-1] == 7
    assert good.alpha == 1
    assert good.expected_tokens(7) == 8
    assert good.predicted_speedup(7, 1.0) == pytest.approx(8 / 1.77)
    assert run(accepts=True, draft_seconds=2.0, steps=20).levels[-1] == 0, "too slow to pay"


def test_a_plain_pass_that_took_long_once_is_measured_again() -> None:
    """The first one compiled for 30 s, so that any drafting looked quick beside it."""
    stats = DraftStats()
    stats.count_step(0, [0], 0.0, 30.0)
    run(accepts=False, draft_seconds=0.1, steps=100, stats=stats)
    assert stats.levels[60:].count(0) > 30


def test_drafting_that_does_not_pay_is_tried_again_from_time_to_time() -> None:
    stats = run(accepts=False, draft_seconds=0.1, steps=60)
    tries = [step for step, k in enumerate(stats.levels) if k]
    assert [b - a for a, b in itertools.pairwise(tries)][1:] == [RETRY + 1] * (len(tries) - 2)
    assert run(accepts=True, draft_seconds=0.1, steps=300, stats=stats).levels[-1] > 0


def test_alpha_counts_every_test_and_nothing_behind_a_rejection() -> None:
    stats = DraftStats()
    stats.count_step(4, [4, 1, 0], 0.4, 1.0)
    assert (stats.tested, stats.accepted) == (4 + 2 + 1, 5)
    stats.count_step(0, [0, 0, 0], 0.0, 1.0)
    assert stats.tested == 7
