"""Norm of the whole model's gradient, and clipping, of parameters that live on different meshes."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat
from composer3d.errors import StepError
from composer3d.mesh import Layout, Role
from composer3d.step import control_numbers
from composer3d.step.gradients import Apart

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

__all__ = ["clip_norm_", "scale_", "total_norm", "weight"]


def scale_(parameters: Iterable[Tensor], factor: float | Tensor) -> None:
    """Multiply all gradients in place by one factor."""
    for (_, _, dtype), grads in _alike(parameters).items():
        # Kernels convert a factor of another dtype once a tensor; narrower dtypes than this take it as it is.
        alike = factor if isinstance(factor, float) or dtype.itemsize < 4 else factor.to(dtype)
        torch_compat.foreach_mul_(grads, alike)


def total_norm(
    parameters: Sequence[nn.Parameter],
    *,
    layout: Layout,
    norm_type: float,
    group: Any,
    device: torch.device,
    apart: Apart | None = None,
) -> Tensor:
    """Return the norm of the gradient of the full model, equal on all ranks.

    Each rank sums its local tensors, every one weighted by one over the number of its replicas; so parameters that are
    sharded, replicated, or of another stage need no meshes of their own.
    Collectives: one all-reduce of one number.

    Args:
        parameters: Of all this rank's parts, each tensor once; any shapes and placements.
        layout: Axes and degrees, for the number of replicas.
        norm_type: 2, or infinity, where a NaN counts as infinite.
        group: Process group of the ranks of one global batch.
        device: Of the reduced number.
        apart: From `apart`.

    Raises:
        StepError: norm_type is neither 2 nor infinity.
    """
    import torch

    infinite = math.isinf(norm_type)
    if norm_type != 2 and not infinite:
        raise StepError(f"the gradient norm is not computed for norm_type = {norm_type:g}; use 2 or infinity")
    found: list[Tensor] = []
    for (share, *_), grads in _alike(parameters, layout, apart).items():
        norms = torch.stack(torch_compat.foreach_norm(grads, norm_type)).to(device=device, dtype=torch.float64)
        number = norms.max() if infinite else norms.square().sum()
        found.append(number if infinite or share == 1.0 else number * share)
    total = functools.reduce(torch.maximum if infinite else torch.add, found) if found else None
    if total is None:
        total = torch.zeros((), dtype=torch.float64, device=device)
    if infinite:
        # The maximum over ranks would lose a NaN: it is neither larger nor smaller than anything.
        total = torch.nan_to_num(total, nan=math.inf, posinf=math.inf)
    control_numbers.all_reduce(total, group=group, takes_maximum=infinite)
    return total if infinite else total.sqrt()


def clip_norm_(
    parameters: Sequence[nn.Parameter],
    max_norm: float,
    *,
    layout: Layout,
    norm_type: float,
    group: Any,
    device: torch.device,
    copies: Container[int] = (),
    apart: Apart | None = None,
) -> Tensor:
    """Scale gradients down to a norm of at most `max_norm`; arguments, and what is returned, as `total_norm`.

    Args:
        parameters: To scale.
        max_norm: Above 0; infinity measures without scaling.
        layout: As `total_norm`.
        norm_type: As `total_norm`.
        group: As `total_norm`.
        device: As `total_norm`.
        copies: `id` of parameters that are scaled here and counted by another rank.
        apart: From `apart`.
    """
    import torch

    counted = [parameter for parameter in parameters if id(parameter) not in copies]
    norm = total_norm(counted, layout=layout, norm_type=norm_type, group=group, device=device, apart=apart)
    # The same formula as torch.nn.utils.clip_grad_norm_, so that runs can be compared.
    if not parameters:
        return norm
    if type(norm) is torch.Tensor and parameters[0].device.type == norm.device.type == "cpu":
        # A factor of 1 changes nothing, so that the gradients are not read for it.
        number = 1.0 / (norm.item() + 1e-6) * max_norm
        if not number >= 1.0:
            scale_(parameters, number)
        return norm
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    scale_(parameters, factor.to(parameters[0].device))
    return norm


def _alike(
    parameters: Iterable[Tensor], layout: Layout | None = None, apart: Apart | None = None
) -> dict[tuple[Any, ...], list[Tensor]]:
    """Group local gradients by weight, device and dtype, as foreach kernels require."""
    result: dict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
    weights: dict[tuple[Any, ...], float] = {}
    for parameter in parameters:
        grad: Any = parameter.grad
        if grad is None:
            continue
        tensor = torch_compat.held_tensor(grad)  # `to_local` would make a node of a graph
        # Ranks whose shard is empty add nothing, and an infinity norm of nothing is an error in torch.
        if not tensor.numel():
            continue
        share = 1.0
        if layout is not None:
            dims = (apart or {}).get(id(parameter), ())
            key = (dims, *((id(grad.device_mesh), grad.placements) if tensor is not grad else ()))
            share = weights[key] if key in weights else weights.setdefault(key, weight(grad, layout, apart=dims))
        result[(share, tensor.device, tensor.dtype)].append(tensor)
    return result


def weight(grad: Tensor, layout: Layout, *, apart: Sequence[str] = ()) -> float:
    """Return one over the number of ranks that hold the same values.

    Args:
        grad: The gradient.
        layout: Axes and degrees.
        apart: Expert axes along which ranks hold different parameters, independent of the gradient's mesh.
    """
    from torch.distributed.tensor import DTensor

    pieces = layout.degree(Role.STAGE)
    if isinstance(grad, DTensor):
        mesh = grad.device_mesh
        apart = [axis for axis in apart if axis not in (mesh.mesh_dim_names or ())]
        pieces *= math.prod(mesh.size(dim) for dim, p in enumerate(grad.placements) if not p.is_replicate())
    pieces *= math.prod(layout.degrees[axis] for axis in apart)
    return pieces * layout.degree(Role.INDEPENDENT) / layout.world_size
