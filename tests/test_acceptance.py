"""Probabilities of guesses, against the backbone run over the text before each."""

import pytest
import torch
from chatml import save_tiny_chat_model

from medusa import MedusaConfig, MedusaModel
from medusa.loading import load_backbone
from medusa.train.acceptance import Target
from medusa.train.evaluate import GUESSES, judge_rows
from medusa.train.hidden_states import LiveHiddenStates
from medusa.train.supervision import IGNORE, TrainingRow
from medusa.tree_search import MISS


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> MedusaModel:
    path = tmp_path_factory.mktemp("model")
    save_tiny_chat_model(path)
    torch.manual_seed(0)
    return MedusaModel.attach(load_backbone(str(path), "float32"), MedusaConfig(num_heads=3))


@pytest.mark.parametrize("chunk", [4, 256])
def test_they_are_the_backbones_behind_the_text(
    model: MedusaModel, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr("medusa.train.acceptance.CHUNK", chunk)
    ids = [list(range(30, 45)), list(range(50, 58))]
    # Two turns of the assistant in the first row, one in the second.
    starts = [[3, 4, 5, 6, 9, 10, 11, 12, 13, 14], [2, 3, 4, 5, 6, 7]]
    rows = [
        TrainingRow(str(i), text, [text[t] if t in starts[i] else IGNORE for t in range(len(text))])
        for i, text in enumerate(ids)
    ]
    target = Target(model.backbone, (0.7, 1.5))
    states = LiveHiddenStates(model.backbone)
    judged = judge_rows(model.heads, rows, states, lambda count: None, target)
    assert judged.acceptance.shape == (16, 2, 3, GUESSES)
    place = seen = 0
    for i, text in enumerate(ids):
        for root in starts[i]:
            for k in range(3):
                found = judged.acceptance[place, :, k]
                # Everything from the root to the guess must be of one turn.
                if not all(t in starts[i] for t in range(root, root + k + 2)):
                    assert not found.any()
                    continue
                with torch.no_grad():
                    logits = model.model(torch.tensor([text[: root + k + 1]])).logits[0, -1]
                for s, temperature in enumerate((0.7, 1.5)):
                    expected = (logits / temperature).softmax(dim=-1)[judged.guesses[place, k]]
                    torch.testing.assert_close(found[s], expected, rtol=1e-3, atol=1e-6)
                seen += 1
            place += 1
    assert seen == 3 + 2 + 1 + 5 + 4 + 3 + 5 + 4 + 3


def test_limits(model: MedusaModel) -> None:
    rows = [TrainingRow("a", list(range(30, 50)), [IGNORE] * 3 + list(range(33, 50)))]
    target = Target(model.backbone, (1.0,))
    judged = judge_rows(model.heads, rows, LiveHiddenStates(model.backbone), lambda count: None, target)
    judged = judged._replace(ranks=torch.arange(17 * 3).reshape(17, 3) % 5)
    limited = judged.limited(2, 3)
    assert int(limited.ranks.max()) == 2
    assert bool((limited.ranks[:, 2] == MISS).all())
    assert bool((limited.ranks[:, :2] == judged.ranks[:, :2])[judged.ranks[:, :2] < 3].all())
    assert limited.acceptance.shape == (17, 1, 3, 3)
    assert not limited.acceptance[:, :, 2].any()
    assert torch.equal(limited.acceptance[:, :, :2], judged.acceptance[:, :, :2, :3])
    whole = judged.limited(None, None)
    assert torch.equal(whole.ranks, judged.ranks)
    assert torch.equal(whole.acceptance, judged.acceptance)


def test_temperature_zero_has_no_probabilities(model: MedusaModel) -> None:
    with pytest.raises(ValueError, match="each must be above 0"):
        Target(model.backbone, (0.0,))
