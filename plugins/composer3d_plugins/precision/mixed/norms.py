"""Norms that compute in float32 whatever the precision around them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from composer3d import map_tensors

if TYPE_CHECKING:
    from torch import nn

__all__ = ["compute_in_float32", "find_norms"]


def find_norms(model: nn.Module) -> list[str]:
    """Return the FQNs of torch's norms, and of leaf modules whose class is called a norm."""
    from torch import nn

    known = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    return [
        fqn
        for fqn, module in model.named_modules()
        if isinstance(module, known) or (type(module).__name__.endswith("Norm") and not list(module.children()))
    ]


def compute_in_float32(module: nn.Module) -> None:
    """Let a module compute on its parameters and inputs in float32, and return what it returns in its input's dtype.

    The casts are inside the forward, so that recomputation repeats them; gradients reach the weights through them.
    """
    forward = module.forward

    @functools.wraps(forward)
    def in_float32(*args: Any, **kwargs: Any) -> Any:
        import torch

        narrow = [tensor.dtype for tensor in (*args, *kwargs.values()) if _is_narrow(tensor)]
        parameters: dict[str, Any] = module._parameters
        kept = dict(parameters)
        try:
            parameters.update({name: _cast(parameter, torch.float32) for name, parameter in kept.items()})
            output = forward(*_cast(args, torch.float32), **_cast(kwargs, torch.float32))
        finally:
            parameters.update(kept)
        if not narrow:
            return output
        return map_tensors(lambda tensor: tensor.to(narrow[0]) if tensor.is_floating_point() else tensor, output)

    module.forward = in_float32


def _is_narrow(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def _cast(value: Any, dtype: Any) -> Any:
    return map_tensors(lambda tensor: tensor.to(dtype) if _is_narrow(tensor) else tensor, value)
