"""Means over islands of flat tensors: in whole by an all-reduce, or as a codec's payloads by an all-gather.

Shapes: K islands; N elements of a fragment's local shards, in one flat buffer; P bytes of an island's payload.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from composer3d import CodedExchange, torch_compat

if TYPE_CHECKING:
    from torch import Tensor

    from composer3d import Codec

__all__ = ["IslandSums", "Total"]

_WEIGHT_BYTES = 8


@dataclass(frozen=True, kw_only=True, eq=False)
class Total:
    """A sum over islands.

    Args:
        sum_N: Of their tensors, each times its weight.
        weight: The sum of their weights.
    """

    sum_N: Tensor
    weight: float


@dataclass(frozen=True, kw_only=True, eq=False)
class IslandSums:
    """Sums over islands, the same bits on all of them.

    Args:
        codec: Of what travels; None sends the elements as they are.
        group: Process group of K islands.
        num_islands: K.
    """

    codec: Codec | None
    group: Any
    num_islands: int

    def travelling(self, length: int, itemsize: int, *, is_weighed: bool) -> tuple[str, int]:
        """Return the collective of a sum, and the bytes of its payload, as `count_collectives` counts them.

        Args:
            length: N.
            itemsize: Bytes of an element.
            is_weighed: Whether weights travel with the islands' tensors.
        """
        if self.codec is None:
            return "all-reduces", (length + is_weighed) * itemsize
        return "all-gathers", self.num_islands * (self.codec.num_bytes(length) + is_weighed * _WEIGHT_BYTES)

    def begin(self, x_N: Tensor, *, weight: float | None, is_async: bool) -> Callable[[], Total]:
        """Begin a sum; return what waits for it.

        Args:
            x_N: This island's.
            weight: Its weight; None where all have the same.
            is_async: Whether other work goes on meanwhile.

        Collectives: one all-reduce, or one all-gather of payloads.
        """
        return self._reduce(x_N, weight, is_async) if self.codec is None else self._gather(x_N, weight, is_async)

    def _reduce(self, x_N: Tensor, weight: float | None, is_async: bool) -> Callable[[], Total]:
        import torch
        import torch.distributed as dist

        sent_N = x_N if weight is None else torch.cat([x_N * weight, x_N.new_full((1,), weight)])
        work = dist.all_reduce(sent_N, group=self.group, async_op=is_async)

        def wait() -> Total:
            if work is not None:
                work.wait()
            if weight is None:
                return Total(sum_N=sent_N, weight=self.num_islands)
            return Total(sum_N=sent_N[:-1], weight=float(sent_N[-1]))

        return wait

    def _gather(self, x_N: Tensor, weight: float | None, is_async: bool) -> Callable[[], Total]:
        import torch

        assert self.codec is not None, "else it is reduced"
        # The dtypes of payloads are the codec's, also where a model's are read as others.
        with torch_compat.without_torch_functions():
            sent_P = self.codec.encode(x_N.view(1, -1)).view(-1)
        if weight is not None:
            own = torch.tensor([weight], dtype=torch.float64, device=x_N.device)
            sent_P = torch.cat([sent_P, own.view(torch.uint8)])
        received_KP = sent_P.new_empty((self.num_islands, sent_P.numel()))
        work = torch_compat.all_gather_single(received_KP.view(-1), sent_P, group=self.group, async_op=is_async)

        def wait() -> Total:
            if work is not None:
                work.wait()
            assert self.codec is not None, "as above"
            if weight is None:
                payload_KP, weights = received_KP, [1.0] * self.num_islands
            else:
                payload_KP = received_KP[:, :-_WEIGHT_BYTES].contiguous()
                weights = received_KP[:, -_WEIGHT_BYTES:].clone().view(torch.float64).view(-1).tolist()
            with torch_compat.without_torch_functions():
                rows_KN = self.codec.decode(payload_KP, x_N.numel()).to(x_N.dtype)
            total_N = rows_KN[0] * weights[0]
            for row_N, each in zip(rows_KN[1:], weights[1:], strict=True):  # in the order of islands
                total_N += row_N * each
            return Total(sum_N=total_N, weight=sum(weights))

        return wait

    def exchange(self) -> CodedExchange:
        """Return the exchange as `verify` tries it: every island gives a row, and is given all."""
        codec, group = self.codec, self.group
        assert codec is not None, "asked only then"

        def run(x_N: Tensor) -> Tensor:
            sent_P = codec.encode(x_N.view(1, -1)).view(-1)
            received_KP = sent_P.new_empty((group.size(), sent_P.numel()))
            torch_compat.all_gather_single(received_KP.view(-1), sent_P, group=group)
            return codec.decode(received_KP, x_N.numel())

        return CodedExchange(what="weights", codec=codec, group=group, run=run, name=f"{codec}, of outer gradients")
