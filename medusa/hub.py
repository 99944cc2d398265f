"""Put a checkpoint on the hub: with a card, a picture of its tree, and a `generate` that transformers can load."""

import shutil
import tempfile
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from .checkpoint import read_config, read_heads
from .model_card import BENCH_FILE, TREE_PICTURE, model_card
from .tree_picture import draw_tree
from .tree_search import TREE_FILE, SearchedTree

PICTURE_NODES = 16
GENERATE = '''"""Decode with these heads: `model.generate(..., custom_generate="{repository}", ...)`."""

from medusa.inference import generate_with


def generate(model, **arguments):
    """As `model.generate`, several tokens a pass."""
    return generate_with("{repository}", model, **arguments)
'''


def prepare(checkpoint: Path, out: Path, repository: str, license_: str | None, bench: Path | None) -> None:
    """Write what is uploaded into the empty directory `out`.

    Args:
        checkpoint: directory of a native checkpoint.
        out: where to.
        repository: its id on the hub, or the path where the directory will stay.
        license_: said on the card.
        bench: directory that `medusa bench --out` wrote.

    Raises:
        ValueError: the checkpoint is damaged, or there is no bench.md.
    """
    read_config(checkpoint)
    read_heads(checkpoint)
    if bench is not None and not (bench / BENCH_FILE).is_file():
        raise ValueError(f"{bench} holds no {BENCH_FILE}; give the directory that `medusa bench --out` wrote")
    shutil.copytree(checkpoint, out, dirs_exist_ok=True)
    if bench is not None:
        shutil.copy(bench / BENCH_FILE, out / BENCH_FILE)
    if (out / TREE_FILE).exists():
        searched = SearchedTree.load(out)
        shares = dict(zip(searched.paths, searched.gains, strict=True))
        draw_tree(searched.best(PICTURE_NODES), shares, out / TREE_PICTURE)
    (out / "README.md").write_text(model_card(out, repository, license_))
    code = out / "custom_generate"
    code.mkdir(exist_ok=True)
    (code / "generate.py").write_text(GENERATE.format(repository=repository))
    (code / "requirements.txt").write_text("medusa-heads\n")


def push(
    checkpoint: Path,
    repository: str,
    private: bool = False,
    license_: str | None = None,
    bench: Path | None = None,
) -> str:
    """Upload a checkpoint in one commit; the repository is made if it is not there.

    Returns:
        Address of the repository.

    Raises:
        ValueError: the checkpoint is damaged, or the hub refuses (no such name, not logged in, not reachable).
    """
    with tempfile.TemporaryDirectory() as work:
        prepare(checkpoint, Path(work), repository, license_, bench)
        api = HfApi()
        try:
            address = api.create_repo(repository, private=private, exist_ok=True)
            api.upload_folder(repo_id=repository, folder_path=work, commit_message="Medusa heads")
        except (HfHubHTTPError, HFValidationError, OSError) as error:
            raise ValueError(
                f"the hub did not take {repository!r} ({error}); the name must be USER/NAME, and `hf auth login` "
                "stores a token that may write there. Nothing of the checkpoint was changed"
            ) from error
    return str(address)
