"""Where a run's result comes from."""

import platform
import subprocess
import sys
from importlib.metadata import version
from typing import Any

import torch

PACKAGES = ("medusa-heads", "torch", "transformers", "accelerate", "safetensors")


def provenance(seed: int) -> dict[str, Any]:
    """Arguments, versions, commit of the working directory, seed and hardware."""
    return {
        "arguments": sys.argv[1:],
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        "commit": _commit(),
        "seed": seed,
        "hardware": {
            "machine": platform.machine(),
            "threads": torch.get_num_threads(),
            "accelerators": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        },
    }


def _commit() -> str | None:
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None
