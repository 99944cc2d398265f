#!/usr/bin/env bash
# Build the wheel and, outside the checkout, import every module from it and type-check it with mypy --strict.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
.venv/bin/python -m build --wheel --no-isolation --outdir "$work" . >"$work/build.log" 2>&1 || { cat "$work/build.log"; exit 1; }
.venv/bin/python -m zipfile -e "$work"/*.whl "$work/wheel"
python=$PWD/.venv/bin/python
config=$PWD/pyproject.toml
cd "$work/wheel"
"$python" - <<'PYTHON'
import importlib
import pkgutil

import medusa

assert "wheel" in medusa.__file__, medusa.__file__
names = [m.name for m in pkgutil.walk_packages(medusa.__path__, "medusa.") if not m.name.endswith("__main__")]
for name in names:
    importlib.import_module(name)
print(f"{len(names)} modules of the wheel import")
PYTHON
"$python" -m mypy --config-file "$config" -p medusa
