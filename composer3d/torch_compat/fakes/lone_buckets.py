"""Reduction of DistributedDataParallel's buckets in a fake process group, on fake tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

__all__ = ["lone_buckets"]


@contextlib.contextmanager
def lone_buckets() -> Iterator[list[Any]]:
    """Let DistributedDataParallel reduce where the other ranks do not exist, and tensors have no values.

    It compares the parameters' shapes over all ranks and hands out rank 0's values, in C++ and by functions that are
    private (torch 2.11-2.15): both are left out. Its reducer takes the reduced bucket from what the collective
    promises, and the `fake` backend promises nothing: a hook of ours hands the bucket back. Buckets stay as they are
    made, where a run arranges them again after its first step, by the order in which gradients came: that reads values.

    Yields:
        Those that ran inside.
    """
    from torch.nn.parallel import distributed

    module: Any = distributed
    cls: Any = distributed.DistributedDataParallel
    names = ("_verify_param_shape_across_processes", "_sync_module_states")
    originals, begin = [getattr(module, name) for name in names], cls._pre_forward
    ran: list[Any] = []

    def pre_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self not in ran:
            ran.append(self)
            if not self._comm_hooks:
                # Of a hook with annotations torch wants them as types, not as text.
                self.register_comm_hook(self.process_group, lambda group, bucket: _reduced(group, bucket))
            self.reducer = _Arranged(self.reducer)
        return begin(self, *args, **kwargs)

    for name in names:
        setattr(module, name, lambda *args, **kwargs: None)
    cls._pre_forward = pre_forward
    try:
        yield ran
    finally:
        cls._pre_forward = begin
        for name, original in zip(names, originals, strict=True):
            setattr(module, name, original)


class _Arranged:
    """A reducer whose buckets stay."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return (lambda: False) if name == "_rebuild_buckets" else getattr(self._reducer, name)


def _reduced(group: Any, bucket: Any) -> Any:
    import torch
    import torch.distributed as dist

    dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    future: Any = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
