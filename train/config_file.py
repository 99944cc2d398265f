"""Read a run's configuration from YAML and the command line, and write it."""

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from .config import TrainConfig


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


def as_dict(config: TrainConfig) -> dict[str, Any]:
    """The configuration as plain values."""
    container = OmegaConf.to_container(OmegaConf.structured(config))
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


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
