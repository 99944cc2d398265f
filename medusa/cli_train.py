"""`medusa train`, the same as `accelerate launch -m medusa.train`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .cli_common import Json, note, show

if TYPE_CHECKING:
    from medusa.model import MedusaModel
    from medusa.train import TrainConfig
    from medusa.tree import CandidateTree

SHOWN_ROWS = 20
"""Of those that are dropped."""


def train(
    config: Annotated[Path, typer.Option(help="YAML file; see configs/.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Read the data, try a few steps, say what the run would take, and stop.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Train heads on your model. Same as `accelerate launch -m medusa.train`; the same command resumes."""
    from medusa.train import load_config
    from medusa.train import train as run

    settings = load_config(config, overrides or [])
    if dry_run:
        _forecast(settings, as_json)
    else:
        run(settings, decoded_tokens_per_step)


def _forecast(settings: "TrainConfig", as_json: bool) -> None:
    from medusa.train.dry_run import dry_run, figures

    found = dry_run(settings)
    for place, reason in found.dropped[:SHOWN_ROWS]:
        note(f"{place}: {reason}")
    if len(found.dropped) > SHOWN_ROWS:
        note(f"... and {len(found.dropped) - SHOWN_ROWS} more rows")
    show(as_json, figures(found), ["", ""], found.table(), "what this run would take")


def decoded_tokens_per_step(
    model: "MedusaModel", tree: "CandidateTree", prompts: list[list[int]], new_tokens: int
) -> float:
    """Answer prompts greedily with a tree: emitted tokens / verify passes, roots included."""
    import torch

    from medusa.inference import MedusaDecoder

    decoder = MedusaDecoder(model, tree=tree)
    ids = (torch.tensor([prompt], device=decoder.device) for prompt in prompts)
    stats = [decoder.generate(prompt, max_new_tokens=new_tokens, do_sample=False).stats for prompt in ids]
    return sum(one.new_tokens - one.rows for one in stats) / max(sum(one.steps for one in stats), 1)
