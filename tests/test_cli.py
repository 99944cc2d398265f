"""The command line as a user types it: one process a command, on a tiny model."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from chatml import save_tiny_chat_model

CONFIG = Path(__file__).parent.parent / "configs" / "tiny.yaml"


def medusa(*arguments: object, fails: bool = False) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "medusa", *map(str, arguments)], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode != 0) == fails, done.stderr[-2000:]
    return done


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
    assert json.loads(done.stdout)["answered"] == 8
    medusa(
        "train", "--config", CONFIG, f"backbone.path={directory / 'model'}", f"data.train={answers}",
        "data.recorded=true", f"output.dir={directory / 'run'}", "optimization.epochs=20",
    )  # fmt: skip
    return directory


def test_help_is_quick() -> None:
    started = time.perf_counter()
    done = medusa("--help")
    assert time.perf_counter() - started < 5  # a second on an idle machine; importing torch would take longer than this
    for command in ("train", "distill", "eval", "tree", "generate", "inspect"):
        assert command in done.stdout


def test_eval_tree_generate_inspect(workspace: Path) -> None:
    checkpoint, answers = workspace / "run" / "final", workspace / "answers.jsonl"
    live = json.loads(medusa("eval", checkpoint, "--data", answers, "--json").stdout)
    recorded = json.loads(medusa("eval", checkpoint, "--data", answers, "--recorded", "--json").stdout)
    assert live == recorded
    assert len(live["top1"]) == 3
    assert live["top1"][0] > 0.3
    searched = json.loads(medusa("tree", checkpoint, "--data", answers, "--nodes", 8, "--json").stdout)
    assert searched["tokens_per_step"]["4"] > 1.3
    spoken = json.loads(medusa("generate", checkpoint, "--prompt", "say 3", "--max-new-tokens", 12, "--json").stdout)
    assert 1 <= spoken["new_tokens"] <= 12
    assert medusa("generate", checkpoint, "--prompt", "say 3", "--max-new-tokens", 12).stdout.strip("\n") == spoken[
        "text"
    ].strip("\n")
    facts = json.loads(medusa("inspect", checkpoint, "--json").stdout)
    assert facts["heads"] == 3
    assert facts["tree_nodes"] == 8
    assert facts["draft_vocab_size"] <= 64
    text = medusa("inspect", answers, "--tokenizer", workspace / "model", "--json")
    assert json.loads(text.stdout)["rows"] == 8
    assert "are learned" in medusa("inspect", answers, "--tokenizer", workspace / "model").stdout
    for command in (["eval", checkpoint, "--data", answers], ["inspect", checkpoint]):
        assert "head" in medusa(*command).stdout


def test_same_training_command_again_does_nothing_new(workspace: Path) -> None:
    before = (workspace / "run" / "metrics.jsonl").read_text()
    done = medusa(
        "train", "--config", CONFIG, f"backbone.path={workspace / 'model'}",
        f"data.train={workspace / 'answers.jsonl'}", "data.recorded=true", f"output.dir={workspace / 'run'}",
        "optimization.epochs=20",
    )  # fmt: skip
    assert "continuing" in done.stdout
    assert (workspace / "run" / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval", "absent", "--data", "answers.jsonl"], "'absent' is neither a directory nor a repository"),
        (["eval", "model", "--data", "answers.jsonl"], "holds no Medusa heads (model_type 'llama')"),
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
def test_bad_input_is_one_message_and_a_status(workspace: Path, arguments: list[str], message: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "medusa", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=workspace,
        timeout=120,
    )
    assert done.returncode == 1
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert not (workspace / "o.jsonl").exists()
