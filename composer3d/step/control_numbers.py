"""Small vectors of numbers that ranks reduce in every step: counts, losses, norms, votes and metrics."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["all_gather", "all_reduce", "vector"]


def vector(numbers: Sequence[float], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers as a tensor of float64 or int64.

    In host memory it is a buffer that Python has filled, which takes a third of `torch.tensor`.
    """
    import torch

    if device.type != "cpu" or not numbers or torch_compat.active_fake_mode() is not None:
        return torch.tensor(numbers, dtype=dtype, device=device)
    return torch.frombuffer(array("d" if dtype is torch.float64 else "q", numbers), dtype=dtype)


def all_reduce(numbers: Tensor, *, group: Any, takes_maximum: bool = False) -> None:
    """Reduce a tensor in place over a process group; None is the world.

    The method of the group is called: `torch.distributed.all_reduce` first examines its arguments, for longer than the
    call takes.
    """
    import torch.distributed as dist

    options: Any = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX if takes_maximum else dist.ReduceOp.SUM
    over: Any = group or dist.group.WORLD
    work = over.allreduce([numbers], options)
    if work is not None:
        work.wait()


def all_gather(numbers: Tensor, *, num_ranks: int) -> list[list[float]]:
    """Return a vector of every rank of the world."""
    import torch.distributed as dist

    everyone = numbers.new_empty(num_ranks, numbers.numel())
    world: Any = dist.group.WORLD
    work = world.allgather([list(everyone.unbind())], [numbers])
    if work is not None:
        work.wait()
    rows: list[list[float]] = everyone.tolist()
    return rows
