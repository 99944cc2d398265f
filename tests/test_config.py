from pathlib import Path

import pytest

from medusa.config import MedusaConfig
from medusa.train import load_config
from medusa.train.config_file import save_config

CONFIGS = Path(__file__).parent.parent / "configs"
NEEDED = ["backbone.path=m", "data.train=d.jsonl"]


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda file: file.stem)
def test_every_shipped_file_loads_and_survives_saving(file: Path, tmp_path: Path) -> None:
    config = load_config(file, NEEDED)
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml") == config


def test_command_line_wins_over_the_file() -> None:
    config = load_config(CONFIGS / "tiny.yaml", [*NEEDED, "heads.num_heads=7", "wandb.enabled=true", "wandb.name=x y"])
    assert config.heads.num_heads == 7
    assert config.wandb.name == "x y"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "optimization.learning_rat=1",
            r"unknown key optimization.learning_rat; did you mean optimization.learning_rate\?",
        ),
        ("optimisation.epochs=1", r"unknown key optimisation; did you mean optimization\?"),
        ("optimization.epochs=two", "optimization.epochs"),
        ("optimization.epochs=0", "optimization.epochs is 0"),
        ("optimization.learning_rate=-1", "learning_rate is -1"),
        ("backbone.dtype=int8", "backbone.dtype is 'int8'; allowed: auto"),
        ("epochs", "not of the form section.key=value"),
        ("data=x", "data must hold keys"),
    ],
)
def test_bad_overrides_are_named(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_config(CONFIGS / "tiny.yaml", [*NEEDED, override])


def test_bad_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no configuration file"):
        load_config(tmp_path / "absent.yaml")
    (tmp_path / "list.yaml").write_text("- a\n")
    with pytest.raises(ValueError, match="must hold sections"):
        load_config(tmp_path / "list.yaml")
    (tmp_path / "torn.yaml").write_text("heads: {num_heads: 3")
    with pytest.raises(ValueError, match="not a YAML file"):
        load_config(tmp_path / "torn.yaml")
    with pytest.raises(ValueError, match=r"backbone\.path is not set"):
        load_config(CONFIGS / "tiny.yaml")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_heads": 0}, "num_heads is 0"),
        ({"num_layers": -1}, "num_layers is -1"),
        ({"projection": "both"}, "'both'; allowed: own, shared"),
        ({"draft_vocab": [3, 1]}, "ascending order"),
        ({"draft_vocab": []}, "ascending order"),
    ],
)
def test_bad_heads(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MedusaConfig(**fields)  # type: ignore[arg-type]
