"""Tree masks, against three loops and against the masks of transformers itself."""

import pytest
import torch
from tiny import prompt_of, random_tree, shared_model
from torch import Tensor
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask, sliding_window_overlay

from medusa import CandidateTree
from medusa.backbone import Backbone
from medusa.inference.cache import TreeCache
from medusa.inference.layout import TreeLayout
from medusa.inference.tree_attention import install, tree_attention, tree_mask
from medusa.inference.verify import prefill, verify

pytestmark = pytest.mark.decoding

NO_TEXT = torch.tensor([0])


def layout_of(tree: CandidateTree) -> TreeLayout:
    return TreeLayout.of(tree, torch.device("cpu"))


def slow_mask(tree: CandidateTree, length: int, window: int | None) -> list[list[bool]]:
    nodes = [(), *tree.paths]
    rows = []
    for node in nodes:
        row = []
        position = length + len(node)
        for key in range(length):
            row.append(window is None or position - key < window)
        for other in nodes:
            near = window is None or position - (length + len(other)) < window
            row.append(node[: len(other)] == other and near)
        rows.append(row)
    return rows


@pytest.mark.parametrize("window", [None, 1, 2, 3, 8, 100])
@pytest.mark.parametrize("length", [0, 1, 5, 20])
def test_mask_matches_three_loops(length: int, window: int | None) -> None:
    for seed in range(5):
        tree = random_tree(seed)
        mask = tree_mask(layout_of(tree), torch.tensor([length]), length + tree.num_nodes, window)
        assert mask[0].tolist() == slow_mask(tree, length, window)


@pytest.mark.parametrize("window", [None, 3, 8])
def test_rows_of_different_lengths_see_what_they_would_alone(window: int | None) -> None:
    tree, lengths, keys = random_tree(1), [0, 7, 3, 20], 40
    mask = tree_mask(layout_of(tree), torch.tensor(lengths), keys, window)
    for row, length in zip(mask, lengths, strict=True):
        end = length + tree.num_nodes
        assert row[:, :end].tolist() == slow_mask(tree, length, window)
        assert not row[:, end:].any(), "nothing behind a row's tree is its own"


@pytest.mark.parametrize("window", [None, 3, 8])
def test_chain_is_plain_text(window: int | None) -> None:
    """For a chain, transformers says what is right."""
    function = causal_mask_function
    if window is not None:
        overlay = sliding_window_overlay(window)

        def function(*where: Tensor) -> Tensor:
            return causal_mask_function(*where) & overlay(*where)

    expected = sdpa_mask(
        batch_size=1, q_length=5, kv_length=15, q_offset=10, mask_function=function, allow_is_causal_skip=False
    )
    assert expected is not None
    mask = tree_mask(layout_of(CandidateTree.chain(4)), torch.tensor([10]), 15, window)
    assert torch.equal(mask, expected[0])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "gemma3"])
def test_every_node_gets_what_its_path_gets_as_text(name: str, attention: str) -> None:
    backbone = Backbone(shared_model(name, torch.float64, attention))
    install()
    prompts, tree = [prompt_of(length)[0] for length in (10, 3, 17)], random_tree(3)
    layout = layout_of(tree)
    tokens = torch.cat([prompt_of(tree.num_nodes, seed=row) for row in range(len(prompts))])
    cache = TreeCache(backbone.num_layers, 64, rows=len(prompts))
    with torch.inference_mode():
        prefill(backbone, prompts, cache)
        hidden, logits = verify(backbone, tokens, layout, cache)
        for row, prompt in enumerate(prompts):
            for node in range(tree.num_nodes):
                text = torch.cat([prompt, tokens[row, layout.ancestors[0, node]]])
                expected = backbone.hidden(text[None])[0, -1]
                torch.testing.assert_close(hidden[row, node], expected, rtol=1e-5, atol=1e-5)
                torch.testing.assert_close(logits[row, node], backbone.logits(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_context_ends_with_the_block_also_after_an_error(attention: str) -> None:
    install()
    model = shared_model("mistral", torch.float64, attention)
    ids = prompt_of(12)
    before = model(input_ids=ids).logits
    flat = layout_of(CandidateTree.from_paths([(rank,) for rank in range(11)]))
    with tree_attention(flat, NO_TEXT):
        inside = model(input_ids=ids).logits
    assert not torch.allclose(inside, before), "the block is meant to change what the model sees"
    assert torch.equal(model(input_ids=ids).logits, before)
    with pytest.raises(RuntimeError, match="inside"), tree_attention(flat, NO_TEXT):
        raise RuntimeError("inside")
    assert torch.equal(model(input_ids=ids).logits, before)


def test_contexts_nest() -> None:
    install()
    model = shared_model("llama")
    ids = prompt_of(4)
    outer, inner = layout_of(CandidateTree.from_paths([(0,), (1,), (2,)])), layout_of(CandidateTree.chain(3))
    with tree_attention(outer, NO_TEXT):
        first = model(input_ids=ids).logits
        with tree_attention(inner, NO_TEXT):
            chain = model(input_ids=ids).logits
        assert torch.equal(model(input_ids=ids).logits, first)
    torch.testing.assert_close(chain, model(input_ids=ids).logits)
    assert not torch.allclose(first, chain)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_plain_use_with_padding_is_untouched(attention: str) -> None:
    """Without a tree the functions in the table must be transformers' own in every respect, padding included."""
    install()
    model = shared_model("gemma3", torch.float32, attention)
    ids = prompt_of(12)
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), ids], dim=1)
    mask = torch.tensor([[0] * 5 + [1] * 12])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(input_ids=padded, attention_mask=mask, position_ids=positions).logits[:, 5:]
    torch.testing.assert_close(logits, model(input_ids=ids).logits, rtol=1e-4, atol=1e-4)


def test_install_twice_is_once() -> None:
    install()
    functions = [AttentionMaskInterface()[name] for name in ("sdpa", "eager")]
    install()
    assert [AttentionMaskInterface()[name] for name in ("sdpa", "eager")] == functions
