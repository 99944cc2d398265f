"""The cost model: against the closed forms, and what it says of batches."""

import json
from pathlib import Path

import pytest
from console import medusa

from medusa.inference.cost_model import CostModel, tokens_per_step

GIVEN = ("estimate", "--alpha", "0.8", "--k", "4", "--draft-cost", "0.05", "--verify-cost", "1.1")


def test_command_prints_tokens_per_step_and_speedup() -> None:
    found = json.loads(medusa(*GIVEN, "--json"))
    assert found["tokens_per_step"] == pytest.approx(sum(0.8**i for i in range(5)), abs=1e-4)
    assert round(found["tokens_per_step"], 2) == 3.36
    assert found["speedup"] == pytest.approx(3.3616 / (4 * 0.05 + 1.1), abs=1e-4)


def test_verify_cost_goes_through_the_pass_that_is_known() -> None:
    costs = CostModel(0.05, 1.1, 4)
    assert costs.verify(4) == pytest.approx(1.1)
    assert costs.verify(0) == pytest.approx(1.0)
    assert 1.1 < costs.verify(5) < 1.2
    assert CostModel(0.05, 1.0, 4).verify(9, batch=100) == 1.0
    assert CostModel(0.05, 6.0, 4).verify(4) == 6.0
    assert CostModel(0.05, 0.9, 4).verify(4) == 0.9


def test_large_batches_lose() -> None:
    costs = CostModel(0.05, 1.1, 4)
    speeds = [costs.speedup(0.6, 4, batch) for batch in (1, 4, 16, 64, 1024)]
    assert speeds == sorted(speeds, reverse=True)
    assert speeds[0] > 1.5
    assert speeds[-1] < 1
    assert costs.best_k(0.6, 8, batch=1024) < costs.best_k(0.6, 8)


def test_what_is_not_decoding_bounds_the_gain() -> None:
    costs = CostModel(0.05, 1.1, 4)
    assert costs.speedup(0.8, 4, other=0.5) == pytest.approx(1 / (0.5 / costs.speedup(0.8, 4) + 0.5))
    assert costs.speedup(1.0, 4, other=0.5) < 2


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("--alpha", "1.2", "alpha is 1.2"),
        ("--alpha", "nan", "alpha is nan"),
        ("--k", "0", "k is 0"),
        ("--draft-cost", "0", "draft cost 0.0"),
        ("--verify-cost", "-1", "verify cost -1.0"),
        ("--batch", "0", "batch is 0"),
        ("--other", "1", "other is 1.0"),
    ],
)
def test_bad_input_is_named(option: str, value: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AssertionError):
        medusa(*GIVEN, option, value)
    assert named in capsys.readouterr().err


def test_nothing_drafted_is_no_step() -> None:
    with pytest.raises(ValueError, match="k is 0"):
        tokens_per_step(0.8, 0)


def test_plot_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    medusa(*GIVEN, "--plot", str(tmp_path / "speed.png"))
    assert (tmp_path / "speed.png").stat().st_size > 1000
