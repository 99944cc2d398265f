"""How often the heads are right on held-out text. P positions, K heads, G guesses of each, S temperatures."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from medusa.checkpoint import EVALUATION_FILE
from medusa.heads import MedusaHeads
from medusa.model import MedusaModel
from medusa.progress import progress_bar
from medusa.tree_search import MISS

from .acceptance import Target, guess_probabilities
from .hidden_states import HiddenStates, LiveHiddenStates, RecordedHiddenStates, recording_directory
from .pairs import following, make_batch
from .rows import load_rows
from .supervision import IGNORE, TrainingRow

GUESSES = 32
"""Of each head. Wide trees use more than ten: a first head's 20th is right more often than most deep nodes."""
BATCH_SIZE = 8


@dataclass(frozen=True)
class HeadAccuracy:
    """Share of supervised positions at which a head's first 1, 5 or 10 guesses hold the token that came."""

    top1: list[float]
    top5: list[float]
    top10: list[float]
    positions: list[int]
    """How many each head was judged on."""
    conditional_top1: list[float]
    """The same, where the first guesses of all heads before were right too."""
    conditional_top5: list[float]
    conditional_top10: list[float]

    def save(self, directory: Path) -> None:
        """Write the figures beside the heads."""
        (directory / EVALUATION_FILE).write_text(json.dumps(asdict(self), indent=2) + "\n")

    def table(self) -> list[list[str]]:
        """Rows for people: head, top-1, top-5, top-10, positions."""
        return [
            [str(k), *(f"{share[k]:.3f}" for share in (self.top1, self.top5, self.top10)), str(self.positions[k])]
            for k in range(len(self.top1))
        ]


class Judged(NamedTuple):
    """Each head's first guesses at many positions."""

    ranks: Tensor
    """Rank of the right token among the guesses, [P, K]; MISS if it is not there, or there is none."""
    targets: Tensor
    """The right tokens, [P, K]."""
    log_confidence: Tensor
    """Log-probability that the head gave each guess, [P, K, G]."""
    guesses: Tensor
    """Vocabulary ids, best first, [P, K, G]."""
    acceptance: Tensor
    """Probability of each guess to the backbone behind the text before it, [P, S, K, G]; S may be 0."""

    @property
    def ends(self) -> Tensor:
        """Whether an answer ends with the root of a position, bool [P]."""
        return self.targets[:, 0] == IGNORE

    def limited(self, max_depth: int | None, max_branching: int | None) -> "Judged":
        """What a tree sees that uses so many heads and so many guesses of each; None: all."""
        ranks, acceptance = self.ranks.clone(), self.acceptance[..., :max_branching].clone()
        log_confidence = self.log_confidence[..., :max_branching].clone()
        if max_branching is not None:
            ranks[ranks >= max_branching] = MISS
        if max_depth is not None:
            ranks[:, max_depth:] = MISS
            acceptance[:, :, max_depth:] = 0
            log_confidence[:, max_depth:] = -torch.inf
        return self._replace(
            ranks=ranks,
            acceptance=acceptance,
            log_confidence=log_confidence,
            guesses=self.guesses[..., :max_branching],
        )


def judge(heads: MedusaHeads, hidden: Tensor, root: Tensor, targets: Tensor, target: Target | None = None) -> Judged:
    """Compare each head's first guesses with what came: hidden [P, D], root [P], targets [P, K].

    With `target`, also ask how probable the backbone finds them; then the positions must be whole answers.

    Sequential heads see the true tokens before their own. A decoder that gets as far as to use a head's guess has
    accepted these, so trees are searched rightly; as accuracies they are not comparable with those of other heads.
    """
    logits = heads(hidden, root, following(targets))  # [K, P, Vd]
    best = logits.topk(min(GUESSES, logits.shape[-1]), dim=-1)  # [K, P, GUESSES]
    guesses = heads.to_vocab(best.indices)
    hits = guesses == targets.T[..., None]
    ranks = torch.where(hits.any(dim=-1), hits.int().argmax(dim=-1), MISS).T
    log_confidence = best.values.float() - logits.float().logsumexp(dim=-1, keepdim=True)
    guesses = guesses.transpose(0, 1)  # [P, K, GUESSES]
    acceptance = torch.zeros(len(hidden), 0, *guesses.shape[1:])
    if target is not None:
        acceptance = guess_probabilities(target, hidden, targets, guesses)
    return Judged(ranks, targets, log_confidence.transpose(0, 1), guesses, acceptance)


@torch.no_grad()
def judge_rows(
    heads: MedusaHeads,
    rows: list[TrainingRow],
    states: HiddenStates,
    advance: Callable[[int], None],
    target: Target | None = None,
) -> Judged:
    """`judge` whole rows, in the order of the text."""
    parameter = next(heads.parameters())
    parts = []
    for start in range(0, len(rows), BATCH_SIZE):
        part = rows[start : start + BATCH_SIZE]
        batch = make_batch(part, states.of(part), len(heads), parameter.device)
        parts.append(judge(heads, batch.hidden.to(parameter.dtype), batch.root, batch.targets, target))
        advance(len(part))
    return Judged(*(torch.cat(tensors).cpu() for tensors in zip(*parts, strict=True)))


def accuracy(judged: Judged) -> HeadAccuracy:
    """Sum up what `judge` found."""
    ranks, counted = judged.ranks, judged.targets != IGNORE
    counts = counted.sum(dim=0)

    def shares(top: int) -> tuple[list[float], list[float]]:
        hit = (ranks != MISS) & (ranks < top) & counted
        reached = hit.cumprod(dim=1).roll(1, dims=1)
        reached[:, 0] = 1
        found = hit.sum(dim=0) / counts.clamp(min=1)
        conditional = (hit & reached.bool()).sum(dim=0) / (counted & reached.bool()).sum(dim=0).clamp(min=1)
        return [round(share, 4) for share in found.tolist()], [round(share, 4) for share in conditional.tolist()]

    (top1, after1), (top5, after5), (top10, after10) = shares(1), shares(5), shares(10)
    return HeadAccuracy(top1, top5, top10, counts.tolist(), after1, after5, after10)


def judge_file(
    model: MedusaModel,
    tokenizer: Any,
    file: str,
    max_length: int,
    recorded: bool,
    temperatures: tuple[float, ...] = (),
) -> Judged:
    """`judge` the rows of a chat file, with recorded hidden states or from a pass of the backbone."""
    target = Target(model.backbone, temperatures) if temperatures else None
    rows, _ = load_rows(file, tokenizer, max_length)
    states: HiddenStates = LiveHiddenStates(model.backbone)
    if recorded:
        states = RecordedHiddenStates(recording_directory(Path(file)))
    with progress_bar("evaluating", len(rows)) as advance:
        return judge_rows(model.heads, rows, states, advance, target)
