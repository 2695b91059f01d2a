"""Reductions of gradients over replicas, which FSDP2 and DistributedDataParallel make themselves."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from composer3d.torch_compat.layouts import fsdp_groups

__all__ = ["bucket_parameters", "replace_all_reduce", "replace_bucket_reduction", "replica_groups", "unit_parameters"]


def replica_groups(module: Any) -> list[Any]:
    """Return the process groups over which a unit of FSDP2 reduces replicas; private (torch 2.11-2.15)."""
    infos = [group.mesh_info for group, _, _ in fsdp_groups(module)]
    return [info.replicate_process_group for info in infos if hasattr(info, "replicate_process_group")]


def unit_parameters(module: Any) -> list[tuple[Any, str]]:
    """Return the parameters of a unit of FSDP2 that are trained, in the order of its buffers (torch 2.11-2.15)."""
    found = [parameter for group, _, _ in fsdp_groups(module) for parameter in group.fsdp_params]
    return [_held(parameter) for parameter in found if parameter.sharded_param.requires_grad]


def _held(parameter: Any) -> tuple[Any, str]:
    return parameter._module_info.module, parameter._module_info.param_name


def replace_all_reduce(module: Any, all_reduce: Callable[[Any, Sequence[tuple[Any, Any]], Any], None]) -> None:
    """Let a unit of FSDP2 reduce over replicas by a function, in the place of the all-reduce of torch.

    torch lets nobody replace that. So the group of the unit takes its mesh for one of shards alone, and the function is
    its hook, which follows a reduce-scatter; parameters stay on the mesh that they have. Groups, and the classes of
    their meshes, are private (torch 2.11-2.15).

    Args:
        module: A unit with replicas.
        all_reduce: Called with the reduced buffer, parameters with their gradients in it, and the process group of
            replicas.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_common as common

    ((group, _, _),) = fsdp_groups(module)
    both = group.mesh_info
    shards: Any = copy.copy(both)
    shards.__class__ = common.FSDPMeshInfo if isinstance(both, common.FSDPMeshInfo) else common.DataParallelMeshInfo
    if group.post_forward_mesh_info is both:
        group.post_forward_mesh_info = shards
    shards.replicate_mesh_dim = None  # nothing of the group's own is sent along it any longer
    group.mesh_info = shards
    memory = _OneBuffer()
    if not isinstance(both, common.FSDPMeshInfo):
        module.set_custom_reduce_scatter(memory)

    def hook(buffer: Any) -> None:
        memory.left = None
        pairs, start = [], 0
        for parameter in group.fsdp_params:
            if parameter.sharded_param.requires_grad and hasattr(parameter, "_unsharded_param"):
                piece = buffer.narrow(0, start, parameter.sharded_size.numel())
                pairs.append((_held(parameter), piece.view(parameter.sharded_size)))
                start += parameter.padded_sharded_param_size.numel()
        assert start == buffer.numel(), "the unit packs the gradients of all parameters that are trained"
        all_reduce(buffer, pairs, both.replicate_process_group)

    module.set_all_reduce_hook(hook)


class _OneBuffer:
    """Memory of a unit of whole parameters, of which nothing is reduce-scattered.

    FSDP2 copies gradients to a reduce-scatter's input, and where one rank has all of them that to its output (torch
    2.11-2.15). On CPU, where a copy to memory that is new costs more than what it copies, both are one: a tensor that
    is copied to itself stays as it is.

    Attributes:
        left: The input, until the output has been asked for.
    """

    left: Any = None

    def allocate(self, size: Any, *, dtype: Any, device: Any) -> Any:
        """Return memory, the same for the input and for the output after it."""
        import torch

        held, self.left = self.left, None
        if held is not None and (tuple(held.shape), held.dtype, held.device) == (tuple(size), dtype, device):
            return held
        made = torch.empty(*size, dtype=dtype, device=device)
        self.left = made if made.device.type == "cpu" else None
        return made

    def __call__(self, *unused: Any, **options: Any) -> None:
        """Fail: one rank scatters nothing."""
        raise AssertionError("a unit of whole parameters has nobody to reduce-scatter to")


def bucket_parameters(module: Any) -> dict[Any, tuple[Any, str]]:
    """Return the parameters that are trained, each with the first module that holds it, and its name there."""
    found: dict[Any, tuple[Any, str]] = {}
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if parameter.requires_grad:
                found.setdefault(parameter, (owner, name))
    return found


def replace_bucket_reduction(
    module: Any, all_reduce: Callable[[Any, Sequence[tuple[Any, Any]], Any], None], group: Any
) -> None:
    """Let buckets of a module that `replicate_buckets` was given be reduced by a function; see `replace_all_reduce`.

    Args:
        module: Before its first forward.
        all_reduce: Called with the buffer of a bucket, its parameters with their gradients, from the module's last one
            to its first, and the process group: buckets are formed again, in another order, after the first backward of
            every run, a resumed one's, too.
        group: Process group of replicas.
    """
    import torch

    held: dict[Any, tuple[Any, str]] = {}
    place: dict[Any, int] = {}

    def hook(_: Any, bucket: Any) -> Any:
        if not held:
            held.update(bucket_parameters(module))
            place.update({parameter: -number for number, parameter in enumerate(held)})
        pairs = sorted(zip(bucket.parameters(), bucket.gradients(), strict=True), key=lambda pair: place[pair[0]])
        all_reduce(bucket.buffer(), [(held[parameter], gradient) for parameter, gradient in pairs], group)
        reduced: Any = torch.futures.Future()
        reduced.set_result(bucket.buffer())
        return reduced

    hook.__annotations__ = {}  # as strings, the reducer would refuse them
    module.register_comm_hook(None, hook)
