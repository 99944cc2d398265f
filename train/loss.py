"""The loss of the heads. P positions, K heads, D hidden, Vd draft vocabulary."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa.heads import LogitTransform, MedusaHeads

from .pairs import following
from .supervision import IGNORE

CHUNKED_FROM = 2**27
"""Logits of one head beyond so many entries (512 MB in fp32) are never materialised."""


class HeadLoss(nn.Module):
    """Cross-entropy of every head, weighted and summed (Cai et al. 2024, section 2.2.1).

    A module of its own so that data parallelism can wrap exactly what trains.
    """

    def __init__(self, heads: MedusaHeads, head_decay: float) -> None:
        super().__init__()
        self.heads = heads
        self.head_decay = head_decay

    def forward(self, hidden: Tensor, root: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Sums over the positions; divide by the number of pairs in the whole optimizer step.

        Args:
            hidden: the backbone's final hidden states, [P, D].
            root: ids of the roots, [P].
            targets: vocabulary ids or IGNORE, [P, K].

        Returns:
            The weighted sum over the heads, a scalar, and each head's own unweighted sum, [K] (detached).
        """
        features = self.heads.features(hidden, root, following(targets))  # [K, P, D]
        sums = []
        for k in range(len(self.heads)):
            weight, bias = self.heads.projection(k)
            target = self.heads.to_draft(targets[:, k])
            sums.append(projected_cross_entropy(features[k], weight, bias, target, self.heads.transform))
        losses = torch.stack(sums)
        decay = self.head_decay ** torch.arange(len(sums), device=losses.device)
        return (losses * decay).sum(), losses.detach()


def projected_cross_entropy(
    features: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, transform: LogitTransform
) -> Tensor:
    """Summed cross-entropy of `transform(features @ weight.T + bias)`; positions with target IGNORE do not count.

    Args:
        features: [P, D]
        weight: [Vd, D]
        bias: [Vd] or None
        target: indices in the draft vocabulary or IGNORE, [P]
        transform: the backbone's logit transform.
    """
    keep = target != IGNORE
    features, target = features[keep], target[keep]
    weight = weight.to(features.dtype)
    bias = None if bias is None else bias.to(features.dtype)
    if transform == LogitTransform() and len(features) * len(weight) > CHUNKED_FROM:
        return F.linear_cross_entropy(
            features, weight, target, linear_bias=bias, reduction="sum", options=nn.LinearCrossEntropyOptions()
        )
    logits = transform(F.linear(features, weight, bias)).float()
    return F.cross_entropy(logits, target, reduction="sum")
