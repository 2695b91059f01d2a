"""Meshes, sharded modules and placements."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "clear_sharding_caches",
    "concatenate",
    "find_unused_in",
    "flatten",
    "fsdp_buffers",
    "fsdp_groups",
    "held_tensor",
    "local_of",
    "mark_unsharded",
    "replicate_buckets",
    "replicate_units",
    "shard_integers",
    "shard_of",
    "silence_redistribution",
    "unflatten",
    "unify_gradients",
    "with_local",
]


def flatten(mesh: Any, name: str, *, override: Any = None) -> Any:
    """Return several axes of a mesh as one; public only as an underscore method (torch 2.11-2.15).

    Args:
        mesh: Its axes.
        name: Of the one.
        override: From `group_override`.
    """
    return mesh._flatten(name, override)


def unflatten(
    mesh: Any, degrees: Mapping[str, int], *, own_group: str, override: Mapping[str, Any] | None = None
) -> Any:
    """Return a mesh of one dim with several; public only as an underscore method (torch 2.11-2.15).

    Args:
        mesh: Of one dim.
        degrees: By the name of the dim, outermost first.
        own_group: The dim that has a process group of its own where it has all ranks of the world: torch would take the
            world's, whose collectives nobody could tell from others.
        override: From `group_override`, by dim.
    """
    import torch.distributed as dist

    whole = degrees[own_group] == dist.get_world_size() > 1
    stated = {name: value for name, value in (override or {}).items() if value is not None}
    overrides = ({own_group: str(dist.get_backend())} if whole else {}) | stated
    return mesh._unflatten(0, tuple(degrees.values()), tuple(degrees), overrides or None)


def concatenate(meshes: Sequence[Any]) -> Any:
    """Return the dims of several views of one mesh as one view; a private static method (torch 2.11-2.15)."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh._concatenate(list(meshes))


def clear_sharding_caches() -> None:
    """Forget what DTensor's operators returned, meshes included; torch has only underscored functions for it.

    DTensor takes meshes of equal ranks for one, whichever rank this process was when they were made, so that another
    rank's world in one process would get results with the first one's coordinates (torch 2.11-2.15). The module that
    has the functions, `torch.distributed.tensor.debug`, imports torch's compiler; this is what they do.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    import torch
    from torch.distributed.tensor import DTensor

    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()


def replicate_units(module: Any, **options: Any) -> Any:
    """Replicate a unit over FSDP2's machinery: DTensor parameters, the same setters (torch 2.11-2.15, not public)."""
    from torch.distributed._composable.replicate_with_fsdp import replicate

    return replicate(module, **options)


def shard_integers() -> None:
    """Let FSDP2 take parameters of integers, such as packed weights.

    torch 2.11 lets every sharded parameter require a gradient for a moment, which integers cannot; torch 2.13 makes it
    as the parameter is. What makes parameters there is a name of a private module.
    """
    import torch
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    module: Any = _fsdp_param
    if torch.torch_version.TorchVersion(torch.__version__) < "2.13" and module.nn is torch.nn:
        module.nn = _Modules()


class _Modules:
    """`torch.nn` whose parameters of integers require no gradient."""

    def __getattr__(self, name: str) -> Any:
        import torch

        return getattr(torch.nn, name)

    @staticmethod
    def Parameter(data: Any, requires_grad: bool = True) -> Any:  # noqa: N802 - torch's name
        import torch

        return torch.nn.Parameter(data, requires_grad and (data.is_floating_point() or data.is_complex()))


def replicate_buckets(module: Any, **options: Any) -> Any:
    """Attach a true DistributedDataParallel to a module without wrapping it (torch 2.11-2.15, not public)."""
    from torch.distributed._composable.replicate import replicate

    return replicate(module, **options)


def find_unused_in(module: Any, loss: Tensor) -> None:
    """Let the reducer of `replicate_buckets`, where it finds unused parameters, find those that a loss does not reach.

    It has searched the graph of the forward's output, in which parameters are not that a loop reads by itself, and it
    takes a second gradient for an error of its own. State, reducer and method are private (torch 2.11-2.15).

    Args:
        module: Between a forward that the reducer has prepared for, and the backward.
        loss: Of which the backward is.
    """
    from torch.distributed._composable.replicate import replicate

    ddp: Any = replicate.state(module)._ddp
    if ddp.find_unused_parameters and not ddp.static_graph:
        ddp.reducer.prepare_for_backward([loss])


class _ShardOf(NamedTuple):
    """Sharding of a tensor by a placement: its dim, and the number of shards that the dim had before."""

    dim: int
    split_factor: int


def shard_of(placement: Any) -> _ShardOf | None:
    """Return how a DTensor placement shards, None for replicas and partial sums.

    FSDP2 places a tensor that tensor parallelism has sharded before with `_StridedShard`, which is private and,
    depending on the version, a subclass of Shard or not (torch 2.11-2.15).
    """
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    if isinstance(placement, _StridedShard):
        return _ShardOf(int(placement.dim), int(placement.split_factor))
    return _ShardOf(placement.dim, 1) if isinstance(placement, Shard) else None


def fsdp_groups(module: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield (group, all-gather, reduce-scatter) of a module that FSDP2 handles; torch only lets them be replaced.

    One group a module in torch 2.11, a list of them from 2.13 on.
    """
    state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
    groups = getattr(state, "_fsdp_param_groups", None)
    for group in [getattr(state, "_fsdp_param_group", None)] if groups is None else groups:
        if group is not None:
            yield group, group._all_gather_comm, group._reduce_scatter_comm


def replace_collective(group: Any, op: str, collective: Any) -> None:
    """Put another all-gather or reduce-scatter into one of FSDP2's groups; the public setters refuse those of several.

    Attributes of a private class (torch 2.11-2.15).

    Args:
        group: From `fsdp_groups`.
        op: `all_gather` or `reduce_scatter`.
        collective: With the methods of the one that is there.
    """
    setattr(group, {"all_gather": "_all_gather_comm", "reduce_scatter": "_reduce_scatter_comm"}[op], collective)


def unify_gradients(module: Any) -> None:
    """Bring the gradients of FSDP2's groups to one dtype before they are reduced outside a backward.

    FSDP2 keeps what it accumulates in `reduce_dtype`, and what comes after its own hook, as the weights' half of a
    divided backward does, in the parameters' dtype; a group that has both it refuses to reduce. Private (torch
    2.11-2.15).
    """
    for submodule in module.modules():
        for group, _, _ in fsdp_groups(submodule):
            unify_group(group)


def unify_group(group: Any) -> None:
    """Bring the gradients of one group to one dtype; see `unify_gradients`."""
    parameters = [p for p in group.fsdp_params if hasattr(p, "_unsharded_param")]
    if any(parameter.unsharded_accumulated_grad is not None for parameter in parameters):
        for parameter in parameters:
            parameter.accumulate_unsharded_grad_if_needed()
            if parameter.unsharded_accumulated_grad is None:
                parameter.to_accumulated_grad_if_needed()


def fsdp_buffers(module: Any) -> Iterator[Any]:
    """Yield the tensors in which FSDP2 gathers a module's own parameters, freed or not; private (torch 2.11-2.15)."""
    for group, _, _ in fsdp_groups(module):
        for parameter in group.fsdp_params:
            yield from parameter.all_gather_outputs
            yield from parameter._unsharded_inner_tensors
            if hasattr(parameter, "_unsharded_param"):
                yield parameter._unsharded_param


def mark_unsharded(module: Any, attributes_of: Callable[[Any], Mapping[str, Any]]) -> None:
    """Give the parameters that FSDP2 gathers, which a forward reads, attributes of the sharded ones.

    They are made in the first all-gather, by a method of a private class (torch 2.11-2.15).
    """

    def mark(parameter: Any, attributes: Mapping[str, Any]) -> None:
        make = parameter.init_unsharded_param

        def init_unsharded_param() -> None:
            make()
            for name, value in attributes.items():
                setattr(parameter._unsharded_param, name, value)

        parameter.init_unsharded_param = init_unsharded_param

    for submodule in module.modules():
        for group, _, _ in fsdp_groups(submodule):
            for parameter in group.fsdp_params:
                attributes = attributes_of(parameter.sharded_param)
                if attributes:
                    mark(parameter, attributes)


def held_tensor(tensor: Any) -> Any:
    """Return the very tensor that a DTensor holds on this rank, with the attributes that others have given it.

    `to_local` makes a view, which has none of them (torch 2.11-2.15). A plain tensor is returned as it is.
    """
    return getattr(tensor, "_local_tensor", tensor)


def local_of(tensor: Any) -> Tensor:
    """Return this rank's shard of a DTensor, a view with a gradient of its own; any other tensor as it is."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def with_local(tensor: Any, local: Any) -> Any:
    """Return a DTensor with the placements of a second one, on memory that `from_local` would move to its device."""
    from torch.distributed.tensor import DTensor

    return DTensor(local, tensor._spec, requires_grad=False)


def silence_redistribution() -> None:
    """Silence DTensor's warning, on every rank, that gathering a twice sharded tensor takes two collectives.

    The logger is named after a private module (torch 2.11-2.15).
    """
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
