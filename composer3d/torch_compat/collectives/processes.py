"""Process groups, stores, launchers, and flight records."""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from composer3d.torch_compat.collectives.own_groups import own_groups

__all__ = [
    "CHECKPOINT_METADATA_GLOBALS",
    "CHECKPOINT_PARAMETER",
    "CHECKPOINT_REBUILDS",
    "CHECKPOINT_STORAGE_INFO",
    "all_gather_single",
    "all_groups",
    "default_store",
    "fake_group",
    "flight_records",
    "gloo_at",
    "group_name",
    "group_timeout",
    "inherit_timeouts",
    "lazy_modules",
    "local_agent",
    "lone_rendezvous",
    "mesh_dim",
    "process_group",
    "ranks_of_group",
    "reduce_scatter_single",
    "set_group_timeout",
    "shared_lone_groups",
]


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


def group_timeout(group: Any, device: Any) -> timedelta | None:
    """Return after what time a collective of a group fails; None where its backend has no such value.

    Nothing public returns it once the group was made (torch 2.11-2.15).

    Args:
        group: A process group.
        device: Of the tensors: a group may have a backend for each type.
    """
    backend = group._get_backend(device)
    timeout: timedelta | None = getattr(
        getattr(getattr(backend, "wrapped_pg", backend), "options", None), "_timeout", None
    )
    return timeout


def inherit_timeouts(group: Any) -> None:
    """Give a group the default group's timeouts: those that a mesh makes have torch's own (torch 2.11-2.15)."""
    import torch.distributed as dist

    world: Any = dist.group.WORLD
    for device in group._device_types:
        timeout = group_timeout(world, device) if device in world._device_types else None
        if timeout is not None and group_timeout(group, device) is not None:
            backend = group._get_backend(device)
            getattr(backend, "wrapped_pg", backend)._set_default_timeout(timeout)


def all_groups() -> list[Any]:
    """Return the process groups that this process is in; torch has no public list of them (torch 2.11-2.15)."""
    from torch.distributed.distributed_c10d import _world

    return [*_world.pg_map]


def default_store() -> Any:
    """Return the store of the default process group; torch has no public way to it (torch 2.11-2.15)."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


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


@contextmanager
def fake_group(world_size: int, rank: int) -> Iterator[None]:
    """Have a default process group of torch's `fake` backend, and meshes that make the groups of its one rank alone.

    The backend's store has no public home, and importing it registers the backend. A mesh makes every group of all its
    dims, by the name that its module has imported (torch 2.11-2.15): 36,000 of them for 16,384 ranks, in none of which
    but a few this rank meets anybody.
    """
    import torch.distributed as dist
    from torch.distributed import device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    module: Any = device_mesh
    original = module.new_group

    def new_group(*, ranks: Sequence[int], **options: Any) -> Any:
        return original(ranks=ranks, **options) if rank in ranks else None

    before = sys.excepthook
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    hook = sys.excepthook  # that says of every exception which rank it was
    module.new_group = new_group
    try:
        with own_groups(rank):
            yield
    finally:
        module.new_group = original
        if dist.is_initialized():
            dist.destroy_process_group()
        if sys.excepthook is hook:
            sys.excepthook = before


@contextmanager
def shared_lone_groups() -> Iterator[None]:
    """Have the dims of meshes made inside share one group of a rank alone, where they have no options of their own.

    Every gloo group has a thread that wakes hundreds of times a second, and two more that wait: those of four axes of
    degree 1 took 3 % of a training loop's CPU time. By the name that the mesh's module has imported, as for
    `fake_group` (torch 2.11-2.15). All ranks make the groups of all ranks, in the same order, as torch does.
    """
    from torch.distributed import device_mesh

    module: Any = device_mesh
    original, made = module.new_group, {}

    def new_group(*, ranks: Sequence[int], **options: Any) -> Any:
        own = any(options.get(name) is not None for name in ("backend", "pg_options", "timeout"))
        if len(ranks) != 1 or own:
            return original(ranks=ranks, **options)
        if ranks[0] not in made:
            made[ranks[0]] = original(ranks=ranks, **options)
        return made[ranks[0]]

    module.new_group = new_group
    try:
        yield
    finally:
        module.new_group = original


def gloo_at(host: str, store: Any, rank: int, size: int, *, timeout: timedelta) -> Any:
    """Return a gloo process group that listens and connects on one address of this machine.

    Public arguments know no address, and GLOO_SOCKET_IFNAME is that of all groups of a process; the class of options,
    and its list of devices, are private (torch 2.11-2.15).
    """
    import torch.distributed as dist

    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, size, options)


def process_group(argument: Any) -> Any:
    """Return the process group that an operator's argument stands for.

    The c10d operators carry a boxed group and the functional ones its name or the group itself; the lookup by name is
    private (torch 2.11-2.15).
    """
    from torch.distributed import distributed_c10d

    if isinstance(argument, str):
        resolve: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
        return resolve(argument)
    group = distributed_c10d.ProcessGroup
    return argument if isinstance(argument, group) else group.unbox(argument)


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


CHECKPOINT_STORAGE_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"

# What `torch.save` writes of a tensor to have it made again (torch 2.11-2.15): the dtype is in the storage's class, or,
# for dtypes that never had one, beside an untyped storage. A safe reader reads the arguments alone.
CHECKPOINT_PARAMETER = "torch._utils._rebuild_parameter"  # by which torch.save's files name a parameter
CHECKPOINT_REBUILDS = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3")


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


def lone_rendezvous(run_id: str) -> Any:
    """Return a rendezvous of an elastic agent that is alone: its store is memory of this process, and nothing listens.

    torch's own, static ones too, open a TCP store on every interface, and c10d's unpickles what it finds in there; the
    classes to derive one from are public in a module that documents nothing else of them (torch 2.11-2.15).

    Args:
        run_id: The name of the run.
    """
    import torch.distributed as dist
    from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

    class Alone(RendezvousHandler):
        def get_backend(self) -> str:
            return "composer3d"

        def next_rendezvous(self) -> RendezvousInfo:
            # Where ranks meet is none of the agent's business.
            nowhere = RendezvousStoreInfo(master_addr="", master_port=0)
            return RendezvousInfo(dist.HashStore(), 0, 1, nowhere)  # type: ignore[attr-defined]

        def is_closed(self) -> bool:
            return False

        def set_closed(self) -> None:
            pass

        def num_nodes_waiting(self) -> int:
            return 0

        def get_run_id(self) -> str:
            return run_id

        def shutdown(self) -> bool:
            return True

    return Alone()


def flight_records(*, waiting: bool = False) -> list[dict[str, Any]]:
    """Return what torch's flight recorders hold of this process's last collectives, as torch writes it in JSON.

    The recorders of gloo and of NCCL are two, each with an underscored function, the second only in builds with NCCL;
    their other form, a pickle that torch made in this process, has the stack of every call, its innermost frame first,
    which is here under `frames` (torch 2.11-2.15).

    Args:
        waiting: Only NCCL's, and only those that were not seen to come back: gloo's recorder cannot tell them.
    """
    from torch._C import _distributed_c10d

    entries: list[dict[str, Any]] = []
    for name in ("_dump_nccl_trace_json",) if waiting else ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(_distributed_c10d, name, None)
        if dump is not None:
            found = json.loads(dump(includeCollectives=True, onlyActive=waiting)).get("entries") or []
            stacks = {} if waiting else _stacks(getattr(_distributed_c10d, name.removesuffix("_json"), None))
            entries += [{**entry, "frames": stacks.get(entry["record_id"], [])} for entry in found]
    return entries


def _stacks(dump: Callable[..., bytes] | None) -> dict[int, list[dict[str, Any]]]:
    """Return the stacks of a recorder's calls by the numbers of their records."""
    if dump is None:
        return {}
    # Torch's own bytes, of plain values.
    found = pickle.loads(dump(includeCollectives=True, includeStackTraces=True, onlyActive=False))
    return {entry["record_id"]: entry.get("frames") or [] for entry in found.get("entries") or ()}


def group_name(group: Any) -> str:
    """Return the name under which a process group, None for the default one, stands in flight records.

    A property of the group in Python, typed and documented nowhere (torch 2.11-2.15).
    """
    import torch.distributed as dist

    found: Any = dist.group.WORLD if group is None else group
    return str(found.group_name)


def mesh_dim(group: Any) -> str | None:
    """Return the name of the mesh dim that a process group was made for, None for any other group.

    DeviceMesh writes it into the description of the group (torch 2.11-2.15).
    """
    kind, _, name = str(group.group_desc).partition("mesh_")
    return None if kind or name in ("", "default") else name


def ranks_of_group(name: str) -> tuple[int, ...] | None:
    """Return the ranks of the process group that stands under a name in flight records; None for a destroyed one.

    The lookup by name is private (torch 2.11-2.15).
    """
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

    resolve: Any = _resolve_process_group
    try:
        return tuple(dist.get_process_group_ranks(resolve(name)))
    except (KeyError, RuntimeError, ValueError):
        return None


def all_gather_single(output: Any, piece: Any, *, group: Any, async_op: bool = False) -> Any:
    """Gather equal tensors into one; torch 2.13 deprecates the name that torch 2.11 has."""
    import torch.distributed as dist

    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(output, piece, group=group, async_op=async_op)


def reduce_scatter_single(output: Any, tensor: Any, *, group: Any, op: Any = None, async_op: bool = False) -> Any:
    """Reduce a tensor over all ranks, and keep this rank's part; torch 2.13 deprecates the name that torch 2.11 has.

    Args:
        output: This rank's part.
        tensor: Of all ranks' parts.
        group: Process group.
        op: Of `dist.ReduceOp`; None is the sum.
        async_op: Return at once, with what waits for the result.
    """
    import torch.distributed as dist

    scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return scatter(output, tensor, group=group, op=dist.ReduceOp.SUM if op is None else op, async_op=async_op)
