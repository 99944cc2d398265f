"""Full vocabulary projections for engines that know neither a draft vocabulary nor a shared projection.

D hidden, V vocabulary, Vd draft vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def full_projection(weight: Tensor, draft_vocab: Sequence[int] | None, vocab_size: int) -> Tensor:
    """Spread the rows of a draft vocabulary over the whole vocabulary: [Vd, D] -> [V, D].

    Every other token gets the mean of the draft rows. Its logit is then the mean of the draft logits, which is never
    above their maximum, whatever the hidden state: it cannot win. Zero rows would win where all logits are negative,
    as they are in GPT-2, and the LM head's own rows win wherever the model would say such a token.
    """
    if draft_vocab is None:
        return weight
    mean = weight.float().mean(dim=0).to(weight.dtype)
    full = mean.repeat(vocab_size, 1)
    full[torch.tensor(draft_vocab)] = weight
    return full
