"""Draw a candidate tree: a column for each head, every node with its rank and how often decoding accepts it."""

from collections.abc import Mapping
from pathlib import Path as FilePath

from .tree import CandidateTree, Path

COLUMN = 110
ROW = 24
RADIUS = 10
MARGIN = 30
"""Sizes in pixels."""
NODE_COLOR, LINE_COLOR, TEXT_COLOR = "#2a7de1", "#8a94a6", "#1c2430"


def draw_tree(tree: CandidateTree, probabilities: Mapping[Path, float], file: FilePath) -> None:
    """Write a picture of `tree`, as SVG or PNG by the file's name.

    Args:
        tree: what to draw.
        probabilities: the share of steps that accept each node; nodes that are missing are drawn without one.
        file: where to.

    Raises:
        ValueError: the name ends otherwise, there is no such folder, or PNG is asked for without matplotlib.
    """
    if file.suffix not in (".svg", ".png"):
        raise ValueError(f"a tree is drawn as SVG or PNG, not as {file.name!r}; end the name with .svg or .png")
    if not file.parent.is_dir():
        raise ValueError(f"there is no directory {file.parent} for {file.name}; make it first")
    if file.suffix == ".svg":
        file.write_text(tree_svg(tree, probabilities))
    else:
        save_png(tree, probabilities, file)


def tree_svg(tree: CandidateTree, probabilities: Mapping[Path, float]) -> str:
    """The picture as SVG text; arguments as for `draw_tree`."""
    places = node_places(tree)
    lines, nodes = [], []
    for path, (column, row) in places.items():
        x, y = MARGIN + column * COLUMN, 2 * MARGIN + row * ROW
        share = probabilities.get(path)
        if path:
            from_column, from_row = places[path[:-1]]
            from_x, from_y = MARGIN + from_column * COLUMN, 2 * MARGIN + from_row * ROW
            middle = (x + from_x) / 2
            lines.append(
                f'<path d="M{from_x} {from_y:g} C{middle:g} {from_y:g} {middle:g} {y:g} {x} {y:g}" fill="none" '
                f'stroke="{LINE_COLOR}" stroke-width="{line_width(share):.2f}"/>'
            )
        nodes.append(
            f"<g><title>{description(path, share)}</title>"
            f'<circle cx="{x}" cy="{y:g}" r="{RADIUS}" fill="white"/>'
            f'<circle cx="{x}" cy="{y:g}" r="{RADIUS}" fill="{NODE_COLOR}" fill-opacity="{opacity(path, share):.2f}" '
            f'stroke="{NODE_COLOR}"/>'
            f'<text x="{x}" y="{y + 4:g}" text-anchor="middle">{rank_label(path)}</text>'
            f'<text x="{x + RADIUS + 4}" y="{y + 4:g}" stroke="white" stroke-width="3" paint-order="stroke">'
            f"{share_label(share)}</text></g>"
        )
    heads = [
        f'<text x="{MARGIN + column * COLUMN}" y="{MARGIN}" text-anchor="middle" font-weight="bold">{name}</text>'
        for column, name in enumerate(column_names(tree))
    ]
    width = 2 * MARGIN + tree.depth * COLUMN + COLUMN // 2
    height = 3 * MARGIN + max(row for _, row in places.values()) * ROW
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:g}" width="{width}" '
            f'height="{height:g}" font-family="sans-serif" font-size="11" fill="{TEXT_COLOR}">',
            '<rect width="100%" height="100%" fill="white"/>',
            *heads,
            *lines,
            *nodes,
            "</svg>\n",
        ]
    )


def save_png(tree: CandidateTree, probabilities: Mapping[Path, float], file: FilePath) -> None:
    """The picture as PNG; arguments and errors as for `draw_tree`."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(
            "drawing a tree as PNG needs matplotlib; install medusa-heads[tracking], or end the name with .svg"
        ) from None
    places = node_places(tree)
    rows = max(row for _, row in places.values())
    figure = Figure(figsize=(1.5 + 1.3 * tree.depth, 1 + 0.28 * rows), layout="constrained")
    axes = figure.subplots()
    for path, (column, row) in places.items():
        share = probabilities.get(path)
        if path:
            from_column, from_row = places[path[:-1]]
            axes.plot([from_column, column], [from_row, row], color=LINE_COLOR, linewidth=line_width(share), zorder=1)
        axes.scatter(column, row, s=170, color="white", zorder=2)
        axes.scatter(column, row, s=170, color=NODE_COLOR, alpha=opacity(path, share), zorder=2)
        axes.text(column, row, rank_label(path), ha="center", va="center", fontsize=8, zorder=3)
        if share is not None:
            halo = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
            axes.text(column + 0.12, row, share_label(share), va="center", fontsize=8, zorder=3, bbox=halo)
    axes.set_xticks(range(tree.depth + 1), column_names(tree))
    axes.xaxis.tick_top()
    axes.set(xlim=(-0.3, tree.depth + 0.6), ylim=(rows + 0.7, -0.7), yticks=[])
    axes.set_frame_on(False)
    figure.savefig(file, dpi=150)


def node_places(tree: CandidateTree) -> dict[Path, tuple[int, float]]:
    """Column and row of every node, root first: leaves one below the other, a parent amid its children."""
    nodes: list[Path] = [(), *tree.paths]
    children: dict[Path, list[Path]] = {path: [] for path in nodes}
    for path in tree.paths:
        children[path[:-1]].append(path)
    leaves = sorted(path for path in nodes if not children[path])
    rows = {leaf: float(row) for row, leaf in enumerate(leaves)}
    for path in reversed(nodes):  # children before their parents
        if children[path]:
            rows[path] = (rows[children[path][0]] + rows[children[path][-1]]) / 2
    return {path: (len(path), rows[path]) for path in nodes}


def column_names(tree: CandidateTree) -> list[str]:
    """What stands above each column."""
    return ["root", *(f"head {k}" for k in range(tree.depth))]


def description(path: Path, share: float | None) -> str:
    """What a node is, for those who point at it."""
    if not path:
        return "the root, which the backbone chose"
    accepted = "" if share is None else f", accepted in {share:.2%} of steps"
    return f"head {len(path) - 1}, rank {path[-1]}, path {list(path)}{accepted}"


def rank_label(path: Path) -> str:
    """What stands in a node; nothing in the root."""
    return str(path[-1]) if path else ""


def share_label(share: float | None) -> str:
    """What stands beside a node."""
    return "" if share is None else f"{share:.1%}"


def opacity(path: Path, share: float | None) -> float:
    """How dark a node is. The eye compares small shares better by their roots."""
    return 0.6 if not path else 0.6 * (share or 0.0) ** 0.5


def line_width(share: float | None) -> float:
    """How broad the way to a node is, in pixels."""
    return 0.7 + 6 * (share or 0.0)
