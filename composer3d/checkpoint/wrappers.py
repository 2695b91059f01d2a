"""Wrapper tensors, and the plain tensors inside of them."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["unwrapped"]


def unwrapped(tensor: Tensor) -> Tensor:
    """Return the plain tensor, or the DTensor of plain tensors, inside a wrapper; other tensors unchanged.

    Some weights are kept in a wrapper only so that FSDP2 gathers them in another form (float8). Wrappers state their
    contents by the protocol of torch.compile. The memory is shared.
    """
    from torch.distributed.tensor import DTensor

    with torch.no_grad():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if type(local) in (torch.Tensor, torch.nn.Parameter) or not hasattr(local, "__tensor_flatten__"):
            return tensor
        inner = [getattr(local, name) for name in local.__tensor_flatten__()[0]]
        same = [each for each in inner if each.shape == local.shape and each.dtype == local.dtype]
        if len(same) != 1:
            return tensor
        if not isinstance(tensor, DTensor):
            return same[0]
        return DTensor.from_local(
            same[0],
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
