"""The parts of a backbone, against the whole model; and the models that cannot be taken apart."""

import pytest
import torch
from tiny import CONFIGS, GROUPED, SCALED, VOCAB, prompt_of, shared_model, tiny_medusa, tiny_model
from torch import Tensor
from transformers import LlamaConfig, LlamaModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from medusa import CandidateTree
from medusa.backbone import Backbone
from medusa.heads import LogitTransform
from medusa.inference import MedusaDecoder
from medusa.inference.cache import TreeCache


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*CONFIGS, *SCALED])
def test_parts_give_the_logits_of_the_whole(name: str, dtype: torch.dtype) -> None:
    model = shared_model(name, dtype)
    backbone = Backbone(model)
    ids = prompt_of(20)
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        logits = backbone.logits(backbone.hidden(ids))
    tolerance = 1e-6 if dtype == torch.float64 else 5e-2
    assert (logits - expected).norm() <= tolerance * expected.norm()
    assert backbone.vocab_size == VOCAB
    assert backbone.hidden_size == 32
    assert backbone.num_layers == model.config.num_hidden_layers
    assert backbone.context_length == model.config.max_position_embeddings


@pytest.mark.parametrize(
    ("name", "softcap", "scale"),
    [("llama", None, 1.0), ("phi", None, 1.0), ("gemma3", 5.0, 1.0), ("cohere", None, 0.25), ("granite", None, 1 / 8)],
)
def test_logit_transform_is_found(name: str, softcap: float | None, scale: float) -> None:
    transform = Backbone(shared_model(name)).transform
    assert transform.softcap == softcap
    assert transform.scale == pytest.approx(scale, rel=1e-5)


def test_softcap_in_half_precision_is_found() -> None:
    """Logits that a softcap hardly bends must still be told from plain ones."""
    assert Backbone(tiny_model("gemma3", torch.bfloat16)).transform == LogitTransform(softcap=5.0)


def test_padded_text_is_masked() -> None:
    backbone = Backbone(shared_model("llama"))
    ids = prompt_of(6)
    padded = torch.cat([ids, torch.zeros(1, 3, dtype=torch.long)], dim=1)
    mask = torch.tensor([[1] * 6 + [0] * 3])
    torch.testing.assert_close(backbone.hidden(padded, mask)[:, :6], backbone.hidden(ids))


def test_training_mode_is_left_alone() -> None:
    model = tiny_model("llama").train()
    Backbone(model)
    assert model.training
    assert all(module.training for module in model.modules())


def test_ids_outside_the_vocabulary() -> None:
    backbone = Backbone(shared_model("llama"))
    backbone.check_ids(torch.tensor([[0, VOCAB - 1]]))
    with pytest.raises(ValueError, match=f"token id {VOCAB} .*0 to {VOCAB - 1}"):
        backbone.check_ids(torch.tensor([[0, VOCAB]]))
    with pytest.raises(ValueError, match="token id -1 "):
        backbone.check_ids(torch.tensor([-1]))


def test_model_without_an_lm_head() -> None:
    with pytest.raises(ValueError, match=r"LlamaModel has no LM head.*AutoModelForCausalLM"):
        Backbone(LlamaModel(LlamaConfig(**GROUPED)))


def test_logits_of_another_kind_are_refused() -> None:
    """A model that reorders its logits in its own way: heads on its hidden states would be wrong."""
    model = tiny_model("llama")

    def reverse(_module: object, _args: object, output: CausalLMOutputWithPast) -> CausalLMOutputWithPast:
        assert output.logits is not None
        return CausalLMOutputWithPast(logits=output.logits.flip(-1))

    model.register_forward_hook(reverse)
    with pytest.raises(ValueError, match="LlamaForCausalLM does not compute its logits"):
        Backbone(model)


@pytest.mark.decoding
@pytest.mark.parametrize("attention", ["flash_attention_2", "flex_attention"])
def test_attention_without_a_tree_mask_is_refused(monkeypatch: pytest.MonkeyPatch, attention: str) -> None:
    medusa = tiny_medusa(tiny_model("llama"), num_heads=2)
    monkeypatch.setattr(medusa.model.config, "_attn_implementation", attention)
    with pytest.raises(ValueError, match=f"{attention}.*LlamaForCausalLM.*sdpa, eager"):
        MedusaDecoder(medusa, CandidateTree.chain(2))


@pytest.mark.decoding
def test_model_that_ignores_the_cache_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then plain decoding in pieces is as wrong as the tree, so it must not be the only thing to compare with."""
    medusa = tiny_medusa(tiny_model("llama"), num_heads=2)
    extend = medusa.backbone.extend

    def forget(ids: Tensor, cache: TreeCache, position_ids: Tensor | None = None) -> Tensor:
        extend(ids, cache, position_ids)
        return extend(ids, TreeCache(medusa.backbone.num_layers, 16), position_ids)

    monkeypatch.setattr(medusa.backbone, "extend", forget)
    with pytest.raises(ValueError, match="LlamaForCausalLM does not follow a tree mask"):
        MedusaDecoder(medusa, CandidateTree.chain(2))


@pytest.mark.decoding
def test_model_that_ignores_the_tree_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the reason, here positions that do not arrive: the decoder tries before it trusts."""
    medusa = tiny_medusa(tiny_model("llama"), num_heads=2)
    extend = medusa.backbone.extend
    monkeypatch.setattr(medusa.backbone, "extend", lambda ids, cache, position_ids=None: extend(ids, cache))
    with pytest.raises(ValueError, match="LlamaForCausalLM does not follow a tree mask"):
        MedusaDecoder(medusa, CandidateTree.chain(2))
