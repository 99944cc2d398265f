"""Run the backbone: once over the prompt, then once over every candidate tree.

B rows, N nodes, T prompt length, D hidden, V vocabulary.
"""

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from medusa.backbone import Backbone
from medusa.tree import CandidateTree

from .cache import TreeCache
from .layout import TreeLayout
from .tree_attention import SUPPORTED_ATTENTION, tree_attention

CACHE_ORDER = {"bloom": "ALiBi", "mpt": "ALiBi", "gpt_neo": "a local mask of its own"}
"""What goes by the order in the cache, by model type. A trial on a short text would not always notice."""


def prefill(backbone: Backbone, prompts: list[Tensor], cache: TreeCache) -> tuple[Tensor, Tensor]:
    """Cache the prompts ([T] each); returns the hidden state [B, D] and the logits [B, V] after each.

    Short prompts are padded behind their end: no token sees what comes after it, so this needs no mask.
    """
    lengths = [len(prompt) for prompt in prompts]
    hidden = backbone.extend(pad_sequence(prompts, batch_first=True), cache)  # [B, T, D]
    cache.keep([list(range(length)) for length in lengths])
    last = hidden[torch.arange(len(prompts)), torch.tensor(lengths) - 1]
    return last, backbone.logits(last)


def verify(backbone: Backbone, tokens: Tensor, layout: TreeLayout, cache: TreeCache) -> tuple[Tensor, Tensor]:
    """Check a whole tree for every row in one pass; its positions stand in the cache behind each row's text.

    Args:
        backbone: the target.
        tokens: candidate tokens, [B, N]; -1 at empty nodes.
        layout: the tree.
        cache: holds the text before the roots.

    Returns:
        The hidden state [B, N, D] and the logits [B, N, V] after each node.
    """
    lengths = torch.tensor(cache.lengths.rows, device=tokens.device)
    with tree_attention(layout, lengths):
        hidden = backbone.extend(tokens.clamp(min=0), cache, positions(backbone, lengths, layout))
    return hidden, backbone.logits(hidden)


def verify_nodes(
    backbone: Backbone, tokens: Tensor, layout: TreeLayout, nodes: range, text: Tensor, cache: TreeCache
) -> Tensor:
    """Run some nodes of a tree, behind those before them, which `cache` counts as text.

    Args:
        backbone: the model.
        tokens: the nodes' tokens, [B, n]; -1 at empty ones.
        layout: the tree.
        nodes: which of its nodes they are.
        text: how much stands before the roots, [B].
        cache: holds text and earlier nodes.

    Returns:
        Logits after each, [B, n, V].
    """
    place = positions(backbone, text, layout)[:, nodes.start : nodes.stop]
    with tree_attention(layout, text, nodes):
        hidden = backbone.extend(tokens.clamp(min=0), cache, place)
    return backbone.logits(hidden)


def positions(backbone: Backbone, lengths: Tensor, layout: TreeLayout) -> Tensor:
    """Place of each node in its text: lengths [B] -> [B, N]."""
    position = lengths[:, None] + layout.depths
    if backbone.context_length is None:
        return position
    # Nodes past the context's end are never emitted, but learned position tables have no row for them.
    return position.clamp(max=backbone.context_length - 1)


@torch.inference_mode()
def check_tree_attention(backbone: Backbone) -> None:
    """Refuse a backbone that does not attend along a tree, by trying: each path must give what plain text gives.

    Raises:
        ValueError: the attention implementation takes no tree mask, or the model's positions do not follow
            `position_ids` (ALiBi) or its masks do not go through transformers' table.
    """
    model = backbone.model
    name = type(model).__name__
    attention = model.config._attn_implementation
    if attention not in SUPPORTED_ATTENTION:
        raise ValueError(
            f"attention implementation {attention!r} takes no tree mask; load {name} with attn_implementation= one of "
            f"{', '.join(SUPPORTED_ATTENTION)}"
        )
    config = model.config.get_text_config(decoder=True)
    what = "ALiBi" if getattr(config, "alibi", False) else CACHE_ORDER.get(config.model_type)
    if what is not None:
        raise ValueError(
            f"{name} uses {what}, which goes by the order in the cache and not by the depth in the tree; tree "
            "verification would change its output. Use plain `generate` for this one"
        )
    device = backbone.lm_weight.device
    # Ordinary tokens: the first of a vocabulary are often special, and upset half precision.
    ids = torch.arange(10, device=device).add(backbone.vocab_size // 2).remainder(backbone.vocab_size)
    prompt, tokens = ids[:6], ids[6:]
    layout = TreeLayout.of(CandidateTree.from_paths([(0,), (1,), (1, 0)]), device)
    cache = TreeCache(backbone.num_layers, len(prompt) + len(tokens))
    prefill(backbone, [prompt], cache)
    hidden, _ = verify(backbone, tokens[None], layout, cache)
    for node in (1, 3):
        path = tokens[layout.ancestors[0, node]]
        whole = backbone.hidden(torch.cat([prompt, path])[None])[0, -1]
        cache = TreeCache(backbone.num_layers, len(prompt) + len(path))
        prefill(backbone, [prompt], cache)
        plain = backbone.extend(path[None], cache)[0, -1]
        rounding = float((plain - whole).float().norm() / whole.float().norm())
        error = float((hidden[0, node] - plain).float().norm() / plain.float().norm())
        slack, limit = (1e-3, 1e-3) if whole.dtype in (torch.float32, torch.float64) else (2e-2, 0.25)
        # A model that ignores its cache is as wrong in pieces as in a tree, so rounding has a limit of its own.
        worst = max(error, rounding)
        if not (error <= 4 * rounding + slack and worst <= limit):
            raise ValueError(
                f"{name} does not follow a tree mask (hidden states differ by {worst:.0%} from plain decoding), "
                "so its output would change; this architecture is not supported. Use plain `generate`"
            )
