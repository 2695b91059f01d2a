"""Small vectors of numbers that ranks reduce in every step: counts, losses, norms, votes and metrics."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["all_gather", "all_reduce", "host_vector", "vector"]


def vector(numbers: Sequence[float], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers as a tensor of float64 or int64."""
    import torch

    if device.type != "cpu" or torch_compat.active_fake_mode() is not None:
        return torch.tensor(numbers, dtype=dtype, device=device)
    return host_vector(numbers, dtype=dtype)


def host_vector(numbers: Sequence[float], *, dtype: torch.dtype) -> Tensor:
    """Return numbers, at least one, in a buffer that Python has filled: that takes a third of `torch.tensor`.

    Args:
        numbers: Of Python; no fake mode is on.
        dtype: float64 or int64.
    """
    import torch

    return torch.frombuffer(array("d" if dtype is torch.float64 else "q", numbers), dtype=dtype)


def all_reduce(numbers: Tensor, *, group: Any, takes_maximum: bool = False) -> None:
    """Reduce a tensor in place over a process group; None is the world.

    The method of the group is called: `torch.distributed.all_reduce` first examines its arguments, for longer than the
    call takes.

    Args:
        numbers: Of any shape, alike on all ranks of the group.
        group: A process group.
        takes_maximum: Take the largest of each number, and not their sum.

    Collectives: one all-reduce.
    """
    import torch.distributed as dist

    over: Any = group or dist.group.WORLD
    work = over.allreduce([numbers], _maximum()) if takes_maximum else over.allreduce([numbers])
    if work is not None:
        work.wait()


@functools.cache
def _maximum() -> Any:
    import torch.distributed as dist

    options: Any = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    return options


def all_gather(numbers: Tensor, *, num_ranks: int) -> list[list[float]]:
    """Return a vector of every rank of the world, which all have the same length. Collectives: one all-gather."""
    import torch.distributed as dist

    everyone = numbers.new_empty(num_ranks, numbers.numel())
    world: Any = dist.group.WORLD
    work = world.allgather([list(everyone.unbind())], [numbers])
    if work is not None:
        work.wait()
    rows: list[list[float]] = everyone.tolist()
    return rows
