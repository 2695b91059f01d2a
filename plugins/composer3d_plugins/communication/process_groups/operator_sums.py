"""Reduce-scatters that operators issue, those of DTensor under sequence parallelism above all, as all-to-alls."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat
from composer3d_plugins.communication.process_groups.exchanged_sums import sum_exchanged

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["exchange_operator_sums"]


def exchange_operator_sums(is_exchanged: Callable[[Any], bool]) -> Callable[[], None]:
    """Have torch's functional reduce-scatters over some groups exchanged and summed; return what ends that.

    Args:
        is_exchanged: Given a process group, returns whether its reduce-scatters are.
    """

    def scatter(tensor: Tensor, dim: int, group: Any, *, is_mean: bool) -> Tensor:
        """Return this rank's part along a dim of the sum over ranks, or of the mean."""
        num_ranks = group.size()
        front = tensor.movedim(dim, 0)
        x_WN = front.reshape(num_ranks, -1)
        with torch_compat.operator_span("all_to_all", group, bytes=x_WN.nbytes):
            total_N = sum_exchanged(x_WN, group)
        if is_mean:
            total_N = total_N / num_ranks
        shape = (front.shape[0] // num_ranks, *front.shape[1:])
        return total_N.to(tensor.dtype).view(shape).movedim(0, dim).contiguous()

    return torch_compat.replace_operator_sums(is_exchanged, scatter)
