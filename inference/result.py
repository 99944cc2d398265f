"""What a generation gave, and what it took. B rows, V vocabulary."""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import GenerationConfig

from .request import Row


@dataclass
class DecodingStats:
    """What a generation took. For several rows the counts are sums over them."""

    new_tokens: int = 0
    steps: int = 0
    """Verify passes; a pass over several rows counts once for each."""
    accepted: list[int] = field(default_factory=list)
    """Accepted candidates of each step, the root not counted."""
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    finish_reason: str = "length"
    """`stop` after an end token, stop string or other criterion; `length` at max_new_tokens or the context's end."""
    rows: int = 1

    def count_prefill(self, row: Row, seconds: float) -> None:
        """Take note of the first token."""
        self.prefill_seconds += seconds
        self._count(row)

    def count_step(self, row: Row, seconds: float) -> None:
        """Take note of one verify pass that the row took part in."""
        self.decode_seconds += seconds
        self.steps += 1
        self.accepted.append(row.new_tokens - self.new_tokens - 1)
        self._count(row)

    def _count(self, row: Row) -> None:
        self.new_tokens = row.new_tokens
        self.finish_reason = row.finish_reason or "length"

    @property
    def tokens_per_step(self) -> float:
        """Tokens emitted by verify passes / verify passes, roots included; the prefill's own tokens are not counted."""
        return (self.new_tokens - self.rows) / self.steps if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """New tokens / time for them, prefill included."""
        seconds = self.prefill_seconds + self.decode_seconds
        return self.new_tokens / seconds if seconds else 0.0


@dataclass(frozen=True)
class GenerationResult:
    """Prompts and answers, and what they took."""

    sequences: Tensor
    """[B, prompt + new tokens], padded behind short answers."""
    stats: DecodingStats
    """Of all rows."""
    row_stats: list[DecodingStats]
    """Of each row."""
    scores: tuple[Tensor, ...] | None = None
    """With output_scores: processed scores of each new token, [B, V] each; all on the pad token after a row's end."""
    logits: tuple[Tensor, ...] | None = None
    """With output_logits: the backbone's own logits, likewise."""


def gather(prompts: Tensor, rows: list[Row], stats: list[DecodingStats], config: GenerationConfig) -> GenerationResult:
    """Put prompts [B, T] and the rows' answers into one matrix."""
    pad = 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)
    longest = max(row.new_tokens for row in rows)
    answers = prompts.new_full((len(rows), longest), pad)
    for i, row in enumerate(rows):
        answers[i, : row.new_tokens] = row.ids[row.start : row.length]
    total = DecodingStats(
        new_tokens=sum(s.new_tokens for s in stats),
        steps=sum(s.steps for s in stats),
        accepted=[count for s in stats for count in s.accepted],
        prefill_seconds=max(s.prefill_seconds for s in stats),
        decode_seconds=max(s.decode_seconds for s in stats),
        finish_reason="stop" if all(s.finish_reason == "stop" for s in stats) else "length",
        rows=len(rows),
    )
    return GenerationResult(
        torch.cat([prompts, answers], dim=1),
        total,
        stats,
        scores=_stacked([row.scores for row in rows], longest, pad) if rows[0].keep_scores else None,
        logits=_stacked([row.logits for row in rows], longest, pad) if rows[0].keep_logits else None,
    )


def _stacked(kept: list[list[Tensor]], longest: int, pad: int) -> tuple[Tensor, ...]:
    """Scores of each row's tokens ([V] each) -> for each token [B, V]; certain of the pad token after a row's end."""
    after = torch.full_like(kept[0][0], -torch.inf)
    after[pad] = 0
    return tuple(torch.stack([row[t] if t < len(row) else after for row in kept]) for t in range(longest))
