"""Small chats, a tiny model and short runs for the tests of training."""

import json
from pathlib import Path

from medusa.train import load_config, train

CONFIG = Path(__file__).parent.parent / "configs" / "tiny.yaml"
MOODS = ("positions_per_second", "memory_gb")


def write_chats(file: Path, count: int = 12) -> Path:
    """Chats of different lengths."""
    chats = [
        [{"role": "user", "content": f"count {i}"}, {"role": "assistant", "content": f"{i} {i + 1} {i + 2}" * 2}]
        for i in range(count)
    ]
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return file


def run(model_path: Path, data: Path, out: Path, *overrides: str) -> Path:
    """The final checkpoint of a run of configs/tiny.yaml."""
    base = [f"backbone.path={model_path}", f"data.train={data}", f"output.dir={out}"]
    return train(load_config(CONFIG, [*base, *overrides]))


def log(out: Path) -> list[dict[str, float]]:
    """The log, without what depends on the machine's mood."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in MOODS} for line in lines]
