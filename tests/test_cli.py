"""The command line as a user types it, on a tiny model."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from chatml import save_tiny_chat_model
from console import medusa

from medusa.cli import main

CONFIG = Path(__file__).parent.parent / "configs" / "tiny.yaml"


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, prompts, answers distilled from it, and heads trained on them."""
    directory = tmp_path_factory.mktemp("workspace")
    save_tiny_chat_model(directory / "model")
    prompts = [{"id": f"p{i}", "prompt": f"say {i}"} for i in range(8)]
    (directory / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    answers = directory / "answers.jsonl"
    done = medusa(
        "distill", "--backbone", directory / "model", "--prompts", directory / "prompts.jsonl",
        "--out", answers, "--max-new-tokens", 16, "--record", "--json",
    )  # fmt: skip
    assert json.loads(done)["answered"] == 8
    medusa(
        "train", "--config", CONFIG, f"backbone.path={directory / 'model'}", f"data.train={answers}",
        "data.recorded=true", f"output.dir={directory / 'run'}", "optimization.epochs=20",
    )  # fmt: skip
    return directory


def test_help_is_quick() -> None:
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "medusa", "--help"], capture_output=True, text=True, check=True)
    assert time.perf_counter() - started < 5  # a third of a second on an idle machine; importing torch takes longer
    for command in ("train", "distill", "eval", "tree", "verify", "generate", "chat", "inspect"):
        assert command in done.stdout


def test_eval_tree_generate_verify_inspect(workspace: Path) -> None:
    checkpoint, answers = workspace / "run" / "final", workspace / "answers.jsonl"
    live = json.loads(medusa("eval", checkpoint, "--data", answers, "--json"))
    recorded = json.loads(medusa("eval", checkpoint, "--data", answers, "--recorded", "--json"))
    assert live == recorded
    assert len(live["top1"]) == 3
    assert live["top1"][0] > 0.3
    searched = json.loads(medusa("tree", checkpoint, "--data", answers, "--nodes", 8, "--json"))
    assert searched["tokens_per_step"]["4"] > 1.3
    spoken = json.loads(medusa("generate", checkpoint, "--prompt", "say 3", "--max-new-tokens", 12, "--json"))
    assert 1 <= spoken["new_tokens"] <= 12
    verified = json.loads(medusa("verify", checkpoint, "--limit", 2, "--max-new-tokens", 24, "--nodes", 8, "--json"))
    assert verified["identical"] == 2
    facts = json.loads(medusa("inspect", checkpoint, "--json"))
    assert facts["heads"] == 3
    assert facts["tree_nodes"] == 8
    assert facts["draft_vocab_size"] <= 64
    text = medusa("inspect", answers, "--tokenizer", workspace / "model", "--json")
    assert json.loads(text)["rows"] == 8
    assert "are learned" in medusa("inspect", answers, "--tokenizer", workspace / "model")
    for command in (["eval", checkpoint, "--data", answers], ["inspect", checkpoint]):
        assert "head" in medusa(*command)


def test_same_training_command_again_does_nothing_new(workspace: Path) -> None:
    before = (workspace / "run" / "metrics.jsonl").read_text()
    done = medusa(
        "train", "--config", CONFIG, f"backbone.path={workspace / 'model'}",
        f"data.train={workspace / 'answers.jsonl'}", "data.recorded=true", f"output.dir={workspace / 'run'}",
        "optimization.epochs=20",
    )  # fmt: skip
    assert "continuing" in done
    assert (workspace / "run" / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval", "absent", "--data", "answers.jsonl"], "'absent' is neither a directory nor a repository"),
        (["eval", "model", "--data", "answers.jsonl"], "holds no Medusa heads"),
        (["eval", "run/final", "--data", "absent.jsonl"], "there is no data file"),
        (["eval", "run/final", "--data", "answers.jsonl", "--dtype", "int8"], "dtype is 'int8'; allowed: auto"),
        (["eval", "run/final", "--data", "prompts.jsonl"], "neither 'messages' nor 'conversations'"),
        (["tree", "absent", "--data", "answers.jsonl"], "there is no directory"),
        (["inspect", "answers.jsonl"], "--tokenizer"),
        (["train", "--config", "absent.yaml"], "there is no configuration file"),
        (["train", "--config", CONFIG, "heads.num_head=1"], "did you mean heads.num_heads?"),
        (
            ["distill", "--backbone", "absent", "--prompts", "prompts.jsonl", "--out", "o.jsonl"],
            "cannot load the tokenizer",
        ),
        (["distill", "--backbone", "model", "--prompts", "model/config.json", "--out", "o.jsonl"], "holds no prompt"),
    ],
)
def test_bad_input_is_one_message_and_a_status(
    workspace: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(workspace)
    monkeypatch.setattr(sys, "argv", ["medusa", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_status:
        main()
    assert exit_status.value.code == 1
    errors = capsys.readouterr().err
    assert message in " ".join(errors.split())
    assert "Traceback" not in errors
    assert not (workspace / "o.jsonl").exists()
