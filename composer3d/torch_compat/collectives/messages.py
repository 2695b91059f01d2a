"""Observation of collectives inside operators, and of messages between pipeline stages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

from composer3d.torch_compat.collectives.processes import group_timeout, process_group

__all__ = ["bounded_messages", "group_among", "wait_for_message", "watch_operator_collectives", "watching_messages"]

Span = Callable[..., AbstractContextManager[None]]

# torch 2.13 has the names in `single`, torch 2.11 those in `tensor`, which 2.13 still has and builds on the others.
_COLLECTIVES = {
    "all_reduce": "all_reduce",
    "all_gather_single": "all_gather",
    "all_gather_tensor": "all_gather",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}

# Compiled code calls these operators; those that end in an underscore change their argument.
_COMPILED = {
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "broadcast_": "broadcast",
}


def watch_operator_collectives(span: Callable[..., Any]) -> Callable[[], None]:
    """Open spans around torch's functional collectives, which DTensor's operators issue; return what ends that.

    They have no hook, and below them there is only a dispatch mode, which costs every operator several microseconds:
    so the functions of the private module by which DTensor calls them are replaced, and of another one the exchange of
    the sharded dim, which on CPU is one of the former (torch 2.11-2.15). Compiled code calls none of them: there
    the operators themselves are watched.

    Args:
        span: Given a name, the process group and attributes, opens a span: the operation with the payload's `bytes`
            where it is issued, and `wait` with its `op` where its result is needed. Groups of one rank are left out.
    """
    issue = _Issue(span)
    ends = _watch_functions(span, issue), _watch_exchange(span), _watch_compiled(span, issue)

    def end() -> None:
        for each in ends:
            each()

    return end


class _Issue(threading.local):
    """Issues collectives inside of spans; one that is built on another is one."""

    def __init__(self, span: Callable[..., Any]) -> None:
        self._span, self._is_inside = span, False

    def group(self, arguments: Sequence[Any]) -> Any:
        """Return the process group of a collective that is to have a span, None for any other."""
        import torch

        group = None if self._is_inside or torch.compiler.is_compiling() else group_among(arguments)
        return group if group is not None and group.size() > 1 else None

    def call(self, op: str, group: Any, tensor: Any, function: Callable[[], Any]) -> Any:
        """Call a function that issues a collective inside of a span."""
        # A gather's payload is what comes out, as everywhere.
        size = _num_bytes(tensor) * (group.size() if op == "all_gather" else 1)
        self._is_inside = True
        try:
            with self._span(op, group, bytes=size):
                return function()
        finally:
            self._is_inside = False


def _watch_functions(span: Callable[..., Any], issue: _Issue) -> Callable[[], None]:
    import torch
    from torch.distributed import _functional_collectives as functional
    from torch.utils.weak import WeakIdKeyDictionary

    pending: Any = WeakIdKeyDictionary()
    plain = {name: getattr(functional, name) for name in (*_COLLECTIVES, "wait_tensor") if hasattr(functional, name)}

    def spanned(name: str, op: str) -> Any:
        function = plain[name]

        def collective(*args: Any, **kwargs: Any) -> Any:
            group = issue.group((*args, *kwargs.values()))
            if group is None:
                return function(*args, **kwargs)
            result = issue.call(op, group, args[0], partial(function, *args, **kwargs))
            if isinstance(result, functional.AsyncCollectiveTensor):
                pending[result.elem] = (op, group)
            return result

        return collective

    def wait_tensor(tensor: Any) -> Any:
        if torch.compiler.is_compiling() or tensor not in pending:
            return plain["wait_tensor"](tensor)
        op, group = pending.pop(tensor)
        with span("wait", group, op=op):
            return plain["wait_tensor"](tensor)

    replaced = {name: spanned(name, op) for name, op in _COLLECTIVES.items() if name in plain}
    for name, function in {**replaced, "wait_tensor": wait_tensor}.items():
        setattr(functional, name, function)

    def end() -> None:
        for name, function in plain.items():
            setattr(functional, name, function)

    return end


def _watch_exchange(span: Callable[..., Any]) -> Callable[[], None]:
    import torch
    from torch.distributed.tensor import placement_types

    module: Any = placement_types
    exchange = module.shard_dim_alltoall

    def shard_dim_alltoall(tensor: Any, gather_dim: int, shard_dim: int, mesh: Any, mesh_dim: int) -> Any:
        if torch.compiler.is_compiling() or mesh.device_type == "cpu":
            return exchange(tensor, gather_dim, shard_dim, mesh, mesh_dim)
        with span("all_to_all", mesh.get_group(mesh_dim), bytes=_num_bytes(tensor)):
            return exchange(tensor, gather_dim, shard_dim, mesh, mesh_dim)

    module.shard_dim_alltoall = shard_dim_alltoall

    def end() -> None:
        module.shard_dim_alltoall = exchange

    return end


def _watch_compiled(span: Callable[..., Any], issue: _Issue) -> Callable[[], None]:
    """Open spans around the collectives that compiled code issues and waits for; return what ends that.

    What torch.compile makes of a function, whichever the backend, is Python that calls an operator by its overload,
    which passes the call on to what it holds as `_op`: that is replaced (torch 2.11-2.15). What is called within is the
    same collective. While code is being traced the arguments are no plain tensors, and nothing is opened.
    """
    import torch

    library: Any = torch.ops._c10d_functional
    pending: dict[int, tuple[str, Any]] = {}
    found = {name: getattr(library, name).default for name in (*_COMPILED, "wait_tensor") if hasattr(library, name)}
    plain = {operator: operator._op for operator in found.values()}

    def issuing(name: str, call: Any) -> Any:
        op = _COMPILED[name]

        def collective(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            group = issue.group(args) if _is_real(tensor) else None
            if group is None:
                return call(tensor, *args, **kwargs)
            result = issue.call(op, group, tensor, partial(call, tensor, *args, **kwargs))
            # The compiler may make another tensor of the same memory before it waits.
            pending[result.untyped_storage().data_ptr()] = (op, group)
            return result

        return collective

    def waiting(call: Any) -> Any:
        def wait(tensor: Any) -> Any:
            known = pending.pop(tensor.untyped_storage().data_ptr(), None) if pending and _is_real(tensor) else None
            if known is None:
                return call(tensor)
            with span("wait", known[1], op=known[0]):
                return call(tensor)

        return wait

    for name, operator in found.items():
        call = plain[operator]
        operator._op = _Call(call, waiting(call) if name == "wait_tensor" else issuing(name, call))

    def end() -> None:
        for operator, call in plain.items():
            operator._op = call

    return end


class _Call:
    """Function that replaces an operator's own, with its hash, which is that of the operator."""

    def __init__(self, own: Any, call: Callable[..., Any]) -> None:
        self._own, self._call = own, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __hash__(self) -> int:
        return hash(self._own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


def _is_real(tensor: Any) -> bool:
    import torch

    return type(tensor) is torch.Tensor and not torch.compiler.is_compiling()


def group_among(arguments: Sequence[Any]) -> Any:
    """Return the process group among the arguments of a collective: itself, its name, or a mesh and one of its dims."""
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    # It comes after the tensor and the name of the reduction.
    for argument in reversed(arguments):
        if isinstance(argument, tuple) and argument and isinstance(argument[0], DeviceMesh):
            return argument[0].get_group(argument[1])
        if isinstance(argument, DeviceMesh):
            return argument.get_group()
        if isinstance(argument, ProcessGroup):
            return argument
        if isinstance(argument, str) and argument and (found := _named(argument)) is not None:
            return found
    return None


def _named(name: str) -> Any:
    """Return the process group of a name; None if it is the name of something else."""
    try:
        return process_group(name)
    except (RuntimeError, ValueError):
        return None


def _num_bytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


class _Bounded:
    """A message under way whose wait ends by an error after a time."""

    def __init__(self, work: Any, timeout: timedelta) -> None:
        self._work, self._timeout = work, timeout

    def wait(self) -> Any:
        return self._work.wait(self._timeout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


@contextmanager
def bounded_messages(group: Any, device: Any) -> Iterator[None]:
    """Let the messages of pipeline stages over gloo be waited for no longer than the group's collectives.

    gloo's messages know the timeout with which their group was made and no later one, unless whoever waits states it,
    which torch's schedules and the exchange of objects before their first step do not. Both issue messages through
    functions of their modules, one of them private (torch 2.11-2.15). NCCL's have its watchdog.

    Args:
        group: Process group of the pipeline's stages.
        device: Of the tensors that they send.
    """
    from torch.distributed import distributed_c10d
    from torch.distributed.pipelining import schedules

    timeout = _patience(group, device)
    if timeout is None:
        yield
        return
    names: tuple[tuple[Any, str], ...] = ((schedules, "_batch_p2p"), (distributed_c10d, "batch_isend_irecv"))
    plain = [getattr(module, name) for module, name in names]

    def bounded(issue: Callable[..., Any]) -> Callable[..., Any]:
        def batch(operations: Any, *args: Any, **kwargs: Any) -> Any:
            works = issue(operations, *args, **kwargs)
            return [_Bounded(work, timeout) for work in works] if _are_over(operations, group) else works

        return batch

    for (module, name), function in zip(names, plain, strict=True):
        setattr(module, name, bounded(function))
    try:
        yield
    finally:
        for (module, name), function in zip(names, plain, strict=True):
            setattr(module, name, function)


def wait_for_message(work: Any, group: Any, device: Any) -> None:
    """Wait for a message between stages, over gloo no longer than for a collective; see `bounded_messages`."""
    timeout = _patience(group, device)
    if timeout is None:
        work.wait()
    else:
        work.wait(timeout)


def _patience(group: Any, device: Any) -> timedelta | None:
    backend = group._get_backend(device)
    return group_timeout(group, device) if getattr(backend, "wrapped_pg", backend).name() == "gloo" else None


def _are_over(operations: Sequence[Any], group: Any) -> bool:
    return bool(operations) and operations[0].group is group


@contextmanager
def watching_messages(span: Span) -> Iterator[None]:
    """Open spans where torch's pipeline schedules wait for messages, `send`, `receive` or `exchange` with their bytes.

    The schedules issue and wait through two private functions of their module (torch 2.11-2.15).

    Args:
        span: Opens one, given a name and attributes.
    """
    import torch.distributed as dist
    from torch.distributed.pipelining import schedules

    module: Any = schedules
    issue, wait = module._batch_p2p, module._wait_batch_p2p
    issued: dict[int, tuple[str, int]] = {}

    def batch(operations: Any, *args: Any, **kwargs: Any) -> Any:
        works = issue(operations, *args, **kwargs)
        kinds = {operation.op for operation in operations}
        name = "exchange" if len(kinds) > 1 else "send" if kinds == {dist.isend} else "receive"
        if works:
            issued[id(works[0])] = name, sum(_num_bytes(operation.tensor) for operation in operations)
        return works

    def wait_batch(works: Any) -> Any:
        if not works or id(works[0]) not in issued:
            return wait(works)
        name, num_bytes = issued.pop(id(works[0]))
        with span(name, bytes=num_bytes):
            return wait(works)

    module._batch_p2p, module._wait_batch_p2p = batch, wait_batch
    try:
        yield
    finally:
        module._batch_p2p, module._wait_batch_p2p = issue, wait
