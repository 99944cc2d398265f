"""`medusa train`, the same as `accelerate launch -m medusa.train`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from medusa.model import MedusaModel
    from medusa.tree import CandidateTree


def train(
    config: Annotated[Path, typer.Option(help="YAML file; see configs/.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value")] = None,
) -> None:
    """Train heads on your model. Same as `accelerate launch -m medusa.train`; the same command resumes."""
    from medusa.train import load_config
    from medusa.train import train as run

    run(load_config(config, overrides or []), decoded_tokens_per_step)


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
