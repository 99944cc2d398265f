"""The packed copy of half-precision weights: as good as the model itself, and the model is left alone."""

import pytest
import torch
from tiny import CONFIGS, GROUPED, prompt_of, tiny_medusa, tiny_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from medusa import CandidateTree
from medusa.inference import MedusaDecoder
from medusa.packed_linear import ENGINES, PackedLinear, can_pack, pack_linears

needs_fbgemm = pytest.mark.skipif(
    not any(engine in torch.backends.quantized.supported_engines for engine in ENGINES), reason="torch has no FBGEMM"
)


def half_model(dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """Wide enough for rounding in the products to show, with weights of usual size."""
    torch.manual_seed(0)
    config = LlamaConfig(**{**GROUPED, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3})
    return LlamaForCausalLM(config).to(dtype).eval()


@needs_fbgemm
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_packed_is_at_least_as_exact(dtype: torch.dtype) -> None:
    """Both are compared to the same weights in fp32."""
    model = half_model(dtype)
    packed = pack_linears(model)
    ids = prompt_of(40)
    with torch.no_grad():
        plain_logits, packed_logits = (m(input_ids=ids).logits.float() for m in (model, packed))
        exact = model.float()(input_ids=ids).logits  # last: it changes the model
    packed_error, plain_error = ((logits - exact).norm() / exact.norm() for logits in (packed_logits, plain_logits))
    assert packed_error <= plain_error * 1.05  # fp16 products on this machine may be exact already
    assert packed_error < 0.02


@needs_fbgemm
def test_one_layer_against_fp64() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(256, 64).to(torch.bfloat16)
    x = torch.randn(3, 5, 256)
    y = PackedLinear(linear)(x)
    expected = nn.functional.linear(x.double(), linear.weight.double(), linear.bias.double())
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-5)


@needs_fbgemm
def test_view_shares_the_weights_and_leaves_the_model_alone() -> None:
    model = half_model()
    modules = dict(model.named_modules())
    types = {name: type(module) for name, module in modules.items()}
    pointers = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    before = model(input_ids=prompt_of(9)).logits
    view = pack_linears(model)
    for name, parameter in view.named_parameters():  # only the norms are copied
        assert parameter.data_ptr() == pointers.get(name.replace("._embedding", "")) or parameter.dim() == 1, name
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == pointers
    assert {name: type(module) for name, module in model.named_modules()} == types
    assert all(module is modules[name] for name, module in model.named_modules())
    assert torch.equal(model(input_ids=prompt_of(9)).logits, before)
    linears = sum(issubclass(kind, nn.Linear) for kind in types.values())
    assert sum(isinstance(module, PackedLinear) for module in view.modules()) == linears > 0
    assert not any(isinstance(module, nn.Linear) for module in view.modules())


@needs_fbgemm
@pytest.mark.decoding
@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "gpt2"])  # gpt2's layers are no nn.Linear
def test_decoder_with_packed_weights(name: str) -> None:
    """Same answer as the packed model's own greedy decoding would give, up to near ties: so compare step by step."""
    model = tiny_model(name, torch.bfloat16)
    decoder = MedusaDecoder(
        tiny_medusa(model, num_heads=2), CandidateTree.from_paths([(0,), (1,), (0, 0)]), pack_weights=True
    )
    assert decoder.backbone.model is not model
    result = decoder.generate(prompt_of(6), max_new_tokens=12)
    assert result.stats.new_tokens == 12
    with torch.no_grad():
        logits = decoder.backbone.model(input_ids=result.sequences).logits[0, 5:-1].float()
    chosen = logits.gather(1, result.sequences[0, 6:, None])[:, 0]
    assert (logits.max(dim=-1).values - chosen <= 0.05 * logits.abs().max()).all()


@needs_fbgemm
@pytest.mark.decoding
def test_end_tokens_of_the_model_count_after_packing() -> None:
    """The view holds a copy of the generation config; the one that the caller can reach is the model's."""
    model = tiny_model("llama", torch.bfloat16)
    decoder = MedusaDecoder(tiny_medusa(model, num_heads=2), CandidateTree.chain(2), pack_weights=True)
    first = decoder.generate(prompt_of(6), max_new_tokens=8)
    assert model.generation_config is not None
    model.generation_config.eos_token_id = int(first.sequences[0, 6])
    result = decoder.generate(prompt_of(6), max_new_tokens=8)
    assert result.stats.finish_reason == "stop"
    assert result.stats.new_tokens == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_full_precision_is_refused(dtype: torch.dtype) -> None:
    reason = can_pack(half_model(dtype))
    assert reason is not None
    with pytest.raises(ValueError, match=f"cannot be packed.*({dtype}|FBGEMM).*pack_weights=False"):
        MedusaDecoder(tiny_medusa(tiny_model("llama", dtype), num_heads=2), CandidateTree.chain(2), pack_weights=True)


@needs_fbgemm
def test_weights_beyond_fp16_are_refused() -> None:
    model = half_model()
    with torch.no_grad():
        model.lm_head.weight[0, 0] = 1e5
    with pytest.raises(ValueError, match="range of fp16"):
        pack_linears(model)


def test_torch_without_fbgemm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("medusa.packed_linear.ENGINES", ())
    with pytest.raises(ValueError, match="no FBGEMM"):
        pack_linears(half_model())
