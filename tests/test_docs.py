"""Every command and every Python example of the README and the guide runs, on a tiny model."""

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from unittest.mock import patch

import pytest
from chatml import save_tiny_chat_model
from console import medusa

ROOT = Path(__file__).parent.parent
GUIDE = ROOT / "docs" / "guide.md"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
CI_RUNS = ("bash scripts/demo.sh", "bash scripts/test.sh")
"""These make environments; .ci/run runs them as they are written."""


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)


def commands_of(page: Path) -> list[str]:
    return [line.strip() for block in blocks(page, "bash") for line in block.splitlines() if line.strip()]


@pytest.fixture(scope="module")
def guided(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a user is who has followed the guide."""
    directory = tmp_path_factory.mktemp("user")
    save_tiny_chat_model(directory / "model")
    for name, count in (("prompts", 6), ("heldout", 3)):
        chats = [
            [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i}!"}] for i in range(count)
        ]
        lines = [json.dumps({"id": f"{name}{i}", "messages": chat}) + "\n" for i, chat in enumerate(chats)]
        (directory / f"{name}.jsonl").write_text("".join(lines))
    for name in ("configs", "scripts"):
        (directory / name).symlink_to(ROOT / name)
    with pytest.MonkeyPatch.context() as patches:
        patches.chdir(directory)
        for command in commands_of(GUIDE):
            run(command, directory)
    return directory


def run(command: str, folder: Path) -> None:
    program, *arguments = shlex.split(command.replace("YOUR_MODEL", "model"), comments=True)
    if program == "medusa":
        with patch.object(sys, "stdin", io.StringIO("What is that?\n")):  # for the chat
            medusa(*arguments)
        return
    if program == "python":
        line = [sys.executable, *arguments]
        done = subprocess.run(line, capture_output=True, text=True, cwd=folder, timeout=300)
        assert done.returncode == 0, f"{command}\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}"
        return
    assert program == "accelerate"
    # A recipe for a 7B model on a GPU; the rest of the line is as written.
    arguments += ["optimization.mixed_precision=none", "optimization.accumulation=1"]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "accelerate.commands.accelerate_cli", *arguments]
    done = subprocess.run(line, capture_output=True, text=True, cwd=folder, timeout=300, env=environment)
    assert done.returncode == 0, f"{command}\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}"


def test_the_readme_names_the_two_commands() -> None:
    assert [command.startswith(CI_RUNS) for command in commands_of(PAGES[0])].count(True) == 2


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_and_example_runs(
    page: Path, guided: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the guide in an empty folder, those of other pages where the guide has been followed."""
    folder = guided
    if page != GUIDE:
        folder = tmp_path / "user"
        shutil.copytree(guided, folder, symlinks=True)
    monkeypatch.chdir(folder)
    commands = [] if page == GUIDE else [line for line in commands_of(page) if not line.startswith(CI_RUNS)]
    if any("distill" in command for command in commands):
        (folder / "answers.jsonl").unlink()  # the guide's are of another length
    if any("medusa.train" in command for command in commands):
        shutil.rmtree(folder / "runs")
    for command in commands:
        run(command, folder)
    for example in blocks(page, "python"):
        with redirect_stdout(io.StringIO()) as output:
            exec(compile(example, page.name, "exec"), {})
        assert output.getvalue().strip()


def test_files_and_folders_named_in_the_pages_exist() -> None:
    for page in (*PAGES, ROOT / "CONTRIBUTING.md"):
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
    for path in re.findall(
        r"`((?:medusa|train|inference|scripts|configs|tests)/[\w./]*)`", (ROOT / "CONTRIBUTING.md").read_text()
    ):
        assert (ROOT / path).exists(), path


def test_quick_start_is_short() -> None:
    (example,) = blocks(ROOT / "README.md", "python")
    assert len([line for line in example.splitlines() if line.strip()]) <= 10
