"""What a run would take is told before it starts, and nothing is written."""

import json
from pathlib import Path

from console import medusa
from training import CONFIG, run

from medusa.train.run_state import STATE_FILE


def test_a_dry_run_counts_and_writes_nothing(model_path: Path, data: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text(data.read_text() + '{"messages": []}\n')
    out = tmp_path / "run"
    options = [f"backbone.path={model_path}", f"output.dir={out}", f"cache.dir={tmp_path / 'cache'}"]
    said = medusa("train", "--config", CONFIG, "--dry-run", "--json", *options, f"data.train={broken}")
    forecast = json.loads(said.splitlines()[-1])
    assert not out.exists()
    assert not (tmp_path / "cache").exists()
    assert forecast["rows"] == 12
    assert [row["place"] for row in forecast["dropped"]] == ["line 13"]
    assert 0 < forecast["learned_tokens"] < forecast["tokens"]
    assert forecast["seconds"] > 0

    run(model_path, data, out)
    assert forecast["steps"] == len((out / "metrics.jsonl").read_text().splitlines())
    (state,) = sorted(out.glob(f"states/step-*/{STATE_FILE}"))[-1:]
    assert 0.7 < forecast["state_gb"] * 1e9 / state.stat().st_size < 1.1


def test_a_dry_run_of_both_stages(model_path: Path, data: Path, tmp_path: Path) -> None:
    options = [f"backbone.path={model_path}", f"data.train={data}", f"output.dir={tmp_path / 'run'}"]
    options += ["joint.method=lora", "joint.lora_rank=2", "joint.max_steps=2"]
    text = medusa("train", "--config", CONFIG, "--dry-run", *options)
    assert "12 kept, 0 dropped" in text
    assert not (tmp_path / "run").exists()
