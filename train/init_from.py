"""Start from heads that were trained before."""

import warnings
from pathlib import Path
from typing import Any

from medusa.checkpoint import HEADS_FILE, config_entries, read_heads
from medusa.compatibility import backbone_differences, warn_of_template
from medusa.model import MedusaModel
from medusa.tensor_checks import check_tensors

from .config import TrainConfig


def init_heads(model: MedusaModel, tokenizer: Any, config: TrainConfig) -> None:
    """Start from the heads of a checkpoint. Those of another backbone of these sizes may learn; that is only said.

    Raises:
        ValueError: it is missing or damaged, or its heads are of another shape; every tensor that differs is named.
    """
    assert config.heads.init_from is not None, "the caller has looked"
    directory = Path(config.heads.init_from)
    tensors, _ = read_heads(directory)
    check_tensors(directory / HEADS_FILE, tensors, model.heads.state_dict())
    entries = config_entries(directory)
    wrong, doubtful = backbone_differences(directory, entries, model.backbone)
    if wrong or doubtful:
        warnings.warn(
            f"heads.init_from: {directory} was made for another backbone than {config.backbone.path}: "
            f"{'; '.join(wrong + doubtful)}; its heads start from guesses that may be wrong",
            stacklevel=2,
        )
    warn_of_template(directory, entries, tokenizer, config.backbone.path)
    model.heads.load_state_dict(tensors)
