"""The heads that a run starts from: of what shape, and whose weights."""

import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from medusa.checkpoint import HEADS_FILE, heads_config, read_config, read_heads
from medusa.compatibility import backbone_differences, warn_of_template
from medusa.config import MedusaConfig
from medusa.model import MedusaModel
from medusa.tensor_checks import check_tensors

from .config import TrainConfig
from .supervision import IGNORE, TrainingRow


def initial_config(config: TrainConfig, rows: list[TrainingRow]) -> MedusaConfig:
    """The heads' architecture, the draft vocabulary counted from the rows' answers."""
    heads = config.heads
    vocab: Sequence[int] | None = None
    if heads.init_from is not None:
        _, vocab = read_heads(Path(heads.init_from))
    elif heads.draft_vocab_size is not None:
        if heads.draft_vocab_size < 1:
            raise ValueError(f"heads.draft_vocab_size is {heads.draft_vocab_size}; it must be at least 1, or null")
        counts = Counter(label for row in rows for label in row.labels if label != IGNORE)
        vocab = sorted(token for token, _ in counts.most_common(heads.draft_vocab_size))
    return MedusaConfig(
        num_heads=heads.num_heads,
        num_layers=heads.num_layers,
        projection=heads.projection,
        draft_vocab=vocab,
        root_conditioned=heads.root_conditioned,
        sequential=heads.sequential,
        embedding_scale=heads.embedding_scale,
        projection_bias=heads.projection_bias,
    )


def init_heads(model: MedusaModel, tokenizer: Any, config: TrainConfig) -> None:
    """Start from the heads of a checkpoint. Those of another backbone of these sizes may learn; that is only said.

    Raises:
        ValueError: it is missing or damaged, or its heads are of another shape; every tensor that differs is named.
            Or they saw embeddings at another scale, which no shape tells.
    """
    assert config.heads.init_from is not None, "the caller has looked"
    directory = Path(config.heads.init_from)
    tensors, vocab = read_heads(directory)
    check_tensors(directory / HEADS_FILE, tensors, model.heads.state_dict())
    entries = read_config(directory)
    scale = heads_config(entries, vocab).embedding_scale
    if scale != model.config.embedding_scale:
        raise ValueError(
            f"the heads of {directory} see embeddings at {scale} scale, those of this run at "
            f"{model.config.embedding_scale}; set heads.embedding_scale={scale}"
        )
    wrong, doubtful = backbone_differences(directory, entries, model.backbone)
    if wrong or doubtful:
        warnings.warn(
            f"heads.init_from: {directory} was made for another backbone than {config.backbone.path}: "
            f"{'; '.join(wrong + doubtful)}; its heads start from guesses that may be wrong",
            stacklevel=2,
        )
    warn_of_template(directory, entries, tokenizer, config.backbone.path)
    model.heads.load_state_dict(tensors)
