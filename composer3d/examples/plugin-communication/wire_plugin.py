"""Collectives of units: a reduce-scatter of one's own through FSDP2's setters, and a codec.

Shapes: W ranks of a group, R rows of N elements, P bytes of a payload.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composer3d import Phase, RunContext, Transform, Units, hookimpl, plugin


class OrderedReduceScatter:
    """A reduce-scatter that adds up in the order of ranks, and in float64 where gradients are float32."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def travelling(self, output_tensor: Tensor, input_tensor: Tensor, group: Any) -> tuple[str, int]:
        # What spans and plans show of it: the collective that is issued, and the bytes of its payload.
        return "all_to_all", input_tensor.nbytes

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        x_WN = input_tensor.view(group.size(), -1)
        received_WN = torch.empty_like(x_WN)
        dist.all_to_all_single(received_WN, x_WN, group=group)
        total_N = received_WN[0].double()
        for row_N in received_WN[1:]:
            total_N += row_N
        output_tensor.copy_(total_N if op == dist.ReduceOp.SUM else total_N / group.size())
        return None


@plugin(family="communication")
class OrderedSums:
    """Sum gradients in the order of ranks, in float64: the same bits whatever the network's algorithm.

    Memory: a unit's gradient once more, and a shard in float64. Collectives: one all-to-all in place of each
    reduce-scatter.
    """

    @hookimpl
    def composer3d_configure(self, context: RunContext) -> None:
        # Only one plugin can replace the reduce-scatter: check names both where two do.
        context.claim("reduce_scatter", by=self)

    @hookimpl
    def composer3d_collectives(self, context: RunContext) -> Transform:
        # COMMUNICATE comes after DATA, in which a data-parallel plugin makes its units.
        return Transform(
            name="ordered_sums",
            phase=Phase.COMMUNICATE,
            select=lambda model, context: context.units(None),
            apply=self._apply,
            uses=("dp_shard",),
        )

    def _apply(self, model: nn.Module, fqns: Sequence[str], context: RunContext) -> Sequence[str]:
        exchange = OrderedReduceScatter()
        for unit in context.stash(Units).by_module.values():
            unit.set_reduce_scatter(exchange)
        return fqns


class Halves:
    """A codec: gradients travel as bfloat16. `composer3d.testing.assert_codec_conforms(Halves())` tests it."""

    is_repeatable = True

    def num_bytes(self, length: int) -> int:
        return 2 * length

    def encode(self, x_RN: Tensor) -> Tensor:
        return x_RN.to(torch.bfloat16).contiguous().view(torch.uint8)

    def decode(self, payload_RP: Tensor, length: int) -> Tensor:
        return payload_RP.contiguous().view(torch.bfloat16).float()

    def bound(self, x_RN: Tensor) -> Tensor:
        # Half a unit in the last of 8 bits, and what is smaller than the smallest normal number.
        return x_RN.abs().float() * 2.0**-8 + 2.0**-126
