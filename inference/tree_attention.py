"""Make an unmodified Hugging Face model attend along a candidate tree.

transformers builds a model's masks through one table of functions, one call for each kind of layer, with that kind's
window. While `tree_attention` is active in the current thread or task, the entries for sdpa and eager attention
return the tree's mask; otherwise they pass the call on, so every other use of the model is untouched.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask

from .layout import TreeLayout

SUPPORTED_ATTENTION = ("sdpa", "eager")


@dataclass(frozen=True)
class TreePass:
    """What the masks of one verify pass depend on."""

    layout: TreeLayout
    lengths: Tensor
    """Text that each row has cached before the tree, [B]."""
    nodes: range | None = None
    """Nodes that this pass computes, where the cache holds those before them; None for all."""


_active: ContextVar[TreePass | None] = ContextVar("medusa_tree_pass", default=None)


class Traced:
    """The tree pass while a compiler traces one: it cannot follow context variables."""

    tree_pass: TreePass | None = None


traced = Traced()


@contextmanager
def tree_attention(layout: TreeLayout, lengths: Tensor, nodes: range | None = None) -> Iterator[None]:
    """Let forward passes inside the block treat their N tokens as the nodes of a tree behind each row's cached text.

    With `nodes`, they are these alone, and the nodes before them are cached behind the text.
    """
    token = _active.set(TreePass(layout, lengths, nodes))
    try:
        yield
    finally:
        _active.reset(token)


def tree_mask(layout: TreeLayout, lengths: Tensor, keys: int, window: int | None) -> Tensor:
    """Who sees whom: each node its ancestors and the text before, as far back as the layer's window reaches.

    Args:
        layout: the tree.
        lengths: how many positions are cached before it in each row, [B].
        keys: how many positions the cache shows, at least the longest row and its tree.
        window: positions that the layer looks back over, its own included, or None for all.

    Returns:
        Bool [B, N, keys].
    """
    nodes = layout.num_nodes
    place = torch.arange(keys, device=lengths.device)
    relative = place - lengths[:, None]  # [B, keys]: below 0 text, then the tree's nodes, then nothing
    node = relative.clamp(0, nodes - 1)
    ancestors = layout.ancestors.expand(len(lengths), -1, -1)
    in_tree = ((relative >= 0) & (relative < nodes))[:, None]  # [B, 1, keys]
    mask = ancestors.gather(2, node[:, None].expand(-1, nodes, -1)) & in_tree | (relative < 0)[:, None]
    if window is not None:
        depths = layout.depths.expand(len(lengths), -1)
        query = lengths[:, None] + depths  # [B, N]
        key = torch.where(relative < 0, place, lengths[:, None] + depths.gather(1, node))
        mask &= query[:, :, None] - key[:, None, :] < window
    return mask


def _tree_pass() -> TreePass | None:
    return traced.tree_pass if torch.compiler.is_compiling() else _active.get()


def _sdpa_with_tree(**call: Any) -> Tensor | None:
    active = _tree_pass()
    if active is None:
        return sdpa_mask(**call)
    mask = tree_mask(active.layout, active.lengths, call["kv_length"], call.get("local_size"))
    if active.nodes is not None:
        mask = mask[:, active.nodes.start : active.nodes.stop]
    return mask[:, None]


def _eager_with_tree(**call: Any) -> Tensor | None:
    if _tree_pass() is None:
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
