"""Fake-quantised linear layer, also where tp has sharded it.

Shapes: x_...I inputs, weight_OI, y_...O outputs; a rank of tp may hold x_...(I/T) and weight_O(I/T).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from composer3d import LinearSharding, RunContext, StoredOrders, linear_sharding, on_local_shards, torch_compat

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["Pieces", "Rounding"]


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """Groups of a weight's columns that shard boundaries split.

    torchao rounds whole groups. So each piece of one is padded with copies of the largest element of its group.

    Args:
        groups: The group of every column that the rank has, `[columns]`.
        slots: Content of the padded weight, `[pieces * group_size]`: index of a column, or after the columns of a
            group.
        back: Position of each column in it, `[columns]`.
        num_groups: Of the whole weight.
    """

    groups: Tensor
    slots: Tensor
    back: Tensor
    num_groups: int

    @classmethod
    def of(cls, columns: Sequence[int], *, size: int, num_groups: int, device: torch.device) -> Pieces | None:
        """Return the pieces; None where every group of a rank's columns is whole and in order."""
        import torch

        if not len(columns) % size and all(
            list(columns[at : at + size]) == list(range(first, first + size)) and not first % size
            for at, first in zip(range(0, len(columns), size), columns[::size], strict=True)
        ):
            return None
        groups = [column // size for column in columns]
        members: dict[int, list[int]] = {}
        for position, group in enumerate(groups):
            members.setdefault(group, []).append(position)
        slots = [slot for group, own in members.items() for slot in (*own, *[len(columns) + group] * (size - len(own)))]
        places = {slot: place for place, slot in enumerate(slots)}
        back = [places[position] for position in range(len(columns))]
        of_columns, of_slots, of_back = (torch.tensor(each, device=device) for each in (groups, slots, back))
        return cls(groups=of_columns, slots=of_slots, back=of_back, num_groups=num_groups)

    def rounded(self, weight: Tensor, quantiser: Any, sharding: LinearSharding) -> Tensor:
        """Return a local shard `[rows, columns]`, rounded with the scales of the whole weight.

        Collectives: one all-reduce.
        """
        import torch

        values = weight.detach().abs()
        largest = values.new_zeros(len(weight), self.num_groups)
        largest = sharding.largest(largest.scatter_reduce_(1, self.groups.expand_as(values), values, "amax"))
        filled: Tensor = quantiser(torch.cat([weight, largest], 1)[:, self.slots])
        return filled[:, self.back]


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """torchao's fake quantisers.

    Args:
        of_weights: Rounds `[rows, columns]` by groups of columns.
        of_tokens: Rounds `[..., in]` by tokens; None leaves them.
        group_size: Columns that share a scale.
    """

    of_weights: Any
    of_tokens: Any
    group_size: int

    @classmethod
    def of(cls, *, weights: str, group_size: int, activations: str) -> Rounding:
        """Make the quantisers of dtypes by name."""
        import torch

        qat: Any = torch_compat.import_torchao("torchao.quantization.qat")
        made: Any = torch_compat.import_torchao("torchao.quantization.qat.fake_quantizer")
        torch_compat.trace_quantisers()
        of_weights = qat.IntxFakeQuantizeConfig(getattr(torch, weights), group_size=group_size)
        of_tokens = qat.IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
        return cls(
            of_weights=made.IntxFakeQuantizer(of_weights),
            of_tokens=made.IntxFakeQuantizer(of_tokens) if activations == "int8" else None,
            group_size=group_size,
        )

    def linear(self, module: Any, x: Any, context: RunContext) -> Any:
        """Compute a layer with rounded operands."""
        sharding = linear_sharding(x, module.weight)
        if sharding is None or sharding.of != "inputs":
            return on_local_shards(self._product, x, module.weight, module.bias)
        known = vars(module)
        if "pieces" not in known:
            module.pieces = self._pieces(module, sharding, context)
        product = partial(self._product, sharding=sharding, pieces=known["pieces"])
        return on_local_shards(product, x, module.weight, module.bias)

    def product(self, x_BI: Tensor, weight_OI: Tensor) -> Tensor:
        """Return y_BO of plain operands, both rounded."""
        return self._product(x_BI, weight_OI.contiguous(), None)

    def stacked(self, weight: Tensor, *, dim: int) -> Tensor:
        """Return a stacked weight of experts with its matrices rounded.

        Args:
            weight: Of three dims, experts first.
            dim: That is summed over, whose neighbours share scales.
        """
        turned = weight.movedim(dim, -1)
        rounded: Tensor = self.of_weights(turned.reshape(-1, turned.shape[-1])).view(turned.shape)
        return rounded.movedim(-1, dim).to(weight.dtype).contiguous()

    def _product(
        self,
        x_BI: Tensor,
        weight_OI: Tensor,
        bias: Tensor | None,
        sharding: LinearSharding | None = None,
        pieces: Pieces | None = None,
    ) -> Tensor:
        import torch.nn.functional as F

        if self.of_tokens is not None:
            x_BI = self.of_tokens(x_BI) if sharding is None else self._tokens(x_BI, sharding)
        if pieces is None or sharding is None:
            return F.linear(x_BI, self.of_weights(weight_OI), bias)
        return F.linear(x_BI, pieces.rounded(weight_OI, self.of_weights, sharding), bias)

    def _tokens(self, x_BI: Tensor, sharding: LinearSharding) -> Tensor:
        """Round sharded tokens x_...(I/T) by the range of x_...I, appended to them for torchao to see."""
        import torch

        own_BI = x_BI.detach()
        ends = sharding.largest(torch.cat([-own_BI.amin(-1, keepdim=True), own_BI.amax(-1, keepdim=True)], -1))
        lowest, highest = ends.split(1, -1)
        rounded_BI: Tensor = self.of_tokens(torch.cat([x_BI, -lowest, highest], -1))
        return rounded_BI[..., :-2]

    def _pieces(self, module: Any, sharding: LinearSharding, context: RunContext) -> Pieces | None:
        """Return pieces of groups, if the shard boundary of the inputs splits any."""
        order = context.stash(StoredOrders).by_name.get(f"{module.fqn}.weight")
        stored: Sequence[int] = range(module.weight.shape[1])
        if order is not None and order.dim == 1:
            stored = [column for start, length in order.runs for column in range(start, start + length)]
        size = len(stored) // sharding.mesh.size()
        first = sharding.mesh.get_local_rank() * size
        own = list(stored)[first : first + size]
        num_groups = len(stored) // self.group_size
        return Pieces.of(own, size=self.group_size, num_groups=num_groups, device=module.weight.device)
