"""Everything a training run is told: dataclasses here, the same names in YAML. Defaults live here only."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from medusa.model import DTYPES

MIXED_PRECISION = ("none", "bf16", "fp16")


@dataclass
class BackboneSection:
    """The model that gets heads."""

    path: str = ""
    """Directory or hub id of a causal LM."""
    dtype: str = "auto"
    """auto (as stored), float32, bfloat16 or float16."""


@dataclass
class HeadsSection:
    """The heads' architecture; see MedusaConfig."""

    num_heads: int = 4
    num_layers: int = 1
    projection: str = "own"
    root_conditioned: bool = False
    sequential: bool = False
    draft_vocab_size: int | None = None
    """Let the heads choose from the most frequent tokens of the training answers only; none: the whole vocabulary."""


@dataclass
class DataSection:
    """Chats to learn from."""

    train: str = ""
    """JSONL file."""
    eval: str | None = None
    """JSONL file of held-out chats; the heads' accuracy on it is measured at the end."""
    max_length: int = 2048
    """Cut rows after so many tokens."""
    recorded: bool = False
    """Use the hidden states that `medusa distill --record` left beside the data instead of running the backbone."""


@dataclass
class OptimizationSection:
    """How to learn."""

    epochs: int = 1
    max_steps: int | None = None
    """Stop after so many steps; the learning rate still reaches 0 at the last one."""
    batch_size: int = 8
    """Rows of one process in one forward pass."""
    accumulation: int = 1
    """Forward passes in one optimizer step."""
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    warmup_steps: int = 40
    max_grad_norm: float = 1.0
    head_decay: float = 0.8
    """Head k's loss counts head_decay ** k."""
    mixed_precision: str = "none"
    """none, bf16 or fp16 (YAML reads a bare no as false); the heads' weights are fp32 always."""
    seed: int = 0


@dataclass
class OutputSection:
    """What is written, and how often."""

    dir: str = "runs/medusa1"
    log_every: int = 10
    """Steps between lines of metrics.jsonl."""
    save_every: int = 500
    """Steps between resumable checkpoints; the two newest are kept."""


@dataclass
class WandbSection:
    """Weights & Biases; metrics.jsonl is written in any case."""

    enabled: bool = False
    project: str = "medusa-heads"
    name: str | None = None


@dataclass
class TrainConfig:
    """A whole training run."""

    backbone: BackboneSection = field(default_factory=BackboneSection)
    heads: HeadsSection = field(default_factory=HeadsSection)
    data: DataSection = field(default_factory=DataSection)
    optimization: OptimizationSection = field(default_factory=OptimizationSection)
    output: OutputSection = field(default_factory=OutputSection)
    wandb: WandbSection = field(default_factory=WandbSection)

    def check(self) -> None:
        """Refuse values that no run can use.

        Raises:
            ValueError: the key, its value and what is allowed.
        """
        for key, value in (("backbone.path", self.backbone.path), ("data.train", self.data.train)):
            if not value:
                raise ValueError(f"{key} is not set; add it to the YAML or to the command line: {key}=...")
        for key, number in (
            ("optimization.epochs", self.optimization.epochs),
            ("optimization.max_steps", 1 if self.optimization.max_steps is None else self.optimization.max_steps),
            ("optimization.batch_size", self.optimization.batch_size),
            ("optimization.accumulation", self.optimization.accumulation),
            ("data.max_length", self.data.max_length),
            ("output.log_every", self.output.log_every),
            ("output.save_every", self.output.save_every),
        ):
            if number < 1:
                raise ValueError(f"{key} is {number}; it must be at least 1")
        if self.optimization.learning_rate <= 0:
            raise ValueError(f"optimization.learning_rate is {self.optimization.learning_rate}; it must be above 0")
        for key, text, allowed in (
            ("backbone.dtype", self.backbone.dtype, DTYPES),
            ("optimization.mixed_precision", self.optimization.mixed_precision, MIXED_PRECISION),
        ):
            if text not in allowed:
                raise ValueError(f"{key} is {text!r}; allowed: {', '.join(allowed)}")


def load_config(file: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read a YAML file and `section.key=value` overrides.

    Raises:
        ValueError: the file is missing or no YAML, a key is unknown (the nearest one is named), or a value has the
            wrong type or range.
    """
    try:
        stored = yaml.safe_load(Path(file).read_text()) or {}
    except FileNotFoundError:
        raise ValueError(f"there is no configuration file {file}") from None
    except (yaml.YAMLError, UnicodeDecodeError, IsADirectoryError) as error:
        raise ValueError(f"{file} is not a YAML file: {error}") from error
    if not isinstance(stored, dict):
        raise ValueError(f"{file} must hold sections ({', '.join(f.name for f in fields(TrainConfig))})")
    for override in overrides:
        if "=" not in override:
            raise ValueError(f"override {override!r} is not of the form section.key=value")
    given = OmegaConf.from_dotlist(list(overrides))
    check_keys(stored, TrainConfig, str(file))
    check_keys(OmegaConf.to_container(given), TrainConfig, "the command line")
    try:
        merged = OmegaConf.merge(OmegaConf.structured(TrainConfig), stored, given)
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ValueError(
            f"{file} with {list(overrides)}: {str(error).splitlines()[0]} (key {error.full_key})"
        ) from error
    assert isinstance(config, TrainConfig)
    config.check()
    return config


def save_config(config: TrainConfig, file: Path) -> None:
    """Write the resolved configuration, every key with its value."""
    file.write_text(OmegaConf.to_yaml(OmegaConf.structured(config)))


def check_keys(given: Any, section: Any, source: str, prefix: str = "") -> None:
    """Refuse keys that `section` does not have.

    Raises:
        ValueError: the unknown key and the nearest known one.
    """
    known = {f.name: f for f in fields(section)}
    if not isinstance(given, dict):
        raise ValueError(f"{source}: {prefix.rstrip('.')} must hold keys ({', '.join(known)}), it holds {given!r}")
    for key, value in given.items():
        if key not in known:
            nearest = get_close_matches(str(key), known, n=1)
            hint = f"did you mean {prefix}{nearest[0]}?" if nearest else f"known here: {', '.join(known)}"
            raise ValueError(f"{source}: unknown key {prefix}{key}; {hint}")
        default = known[key].default_factory
        if isinstance(default, type) and is_dataclass(default):
            check_keys(value, default, source, f"{prefix}{key}.")
