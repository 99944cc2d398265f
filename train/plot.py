"""A picture of how often the heads are right. K heads."""

import warnings
from pathlib import Path

from .evaluate import HeadAccuracy

PLOT_FILE = "accuracy.png"


def plot_accuracy(found: HeadAccuracy, directory: Path) -> Path | None:
    """Draw top-1, top-5 and top-10 of each head; None, with a warning, where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        warnings.warn("no picture of the heads' accuracy: matplotlib is not installed", stacklevel=2)
        return None
    figure = Figure(figsize=(5, 3.2), layout="constrained")
    axes = figure.subplots()
    heads = range(len(found.top1))
    for name, shares in (("top-1", found.top1), ("top-5", found.top5), ("top-10", found.top10)):
        axes.plot(heads, shares, marker="o", label=name)
    axes.set_xticks(list(heads))
    axes.set(xlabel="head", ylabel="share of held-out positions", ylim=(0, 1))
    axes.legend()
    figure.savefig(directory / PLOT_FILE, dpi=150)
    return directory / PLOT_FILE
