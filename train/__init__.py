"""Train Medusa heads: data -> (self-distillation) -> hidden states -> loss -> checkpoint."""

if __name__ == "train":
    raise ImportError("import medusa.train: the bare folder would be a second copy of the package")

from .config import TrainConfig
from .config_file import load_config
from .dry_run import dry_run
from .loop import train

__all__ = ["TrainConfig", "dry_run", "load_config", "train"]
