"""Pictures of trees: every node is there, where it belongs, with what it is."""

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from medusa import CandidateTree
from medusa.tree_picture import draw_tree, node_places, tree_svg

SVG = "{http://www.w3.org/2000/svg}"
TREE = CandidateTree.from_paths([(0,), (1,), (4,), (0, 0), (0, 2), (0, 2, 1)])
SHARES = {(0,): 0.5, (1,): 0.25, (4,): 0.0312, (0, 0): 0.2, (0, 2): 0.1, (0, 2, 1): 0.004}


def test_every_node_has_its_rank_and_its_probability() -> None:
    root = ElementTree.fromstring(tree_svg(TREE, SHARES))
    nodes = [[text.text or "" for text in group.iter(f"{SVG}text")] for group in root.iter(f"{SVG}g")]
    expected = [["", ""], *([str(path[-1]), f"{SHARES[path]:.1%}"] for path in TREE.paths)]
    assert nodes == expected
    assert len(list(root.iter(f"{SVG}path"))) == TREE.num_nodes - 1  # one way to each node but the root
    assert "head 1, rank 2, path [0, 2], accepted in 10.00% of steps" in tree_svg(TREE, SHARES)
    columns = [text.text for text in root.findall(f"{SVG}text")]
    assert columns == ["root", "head 0", "head 1", "head 2"]


def test_all_is_within_the_picture() -> None:
    wide = CandidateTree.from_paths([(rank,) for rank in range(63)])
    root = ElementTree.fromstring(tree_svg(wide, {}))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for circle in root.iter(f"{SVG}circle"):
        assert 10 <= float(circle.attrib["cx"]) <= width - 10
        assert 10 <= float(circle.attrib["cy"]) <= height - 10


def test_leaves_stand_below_each_other_and_parents_amid_their_children() -> None:
    places = node_places(TREE)
    assert {path: column for path, (column, _) in places.items()} == {path: len(path) for path in ((), *TREE.paths)}
    assert [places[leaf][1] for leaf in ((0, 0), (0, 2, 1), (1,), (4,))] == [0, 1, 2, 3]
    assert places[0, 2][1] == 1
    assert places[0,][1] == 0.5
    assert places[()][1] == (0.5 + 3) / 2
    assert node_places(CandidateTree(())) == {(): (0, 0.0)}


def test_nodes_without_a_probability_have_no_figure() -> None:
    root = ElementTree.fromstring(tree_svg(CandidateTree.chain(1), {}))
    assert [text.text or "" for group in root.iter(f"{SVG}g") for text in group.iter(f"{SVG}text")] == ["", "", "0", ""]


def test_files(tmp_path: Path) -> None:
    draw_tree(TREE, SHARES, tmp_path / "tree.svg")
    assert (tmp_path / "tree.svg").read_text() == tree_svg(TREE, SHARES)
    pytest.importorskip("matplotlib")
    draw_tree(TREE, SHARES, tmp_path / "tree.png")
    assert (tmp_path / "tree.png").read_bytes().startswith(b"\x89PNG")


def test_bad_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"not as 'tree.gif'; end the name with .svg or .png"):
        draw_tree(TREE, SHARES, tmp_path / "tree.gif")
    with pytest.raises(ValueError, match="there is no directory"):
        draw_tree(TREE, SHARES, tmp_path / "missing" / "tree.svg")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match="needs matplotlib"):
        draw_tree(TREE, SHARES, tmp_path / "tree.png")
