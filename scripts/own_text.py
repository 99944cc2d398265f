"""Text that a backbone writes itself, as rows to judge heads on."""

from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from medusa import MedusaModel
from medusa.inference import MedusaDecoder
from medusa.loading import load_tokenizer
from medusa.progress import progress_bar
from medusa.train.rows import load_rows
from medusa.train.supervision import IGNORE, TrainingRow
from medusa.tree import CandidateTree

BATCH_SIZE = 16


def prompts_of(file: Path, checkpoint: str) -> list[list[int]]:
    """Token ids of the prompts of a chat file, up to the first answer."""
    rows, _ = load_rows(file, load_tokenizer(checkpoint), 2048)
    return [row.input_ids[: next(i for i, label in enumerate(row.labels) if label != IGNORE)] for row in rows]


def write_answers(
    model: MedusaModel,
    tree: CandidateTree,
    prompts: list[list[int]],
    new_tokens: int,
    temperature: float,
) -> tuple[list[TrainingRow], float]:
    """Answer prompts with a tree: rows, and tokens emitted by verify passes / verify passes, roots included.

    Acceptance is exact, so whatever the tree, the answers are the backbone's own.
    """
    decoder = MedusaDecoder(model, tree=tree, proposal="top_k")
    options = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    dice = torch.Generator(decoder.device).manual_seed(0)
    rows: list[TrainingRow] = []
    tokens = steps = 0
    with progress_bar(f"decoding with {tree.num_nodes} nodes", len(prompts)) as advance:
        for start in range(0, len(prompts), BATCH_SIZE):
            batch = [torch.tensor(prompt) for prompt in prompts[start : start + BATCH_SIZE]]
            ids, mask = padded_in_front(batch), padded_in_front([torch.ones_like(prompt) for prompt in batch])
            result = decoder.generate(ids, new_tokens, attention_mask=mask, generator=dice, **options)
            tokens, steps = tokens + result.stats.new_tokens - result.stats.rows, steps + result.stats.steps
            ends = ends_of(decoder)
            for prompt, answer in zip(batch, result.sequences[:, ids.shape[1] :].tolist(), strict=True):
                length = next((i + 1 for i, token in enumerate(answer) if token in ends), len(answer))
                labels = [IGNORE] * len(prompt) + answer[:length]
                rows.append(TrainingRow(str(len(rows)), prompt.tolist() + answer[:length], labels))
            advance(len(batch))
    return rows, tokens / max(steps, 1)


def padded_in_front(prompts: list[Tensor]) -> Tensor:
    """[B, T]."""
    return pad_sequence(prompts, batch_first=True, padding_side="left")


def ends_of(decoder: MedusaDecoder) -> set[int]:
    """Tokens that end an answer."""
    config = decoder.model.model.generation_config
    assert config is not None
    ends = config.eos_token_id
    return set(ends) if isinstance(ends, list) else {int(ends or -1)}
