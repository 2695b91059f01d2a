"""Parameters whose rows or columns are kept in another order than the model's.

Some layouts have no placement: a fused projection is sharded per part, so that a local shard is several runs of rows.
Kept in an order in which each of them is one run, it is an ordinary shard. What enters and leaves a run is in the
model's order: initial weights, checkpoints, comparisons.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, overload

from composer3d.errors import TransformError
from composer3d.initialisation import Slab

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Order", "StoredOrders"]


class Order:
    """One parameter's order.

    Args:
        dim: The tensor dim that is reordered.
        runs: (start, length) in the model's order, in the order in which they are kept; together each row once.

    Raises:
        TransformError: Rows are missing or there twice.
    """

    def __init__(self, dim: int, runs: Sequence[tuple[int, int]]) -> None:
        self.dim = dim
        self.runs = tuple(runs)
        self.size = sum(length for _, length in runs)
        end = 0
        for start, length in sorted(runs):
            if start != end:
                raise TransformError(f"the order {list(runs)} has row {min(start, end)} twice or not at all")
            end = start + length

    @overload
    def stored(self, full: Tensor) -> Tensor: ...
    @overload
    def stored(self, full: Slab) -> Slab: ...
    def stored(self, full: Tensor | Slab) -> Tensor | Slab:
        """Return a tensor of the model's order in the stored one."""
        import torch

        if isinstance(full, Slab):
            return full.reordered(self.dim, self.runs)
        return torch.cat([full.narrow(self.dim, start, length) for start, length in self.runs], self.dim)

    def model(self, full: Tensor) -> Tensor:
        """Return a tensor of the stored order in the model's."""
        import torch

        pieces = zip(self.runs, full.split([length for _, length in self.runs], self.dim), strict=True)
        return torch.cat([piece for _, piece in sorted(pieces, key=lambda pair: pair[0])], self.dim)


@dataclass(kw_only=True, eq=False)
class StoredOrders:
    """Stash of parameters that are stored in another order than the model's: `context.stash(StoredOrders)`.

    Their gradients and optimizer state are stored alike.

    Attributes:
        by_name: Of such a parameter, under each of its FQNs.
    """

    by_name: dict[str, Order] = field(default_factory=dict)

    def keep(self, names: Iterable[str], *, dim: int, runs: Sequence[tuple[int, int]]) -> None:
        """Declare a parameter's order.

        Args:
            names: All FQNs of the parameter; see `RunContext.names_of`.
            dim: The tensor dim that is reordered.
            runs: (start, length) in the model's order, in the stored order.
        """
        self.by_name |= dict.fromkeys(names, Order(dim, runs))
