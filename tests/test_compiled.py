"""The compiled pass gives what the eager one gives, and is compiled once."""

import warnings

import pytest
import torch
from tiny import guide, hf_greedy, prompt_of, tiny_medusa, tiny_model
from torch._dynamo.utils import counters

from medusa import CandidateTree
from medusa.inference import DynamicTree, MedusaDecoder, compiled
from medusa.inference.compiled import why_not_compile

pytestmark = [
    pytest.mark.decoding,
    pytest.mark.skipif(why_not_compile(torch.device("cpu")) is not None, reason="no C++ compiler here"),
]

K = 3
TREE = CandidateTree.from_paths([(0,), (1,), (0, 0), (1, 0), (0, 0, 0)])


@pytest.mark.parametrize("name", ["gemma3"])
def test_one_graph_for_every_prompt_and_context(name: str) -> None:
    """Windows of two kinds, prompts inside and beyond them, caches of several sizes, random and right guesses."""
    torch._dynamo.reset()
    model = tiny_model(name, torch.float64)
    medusa = tiny_medusa(model, num_heads=K, root_conditioned=True)
    decoder = MedusaDecoder(medusa, TREE, compile=True)
    counters.clear()
    decoder.generate(prompt_of(5), 4)
    graphs = counters["stats"]["unique_graphs"]
    assert graphs == 2, "one for the verify pass and one for the heads"
    for length, new in ((1, 9), (6, 30), (20, 3), (70, 40)):
        prompt = prompt_of(length)
        assert decoder.generate(prompt, new).sequences.tolist() == hf_greedy(model, prompt, new).tolist()
    text = hf_greedy(model, prompt_of(9), 17 + K)
    guide(medusa, [text], rank=lambda t, k: t % 2)
    decoder.proposer.heads = medusa.heads
    result = decoder.generate(prompt_of(9), 17)
    assert result.sequences.tolist() == text[:, :-K].tolist()
    assert result.stats.tokens_per_step >= 2
    assert counters["stats"]["unique_graphs"] == graphs, "something was compiled again"


def test_one_graph_for_each_size_of_a_dynamic_tree() -> None:
    torch._dynamo.reset()
    model = tiny_model("llama", torch.float64)
    tree = DynamicTree(TREE, (3, 4), seconds=(1.0, 1.05), tokens_per_second=1.0)
    decoder = MedusaDecoder(tiny_medusa(model, num_heads=K), tree, compile=True)
    decoder.proposer.heads = decoder.model.heads
    counters.clear()
    decoder.warm_up()
    assert counters["stats"]["unique_graphs"] == 2
    for length, new in ((5, 30), (9, 70), (40, 30)):
        prompt = prompt_of(length)
        assert decoder.generate(prompt, new).sequences.tolist() == hf_greedy(model, prompt, new).tolist()
        assert counters["stats"]["unique_graphs"] == 2, "one for each size, all of them made before the first text"


def test_more_sizes_than_graphs_are_refused() -> None:
    tree = DynamicTree(CandidateTree.chain(K), (1, 2, 3, 4))
    medusa = tiny_medusa(tiny_model("llama"), num_heads=K)
    with (
        torch._dynamo.config.patch(recompile_limit=3),
        pytest.raises(ValueError, match=r"each of the 4 sizes .* torch keeps 3; give fewer"),
    ):
        MedusaDecoder(medusa, tree, compile=True)


def test_batches_stay_eager() -> None:
    torch._dynamo.reset()
    model = tiny_model("llama", torch.float64)
    decoder = MedusaDecoder(tiny_medusa(model, num_heads=K), TREE, compile=True)
    decoder.proposer.heads = decoder.model.heads
    counters.clear()
    prompt = prompt_of(5)
    result = decoder.generate(prompt.repeat(2, 1), 6)
    assert result.sequences.tolist() == hf_greedy(model, prompt, 6).repeat(2, 1).tolist()
    assert counters["stats"]["unique_graphs"] == 0


def test_without_a_compiler_it_says_so_once_and_runs_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("medusa.inference.decoder.why_not_compile", lambda device: "there is no C++ compiler")
    model = tiny_model("llama", torch.float64)
    with pytest.warns(UserWarning, match=r"compile=True, but there is no C\+\+ compiler") as caught:
        decoder = MedusaDecoder(tiny_medusa(model, num_heads=K), TREE, compile=True)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        result = decoder.generate(prompt_of(5), max_new_tokens=6)
    assert result.sequences.tolist() == hf_greedy(model, prompt_of(5), 6).tolist()


def test_a_missing_compiler_is_noticed() -> None:
    from torch._inductor import config

    with config.patch("cpp.cxx", ("no-such-compiler",)):
        assert "no C++ compiler" in str(compiled.why_not_compile(torch.device("cpu")))
    assert compiled.why_not_compile(torch.device("cuda")) is None
