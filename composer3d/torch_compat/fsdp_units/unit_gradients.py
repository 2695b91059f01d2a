"""Gradients of parameters that a unit of FSDP2 has gathered; its records are private (torch 2.11-2.15)."""

from __future__ import annotations

from typing import Any

from composer3d.torch_compat.layouts import unify_group
from composer3d.torch_compat.tensors import is_wrapper_subclass

__all__ = ["fill_gradients", "gradient_of", "gradient_version", "shard_gradients"]


def gradient_of(parameter: Any) -> Any:
    """Return the gradient, accumulated in another dtype where FSDP2 does so; None where there is none."""
    accumulated = parameter.unsharded_accumulated_grad
    return parameter._unsharded_param.grad if accumulated is None else accumulated


def gradient_version(parameter: Any) -> tuple[int, int] | None:
    """Return something that changes when a backward adds to a gradient; None where there is none to add to."""
    grad = parameter._unsharded_param.grad
    return None if grad is None else (id(grad), grad._version)


def shard_gradients(group: Any) -> Any:
    """Shard what a loop's own use of sharded parameters has made of their gradients, and return their group.

    FSDP2 adds shards to them. An operator that is computed on whole tensors, as a singular value decomposition, returns
    a whole gradient.
    """
    for parameter in group.fsdp_params:
        own = parameter.sharded_param
        if own.grad is not None and own.grad.placements != own.placements:
            own.grad = own.grad.redistribute(placements=own.placements)
    return group


def fill_gradients(group: Any) -> bool:
    """Give parameters without a gradient zeros, of the others' dtype; return whether there is anything to reduce."""
    import torch
    from torch.distributed.tensor import DTensor

    parameters = [p for p in group.fsdp_params if hasattr(p, "_unsharded_param")]
    others = {gradient_of(parameter).dtype for parameter in parameters if gradient_of(parameter) is not None}
    for parameter in parameters:
        if parameter.sharded_param.requires_grad and gradient_of(parameter) is None:
            full = parameter._unsharded_param
            if is_wrapper_subclass(type(full)) and not isinstance(full, DTensor):
                # Weights gathered in float8: their gradients are plain tensors, which they do not take by assignment.
                # What FSDP2 accumulates, which it takes them for, is in the dtype of the reduction.
                dtype = group.mp_policy.reduce_dtype or next(iter(others), full.dtype)
                parameter.unsharded_accumulated_grad = torch.zeros(full.shape, dtype=dtype, device=full.device)
            else:
                full.grad = torch.zeros_like(full)
    unify_group(group)
    return bool(parameters)
