"""Every private or version-dependent torch name that composer3d and its plugins use, each with its reason and a test.

torch 2.11 to 2.15. A name that disappears fails in tests/core/test_torch_compat.py, and nowhere else.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any


def set_group_timeout(group: Any, timeout: timedelta) -> None:
    """Set the timeout of one process group; public functions only take it when the group is made (torch 2.11-2.15)."""
    from torch.distributed.distributed_c10d import _set_pg_timeout

    _set_pg_timeout(timeout, group)


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


def dispatch_mode(handler: Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]) -> AbstractContextManager[Any]:
    """Return a context in which every dispatched operator goes to `handler(operator, types, args, kwargs)`.

    TorchDispatchMode is how operators are seen below autograd; torch documents it under a private module only
    (torch 2.11-2.15). `handler` may return NotImplemented, so that a tensor subclass takes the operator apart first.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
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
    from torch.distributed.distributed_c10d import _resolve_process_group

    if isinstance(argument, ProcessGroup):
        return argument
    return _resolve_process_group(argument) if isinstance(argument, str) else ProcessGroup.unbox(argument)


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
    from torch.distributed._composable import replicate

    return replicate(module, **options)


def bucket_precision(*, param_dtype: Any, reduce_dtype: Any) -> Any:
    """Return DistributedDataParallel's own mixed precision settings (torch 2.11-2.15, not public)."""
    from torch.nn.parallel.distributed import _MixedPrecision

    return _MixedPrecision(param_dtype=param_dtype, reduce_dtype=reduce_dtype)


def local_agent(
    spec: Any,
    start_method: str,
    *,
    started: Callable[[dict[int, int]], None],
    look: Callable[[], dict[int, int]],
    failed: Callable[[dict[int, int]], dict[int, int]],
) -> Any:
    """Return torch's local elastic agent with an eye on its ranks.

    torch documents these underscore methods as the ones to extend, and has no public way to the processes: its agent
    names one failed rank, takes exit code 0 for success, and waits 30 s for the others (torch 2.11-2.15).

    Args:
        spec: The agent's WorkerSpec.
        start_method: `fork` or `spawn`.
        started: Told the process of each rank after every start.
        look: Asked before each look of the agent's; exit codes make it restart the ranks.
        failed: Told the exit codes of ranks that the agent saw fail; returns those that it is to restart for.
    """
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    class Agent(LocalElasticAgent):
        def _start_workers(self, worker_group: Any) -> dict[int, Any]:
            pids = super()._start_workers(worker_group)
            started({worker.global_rank: pids[worker.local_rank] for worker in worker_group.workers})
            return pids

        def _monitor_workers(self, worker_group: Any) -> RunResult:
            codes = look()
            if not codes:
                result = super()._monitor_workers(worker_group)
                if result.state is not WorkerState.FAILED:
                    return result
                codes = failed({rank: failure.exitcode for rank, failure in result.failures.items()})
            failures = {
                worker.global_rank: ProcessFailure(worker.local_rank, worker.id, codes[worker.global_rank], os.devnull)
                for worker in worker_group.workers
                if worker.global_rank in codes
            }
            return RunResult(state=WorkerState.FAILED, failures=failures)

    return Agent(spec, DefaultLogsSpecs(log_dir=os.devnull), start_method)
