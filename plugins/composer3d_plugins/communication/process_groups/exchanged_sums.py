"""Reduce-scatter as an all-to-all and a local sum; shapes: W ranks of the group, N elements of a shard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["ExchangedReduceScatter", "sum_exchanged"]


@dataclass(frozen=True, kw_only=True, eq=False)
class ExchangedReduceScatter:
    """A unit's reduce-scatter: every rank sends each other one its chunk, and adds up what it is sent.

    gloo's own is an all-reduce of which all but one chunk is dropped: 6.0 times the bytes of the gradient over four
    ranks together, where this sends 3.0. The chunks are added in the order of ranks, in at least float32.

    Memory: the gradient of the unit at work once more, and a shard in float32 where gradients are narrower.
    Collectives: one all-to-all.

    Args:
        is_exchanged: Given the process group, returns whether to exchange; else torch's own reduce-scatter runs.
    """

    is_exchanged: Callable[[Any], bool]

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for a buffer."""
        import torch

        return torch.empty(size, dtype=dtype, device=device)

    def travelling(self, output_tensor: Tensor, input_tensor: Tensor, group: Any) -> tuple[str, int]:
        """Return the collective that is issued, and the bytes of its payload."""
        return ("all_to_all" if self.is_exchanged(group) else "reduce_scatter"), input_tensor.nbytes

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        """Reduce chunk r of every rank's input, WN, into the output, N, of rank r."""
        import torch.distributed as dist

        if not self.is_exchanged(group) or op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            return torch_compat.reduce_scatter_single(output_tensor, input_tensor, group=group, op=op)
        total = sum_exchanged(input_tensor.view(group.size(), -1), group)
        output_tensor.copy_(total if op == dist.ReduceOp.SUM else total.div_(group.size()))
        return None


def sum_exchanged(x_WN: Tensor, group: Any) -> Tensor:
    """Return the sum of row r of every rank, on rank r of the group, in at least float32 where it is no integer: N.

    Args:
        x_WN: This rank's part of the sum for every rank.
        group: Process group of W ranks.

    Collectives: one all-to-all.
    """
    import torch
    import torch.distributed as dist

    is_narrow = x_WN.is_floating_point() and x_WN.itemsize < 4
    # The dtypes of what travels are the gradients', also where a model's are read as others.
    with torch_compat.without_torch_functions():
        sent = x_WN.contiguous()
        received_WN = torch.empty_like(sent)
        dist.all_to_all_single(received_WN, sent, group=group)
        total_N = received_WN[0].to(torch.float32 if is_narrow else x_WN.dtype)
        for row_N in received_WN[1:]:  # one after the other: the order is that of ranks
            total_N += row_N
    return total_N
