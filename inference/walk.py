"""Walk down a verified tree and write what is accepted. B rows, N nodes, V vocabulary.

Only nodes on the way are looked at, each once and in the order of the text. So logits processors see exactly the calls
that plain decoding would make, even those that remember what they saw, and a row that ends stops there.
"""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from .accept import NO_TOKEN, Blockwise, Typical, accept_fixed, accept_mixed, accept_sampled, possible
from .draws import Draws
from .layout import TreeLayout
from .propose import Candidates
from .request import Row
from .warp import probabilities, processed_scores

Path = list[int]
"""Accepted nodes, from the root on."""
Decide = Callable[[Tensor, Tensor, list[int], list[Path], list[list[int]]], tuple[Tensor, Tensor]]
"""Rule at a node: processed scores [R, V], p [R, V], which rows, their paths and the children of the paths' ends -> the
next token [R] and which child carries it [R], -1 for none."""


def walk_exact(rows: list[Row], candidates: Candidates, logits: Tensor, layout: TreeLayout, draws: Draws) -> list[Path]:
    """Accept what keeps the backbone's distribution; the accepted tokens and the bonus token are emitted to the rows.

    Args:
        rows: the texts; their last token is the root.
        candidates: the filled tree.
        logits: the backbone's after each node, [B, N, V].
        layout: the tree.
        draws: the dice.

    Returns:
        The accepted nodes of each row.
    """

    def decide(
        scores: Tensor, p: Tensor, active: list[int], paths: list[Path], children: list[list[int]]
    ) -> tuple[Tensor, Tensor]:
        return _decide(p, candidates, active, [path[-1] for path in paths], children, draws)

    return _walk(rows, logits, layout, decide)


def walk_blockwise(
    rows: list[Row], candidates: Candidates, logits: Tensor, layout: TreeLayout, blockwise: Blockwise, draws: Draws
) -> list[Path]:
    """Accept as long as a child meets the criterion, or the block is too small; of several the first. As above."""

    def decide(
        scores: Tensor, p: Tensor, active: list[int], paths: list[Path], children: list[list[int]]
    ) -> tuple[Tensor, Tensor]:
        token, tokens = draws.categorical(p), _tokens_of(candidates.tokens, active, children)
        if tokens.shape[1] == 0:
            return token, torch.full_like(token, NO_TOKEN)
        short = torch.tensor([len(path) < blockwise.min_block for path in paths], device=p.device)
        met = blockwise.accepts(scores, token, tokens)  # [R, C]
        stays = torch.where((short & ~met.any(dim=1))[:, None], possible(scores, tokens), met)
        child = torch.where(stays.any(dim=1), stays.int().argmax(dim=1), NO_TOKEN)
        return torch.where(child == NO_TOKEN, token, tokens.gather(1, child.clamp(min=0)[:, None])[:, 0]), child

    return _walk(rows, logits, layout, decide)


def _walk(rows: list[Row], logits: Tensor, layout: TreeLayout, decide: Decide) -> list[Path]:
    """Go down all trees at once, a node a time, and emit what is decided."""
    paths: list[Path] = [[0] for _ in rows]
    active = list(range(len(rows)))
    while active:
        here = [rows[b] for b in active]
        nodes = [paths[b][-1] for b in active]
        raw = logits[active, nodes]
        scores = processed_scores(here, [row.context for row in here], raw)
        p = probabilities(here, scores)
        children = [layout.children_of(b, node) for b, node in zip(active, nodes, strict=True)]
        token, child = decide(scores, p, active, [paths[b] for b in active], children)
        walking = []
        for i, (b, next_token, which) in enumerate(zip(active, token.tolist(), child.tolist(), strict=True)):
            rows[b].emit(next_token, scores[i], raw[i])
            if which != NO_TOKEN and rows[b].finish_reason is None:
                paths[b].append(children[i][which])
                walking.append(b)
        active = walking
    return paths


def _decide(
    p: Tensor,
    candidates: Candidates,
    active: list[int],
    nodes: list[int],
    children: list[list[int]],
    draws: Draws,
) -> tuple[Tensor, Tensor]:
    """Apply the rule that fits how the children of `nodes` came about.

    Returns the next token of each active row, [R], and which child of its node carries it, [R].
    """
    tokens = _tokens_of(candidates.tokens, active, children)  # [R, C]
    drawn = candidates.drawn
    if drawn is None or tokens.shape[1] == 0:
        return accept_fixed(p, tokens, draws)
    # Of a node without children no q is needed, and its index may be of none.
    index = drawn.q_of[nodes].clamp(max=drawn.q.shape[1] - 1)
    q = drawn.q[active, index].to(p.dtype)  # [R, V]
    if not drawn.mixed:
        return accept_sampled(p, q, tokens, draws)
    counts = torch.tensor([len(group) for group in children], device=p.device)
    last = counts.sub(1).clamp(min=0)[:, None]
    sampled = torch.where(counts > 0, tokens.gather(1, last)[:, 0], NO_TOKEN)
    token, child = accept_mixed(p, q, tokens.scatter(1, last, NO_TOKEN), sampled, draws)
    return token, torch.where(child == tokens.shape[1], last[:, 0], child)


def walk_typical(
    rows: list[Row], candidates: Candidates, logits: Tensor, layout: TreeLayout, typical: Typical, draws: Draws
) -> list[Path]:
    """Accept the longest path of typical tokens, the likeliest of equally long ones; then emit it and the next root.

    Processors see each accepted node's own text, though not in the order of plain decoding. Arguments as above.
    """
    return [
        _longest_typical(b, row, candidates.tokens[b].tolist(), logits[b], layout, typical, draws)
        for b, row in enumerate(rows)
    ]


def _longest_typical(
    b: int, row: Row, tokens: list[int], logits: Tensor, layout: TreeLayout, typical: Typical, draws: Draws
) -> Path:
    """One row of `walk_typical`; logits [N, V]."""
    scores: dict[int, Tensor] = {}
    best: Path = [0]
    frontier: list[tuple[float, Path]] = [(0.0, [0])]
    while frontier:
        best = max(frontier, key=lambda reached: reached[0])[1]  # all of one length, longer than those before
        contexts = [_context(row, [tokens[node] for node in path[1:]]) for _, path in frontier]
        nodes = [path[-1] for _, path in frontier]
        found = processed_scores([row] * len(nodes), contexts, logits[nodes])
        scores.update(zip(nodes, found, strict=True))
        p = probabilities([row] * len(nodes), found)
        children = [layout.children_of(b, node) for node in nodes]
        candidates = torch.tensor(_padded([[tokens[c] for c in group] for group in children]), device=p.device)
        if candidates.shape[1] == 0:
            break
        stays = typical.accepts(p, candidates).tolist()
        likelihood = p.gather(1, candidates.clamp(min=0)).log().tolist()
        frontier = [
            (total + likelihood[i][j], [*path, child])
            for i, (total, path) in enumerate(frontier)
            for j, child in enumerate(children[i])
            if stays[i][j]
        ]
    for parent, node in itertools.pairwise(best):
        row.emit(tokens[node], scores[parent], logits[parent])
        if row.finish_reason is not None:
            return best
    last = scores[best[-1]][None]
    p = probabilities([row], last)
    bonus = p.argmax(dim=-1) if typical.greedy_root else draws.categorical(p)
    row.emit(int(bonus), last[0], logits[best[-1]])
    return best


def _context(row: Row, tokens: list[int]) -> Tensor:
    """The row's text and more tokens behind it, [1, length]."""
    return torch.cat([row.context, row.context.new_tensor([tokens])], dim=1) if tokens else row.context


def _tokens_of(tokens: Tensor, active: list[int], children: list[list[int]]) -> Tensor:
    """Tokens of the children of each active row's node, padded with -1: [R, C]."""
    nodes = torch.tensor(_padded(children), device=tokens.device, dtype=torch.long)
    if nodes.shape[1] == 0:
        return nodes
    return torch.where(nodes == NO_TOKEN, NO_TOKEN, tokens[active].gather(1, nodes.clamp(min=0)))


def _padded(lists: list[list[int]]) -> list[list[int]]:
    """Lists of one length, filled up with -1."""
    longest = max(map(len, lists))
    return [[*values, *[NO_TOKEN] * (longest - len(values))] for values in lists]
