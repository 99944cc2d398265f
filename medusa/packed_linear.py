"""A faster matrix product for half-precision backbones on CPUs without half-precision instructions.

There, torch multiplies a few bf16 rows one by one: a pass over 8 tokens costs several times a pass over one, and no
tree pays. FBGEMM keeps the same weights as fp16, packed for the product, and multiplies in fp32, so that few rows cost
nearly what one does. This is a second copy of the linear weights in memory (2 bytes each). Everything between the
products is done in fp32 too: such a CPU rounds to bf16 by hand at every operation, which costs time and precision.
"""

import copy
import itertools
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

FP16_MAX = torch.finfo(torch.float16).max
ENGINES = ("fbgemm", "x86")


_packed: dict[int, Any] = {}
"""Packed weights by number: a compiler cannot trace FBGEMM's object, but an operator that takes a number."""
_numbers = itertools.count()


@torch.library.custom_op("medusa::packed_linear", mutates_args=())
def packed_linear(x: Tensor, number: int, out_features: int) -> Tensor:
    """Multiply rows [M, D] by the packed weight of that number: [M, V]."""
    y: Tensor = torch.ops.quantized.linear_dynamic_fp16.default(x, _packed[number])
    return y


@packed_linear.register_fake
def _(x: Tensor, number: int, out_features: int) -> Tensor:
    return x.new_empty(x.shape[0], out_features)


class PackedLinear(nn.Module):
    """A linear layer with packed weights, fp32 in and out."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        bias = None if linear.bias is None else linear.bias.detach().float()
        self.number = next(_numbers)
        _packed[self.number] = torch.ops.quantized.linear_prepack_fp16(linear.weight.detach().float(), bias)
        weakref.finalize(self, _packed.pop, self.number)
        self.out_features = linear.weight.shape[0]

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., V]."""
        rows = x.reshape(-1, x.shape[-1])  # the operator takes no single vector
        if torch.compiler.is_compiling():
            y: Tensor = packed_linear(rows, self.number, self.out_features)
        else:
            y = torch.ops.quantized.linear_dynamic_fp16(rows, _packed[self.number])
        return y.view(*x.shape[:-1], -1)


class Fp32Embedding(nn.Module):
    """An embedding whose table stays as it is and whose output is fp32."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight
        self._embedding = embedding

    def forward(self, ids: Tensor) -> Tensor:
        """[...] -> [..., D]."""
        y: Tensor = self._embedding(ids)
        return y.float()


def can_pack(model: PreTrainedModel) -> str | None:
    """Why `pack_linears` does not work for this model, or None if it does."""
    if not any(engine in torch.backends.quantized.supported_engines for engine in ENGINES):
        return "this build of torch has no FBGEMM"
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    for weight in weights:
        if weight.device.type != "cpu" or weight.dtype not in (torch.bfloat16, torch.float16):
            return f"a weight is {weight.dtype} on {weight.device}; packing is for bfloat16 and float16 on a CPU"
        if weight.detach().abs().max() > FP16_MAX:
            return f"a weight is beyond the range of fp16 ({FP16_MAX:.0f})"
    return None


def pack_linears(model: PreTrainedModel) -> PreTrainedModel:
    """A view of `model` that computes in fp32 with packed weights; `model` itself stays as it is.

    The view shares the weights of linear layers and embeddings; it copies only the small rest (norms) to fp32.

    Raises:
        ValueError: the model or this machine does not allow it, with the reason.
    """
    reason = can_pack(model)
    if reason is not None:
        raise ValueError(f"the weights cannot be packed: {reason}; use pack_weights=False")
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    view = copy.deepcopy(model, memo=dict(shared))
    for name, module in list(view.named_modules()):
        parent, _, attribute = name.rpartition(".")
        if isinstance(module, nn.Linear):
            setattr(view.get_submodule(parent), attribute, PackedLinear(module))
        elif isinstance(module, nn.Embedding):
            setattr(view.get_submodule(parent), attribute, Fp32Embedding(module))
        else:
            for key, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, key, nn.Parameter(parameter.detach().float(), requires_grad=False))
    return view
