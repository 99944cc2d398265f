"""Backbones whose parts lie on several devices, and quantised ones."""

from pathlib import Path

import pytest
import torch
from chatml import save_tiny_chat_model
from tiny import hf_greedy, prompt_of, tiny_medusa, tiny_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from medusa import CandidateTree
from medusa.inference import MedusaDecoder

pytestmark = pytest.mark.decoding

TREE = CandidateTree.from_paths([(0,), (1,), (0, 0), (1, 0)])
PROMPT = torch.arange(40, 52)[None]


def test_layers_that_accelerate_brings_in_when_they_are_needed(tmp_path: Path) -> None:
    """One layer lives on disk: inputs, masks and the cache travel with accelerate's hooks, as between two GPUs."""
    save_tiny_chat_model(tmp_path / "model")
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    places |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    spread = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "offload"
    )
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert {p.device.type for p in spread.parameters()} == {"cpu", "meta"}, "a layer is meant to be offloaded"
    decoder = MedusaDecoder(tiny_medusa(spread.eval(), num_heads=2, root_conditioned=True), TREE)
    expected = hf_greedy(whole.eval(), PROMPT, 12)
    assert decoder.generate(PROMPT, 12, pad_token_id=0).sequences.tolist() == expected.tolist()


class Int8Linear(nn.Module):
    """Stands in for the layers of quantisation libraries: integers and a scale, of a class of its own."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self.scale = weight.abs().amax(dim=1, keepdim=True) / 127
        self.weight = nn.Parameter((weight / self.scale).round().to(torch.int8).T.contiguous(), requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight.to(x.dtype) * self.scale[:, 0]
        return y if self.bias is None else y + self.bias


@pytest.mark.parametrize("projection", ["own", "shared"])
@pytest.mark.parametrize("name", ["llama", "phi"])  # phi's LM head has a bias
@pytest.mark.parametrize("quantised_head", [False, True])
def test_quantised_backbones(name: str, projection: str, quantised_head: bool) -> None:
    """Heads take the LM head's dense weight, in whatever format it is kept."""
    model = tiny_model(name)
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and (quantised_head or path != "lm_head"):
            parent, _, attribute = path.rpartition(".")
            setattr(model.get_submodule(parent), attribute, Int8Linear(module))
    medusa = tiny_medusa(model, num_heads=2, projection=projection)
    head = model.lm_head
    states = torch.randn(3, 32, dtype=torch.float64)
    dense = nn.functional.linear(states, medusa.backbone.lm_weight, medusa.backbone.lm_bias)
    torch.testing.assert_close(dense, head(states))
    prompt = prompt_of(7)
    assert MedusaDecoder(medusa, TREE).generate(prompt, 12).sequences.tolist() == hf_greedy(model, prompt, 12).tolist()
