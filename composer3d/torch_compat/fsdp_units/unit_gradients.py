"""Gradients of parameters that a unit of FSDP2 has gathered; its records are private (torch 2.11-2.15)."""

from __future__ import annotations

from typing import Any

__all__ = ["gradient_of", "gradient_version", "shard_gradients"]


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
