"""Projections of a sharded sequence in chunks: while one chunk is multiplied, another one travels.

Shapes: B batch, S sequence, T ranks of the group, L = S / T positions of a rank, C of a chunk's; D features of the
model, F this rank's features of a projection. The sequence's dim is written second, and may be any but the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from composer3d import torch_compat

__all__ = ["gathered_linear", "summed_linear"]


def gathered_linear(
    x_BLD: Tensor, weight_FD: Tensor, bias_F: Tensor | None, dim: int, group: Any, *, num_chunks: int
) -> tuple[Tensor, Tensor]:
    """Return a projection of the gathered sequence, y_BSF, and the sequence, x_BSD; see `composer3d.communication`.

    Memory: a chunk of the sequence besides. Collectives: all-gathers of the chunks; in the backward as many reductions.
    """
    return _GatheredLinear.apply(x_BLD, weight_FD, bias_F, _Sequence(dim=dim, group=group, num_chunks=num_chunks))


def summed_linear(
    x_BSF: Tensor, weight_DF: Tensor, bias_D: Tensor | None, dim: int, group: Any, *, num_chunks: int
) -> Tensor:
    """Return this rank's positions of the sum over ranks of their products, y_BLD, plus the bias.

    Memory: two chunks of the products. Collectives: reductions of the chunks; in the backward as many all-gathers.
    """
    result: Tensor = _SummedLinear.apply(
        x_BSF, weight_DF, bias_D, _Sequence(dim=dim, group=group, num_chunks=num_chunks)
    )
    return result


@dataclass(frozen=True, kw_only=True)
class _Sequence:
    """A sequence that ranks hold in turn, and what travels of it at once.

    Args:
        dim: Of the sequence.
        group: Process group of T ranks.
        num_chunks: Chunks of a rank's positions, at most; each has as many as the others, or one more.
    """

    dim: int
    group: Any
    num_chunks: int

    def chunks(self, length: int) -> list[tuple[int, int]]:
        """Return where the chunks of a rank's L positions begin, and their lengths."""
        num = max(min(self.num_chunks, length), 1)
        bounds = [length * index // num for index in range(num + 1)]
        return [(begin, end - begin) for begin, end in zip(bounds, bounds[1:], strict=False)]

    def length(self, whole: Tensor) -> int:
        """Return L of a tensor of the whole sequence."""
        return int(whole.shape[self.dim]) // int(self.group.size())

    def of_ranks(self, whole: Tensor, begin: int, size: int) -> Tensor:
        """Return the view of all ranks' positions of a chunk: T in front, TBCD of BSD."""
        each = whole.unflatten(self.dim, (self.group.size(), -1)).narrow(self.dim + 1, begin, size)
        return each.movedim(self.dim, 0)

    def gathered(self, x_BLD: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """Yield the chunks' places and all ranks' positions of them, TBCD, while the next one travels."""
        chunks = self.chunks(x_BLD.shape[self.dim])
        flight = self._gather(x_BLD, *chunks[0])
        for following in (*chunks[1:], None):
            later = None if following is None else self._gather(x_BLD, *following)
            yield flight()
            flight = later or flight

    def _gather(self, x_BLD: Tensor, begin: int, size: int) -> Callable[[], tuple[int, int, Tensor]]:
        sent_BCD = x_BLD.narrow(self.dim, begin, size).contiguous()
        received_TBCD = sent_BCD.new_empty((self.group.size(), *sent_BCD.shape))
        with torch_compat.operator_span("all_gather", self.group, bytes=received_TBCD.nbytes):
            work = torch_compat.all_gather_single(
                received_TBCD.view(-1), sent_BCD.view(-1), group=self.group, async_op=True
            )

        def wait() -> tuple[int, int, Tensor]:
            self._wait("all_gather", work)
            return begin, size, received_TBCD

        return wait

    def reduce(self, x_TBCD: Tensor) -> Callable[[], Tensor]:
        """Begin the sum over ranks of each rank's positions; return what waits for this rank's, BCD.

        On CPU, where a reduce-scatter is an all-reduce inside, every rank sends the others their positions, and adds up
        what it is sent in the order of ranks, in at least float32.
        """
        sent = x_TBCD.contiguous()
        if sent.device.type != "cpu":
            total = torch.empty_like(sent[0])
            with torch_compat.operator_span("reduce_scatter", self.group, bytes=sent.nbytes):
                work = torch_compat.reduce_scatter_single(
                    total.view(-1), sent.view(-1), group=self.group, op=dist.ReduceOp.SUM, async_op=True
                )

            def wait() -> Tensor:
                self._wait("reduce_scatter", work)
                return total

            return wait
        received = torch.empty_like(sent)
        with torch_compat.operator_span("all_to_all", self.group, bytes=sent.nbytes):
            work = dist.all_to_all_single(received.view(-1), sent.view(-1), group=self.group, async_op=True)

        def add() -> Tensor:
            self._wait("all_to_all", work)
            total = received[0].to(torch.promote_types(sent.dtype, torch.float32))
            for row in received[1:]:
                total = total + row
            return total.to(sent.dtype)

        return add

    def _wait(self, op: str, work: Any) -> None:
        with torch_compat.operator_span("wait", self.group, op=op):
            if work is not None:
                work.wait()


class _GatheredLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BLD: Tensor, weight_FD: Tensor, bias_F: Tensor | None, over: _Sequence
    ) -> tuple[Tensor, Tensor]:
        with torch_compat.without_torch_functions():
            shape = list(x_BLD.shape)
            shape[over.dim] *= over.group.size()
            x_BSD = x_BLD.new_empty(shape)
            y_BSF = x_BLD.new_empty((*shape[:-1], weight_FD.shape[0]))
            for begin, size, chunk_TBCD in over.gathered(x_BLD):
                over.of_ranks(y_BSF, begin, size).copy_(torch.nn.functional.linear(chunk_TBCD, weight_FD, bias_F))
                over.of_ranks(x_BSD, begin, size).copy_(chunk_TBCD)
        ctx.save_for_backward(x_BSD, weight_FD)
        ctx.over = over
        ctx.set_materialize_grads(False)
        return y_BSF, x_BSD

    @staticmethod
    def backward(ctx: Any, dy_BSF: Tensor | None, dx_BSD: Tensor | None) -> tuple[Tensor | None, ...]:
        x_BSD, weight_FD = ctx.saved_tensors
        over: _Sequence = ctx.over
        flights = list[tuple[int, int, Callable[[], Tensor]]]()
        dweight_FD = dbias_F = dx_BLD = None
        with torch_compat.without_torch_functions():
            for begin, size in over.chunks(over.length(x_BSD)) if ctx.needs_input_grad[0] else ():
                sums = [] if dx_BSD is None else [over.of_ranks(dx_BSD, begin, size)]
                sums += [] if dy_BSF is None else [over.of_ranks(dy_BSF, begin, size) @ weight_FD]
                flights.append((begin, size, over.reduce(sum(sums[1:], sums[0]))))
            if dy_BSF is not None:
                dweight_FD, dbias_F = _of_weights(dy_BSF, x_BSD, ctx.needs_input_grad)
            if flights:
                shape = list(x_BSD.shape)
                shape[over.dim] //= over.group.size()
                dx_BLD = x_BSD.new_empty(shape)
                for begin, size, wait in flights:
                    dx_BLD.narrow(over.dim, begin, size).copy_(wait())
        return dx_BLD, dweight_FD, dbias_F, None


class _SummedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSF: Tensor, weight_DF: Tensor, bias_D: Tensor | None, over: _Sequence) -> Tensor:
        flights = list[tuple[int, int, Callable[[], Tensor]]]()
        with torch_compat.without_torch_functions():
            shape = [*x_BSF.shape[:-1], weight_DF.shape[0]]
            shape[over.dim] //= over.group.size()
            y_BLD = x_BSF.new_empty(shape)
            for begin, size in over.chunks(over.length(x_BSF)):
                flights.append((begin, size, over.reduce(over.of_ranks(x_BSF, begin, size) @ weight_DF.T)))
                if len(flights) > 1:  # one travels, and another one is multiplied
                    _put(y_BLD, flights.pop(0), bias_D, over.dim)
            for flight in flights:
                _put(y_BLD, flight, bias_D, over.dim)
        ctx.save_for_backward(x_BSF, weight_DF)
        ctx.over = over
        return y_BLD

    @staticmethod
    def backward(ctx: Any, dy_BLD: Tensor) -> tuple[Tensor | None, ...]:
        x_BSF, weight_DF = ctx.saved_tensors
        over: _Sequence = ctx.over
        with torch_compat.without_torch_functions():
            dx_BSF = torch.empty_like(x_BSF)
            dy_BSD = dy_BLD.new_empty((*x_BSF.shape[:-1], dy_BLD.shape[-1]))
            for begin, size, chunk_TBCD in over.gathered(dy_BLD):
                over.of_ranks(dx_BSF, begin, size).copy_(chunk_TBCD @ weight_DF)
                over.of_ranks(dy_BSD, begin, size).copy_(chunk_TBCD)
            dweight_DF, dbias_D = _of_weights(dy_BSD, x_BSF, ctx.needs_input_grad)
        return dx_BSF, dweight_DF, dbias_D, None


def _put(y_BLD: Tensor, flight: tuple[int, int, Callable[[], Tensor]], bias_D: Tensor | None, dim: int) -> None:
    begin, size, wait = flight
    total_BCD = wait()
    y_BLD.narrow(dim, begin, size).copy_(total_BCD if bias_D is None else total_BCD + bias_D)


def _of_weights(dy_BSF: Tensor, x_BSD: Tensor, needed: Sequence[bool]) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of a weight, FD, and a bias, F, in one product over the whole sequence."""
    dy_NF, x_ND = dy_BSF.reshape(-1, dy_BSF.shape[-1]), x_BSD.reshape(-1, x_BSD.shape[-1])
    return (dy_NF.T @ x_ND if needed[1] else None), (dy_NF.sum(dim=0) if needed[2] else None)
