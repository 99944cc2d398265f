"""Distil a small draft model from a target: its first layers, trained to say what the target says.

Usage: python scripts/distil_draft.py MODEL ANSWERS DIRECTORY [--layers N] [--epochs N] [--rows N]
ANSWERS is a file that `medusa distill` wrote. Embeddings and LM head stay as they are; the layers and the norm learn by
KL to the target's next-token distribution at every token of an answer. The student is saved as a normal Hugging Face
model, with the target's tokenizer.
"""

import argparse
import copy
import random
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, PreTrainedModel, get_linear_schedule_with_warmup

from medusa.checkpoint import atomic_directory
from medusa.loading import load_backbone, load_tokenizer
from medusa.progress import progress_bar
from medusa.train.pairs import root_positions
from medusa.train.rows import load_rows
from medusa.train.supervision import TrainingRow


def first_layers(target: PreTrainedModel, layers: int) -> PreTrainedModel:
    """A model of the target's kind with its weights and its first layers alone, in fp32."""
    config = copy.deepcopy(target.config)
    if not 1 <= layers < config.num_hidden_layers:
        raise ValueError(f"layers is {layers}; the target has {config.num_hidden_layers}, the draft needs fewer")
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    student: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    missing = student.load_state_dict(target.state_dict(), strict=False).missing_keys
    assert not missing, f"the target has no {missing}"
    student.generation_config = copy.deepcopy(target.generation_config)
    return student


def freeze_vocabulary(student: PreTrainedModel) -> list[torch.nn.Parameter]:
    """Embeddings and LM head, most of a small model, are left as they are; returns what learns."""
    for module in (student.get_input_embeddings(), student.get_output_embeddings()):
        module.requires_grad_(False)
    return [parameter for parameter in student.parameters() if parameter.requires_grad]


def distil_loss(student: PreTrainedModel, target: PreTrainedModel, rows: list[TrainingRow]) -> Tensor:
    """Mean KL(target || student) of the tokens that follow each position of the rows' answers."""
    ids = pad_sequence([torch.tensor(row.input_ids) for row in rows], batch_first=True).to(target.device)
    places = [(i, t) for i, row in enumerate(rows) for t in root_positions(row.labels)]
    index = torch.tensor(places, device=ids.device).T  # [2, P]
    with torch.no_grad():
        hidden = target.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state[index[0], index[1]]
        wanted = target.get_output_embeddings()(hidden).float().log_softmax(dim=-1)  # [P, V]
    guess = student.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state[index[0], index[1]]
    found = student.get_output_embeddings()(guess).log_softmax(dim=-1)
    return torch.nn.functional.kl_div(found, wanted, reduction="batchmean", log_target=True)


def distil(
    target: PreTrainedModel, rows: list[TrainingRow], layers: int, epochs: int, batch_size: int, rate: float
) -> PreTrainedModel:
    """Train the student."""
    student = first_layers(target, layers).to(target.device).train()
    learning = freeze_vocabulary(student)
    steps = epochs * -(-len(rows) // batch_size)
    optimizer = torch.optim.AdamW(learning, lr=rate, weight_decay=0.0)
    schedule = get_linear_schedule_with_warmup(optimizer, steps // 20, steps)
    order, losses = random.Random(0), []
    with progress_bar("distilling", steps) as advance:
        for _ in range(epochs):
            shuffled = order.sample(rows, len(rows))
            for start in range(0, len(rows), batch_size):
                loss = distil_loss(student, target, shuffled[start : start + batch_size])
                loss.backward()
                torch.nn.utils.clip_grad_norm_(learning, 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                losses.append(loss.item())
                advance(1)
    tenth = max(len(losses) // 10, 1)
    print(f"KL {sum(losses[:tenth]) / tenth:.2f} -> {sum(losses[-tenth:]) / tenth:.2f} nats a token")
    return student.eval()


def main() -> None:
    """Distil and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("answers", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--rows", type=int, help="use so many of the answers")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--dtype", default="auto", help="of the target while it teaches")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    target = load_backbone(arguments.model, arguments.dtype).requires_grad_(False)
    tokenizer = load_tokenizer(arguments.model)
    rows, report = load_rows(arguments.answers, tokenizer, arguments.max_length)
    print(report.summary())
    student = distil(
        target,
        rows[: arguments.rows],
        arguments.layers,
        arguments.epochs,
        arguments.batch_size,
        arguments.learning_rate,
    )
    with atomic_directory(arguments.directory) as work:
        student.to(load_backbone(arguments.model).dtype).save_pretrained(work)
        tokenizer.save_pretrained(work)
    print(f"{arguments.layers}-layer draft saved to {arguments.directory}")


if __name__ == "__main__":
    main()
