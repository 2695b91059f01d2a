"""Gradients of a model whose parameters live on different meshes: scaling, the norm of the whole, and clipping."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat
from composer3d.errors import StepError
from composer3d.mesh import Layout, Role
from composer3d.torch_compat import local_of as local

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from composer3d.context import RunContext

__all__ = [
    "add_up",
    "apart",
    "average_whole",
    "averaged_dims",
    "clip_norm_",
    "local",
    "refuse_none",
    "scale_",
    "settle_partial",
    "total_norm",
    "weight",
]

Apart = Mapping[int, tuple[str, ...]]


def add_up(numbers: Tensor, *, context: RunContext) -> None:
    """Add up a tensor in place over the ranks that have other samples or positions.

    Collectives: one all-reduce an axis.
    """
    import torch.distributed as dist

    for axis in context.layout.names(Role.BATCH, Role.SEQUENCE):
        if context.degrees[axis] > 1:
            with context.span("all_reduce", group="divisors", axis=axis, bytes=numbers.nbytes):
                dist.all_reduce(numbers, group=context.mesh.get_group(axis))


def settle_partial(parameters: Iterable[nn.Parameter]) -> None:
    """Reduce gradients that are still partial sums (norm weights under sequence parallelism).

    Collectives: one all-reduce or reduce-scatter for each such gradient.
    """
    from torch.distributed.tensor import DTensor

    for parameter in parameters:
        grad = parameter.grad
        if isinstance(grad, DTensor) and any(placement.is_partial() for placement in grad.placements):
            assert isinstance(parameter, DTensor)
            parameter.grad = grad.redistribute(placements=parameter.placements)


def refuse_none(parameters: Iterable[nn.Parameter], *, step: int) -> None:
    """Raise where no parameter that is trained has a gradient.

    FSDP2 finds the tensors of an output in containers that torch knows; in any other object it misses them, reduces
    nothing, and the optimizer would step on nothing.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if trained and all(parameter.grad is None for parameter in trained):
        raise StepError(
            f"no parameter got a gradient in step {step}; return the model's output as a tensor, or in a tuple, list, "
            "dict or dataclass"
        )


def average_whole(parameters: Iterable[nn.Parameter], *, axes: Iterable[str], context: RunContext) -> None:
    """Average gradients of parameters in no unit of a data-parallel plugin: otherwise replicas would diverge.

    A rank without a gradient for a parameter, because its samples took another branch, adds zeros.

    Args:
        parameters: The same ones, in the same order, on all ranks of the axes; tied ones may be there twice.
        axes: Mesh axes over which to average; degrees of 1 are allowed.
        context: With its mesh.

    Parameters of experts are averaged over the ranks that hold the same ones.
    Collectives: one all-reduce an axis, of all gradients and one number a parameter.
    """
    of_experts, axes = apart(context), tuple(axes)
    groups: dict[tuple[str, ...], list[nn.Parameter]] = {}
    for parameter in dict.fromkeys(parameters):
        if parameter.requires_grad:
            groups.setdefault(of_experts.get(id(parameter), ()), []).append(parameter)
    for experts, trained in groups.items():
        _average(trained, averaged_dims(axes, experts, context), context)


def averaged_dims(axes: Sequence[str], experts: Sequence[str], context: RunContext) -> list[tuple[str, Any]]:
    """Return name and process group of the dims over which parameters are averaged.

    Args:
        axes: Mesh axes of parameters that all ranks hold.
        experts: The axes of experts along which ranks hold other parameters.
        context: With its mesh.
    """
    carved = {axis for expert in experts for axis in context.layout.axes_of(expert)}
    found = [(axis, context.mesh.get_group(axis)) for axis in axes if axis not in carved]
    for expert in experts:
        _, beside, _ = context.expert_mesh(expert).mesh_dim_names or ("", "", "")
        found.append((beside, context.expert_mesh(expert).get_group(beside)))
    return found


def _average(trained: Sequence[nn.Parameter], dims: Sequence[tuple[str, Any]], context: RunContext) -> None:
    import torch
    import torch.distributed as dist

    missing = [parameter for parameter in trained if parameter.grad is None]
    there = torch.tensor([float(p.grad is not None) for p in trained], device=local(trained[0]).device)
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    # With a rank that adds zeros, they could not be reduced later.
    settle_partial(trained)
    grads = [local(parameter.grad) for parameter in trained if parameter.grad is not None]  # all have one by now
    # Sums of few digits lose more than they carry.
    flat = torch.cat([grad.reshape(-1).float() if grad.dtype.itemsize < 4 else grad.reshape(-1) for grad in grads])
    flat = torch.cat([flat, there.to(flat)])
    for axis, group in dims:
        with context.span("all_reduce", group="ignored", axis=axis, bytes=flat.nbytes):
            dist.all_reduce(flat, group=group)
        flat /= group.size()
    *pieces, found = flat.split([*(grad.numel() for grad in grads), len(trained)])
    for grad, piece in zip(grads, pieces, strict=True):
        grad.copy_(piece.view_as(grad))
    # A parameter without a gradient on any rank must not be stepped, its decay included. Fake tensors have no values.
    shares = [0.0] * len(trained) if not missing or torch_compat.active_fake_mode() is not None else found.tolist()
    for parameter, share in zip(trained, shares, strict=True):
        if not share and any(parameter is other for other in missing):
            parameter.grad = None


def apart(context: RunContext) -> Apart:
    """Return by `id` the axes of experts along which ranks hold other parameters than this one, where there are any."""
    experts = [axis for axis in context.layout.names(Role.EXPERT) if context.degrees[axis] > 1]
    found: dict[int, tuple[str, ...]] = {}
    for fqn, parameter in context.named_parameters() if experts else ():
        own = context.parameter_mesh(fqn)
        if own is not None:
            found[id(parameter)] = tuple(axis for axis in experts if axis in (own.mesh.mesh_dim_names or ()))
    return found


def scale_(parameters: Iterable[nn.Parameter], factor: float | Tensor) -> None:
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
    import torch.distributed as dist

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
    dist.all_reduce(total, op=dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=group)
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
    parameters: Iterable[nn.Parameter], layout: Layout | None = None, apart: Apart | None = None
) -> dict[tuple[Any, ...], list[Tensor]]:
    """Group local gradients by weight, device and dtype, as foreach kernels require."""
    import torch
    from torch.distributed.tensor import DTensor

    result: dict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
    weights: dict[tuple[Any, ...], float] = {}
    with torch.no_grad():  # else every DTensor would make a node of a graph
        for parameter in parameters:
            grad: Any = parameter.grad
            if grad is None:
                continue
            tensor = grad.to_local() if isinstance(grad, DTensor) else grad
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
