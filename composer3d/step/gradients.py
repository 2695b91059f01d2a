"""Gradients of a model whose parameters live on different meshes: missing ones, partial ones, and averages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat
from composer3d.errors import StepError
from composer3d.mesh import Role
from composer3d.torch_compat import local_of as local
from composer3d.transform import StepAction, StepPoint

if TYPE_CHECKING:
    from torch import Tensor, nn

    from composer3d.context import RunContext
    from composer3d.step.step_state import StepState

__all__ = [
    "Apart",
    "add_up",
    "apart",
    "average_whole",
    "averaged_dims",
    "averaging_action",
    "reducing_point",
    "local",
    "refuse_none",
    "settle_partial",
]

Apart = Mapping[int, tuple[str, ...]]


def add_up(numbers: Tensor, *, context: RunContext, axes: Sequence[str] | None = None) -> None:
    """Add up a tensor in place over the ranks that have other samples or positions, or over those of some axes.

    Collectives: one all-reduce an axis.
    """
    import torch.distributed as dist

    for axis in context.layout.names(Role.BATCH, Role.SEQUENCE) if axes is None else axes:
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


def averaging_action(name: str, average: Callable[[StepState], None], context: RunContext) -> StepAction:
    """Return the action of a data-parallel plugin that averages what no unit reduces.

    It runs at `reducing_point(context)`: a loop which reads gradients, or updates by them itself, has averages.

    Args:
        name: Of the action.
        average: Leaves averages as they are.
        context: Configured.
    """
    return StepAction(name=name, point=reducing_point(context), run=average)


def reducing_point(context: RunContext) -> StepPoint:
    """Return when gradients of a batch are to be reduced that were not in its backward, before a loop reads them.

    After each batch, of which a step may have several; gradients that are in host memory come back once they are used.

    Args:
        context: Configured.
    """
    return StepPoint.GRADIENTS_LOCAL if context.claimants("moved_gradients") else StepPoint.AFTER_BATCH


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
