"""All-reduces of gradients over replicas with a codec on the wire, or as products of low rank, with error feedback.

Shapes: N elements of a buffer of gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat
from composer3d_plugins.communication.compression.exchange import Owed, mean_of_replicas
from composer3d_plugins.communication.compression.low_rank import LowRank

if TYPE_CHECKING:
    from torch import Tensor, nn

    from composer3d import Codec
    from composer3d_plugins.communication.compression.residuals import Residuals

__all__ = ["ReplicaMeans", "mean_by"]


@dataclass(frozen=True, kw_only=True, eq=False)
class ReplicaMeans:
    """The mean over replicas, in the place of a data-parallel plugin's all-reduce.

    Args:
        method: Given the elements of a unit, or a bucket, returns how it travels; None sends it as it is, by the
            all-reduce that it has without compression.
        note: Called with the process group and N where it is compressed.
        residuals: Of error feedback; None does without.
        name_of: Returns the name of a parameter, the same on all replicas.
    """

    method: Callable[[int], Codec | LowRank | None]
    note: Callable[[Any, int], None]
    residuals: Residuals | None
    name_of: Callable[[tuple[nn.Module, str]], str]

    def __call__(self, buffer_N: Tensor, gradients: Sequence[tuple[tuple[nn.Module, str], Tensor]], group: Any) -> None:
        """Take the mean in place; see `composer3d.communication.AllReduce`."""
        import torch
        import torch.distributed as dist

        numel = sum(gradient.numel() for _, gradient in gradients)
        method = self.method(numel)
        if method is None or not numel:
            with torch_compat.operator_span("all_reduce", group, bytes=buffer_N.nbytes):
                dist.all_reduce(buffer_N, op=dist.ReduceOp.AVG, group=group)
            return
        self.note(group, numel)
        with torch.no_grad():
            named = {self.name_of(held): gradient for held, gradient in gradients}
            owed = None if self.residuals is None else self.residuals.owed(list(named))
            flat_N = _all_of(buffer_N, list(named.values()))
            mean_N = mean_by(method, named, group, owed, flat_N=flat_N)
            if self.residuals is not None and owed is not None:
                self.residuals.put(list(named), owed)
            if flat_N is not None:
                if mean_N is not flat_N:
                    flat_N.copy_(mean_N)
                return
            pieces = mean_N.split([gradient.numel() for gradient in named.values()])
            for gradient, piece in zip(named.values(), pieces, strict=True):
                gradient.copy_(piece.view_as(gradient))


def _all_of(buffer_N: Tensor, gradients: Sequence[Tensor]) -> Tensor | None:
    """Return the buffer, if it is its gradients one after the other."""
    end = buffer_N.storage_offset()
    for gradient in gradients:
        if gradient.storage_offset() != end or not gradient.is_contiguous():
            return None
        end += gradient.numel()
    return buffer_N if end - buffer_N.storage_offset() == buffer_N.numel() and buffer_N.is_contiguous() else None


def mean_by(
    method: Codec | LowRank,
    gradients: Mapping[str, Tensor],
    group: Any,
    owed: Owed | None,
    *,
    flat_N: Tensor | None = None,
) -> Tensor:
    """Return the mean over replicas, N, the same bits on all of them.

    Args:
        method: A codec of rows, or products of low rank.
        gradients: This rank's, by names that all replicas have.
        group: Process group of the replicas.
        owed: As of `mean_of_replicas`.
        flat_N: The gradients one after the other, if they are that in memory, which a codec may then write the mean to.
    """
    import torch

    x_N = torch.cat([gradient.reshape(-1) for gradient in gradients.values()]) if flat_N is None else flat_N
    x_N = x_N.to(torch.promote_types(x_N.dtype, torch.float32))
    if not isinstance(method, LowRank):
        return mean_of_replicas(x_N, method, group, owed, out=flat_N)
    if owed is not None:
        x_N = x_N + owed.sender_N + group.size() * owed.owner_N
        owed.owner_N.zero_()
    pieces = x_N.split([gradient.numel() for gradient in gradients.values()])
    # In memory of its own: how a product is summed depends on where a matrix begins, and on what is sent beside it.
    named = {name: piece.view(gradients[name].shape).clone() for name, piece in zip(gradients, pieces, strict=True)}
    means = method.means(named, group)
    mean_N = torch.cat([means[name].reshape(-1) for name in named])
    if owed is not None:
        owed.sender_N.copy_(x_N - mean_N)
    return mean_N
