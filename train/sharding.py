"""Split what learns over the processes (FSDP2), for backbones that fill a GPU. Tensors of any shape.

Torch's `fully_shard` is used as it is, since accelerate has it on GPUs only and it is tested here on CPUs.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


def shard(loss: nn.Module, layers: Iterable[nn.Module], accelerator: Accelerator) -> nn.Module:
    """Split every layer by itself, so that only one is whole at a time, and then the rest of `loss`."""
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(loss, mesh=mesh)
    parameters = list(loss.parameters())
    here = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in parameters)
    accelerator.print(f"split with FSDP2: {here} of {sum(p.numel() for p in parameters)} parameters are here")
    return loss


@contextmanager
def gathered(loss: nn.Module) -> Iterator[None]:
    """Outside of a forward pass, hold what does not belong to a layer whole; all ranks must enter together."""
    if not isinstance(loss, FSDPModule):
        yield
        return
    loss.unshard()
    try:
        yield
    finally:
        loss.reshard()


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on every rank; all ranks must call it together where it is split."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def split_like(stored: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor, split as a parameter of its shape is."""
    stored = stored.to(parameter.device)
    if not isinstance(parameter, DTensor) or stored.shape != parameter.shape:
        return stored
    return distribute_tensor(stored, parameter.device_mesh, parameter.placements)


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """The optimizer's state with whole tensors; all ranks must call it together."""
    state = optimizer.state_dict()
    whole_state = {
        index: {name: whole(value) if isinstance(value, Tensor) else value for name, value in entries.items()}
        for index, entries in state["state"].items()
    }
    return {**state, "state": whole_state}


def load_optimizer_state(optimizer: torch.optim.Optimizer, stored: dict[str, dict[int, dict[str, Tensor]]]) -> None:
    """What `optimizer_state` gave, split again where the parameters are."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    split = {
        index: {name: split_like(value, parameters[index]) for name, value in entries.items()}
        for index, entries in stored["state"].items()
    }
    optimizer.load_state_dict({**stored, "state": split})
