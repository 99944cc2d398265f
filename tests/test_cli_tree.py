"""`medusa tree` and `medusa simulate` as a user types them, on a tiny model."""

import json
import sys
from pathlib import Path

import pytest
import torch
from chatml import save_tiny_chat_model
from console import medusa

from medusa import CandidateTree, MedusaConfig, MedusaModel
from medusa.cli import main
from medusa.hit_rates import load_hit_rates
from medusa.inference import MedusaDecoder
from medusa.tree_search import SearchedTree


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random heads, and answers of their backbone."""
    directory = tmp_path_factory.mktemp("workspace")
    save_tiny_chat_model(directory / "model")
    prompts = [{"id": f"p{i}", "prompt": f"say {i}"} for i in range(12)]
    (directory / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    medusa(
        "distill", "--backbone", directory / "model", "--prompts", directory / "prompts.jsonl",
        "--out", directory / "answers.jsonl", "--max-new-tokens", 24, "--record", "--json",
    )  # fmt: skip
    from medusa.loading import load_backbone, load_tokenizer

    torch.manual_seed(0)
    model = MedusaModel.attach(load_backbone(str(directory / "model")), MedusaConfig(num_heads=3))
    model.save_pretrained(directory / "heads", load_tokenizer(str(directory / "model")), {})
    return directory


def tree(workspace: Path, *arguments: object) -> dict[str, object]:
    line = ("tree", workspace / "heads", "--data", workspace / "answers.jsonl", "--recorded", "--json", *arguments)
    found: dict[str, object] = json.loads(medusa(*line))
    return found


def test_it_searches_saves_draws_and_exports(workspace: Path, tmp_path: Path) -> None:
    found = tree(workspace, "--draw", tmp_path / "tree.svg", "--export-choices", tmp_path / "tree.json")
    searched = SearchedTree.load(workspace / "heads")
    assert found["paths"] == [list(path) for path in searched.paths]
    exported = CandidateTree.from_paths(json.loads((tmp_path / "tree.json").read_text()))
    assert exported == searched.best(64)
    assert (tmp_path / "tree.svg").read_text().count("<g>") == exported.num_nodes
    assert [rates.temperature for rates in load_hit_rates(workspace / "heads")] == [0.0, 0.7, 1.0]
    for node in found["nodes"]:  # type: ignore[attr-defined]
        low, high = node["conditional_interval"]
        assert 0 <= low <= node["conditional"] <= high <= 1
        assert node["probability"] * found["steps"] == pytest.approx(node["conditional"] * node["reached"], abs=0.05)


def test_few_steps_give_a_small_tree_and_a_sentence(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = tree(workspace)
    assert found["few_steps"]
    assert all(node["probability"] * found["steps"] > 2.4 for node in found["nodes"])  # type: ignore[attr-defined]
    assert f"only {found['steps']} steps to count over" in " ".join(capsys.readouterr().err.split())


def test_limits_hold(workspace: Path) -> None:
    paths = tree(workspace, "--depth", 2, "--branching", 2)["paths"]
    assert paths
    assert all(len(path) <= 2 and max(path) < 2 for path in paths)  # type: ignore[attr-defined]


def test_at_a_temperature_rates_are_expectations(workspace: Path) -> None:
    found = tree(workspace, "--temperature", 0.5)
    assert found["temperature"] == SearchedTree.load(workspace / "heads").temperature == 0.5
    rates = load_hit_rates(workspace / "heads")
    assert [one.temperature for one in rates] == [0.0, 0.5, 0.7, 1.0]
    assert all(hits == int(hits) for head in rates[0].hits for hits in head)
    assert any(hits != int(hits) for head in rates[1].hits for hits in head)


def test_an_imported_tree_is_cut_to_the_heads_and_rated(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = tree(workspace, "--import-choices", "mc_sim_7b_63")
    said = " ".join(capsys.readouterr().err.split())
    assert "mc_sim_7b_63 is 4 levels deep but there are 3 heads: the 2 nodes below level 3 are cut off" in said
    assert len(found["paths"]) == 61  # type: ignore[arg-type]
    assert SearchedTree.load(workspace / "heads").best(62).num_nodes == 62


def test_the_simulation_is_what_the_decoder_does(workspace: Path, tmp_path: Path) -> None:
    """Greedy decoding of the same prompts, with trees that nobody calibrated on."""
    trees = {"wide": [[0], [1], [2], [0, 0]], "chain": [[0], [0, 0], [0, 0, 0]], "odd": [[1], [3], [1, 2], [1, 2, 0]]}
    line: list[object] = ["simulate", workspace / "heads", "--data", workspace / "answers.jsonl", "--recorded"]
    for name, paths in trees.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(paths))
        line += ["--choices", tmp_path / f"{name}.json"]
    predicted = json.loads(medusa(*line, "--json"))
    model = MedusaModel.from_pretrained(workspace / "heads")
    rows = [json.loads(row) for row in (workspace / "answers.jsonl").read_text().splitlines()]
    for name, paths in trees.items():
        decoder = MedusaDecoder(model, tree=paths)
        steps = tokens = 0
        for row in rows:
            start = row["answer_start"]
            prompt = torch.tensor([row["input_ids"][:start]])
            stats = decoder.generate(prompt, max_new_tokens=24).stats
            steps, tokens = steps + stats.steps, tokens + stats.new_tokens - 1
        found = predicted[str(tmp_path / f"{name}.json")]
        assert (found["steps"], found["tokens"]) == (steps, tokens)
        assert sum(found["accepted"]) == steps


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tree", "heads", "--data", "answers.jsonl", "--import-choices", "mc_sim"], "neither a file nor a published"),
        (["tree", "heads", "--data", "answers.jsonl", "--draw", "tree.gif"], "not as 'tree.gif'"),
        (["tree", "heads", "--data", "answers.jsonl", "--export-choices", "absent/t.json"], "there is no directory"),
        (["simulate", "heads", "--data", "answers.jsonl", "--nodes", "4,x"], "--nodes is '4,x'"),
    ],
)
def test_bad_input_is_one_message(
    workspace: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tree(workspace)
    monkeypatch.chdir(workspace)
    monkeypatch.setattr(sys, "argv", ["medusa", *arguments])
    with pytest.raises(SystemExit) as status:
        main()
    assert status.value.code == 1
    assert message in " ".join(capsys.readouterr().err.split())
