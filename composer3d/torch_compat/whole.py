"""Parameters that FSDP2 does not take, and what it would have done to their gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from composer3d.torch_compat.tracing import active_fake_mode

__all__ = ["average_whole", "scalar_parameters"]


def scalar_parameters(module: Any) -> set[Any]:
    """Return the parameters without dims, which FSDP2's units refuse, replicated ones too (torch 2.11-2.15).

    They have nothing to cut: they are left to `ignored_params`, and stay whole on every rank.
    """
    return {parameter for parameter in module.parameters() if not parameter.dim()}


def average_whole(parameters: Iterable[Any], *, axes: Iterable[str], context: Any) -> None:
    """Average the gradients of parameters that FSDP2 ignores: nobody else would, and ranks would train other copies.

    A rank on which a parameter had no part, as one whose samples took another branch, adds zeros.

    Args:
        parameters: The same ones, in the same order, on all ranks of the axes; tied ones may be there twice.
        axes: Over which to average; degrees of 1 too.
        context: Of the run: its mesh, degrees and spans.

    Collectives: one all-reduce an axis, of all gradients and one number a parameter.
    """
    import torch
    import torch.distributed as dist

    trained = [p for p in dict.fromkeys(parameters) if p.requires_grad]
    if not trained:
        return
    missing = [parameter for parameter in trained if parameter.grad is None]
    there = torch.tensor([float(p.grad is not None) for p in trained], device=_values(trained[0]).device)
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else _settled(parameter)
    grads = [_values(parameter.grad) for parameter in trained]
    # Sums of few digits lose more than they carry.
    flat = torch.cat([grad.reshape(-1).float() if grad.dtype.itemsize < 4 else grad.reshape(-1) for grad in grads])
    flat = torch.cat([flat, there.to(flat)])
    for axis in axes:
        with context.span("all_reduce", group="ignored", axis=axis, bytes=flat.nbytes):
            dist.all_reduce(flat, group=context.mesh[axis].get_group())
        flat /= context.degrees[axis]
    *pieces, found = flat.split([*(grad.numel() for grad in grads), len(trained)])
    for grad, piece in zip(grads, pieces, strict=True):
        grad.copy_(piece.view_as(grad))
    # What no rank has a gradient of, an optimizer is to leave alone, its decay too. Fake tensors have no values.
    shares = [0.0] * len(trained) if not missing or active_fake_mode() is not None else found.tolist()
    for parameter, share in zip(trained, shares, strict=True):
        if not share and any(parameter is other for other in missing):
            parameter.grad = None


def _settled(parameter: Any) -> Any:
    """Return a gradient laid out as its parameter; beside a rank that adds zeros, nobody could settle it later."""
    grad = parameter.grad
    is_partial = any(placement.is_partial() for placement in getattr(grad, "placements", ()))
    return grad.redistribute(placements=parameter.placements) if is_partial else grad


def _values(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
