"""The loss of the heads. P positions, n of a chunk, K heads, h of a chunk, D hidden, Vd draft vocabulary."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from medusa.heads import MedusaHeads

from .pairs import following
from .supervision import IGNORE

CHUNK_ENTRIES = 2**24
"""At most so many logits (64 MB in fp32) are made at a time."""


class HeadLoss(nn.Module):
    """Cross-entropy of every head, weighted and summed (Cai et al. 2024, section 2.2.1).

    With soft labels, head k at t learns the backbone's own distribution over the draft vocabulary at t+1+k, which
    hidden states give that are there anyway: those of the next positions.

    A module of its own so that data parallelism can wrap exactly what trains.
    """

    def __init__(
        self,
        heads: MedusaHeads,
        head_decay: float,
        soft_labels: float = 0.0,
        label_smoothing: float = 0.0,
        lm_head: tuple[Tensor, Tensor | None] | None = None,
    ) -> None:
        """Prepare the loss.

        Args:
            heads: what learns.
            head_decay: head k's loss counts head_decay ** k.
            soft_labels: share of the KL divergence from the backbone in the loss; the rest is cross-entropy.
            label_smoothing: of the cross-entropy.
            lm_head: the backbone's LM head, weight [V, D] and bias [V]; needed for soft labels only.
        """
        super().__init__()
        self.heads = heads
        self.head_decay = head_decay
        self.soft_labels = soft_labels
        self.label_smoothing = label_smoothing
        # Not buffers: data parallelism would send them around in every step.
        self.teacher = draft_rows(heads, *lm_head) if lm_head is not None and soft_labels > 0 else None

    def forward(self, hidden: Tensor, root: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Sums over the positions; divide by the number of pairs in the whole optimizer step.

        Args:
            hidden: the backbone's final hidden states, [P, D]; those of an answer stand one behind the other.
            root: ids of the roots, [P].
            targets: vocabulary ids or IGNORE, [P, K].

        Returns:
            The weighted sum over the heads, a scalar, and each head's own unweighted sum, [K] (detached).
        """
        features = self.heads.features(hidden, root, following(targets))  # [K, P, D]
        count, positions = features.shape[:2]
        targets = self.heads.to_draft(targets)
        ahead = F.pad(hidden.detach(), (0, 0, 0, count))  # [P + K, D]

        def part(first: int, last: int, start: int, stop: int) -> Tensor:
            states = ahead[start + 1 + first : stop + last]
            return self.losses(first, features[first:last, start:stop], targets[start:stop, first:last], states)

        size = max(1, CHUNK_ENTRIES // self.heads.draft_size)
        if positions * count <= size:
            losses = part(0, count, 0, positions)
        else:  # head by head, so that the gradient of only one projection is being summed up at any time
            losses = torch.cat([in_chunks(partial(part, k, k + 1), positions, size) for k in range(count)])
        decay = self.head_decay ** torch.arange(count, device=losses.device)
        return (losses * decay).sum(), losses.detach()

    def losses(self, first: int, features: Tensor, targets: Tensor, ahead: Tensor) -> Tensor:
        """Sums of some heads over some positions.

        Args:
            first: the first of these h heads.
            features: what the projections see, [h, n, D].
            targets: indices in the draft vocabulary or IGNORE, [n, h].
            ahead: the hidden states that the first head's soft labels come from, and h-1 more, [n + h - 1, D].

        Returns:
            [h].
        """
        teacher = None
        if self.soft_labels > 0:
            assert self.teacher is not None, "soft labels need the LM head"
            weight, bias = self.teacher
            teacher = self.heads.transform(F.linear(ahead.to(weight.dtype), weight, bias)).float().log_softmax(dim=-1)
        sums = []
        for i in range(len(features)):
            keep = targets[:, i] != IGNORE
            logits = self.heads.transform(self.heads.project(features[i][keep], first + i)).float()  # [kept, Vd]
            loss = F.cross_entropy(logits, targets[keep, i], reduction="sum", label_smoothing=self.label_smoothing)
            if teacher is not None:
                # A pair counts only if all tokens between are of the same answer: position p+1+k is t+1+k.
                soft = divergence(logits, teacher[i : i + len(keep)][keep])
                loss = (1 - self.soft_labels) * loss + self.soft_labels * soft
            sums.append(loss)
        return torch.stack(sums)


def divergence(logits: Tensor, teacher: Tensor) -> Tensor:
    """Summed KL(teacher || student): the student's logits and the teacher's log-probabilities, [P, V] each."""
    return F.kl_div(logits.log_softmax(dim=-1), teacher, reduction="sum", log_target=True)


def draft_rows(heads: MedusaHeads, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The LM head's rows of the draft vocabulary: [Vd, D] and [Vd]."""
    if heads.draft_ids is None:
        return weight.detach(), None if bias is None else bias.detach()
    return weight.detach()[heads.draft_ids], None if bias is None else bias.detach()[heads.draft_ids]


def in_chunks(part: Callable[[int, int], Tensor], positions: int, size: int) -> Tensor:
    """Sum of `part(start, stop)` over slices of the positions.

    Where there are several, each is computed a second time in the backward pass, so that the logits of only one exist
    at any time.
    """
    if positions <= size:
        return part(0, positions)
    starts = range(0, positions, size)
    parts = [checkpoint(part, start, min(start + size, positions), use_reentrant=False) for start in starts]
    return torch.stack(parts).sum(dim=0)
