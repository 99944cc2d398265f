"""Make an unmodified Hugging Face model attend along a candidate tree.

transformers builds a model's masks through one table of functions, one call for each kind of layer, with that kind's
window. While `tree_attention` is active in the current thread or task, the entries for sdpa and eager attention
return the tree's mask; otherwise they pass the call on, so every other use of the model is untouched.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask

from .layout import TreeLayout

SUPPORTED_ATTENTION = ("sdpa", "eager")


_active: ContextVar[TreeLayout | None] = ContextVar("medusa_tree_layout", default=None)


@contextmanager
def tree_attention(layout: TreeLayout) -> Iterator[None]:
    """Let forward passes inside the block treat their N tokens as the nodes of a tree behind the cached text."""
    token = _active.set(layout)
    try:
        yield
    finally:
        _active.reset(token)


def tree_mask(layout: TreeLayout, length: int, window: int | None) -> Tensor:
    """Who sees whom: each node its ancestors and the text before, as far back as the layer's window reaches.

    Args:
        layout: the tree.
        length: how many positions are cached before it.
        window: positions that the layer looks back over, its own included, or None for all.

    Returns:
        Bool [N, length + N].
    """
    device = layout.depths.device
    text = torch.ones(len(layout.depths), length, dtype=torch.bool, device=device)
    mask = torch.cat([text, layout.ancestors], dim=1)
    if window is not None:
        query = length + layout.depths
        key = torch.cat([torch.arange(length, device=device), query])
        mask &= query[:, None] - key[None, :] < window
    return mask


def _sdpa_with_tree(**call: Any) -> Tensor | None:
    layout = _active.get()
    if layout is None:
        return sdpa_mask(**call)
    mask = tree_mask(layout, call["kv_length"] - call["q_length"], call.get("local_size"))
    return mask[None, None].expand(call["batch_size"], 1, -1, -1)


def _eager_with_tree(**call: Any) -> Tensor | None:
    if _active.get() is None:
        return eager_mask(**call)
    visible = _sdpa_with_tree(**call)
    assert visible is not None
    dtype = call["dtype"]
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(~visible, torch.finfo(dtype).min)


def install() -> None:
    """Put the two functions into the table of transformers. Idempotent."""
    functions: dict[str, Callable[..., Tensor | None]] = {"sdpa": _sdpa_with_tree, "eager": _eager_with_tree}
    for name, function in functions.items():
        AttentionMaskInterface.register(name, function)
