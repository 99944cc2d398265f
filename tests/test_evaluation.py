"""What is measured while training: the figures against a count by hand, the best heads, and where they are sent."""

import json
import sys
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from console import medusa
from safetensors.torch import load_file
from training import CONFIG, log, run

from medusa import MedusaModel
from medusa.checkpoint import HEADS_FILE
from medusa.inference import MedusaDecoder
from medusa.loading import load_tokenizer
from medusa.train import load_config, train
from medusa.train import loop as loop_module
from medusa.train.drift import Original
from medusa.train.evaluate import Judged, accuracy, judge_rows
from medusa.train.hidden_states import LiveHiddenStates
from medusa.train.rows import load_rows
from medusa.train.supervision import IGNORE, TrainingRow
from medusa.tree_search import MISS, search_tree_for_decoding

ACCELERATE = Path(__file__).parent.parent / "configs" / "accelerate"


def test_accuracy_and_what_it_is_where_the_heads_before_were_right() -> None:
    ranks = torch.tensor([[0, 0, 0], [0, 1, 0], [0, MISS, 0], [3, 0, 0], [0, 0, MISS]])
    targets = torch.tensor([[5, 5, 5], [5, 5, 5], [5, 5, 5], [5, 5, 5], [5, 5, IGNORE]])
    found = accuracy(Judged(ranks, targets, torch.zeros(5, 3, 10), torch.zeros(5, 3, 10), torch.zeros(5, 0, 3, 10)))
    assert found.top1 == [0.8, 0.6, 1.0]
    assert found.conditional_top1 == [0.8, 0.5, 1.0]  # head 1: of rows 0, 1, 2, 4; head 2: of row 0
    assert found.conditional_top5 == [1.0, 0.8, 1.0]


def test_the_best_heads_are_kept(model_path: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads that get worse again: best/ holds those of the step with the most predicted tokens per step."""
    seen = {}
    original = loop_module.evaluate

    def spy(run, stage, step, tracker):  # type: ignore[no-untyped-def]
        if step == 9:  # spoiled from here on
            for parameter in run.model.heads.parameters():
                parameter.data.normal_(std=3)
        original(run, stage, step, tracker)
        seen[step] = {name: tensor.clone() for name, tensor in run.model.heads.state_dict().items()}

    monkeypatch.setattr(loop_module, "evaluate", spy)
    options = ("optimization.epochs=2", f"data.eval={data}", "output.eval_every=3", "optimization.learning_rate=0.03")
    final = run(model_path, data, tmp_path / "run", *options)
    figures = {
        line["step"]: line["eval/tokens_per_step"] for line in log(tmp_path / "run") if "eval/top1/head0" in line
    }
    best = max(figures, key=lambda step: figures[step])
    assert best in (3, 6)
    stored = load_file(tmp_path / "run" / "best" / HEADS_FILE)
    assert all(torch.equal(stored[name], tensor) for name, tensor in seen[best].items())
    assert (final / "evaluation.json").exists()
    assert (final / "accuracy.png").exists() or "matplotlib" not in sys.modules
    assert "eval/conditional/head2" in log(tmp_path / "run")[-1]


@pytest.mark.parametrize("cached", [False, True])
def test_tokens_per_step_are_measured_by_the_real_decoder(
    model_path: Path, data: Path, tmp_path: Path, cached: bool
) -> None:
    """The command's figure is that of decoding the saved heads, and the one that heads are compared by."""
    options = [f"backbone.path={model_path}", f"data.train={data}", f"output.dir={tmp_path / 'run'}"]
    options += [f"data.eval={data}", "output.eval_every=3", "output.decode_prompts=3", "output.decode_tokens=12"]
    options += [f"cache.dir={tmp_path / 'cache'}"] * cached
    medusa("train", "--config", str(CONFIG), *options)
    lines = [line for line in log(tmp_path / "run") if "eval/decoded_tokens_per_step" in line]
    assert len(lines) > 1
    assert all(1 <= line["eval/decoded_tokens_per_step"] <= 4 for line in lines)

    heads = MedusaModel.from_pretrained(tmp_path / "run" / "final")
    rows, _ = load_rows(data, load_tokenizer(str(model_path)), 2048)
    judged = judge_rows(heads.heads, rows, LiveHiddenStates(heads.backbone), lambda count: None)
    tree = search_tree_for_decoding(judged.ranks, judged.targets[:, 0] == IGNORE, 16).best(16)
    decoder = MedusaDecoder(heads, tree=tree)
    prompts = [row.input_ids[: next(i for i, label in enumerate(row.labels) if label != IGNORE)] for row in rows[:3]]
    results = [decoder.generate(torch.tensor([prompt]), max_new_tokens=12).stats for prompt in prompts]
    expected = sum(one.new_tokens - 1 for one in results) / sum(one.steps for one in results)
    assert lines[-1]["eval/decoded_tokens_per_step"] == pytest.approx(expected, abs=1e-4)


def test_the_best_heads_are_those_that_decode_best(model_path: Path, data: Path, tmp_path: Path) -> None:
    """Whatever the prediction says: the figure of the decoder decides."""
    options = [f"backbone.path={model_path}", f"data.train={data}", f"output.dir={tmp_path / 'run'}"]
    options += [f"data.eval={data}", "output.eval_every=2", "output.decode_prompts=1", "optimization.max_steps=8"]
    figures = iter([1.1, 3.0, 1.2, 1.3, 1.25])
    train(load_config(CONFIG, options), lambda model, tree, prompts, tokens: next(figures))
    (best,) = (tmp_path / "run" / "states").glob("best-*")
    assert best.name == "best-00000004"
    assert (tmp_path / "run" / "best").is_dir()


def test_drift_is_what_it_says(model_path: Path) -> None:
    from medusa.backbone import Backbone
    from medusa.loading import load_backbone

    backbone = Backbone(load_backbone(str(model_path)))
    row = TrainingRow("a", list(range(30, 50)), [IGNORE] * 5 + list(range(35, 50)))
    before = Original(backbone, [row])
    ids = torch.tensor([row.input_ids])
    with torch.no_grad():
        old = backbone.model(input_ids=ids).logits[0, 4:-1].log_softmax(-1)
        for parameter in backbone.decoder.layers.parameters():
            parameter.mul_(1.05)
        new = backbone.model(input_ids=ids).logits[0, 4:-1].log_softmax(-1)
    drift = before.drift(backbone)
    truth = torch.arange(35, 50)
    assert drift.positions == 15
    assert drift.perplexity_before == pytest.approx(float((-old[range(15), truth]).mean().exp()), rel=1e-4)
    assert drift.perplexity_after == pytest.approx(float((-new[range(15), truth]).mean().exp()), rel=1e-4)
    assert drift.kl == pytest.approx(float((old.exp() * (old - new)).sum(-1).mean()), rel=1e-3)
    assert drift.greedy_agreement == pytest.approx(float((old.argmax(-1) == new.argmax(-1)).float().mean()))
    assert len(LiveHiddenStates(backbone).of([row])[0]) == 15


def test_a_tracker_that_fails_later_is_left_alone(
    model_path: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        id = "run"

        def log(self, *arguments: object, **options: object) -> None:
            raise ConnectionError("no network")

    monkeypatch.setitem(sys.modules, "wandb", type("wandb", (), {"init": staticmethod(lambda **options: Broken())}))
    with pytest.warns(UserWarning, match="Weights & Biases is off from here on: no network"):
        run(model_path, data, tmp_path / "run", "wandb.enabled=true", "optimization.max_steps=3")
    assert [line["step"] for line in log(tmp_path / "run")] == [1, 2, 3]


def test_tensorboard(model_path: Path, data: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    run(model_path, data, tmp_path / "run", "tracking.tensorboard=true", "optimization.max_steps=2")
    assert list((tmp_path / "run" / "tensorboard").glob("events.*"))


def test_training_goes_on_without_tensorboard(
    model_path: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.warns(UserWarning, match="TensorBoard is off"):
        run(model_path, data, tmp_path / "run", "tracking.tensorboard=true", "optimization.max_steps=1")


@pytest.mark.parametrize("file", sorted(ACCELERATE.glob("*.yaml")), ids=lambda file: file.stem)
def test_accelerate_reads_the_launch_files(file: Path) -> None:
    config = load_config_from_file(str(file))
    assert config.num_processes == yaml.safe_load(file.read_text())["num_processes"]


def test_figures_are_numbers(model_path: Path, data: Path, tmp_path: Path) -> None:
    run(model_path, data, tmp_path / "run", "optimization.max_steps=2")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for name in ("gradient_norm", "learning_rate", "positions_per_second", "memory_gb", "top10/head2"):
        assert lines[0][name] > 0 or name.startswith("top10")
