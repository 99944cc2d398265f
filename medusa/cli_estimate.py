"""`medusa estimate`: what guesses gain, by formula."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .cli_common import Json, note, show

if TYPE_CHECKING:
    from medusa.inference.cost_model import CostModel

BATCHES = (1, 4, 16, 64)


def estimate(
    alpha: Annotated[float, typer.Option(help="How likely a guess is accepted, if those before it were.")],
    k: Annotated[int, typer.Option("--k", help="Guesses of a step.")] = 4,
    draft_cost: Annotated[float, typer.Option(help="Time of one guess, in plain passes of the backbone.")] = 0.05,
    verify_cost: Annotated[float, typer.Option(help="Time of a pass over k+1 tokens, in plain passes.")] = 1.1,
    batch: Annotated[int, typer.Option(help="Rows decoded together.")] = 1,
    other: Annotated[float, typer.Option(help="Share of plain decoding's time that guesses do not shorten.")] = 0.0,
    plot: Annotated[Path | None, typer.Option(help="Draw speed-up against k here; PNG or SVG.")] = None,
    as_json: Json = False,
) -> None:
    """Predict tokens per step and speed-up of chains of guesses, and how they change with k and the batch."""
    from medusa.inference.cost_model import CostModel, tokens_per_step

    costs = CostModel(draft_cost, verify_cost, k)
    sizes = range(1, max(8, k) + 1)
    by_k = [
        {
            "k": size,
            "tokens_per_step": round(tokens_per_step(alpha, size), 4),
            "speedup": {rows: round(costs.speedup(alpha, size, rows, other), 4) for rows in BATCHES},
        }
        for size in sizes
    ]
    figures = {
        "tokens_per_step": round(tokens_per_step(alpha, k), 4),
        "speedup": round(costs.speedup(alpha, k, batch, other), 4),
        "best_k": costs.best_k(alpha, len(sizes), batch),
        "by_k": by_k,
    }
    rows = [
        [str(size), f"{tokens_per_step(alpha, size):.2f}"]
        + [f"{costs.speedup(alpha, size, rows, other):.2f}" for rows in BATCHES]
        for size in sizes
    ]
    columns = ["k", "tokens per step", *(f"speed-up, batch {rows}" for rows in BATCHES)]
    title = f"alpha {alpha}: {figures['tokens_per_step']} tokens per step, speed-up {figures['speedup']} at k = {k}"
    show(as_json, figures, columns, rows, title)
    if plot is not None:
        _draw(costs, alpha, sizes, other, plot)
        note(f"drawn: {plot}")


def _draw(costs: "CostModel", alpha: float, sizes: range, other: float, file: Path) -> None:
    """Speed-up against k, one line a batch size."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install 'medusa-heads[tracking]'") from None
    figure = Figure(figsize=(5, 3.2), layout="constrained")
    axes = figure.subplots()
    for batch in BATCHES:
        speeds = [costs.speedup(alpha, k, batch, other) for k in sizes]
        axes.plot(list(sizes), speeds, marker="o", label=f"batch {batch}")
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set(xlabel="guesses of a step, k", ylabel="speed-up over plain decoding", title=f"alpha = {alpha}")
    axes.legend()
    figure.savefig(file, dpi=150)
