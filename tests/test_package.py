"""What imports what, and what an import costs."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import medusa

ROOT = Path(__file__).parent.parent
PACKAGES = {"medusa": "medusa", "train": "medusa.train", "inference": "medusa.inference"}
"""Folder -> the name it installs under."""


def imports(file: Path, package: str) -> Iterator[tuple[str, int]]:
    """Every module that a file imports, by its full name, and whether relatively; those inside functions too."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, 0) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module, node.level
            yield from ((f"{module}.{alias.name}", node.level) for alias in node.names)


def inside(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def sources(folder: str) -> list[Path]:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    return files


def test_core_imports_neither_half() -> None:
    """Only the command line knows both, and imports them when a command runs."""
    for file in sources("medusa"):
        if file.name.startswith("cli"):
            continue
        for module, _ in imports(file, "medusa"):
            assert not inside(module, "medusa.train"), f"{file} imports {module}"
            assert not inside(module, "medusa.inference"), f"{file} imports {module}"


@pytest.mark.parametrize(("folder", "other"), [("train", "inference"), ("inference", "train")])
def test_halves_do_not_know_each_other(folder: str, other: str) -> None:
    for file in sources(folder):
        for module, _ in imports(file, PACKAGES[folder]):
            assert not inside(module, PACKAGES[other]), f"{file} imports {module}"


@pytest.mark.parametrize("folder", PACKAGES)
def test_imports_are_relative_inside_a_folder_only(folder: str) -> None:
    """A relative import that climbs out works from an installed package and breaks in a checkout, or the reverse."""
    for file in sources(folder):
        for module, level in imports(file, PACKAGES[folder]):
            assert level <= 1, f"{file} climbs out of its folder for {module}"
            assert not inside(module, "train"), f"{file} imports the bare folder {module}"
            assert not inside(module, "inference"), f"{file} imports the bare folder {module}"
            if not level and folder != "medusa":
                assert not inside(module, PACKAGES[folder]), f"{file} must import {module} relatively"


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("folder", ["train", "inference"])
def test_bare_folder_cannot_be_imported(folder: str) -> None:
    result = python(f"import {folder}")
    assert result.returncode != 0
    assert f"ImportError: import medusa.{folder}" in result.stderr


def test_import_is_cheap() -> None:
    result = python("import medusa, sys; print(sorted({'torch', 'transformers', 'accelerate'} & set(sys.modules)))")
    assert result.stdout.strip() == "[]", result.stderr


def test_public_names() -> None:
    assert medusa.__all__ == ["CandidateTree", "MedusaConfig", "MedusaModel"]
    for name in medusa.__all__:
        assert getattr(medusa, name).__name__ == name
    with pytest.raises(AttributeError, match=r"no attribute 'Medusa'; it exports CandidateTree, MedusaConfig"):
        _ = medusa.Medusa


def test_public_names_of_inference() -> None:
    import medusa.inference as inference

    assert inference.__name__ == "medusa.inference"
    for name in inference.__all__:
        assert getattr(inference, name).__name__ == name
