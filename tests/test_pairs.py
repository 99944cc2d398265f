import torch
from chatml import save_tiny_chat_model
from transformers import AutoModelForCausalLM

from medusa.backbone import Backbone
from medusa.train.hidden_states import LiveHiddenStates
from medusa.train.pairs import head_targets, make_batch, root_positions
from medusa.train.supervision import IGNORE, TrainingRow


def test_which_pairs_count_on_a_small_row() -> None:
    """A question of two tokens and an answer of four, written out."""
    labels = [IGNORE, IGNORE, 12, 13, 14, 15]
    assert root_positions(labels) == [1, 2, 3, 4]
    assert head_targets(labels, 3).tolist() == [
        [13, 14, 15],  # t=1, root 12
        [14, 15, IGNORE],  # t=2, root 13
        [15, IGNORE, IGNORE],  # t=3, root 14
        [IGNORE, IGNORE, IGNORE],  # t=4, root 15: nothing follows
    ]


def test_no_head_reaches_over_the_end_of_a_turn() -> None:
    labels = [IGNORE, 11, 12, IGNORE, 14, 15, 16]
    assert head_targets(labels, 4).tolist() == [
        [12, IGNORE, IGNORE, IGNORE],
        [IGNORE] * 4,  # the next answer is near, but a question lies between
        [15, 16, IGNORE, IGNORE],
        [16, IGNORE, IGNORE, IGNORE],
        [IGNORE] * 4,
    ]


def test_batch_against_a_slow_reference(tmp_path) -> None:
    """Padded rows of different lengths, one with the padding token inside, give each row's own hidden states (R9)."""
    model = AutoModelForCausalLM.from_pretrained(save_tiny_chat_model(tmp_path)).double().eval()
    pad = model.config.pad_token_id
    rows = [
        TrainingRow("a", [5, 6, 7, 8], [IGNORE, IGNORE, 7, 8]),
        TrainingRow("b", [9, pad, 3, 4, 5, 6, 7], [IGNORE, pad, IGNORE, 4, 5, 6, 7]),
    ]
    batch = make_batch(rows, LiveHiddenStates(Backbone(model)).of(rows), 2, torch.device("cpu"))
    index = 0
    for row in rows:
        hidden = model.model(torch.tensor([row.input_ids])).last_hidden_state[0]
        for t in range(len(row.input_ids) - 1):
            if row.labels[t + 1] == IGNORE:
                continue
            torch.testing.assert_close(batch.hidden[index], hidden[t])
            assert batch.root[index] == row.input_ids[t + 1]
            for k in range(2):
                path = row.labels[t + 1 : t + 3 + k]
                expected = path[-1] if len(path) == 2 + k and IGNORE not in path else IGNORE
                assert batch.targets[index, k] == expected
            index += 1
    assert index == len(batch.root)
