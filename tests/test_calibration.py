"""What confidence is worth, recovered from data made by a known calibration."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from medusa.calibration import Calibration, fit_calibration, log_hit, log_odds
from medusa.tree_search import (
    MISS,
    TREE_FILE,
    SearchedTree,
    count_gains,
    search_tree,
    search_tree_for_decoding,
    visited_positions,
)

TRUE = Calibration((0.6, 1.0, 1.4), (-1.0, 0.0, 0.5))


def tensors(calibration: Calibration) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(calibration.powers), torch.tensor(calibration.offsets)


def synthetic(positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Confidences of 3 heads in their 2 best guesses, and ranks that hit as often as `TRUE` says."""
    generator = torch.Generator().manual_seed(0)
    best = torch.rand(positions, 3, generator=generator) * 0.4
    confidence = torch.stack([best, best * torch.rand(positions, 3, generator=generator) * 0.6], dim=2)
    hit = log_hit(confidence.log(), *tensors(TRUE)).exp()
    assert float(hit.sum(dim=2).max()) < 1
    uniform = torch.rand(positions, 3, generator=generator)
    ranks = torch.where(uniform < hit[..., 0], 0, torch.where(uniform < hit.sum(dim=2), 1, MISS))
    return confidence.log(), ranks


def test_the_fit_recovers_what_made_the_data() -> None:
    found = fit_calibration(*synthetic(200_000))
    assert found.powers == pytest.approx(TRUE.powers, abs=0.1)
    assert found.offsets == pytest.approx(TRUE.offsets, abs=0.15)


def test_later_heads_are_judged_where_the_earlier_ones_were_right() -> None:
    log_confidence, ranks = synthetic(4000)
    spoiled = ranks.clone()
    spoiled[ranks[:, 0] == MISS, 1:] = 0  # right, but nobody gets there
    assert fit_calibration(log_confidence, spoiled) == fit_calibration(log_confidence, ranks)


def test_heads_without_data_stay_as_they_are() -> None:
    found = fit_calibration(torch.full((5, 2, 3), -1.0), torch.full((5, 2), MISS))
    assert (found.powers[1], found.offsets[1]) == (1.0, 0.0)
    assert all(map(math.isfinite, (found.powers[0], found.offsets[0])))


def test_identity_and_extreme_confidences() -> None:
    log_confidence = torch.tensor([[[0.0, math.log(0.5), math.log(0.01), -torch.inf]]])
    kept = log_hit(log_confidence, *tensors(Calibration.identity(1)))
    assert kept.exp()[0, 0].tolist() == pytest.approx([1, 0.5, 0.01, 0], abs=1e-5)
    assert bool(log_odds(log_confidence).isfinite().all())
    assert float(log_hit(log_confidence, torch.tensor([9.0]), torch.tensor([50.0])).max()) <= 0


def test_only_visited_positions_count() -> None:
    log_confidence, ranks = synthetic(300)
    ends = torch.arange(300) % 50 == 49
    searched = search_tree_for_decoding(ranks, ends, 16, log_confidence)
    visited = visited_positions(ranks, ends, searched.best(16))
    assert 0 < int(visited.sum()) < 300
    calibration = fit_calibration(log_confidence[visited], ranks[visited])
    assert searched.calibration == calibration
    chosen = search_tree(ranks[visited], 16, calibration.hits(log_confidence[visited]))
    assert searched.paths == chosen.paths
    assert searched.gains == count_gains(chosen.paths, ranks[visited])


def test_confidence_chooses_better_nodes_than_few_counts() -> None:
    """Data whose true rates are known: the tree that 150 positions choose, judged on 20,000."""
    log_confidence, ranks = synthetic(20_150)
    few, many = slice(150), slice(150, None)
    ends = torch.arange(150) % 50 == 49
    by_confidence = search_tree_for_decoding(ranks[few], ends, 9, log_confidence[few])
    by_counts = search_tree_for_decoding(ranks[few], ends, 9)
    found = [sum(count_gains(tree.best(9).paths, ranks[many])) for tree in (by_confidence, by_counts)]
    assert found[0] > found[1] * 1.005


def test_round_trip_and_files_from_before(tmp_path: Path) -> None:
    searched = replace(search_tree(synthetic(100)[1], max_nodes=8), calibration=TRUE)
    searched.save(tmp_path)
    assert SearchedTree.load(tmp_path) == searched
    stored = json.loads((tmp_path / TREE_FILE).read_text())
    del stored["calibration"]
    (tmp_path / TREE_FILE).write_text(json.dumps(stored))
    assert SearchedTree.load(tmp_path) == replace(searched, calibration=None)


@pytest.mark.parametrize(
    "calibration",
    [3, {"powers": [1.0]}, {"powers": [1.0], "offsets": []}, {"powers": [1.0], "offsets": [math.nan]}],
    ids=str,
)
def test_a_damaged_calibration_is_named(tmp_path: Path, calibration: object) -> None:
    stored = {"paths": [[0]], "gains": [0.5], "positions": 8, "calibration": calibration}
    (tmp_path / TREE_FILE).write_text(json.dumps(stored))
    with pytest.raises(ValueError, match=f"{TREE_FILE} is not a searched tree"):
        SearchedTree.load(tmp_path)
