"""Trees in the reference's format, and the nine that were published with it: `medusa_choices`, lists of rank paths.

Source: FasterDecoding/Medusa, medusa/model/medusa_choices.py.
"""

import json
from importlib.resources import files
from pathlib import Path

from .tree import CandidateTree

PUBLISHED_FILE = "published_trees.json"


def published_trees() -> dict[str, CandidateTree]:
    """The published trees by name; each has 63 nodes besides its root."""
    stored = json.loads(files("medusa").joinpath(PUBLISHED_FILE).read_text())
    return {name: CandidateTree.from_paths(paths) for name, paths in stored.items()}


def read_choices(source: str) -> CandidateTree:
    """A tree from the name of a published one or from a JSON file with a list of paths.

    Raises:
        ValueError: there is no such name or file, or the file holds no tree.
    """
    published = published_trees()
    if source in published:
        return published[source]
    file = Path(source)
    if not file.is_file():
        raise ValueError(f"{source!r} is neither a file nor a published tree; these are: {', '.join(published)}")
    try:
        return CandidateTree.from_paths(json.loads(file.read_text()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file} is no list of rank paths like [[0], [1], [0, 0]]: {error}") from error


def write_choices(tree: CandidateTree, file: Path) -> None:
    """Write a tree as the list of paths that the reference and its engines read.

    Raises:
        ValueError: the folder is missing.
    """
    if not file.parent.is_dir():
        raise ValueError(f"there is no directory {file.parent} for {file.name}; make it first")
    file.write_text(json.dumps([list(path) for path in tree.paths]) + "\n")
