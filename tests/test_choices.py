"""The published trees, against what the reference's study counted, and lists of paths as files."""

import json
from collections import Counter
from pathlib import Path

import pytest

from medusa import CandidateTree
from medusa.choices import published_trees, read_choices, write_choices

NODES_PER_DEPTH_AND_LEAVES = {
    "mc_sim_7b_63": ([10, 28, 23, 2], 42),
    "vicuna_7b_stage1": ([10, 32, 20, 1], 44),
    "vicuna_7b_stage1_ablation": ([10, 21, 25, 7], 42),
    "vicuna_7b_stage2": ([10, 23, 23, 7], 42),
    "vicuna_13b_stage1": ([10, 29, 23, 1], 44),
    "vicuna_13b_stage2": ([10, 19, 25, 9], 42),
    "vicuna_33b_stage1": ([10, 34, 19], 46),
    "vicuna_33b_stage2": ([10, 24, 24, 5], 43),
    "zephyr_stage2": ([10, 27, 23, 3], 44),
}


def test_there_are_nine_and_they_have_the_published_shapes() -> None:
    trees = published_trees()
    assert list(trees) == list(NODES_PER_DEPTH_AND_LEAVES)
    for name, tree in trees.items():
        depths = Counter(len(path) for path in tree.paths)
        leaves = tree.num_nodes - 1 - len({path[:-1] for path in tree.paths} - {()})
        assert ([depths[depth] for depth in sorted(depths)], leaves) == NODES_PER_DEPTH_AND_LEAVES[name]
        assert tree.num_nodes == 64
        assert tree.top_k == 10


def test_a_tree_is_read_by_name_or_from_a_file(tmp_path: Path) -> None:
    tree = CandidateTree.from_paths([(0,), (3,), (0, 1)])
    write_choices(tree, tmp_path / "choices.json")
    assert json.loads((tmp_path / "choices.json").read_text()) == [[0], [3], [0, 1]]
    assert read_choices(str(tmp_path / "choices.json")) == tree
    assert read_choices("zephyr_stage2") == published_trees()["zephyr_stage2"]


def test_a_cut_tree_has_no_deeper_nodes() -> None:
    cut = published_trees()["mc_sim_7b_63"].cut(2)
    assert (cut.depth, cut.num_nodes) == (2, 39)
    assert cut.cut(9) == cut
    assert cut.cut(0) == CandidateTree(())


@pytest.mark.parametrize("content", ["", "{}x", "[[0], [0, 1, 2]]", "3", '[["a"]]', "[[]]"])
def test_a_file_that_is_no_tree_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "choices.json").write_text(content)
    with pytest.raises(ValueError, match=r"choices.json is no list of rank paths"):
        read_choices(str(tmp_path / "choices.json"))


def test_neither_name_nor_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'mc_sim' is neither a file nor a published tree; these are: mc_sim_7b_63, "):
        read_choices("mc_sim")
    with pytest.raises(ValueError, match="there is no directory"):
        write_choices(CandidateTree.chain(2), tmp_path / "absent" / "choices.json")
