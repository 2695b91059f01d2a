"""Norms that compute in float32 whatever the precision around them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from composer3d import map_tensors

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["compute_in_float32", "find_norms", "find_statistics"]


def find_norms(model: nn.Module) -> list[str]:
    """Return the FQNs of torch's norms, and of leaf modules whose class is called a norm."""
    from torch import nn

    known = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    return [
        fqn
        for fqn, module in model.named_modules()
        if isinstance(module, known) or (type(module).__name__.endswith("Norm") and not list(module.children()))
    ]


def find_statistics(model: nn.Module, dtype: torch.dtype, buffer_dtype: torch.dtype | None) -> list[str]:
    """Return the FQNs of torch's norms whose running statistics are of another dtype than their weights will be.

    Args:
        model: Before its conversion.
        dtype: Of weights and inputs.
        buffer_dtype: Of buffers after conversion; None for their own.
    """
    from torch import nn

    batch = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    known = (*batch, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
    means = [(fqn, module.running_mean) for fqn, module in model.named_modules() if isinstance(module, known)]
    return [fqn for fqn, mean in means if mean is not None and (buffer_dtype or mean.dtype) != dtype]


def compute_in_float32(module: nn.Module) -> None:
    """Make a module compute on its parameters and inputs in float32, and cast its output to the input's dtype.

    The casts are inside the forward, so that recomputation repeats them; gradients reach the weights through them.
    Running statistics that are kept in a narrower dtype are rounded to it once they are updated.
    """
    forward = module.forward

    @functools.wraps(forward)
    def in_float32(*args: Any, **kwargs: Any) -> Any:
        import torch

        narrow = [tensor.dtype for tensor in (*args, *kwargs.values()) if _is_narrow(tensor)]
        parameters: dict[str, Any] = module._parameters
        buffers: dict[str, Any] = module._buffers
        kept, held = dict(parameters), {name: buffer for name, buffer in buffers.items() if _is_narrow(buffer)}
        try:
            parameters.update({name: _cast(parameter, torch.float32) for name, parameter in kept.items()})
            buffers.update({name: _cast(buffer, torch.float32) for name, buffer in held.items()})
            output = forward(*_cast(args, torch.float32), **_cast(kwargs, torch.float32))
            for name, buffer in held.items():
                buffer.copy_(buffers[name])
        finally:
            parameters.update(kept)
            buffers.update(held)
        if not narrow:
            return output
        return map_tensors(lambda tensor: tensor.to(narrow[0]) if tensor.is_floating_point() else tensor, output)

    module.forward = in_float32


def _is_narrow(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def _cast(value: Any, dtype: Any) -> Any:
    return map_tensors(lambda tensor: tensor.to(dtype) if _is_narrow(tensor) else tensor, value)
