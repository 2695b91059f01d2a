"""Every private or version-dependent torch name that composer3d and its plugins use, each with its reason and a test.

torch 2.11 to 2.15. A name that disappears fails in tests/core/test_torch_compat.py, and nowhere else.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, NamedTuple, cast


def set_group_timeout(group: Any, timeout: timedelta) -> None:
    """Set the timeout of one process group, None for the default one, after it was made.

    Public functions take it only before; torch's own private one does nothing but warn for groups that the debug level
    DETAIL has wrapped (torch 2.11-2.15).
    """
    import torch.distributed as dist

    group = dist.group.WORLD if group is None else group
    for device in group._device_types:
        backend = group._get_backend(device)
        getattr(backend, "wrapped_pg", backend)._set_default_timeout(timeout)


def default_store() -> Any:
    """Return the store of the default process group; torch has no public way to it (torch 2.11-2.15)."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def flatten(mesh: Any, name: str) -> Any:
    """Return several axes of a mesh as one; public only as an underscore method (torch 2.11-2.15)."""
    return mesh._flatten(name)


def lazy_modules() -> tuple[str, ...]:
    """Return the modules that a first FSDP2, DTensor, pipeline or checkpoint step imports.

    Found by comparing `sys.modules` before and after such steps: about 920 modules, nearly all of them through
    torch._dynamo, which DTensor and the optimizers import at their first use (torch 2.11-2.15).
    """
    return (
        "torch._dynamo",
        "torch.distributed._composable.replicate_with_fsdp",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.fsdp",
        "torch.distributed.pipelining",
        "torch.distributed.tensor.parallel",
        "torch.utils.checkpoint",
    )


def fake_store() -> Any:
    """Return the store of the `fake` backend; importing it registers the backend, and it has no public home."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def clear_sharding_caches() -> None:
    """Forget what DTensor's operators returned, meshes included; torch has only underscored functions for it.

    DTensor takes meshes of equal ranks for one, whichever rank this process was when they were made, so that another
    rank's world in one process would get results with the first one's coordinates (torch 2.11-2.15).
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import debug

    debug._clear_python_sharding_prop_cache()
    debug._clear_fast_path_sharding_prop_cache()


def dispatch_mode(
    handler: Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any], *, compiles: bool = True
) -> AbstractContextManager[Any]:
    """Return a context in which every dispatched operator goes to `handler(operator, types, args, kwargs)`.

    TorchDispatchMode is how operators are seen below autograd; torch documents it under a private module only
    (torch 2.11-2.15). `handler` may return NotImplemented, so that a tensor subclass takes the operator apart first.
    `compiles=False` promises that nothing inside is compiled; else the first operator imports torch._dynamo, for 1 s.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return compiles

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return handler(func, types, args, kwargs or {})

    return Mode()


def is_wrapper_subclass(cls: type) -> bool:
    """Tell whether a tensor class wraps other tensors (DTensor, AsyncCollectiveTensor, float8), so dispatches again."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type

    return is_traceable_wrapper_subclass_type(cls)


def process_group(argument: Any) -> Any:
    """Return the process group that an operator's argument stands for.

    The c10d operators carry a boxed group and the functional ones its name or the group itself; the lookup by name is
    private (torch 2.11-2.15).
    """
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

    if isinstance(argument, ProcessGroup):
        return argument
    resolve: Any = _resolve_process_group
    return resolve(argument) if isinstance(argument, str) else ProcessGroup.unbox(argument)


CHECKPOINT_METADATA_GLOBALS = frozenset(
    # The classes of which `.metadata` of torch's distributed checkpoints consists (torch 2.11-2.15), two of them
    # private; a safe reader must name them, because torch's own unpickles whatever it finds.
    {
        ("torch", "Size"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "Metadata"),
        ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
        ("torch.distributed.checkpoint.metadata", "StorageMeta"),
        ("torch.distributed.checkpoint.metadata", "TensorProperties"),
        ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    }
)


def replicate_units(module: Any, **options: Any) -> Any:
    """Replicate a unit over FSDP2's machinery: DTensor parameters, the same setters (torch 2.11-2.15, not public)."""
    from torch.distributed._composable.replicate_with_fsdp import replicate

    return replicate(module, **options)


def replicate_buckets(module: Any, **options: Any) -> Any:
    """Attach a true DistributedDataParallel to a module without wrapping it (torch 2.11-2.15, not public)."""
    from torch.distributed._composable.replicate import replicate

    return replicate(module, **options)


def local_agent(
    spec: Any,
    start_method: str,
    *,
    started: Callable[[dict[int, int]], None],
    look: Callable[[], None],
    failed: Callable[[dict[int, int]], None],
) -> Any:
    """Return torch's local elastic agent with an eye on its ranks.

    torch documents these underscore methods as the ones to extend, and has no public way to the processes: its agent
    names one failed rank, takes exit code 0 for success, and waits 30 s for the others (torch 2.11-2.15).

    Args:
        spec: The agent's WorkerSpec.
        start_method: `fork` or `spawn`.
        started: Told the process of each rank.
        look: Called before each look of the agent's; what it raises ends `agent.run()`.
        failed: Told the exit codes of ranks that the agent saw fail before `look` did; it raises as well.
    """
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

    class Agent(LocalElasticAgent):
        def _start_workers(self, worker_group: Any) -> dict[int, Any]:
            pids = super()._start_workers(worker_group)
            started({worker.global_rank: pids[worker.local_rank] for worker in worker_group.workers})
            return pids

        def _monitor_workers(self, worker_group: Any) -> Any:
            look()
            result = super()._monitor_workers(worker_group)
            if result.failures:
                failed({rank: failure.exitcode for rank, failure in result.failures.items()})
            return result

    return Agent(spec, DefaultLogsSpecs(log_dir=os.devnull), start_method)


def storage_key(tensor: Any) -> int:
    """Return what identifies a tensor's memory while it lives, on meta too, where every data pointer is 0."""
    return int(tensor.untyped_storage()._cdata)


def written_tensors(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that an operator writes to, as its schema says; schemas have no public home."""
    written: list[Any] = []
    for index, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            written += [leaf for leaf in tree_leaves(value) if leaf is not None]
    return written


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply a function to the leaves of nested tuples, lists and dicts; torch's pytree has no public home."""
    from torch.utils._pytree import tree_map

    return tree_map(function, tree)


def tree_leaves(tree: Any) -> list[Any]:
    """Return the leaves of nested tuples, lists and dicts; torch's pytree has no public home."""
    from torch.utils._pytree import tree_leaves

    return tree_leaves(tree)


def neg_view(tensor: Any) -> Any:
    """Return a tensor that is read negated; torch makes such views for imaginary parts, and names it privately."""
    import torch

    return torch._neg_view(tensor)


class ShardOf(NamedTuple):
    """How a placement cuts a tensor: along which dim, and into how many pieces that dim was cut before."""

    dim: int
    split_factor: int


def shard_of(placement: Any) -> ShardOf | None:
    """Return how a DTensor placement shards, None for replicas and partial sums.

    FSDP2 places a tensor that tensor parallelism has cut before with `_StridedShard`, which is private and, depending
    on the version, a subclass of Shard or not (torch 2.11-2.15).
    """
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    if isinstance(placement, _StridedShard):
        return ShardOf(int(placement.dim), int(placement.split_factor))
    return ShardOf(placement.dim, 1) if isinstance(placement, Shard) else None


def allocate(module: Any, device: Any) -> None:
    """Give a module's tensors on meta memory on a device, and move the others there with their values.

    `Module.to_empty` would empty those too, and `Module._apply`, which FSDP2 overrides to follow, is not public.
    """
    import torch

    module._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))


def has_argument(operator: Any, name: str) -> bool:
    """Tell whether an operator has an argument of a name, as its schema says; schemas have no public home."""
    return any(argument.name == name for argument in operator._schema.arguments)


def foreach_mul_(tensors: Any, factor: Any) -> None:
    """Multiply a list of tensors in place in one kernel; foreach functions have no public names (torch 2.11-2.15)."""
    import torch

    torch._foreach_mul_(tensors, factor)


def foreach_lerp_(tensors: Any, ends: Any, weight: float) -> None:
    """Move a list of tensors towards others in place in one kernel; see `foreach_mul_`."""
    import torch

    torch._foreach_lerp_(tensors, ends, weight)


def foreach_norm(tensors: Any, norm_type: float) -> Any:
    """Return the norm of every tensor of a list in one kernel; see `foreach_mul_`."""
    import torch

    return torch._foreach_norm(tensors, norm_type)


def num_flops(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> float:
    """Return the floating-point operations of an operator by torch's own formulas; 0 for those without one.

    The formulas are found by the operator's packet, which has no public name (torch 2.11-2.15).
    """
    from torch.utils.flop_counter import flop_registry

    formula = flop_registry.get(operator._overloadpacket)
    return float(formula(*args, **kwargs, out_val=result)) if formula is not None else 0.0


def pipeline_schedule(name: str) -> Any:
    """Return the class of a pipeline schedule by its name; the lookup is not exported (torch 2.11-2.15)."""
    from torch.distributed.pipelining.schedules import get_schedule_class

    return get_schedule_class(name)


def custom_pipeline_schedule(stages: Any, orders: Sequence[Sequence[tuple[int, str, int]]], **options: Any) -> Any:
    """Return a schedule that runs the given actions; torch's runtime for these has no public name (torch 2.11-2.15).

    Args:
        stages: This rank's.
        orders: Of every rank, as (stage, kind, micro-batch); kinds are F, B, I and W.
        options: Of the schedule's constructor.
    """
    from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

    schedule = _PipelineScheduleRuntime(stages, **options)
    schedule.pipeline_order = {
        rank: [_Action.from_str(f"{stage}{kind}{index}") for stage, kind, index in order]
        for rank, order in enumerate(orders)
    }
    schedule._prepare_schedule_with_comms(schedule.pipeline_order)
    return schedule


def pipeline_orders(
    name: str, degree: int, num_microbatches: int, stages_per_rank: int
) -> list[list[tuple[int, str, int]]]:
    """Return the actions of every rank as (stage, kind, micro-batch), for schedules of several stages a rank.

    Kinds are F, B, I and W. The lists are those that a schedule makes in its constructor; torch gives them without
    process groups only in a private module, its visualizer (torch 2.11-2.15). Overlapped pairs are taken apart, idle
    places left out.
    """
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    kinds = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
    orders = get_schedule_ops(name, degree, num_microbatches, num_stages_per_rank=stages_per_rank)
    return [
        [
            (single.stage_index, kinds[single.computation_type.name], single.microbatch_index or 0)
            for action in order
            if action is not None
            for single in (getattr(action, "sub_actions", None) or (action,))
        ]
        for order in orders
    ]


def without_torch_functions() -> AbstractContextManager[None]:
    """Return a context in which torch functions reach no mode and no subclass; public only for use in C++."""
    import torch

    return torch._C.DisableTorchFunction()


def unviewed(tensor: Any) -> Any:
    """Return a tensor that shares memory and graph, and is no view to autograd; aten operators have no public names.

    What DTensor's `to_local` returns may not be changed in place, and FSDP2 warns about modules that return views.
    """
    import torch

    return torch.ops.aten._unsafe_view.default(tensor, tensor.shape)


def flight_records() -> list[dict[str, Any]]:
    """Return what torch's flight recorders hold of this process's last collectives, as torch writes it in JSON.

    The recorders of gloo and of NCCL are two, each with an underscored function, the second only in builds with NCCL;
    their other form is a pickle (torch 2.11-2.15).
    """
    from torch._C import _distributed_c10d

    entries: list[dict[str, Any]] = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(_distributed_c10d, name, None)
        if dump is not None:
            entries += json.loads(dump(includeCollectives=True, onlyActive=False)).get("entries") or []
    return entries


def group_name(group: Any) -> str:
    """Return the name under which a process group, None for the default one, stands in flight records.

    A property of the group in Python, typed and documented nowhere (torch 2.11-2.15).
    """
    import torch.distributed as dist

    found: Any = dist.group.WORLD if group is None else group
    return str(found.group_name)


def in_backward() -> bool:
    """Tell whether autograd is running a backward on this thread: a forward inside is a recomputation.

    The number of the running graph task is private (torch 2.11-2.15); it is -1 outside of backwards.
    """
    import torch

    return torch._C._current_graph_task_id() != -1


def run_backward(tensors: Any, gradients: Any = None, retain_graph: bool | None = None, **options: Any) -> None:
    """Do what `torch.autograd.backward` does, with the torch-function modes that are on staying on.

    torch takes a mode off while that mode handles a call, so what a backward computes again would run without it; the
    engine itself, which takes no mode off, has no public name (torch 2.11-2.15).
    """
    import torch

    several, given, targets = (
        (value,) if isinstance(value, torch.Tensor) else tuple(value or ())
        for value in (tensors, gradients, options.get("inputs"))
    )
    starts = [torch.ones_like(t) if t.requires_grad and t.numel() == 1 else None for t in several]
    starts = [start if gradient is None else gradient for start, gradient in zip(starts, given or starts, strict=True)]
    engine, again = cast(Any, torch.autograd.Variable), bool(options.get("create_graph"))
    kept = again if retain_graph is None else retain_graph
    # The last two: parameters that are not reached are no error, and gradients are accumulated in them.
    engine._execution_engine.run_backward(several, tuple(starts), kept, again, targets, True, True)


def fsdp_groups(module: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield (group, all-gather, reduce-scatter) of a module that FSDP2 handles; torch only lets them be replaced.

    One group a module in torch 2.11, a list of them from 2.13 on.
    """
    state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
    groups = getattr(state, "_fsdp_param_groups", None)
    for group in [getattr(state, "_fsdp_param_group", None)] if groups is None else groups:
        if group is not None:
            yield group, group._all_gather_comm, group._reduce_scatter_comm


def import_torchao(name: str) -> Any:
    """Import a module of torchao without its noise.

    It logs that it cannot load kernels of other devices, and registers an enum as torch 2.13 warns not to (torchao
    0.17-0.18).
    """
    import importlib
    import warnings

    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(action="ignore"):
            return importlib.import_module(name)
    finally:
        logging.disable(before)


def all_gather_single(output: Any, piece: Any, *, group: Any, async_op: bool = False) -> Any:
    """Gather equal tensors into one; torch 2.13 deprecates the name that torch 2.11 has."""
    import torch.distributed as dist

    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(output, piece, group=group, async_op=async_op)


def with_local(tensor: Any, local: Any) -> Any:
    """Return a DTensor laid out as another one, on memory that `from_local` would move to the mesh's device."""
    from torch.distributed.tensor import DTensor

    return DTensor(local, tensor._spec, requires_grad=False)
