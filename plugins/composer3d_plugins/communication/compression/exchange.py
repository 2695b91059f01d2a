"""Collectives with a codec on the wire: all-to-alls that reduce, all-gathers of shards, and means of replicas.

Shapes: W ranks of the group; N elements of a shard, or of a replica's gradient; L of one of its W chunks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from composer3d import InPlaceCodec, torch_compat

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from composer3d import Codec

Span = Callable[..., contextlib.AbstractContextManager[None]]

__all__ = ["CodedAllGather", "CodedReduceScatter", "Owed", "gather_rows", "mean_of_replicas", "reduce_rows"]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Coded:
    """A collective that asks in every call for its codec.

    Args:
        codec: Given the elements of a unit, returns its codec; None sends them as they are.
        note: Called with the process group and the length of a shard where a codec is used.
    """

    codec: Callable[[int], Codec | None]
    note: Callable[[Any, int], None]

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for a buffer."""
        import torch

        return torch.empty(size, dtype=dtype, device=device)


@dataclass(frozen=True, kw_only=True, eq=False)
class CodedReduceScatter(_Coded):
    """FSDP2's reduce-scatter as one all-to-all of payloads, which their receiver decodes and adds in float32.

    The ranks' payloads are added in the order of ranks. Without a codec gradients are exchanged in their own dtype and
    added in float32, or float64: on gloo half of what its own reduce-scatter sends.

    Memory: the payloads of a unit twice, and a shard in float32.
    Collectives: one all-to-all.
    """

    def travelling(self, output_tensor: Tensor, input_tensor: Tensor, group: Any) -> tuple[str, int]:
        """Return the collective that is issued, and the bytes of its payload."""
        codec = self.codec(input_tensor.numel())
        num_bytes = None if codec is None else group.size() * codec.num_bytes(output_tensor.numel())
        return "all_to_all", input_tensor.nbytes if num_bytes is None else num_bytes

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Reduce chunk r of every rank's input, WN, into the output, N, of rank r."""
        import torch
        import torch.distributed as dist

        num_ranks, length = group.size(), output_tensor.numel()
        codec = self.codec(num_ranks * length)
        if codec is not None:
            self.note(group, length)
        out = output_tensor if output_tensor.dtype == torch.float32 and output_tensor.is_contiguous() else None
        total = reduce_rows(input_tensor.view(num_ranks, length), codec, group, out=out)
        if op == dist.ReduceOp.AVG:
            total /= num_ranks
        elif op != dist.ReduceOp.SUM:
            raise RuntimeError(f"gradients are to be reduced by {op}, which compression does not know")
        if out is None:
            output_tensor.copy_(total)


@dataclass(frozen=True, kw_only=True, eq=False)
class CodedAllGather(_Coded):
    """FSDP2's all-gather of payloads. A rank decodes its own shard too: all ranks compute with the same weights.

    What is no floating-point number, float8 weights as bytes for example, is gathered as it is.

    Memory: the payloads of a unit.
    Collectives: one all-gather.
    """

    def travelling(self, output_tensor: Tensor, input_tensor: Tensor, group: Any) -> tuple[str, int]:
        """Return the collective that is issued, and the bytes of its payload."""
        codec = self.codec(output_tensor.numel()) if input_tensor.is_floating_point() else None
        num_bytes = None if codec is None else group.size() * codec.num_bytes(input_tensor.numel())
        return "all_gather", output_tensor.nbytes if num_bytes is None else num_bytes

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        """Gather every rank's shard, N, into the output, WN."""
        num_ranks, length = group.size(), input_tensor.numel()
        codec = self.codec(num_ranks * length) if input_tensor.is_floating_point() else None
        if codec is None:
            return torch_compat.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)
        self.note(group, length)
        gather_rows(input_tensor, codec, group, out=output_tensor.view(num_ranks, length))
        return None


def _unspanned(*_: Any, **__: Any) -> contextlib.AbstractContextManager[None]:
    """Return no span: FSDP2's collectives are in one each."""
    return contextlib.nullcontext()


def reduce_rows(
    x_WN: Tensor, codec: Codec | None, group: Any, *, span: Span = _unspanned, out: Tensor | None = None
) -> Tensor:
    """Return the sum of row r of every rank, on rank r of the group: float32 N, or float64.

    Args:
        x_WN: This rank's part of the sum for every rank.
        codec: Of what travels; None sends the elements as they are.
        group: Process group of W ranks.
        span: Opens one around what is sent.
        out: Memory of the sum, contiguous, in its dtype, and apart from `x_WN`.

    Collectives: one all-to-all.
    """
    import torch
    import torch.distributed as dist

    num_ranks, length = x_WN.shape
    wide = torch.promote_types(x_WN.dtype, torch.float32)
    # The dtypes of payloads are the codec's, also where a model's are read as others.
    with torch_compat.without_torch_functions():
        sent = x_WN.contiguous() if codec is None else codec.encode(x_WN)
        received = torch.empty_like(sent)
        with span("all_to_all", group, bytes=sent.nbytes):
            dist.all_to_all_single(received, sent, group=group)
        total = torch.zeros(length, dtype=wide, device=x_WN.device) if out is None else out.zero_()
        for rank in range(num_ranks):  # one row at a time: the order is that of ranks, and memory one shard's
            row = received[rank : rank + 1]
            if codec is None:
                total += row.view(-1)
            else:
                _decode_into(codec, row, total.view(1, -1), add=True)
    return total


def gather_rows(
    x_N: Tensor, codec: Codec | None, group: Any, *, span: Span = _unspanned, out: Tensor | None = None
) -> Tensor:
    """Return every rank's row as it was decoded, float32 WN; without a codec as it was.

    Args:
        x_N: This rank's.
        codec: Of what travels; None sends the elements as they are.
        group: Process group of W ranks.
        span: Opens one around what is sent.
        out: Takes the rows instead of memory of their own, WN, of any dtype.

    Collectives: one all-gather.
    """
    import torch

    with torch_compat.without_torch_functions():
        sent = x_N.view(1, -1) if codec is None else codec.encode(x_N.view(1, -1))
        received = torch.empty(group.size() * sent.numel(), dtype=sent.dtype, device=sent.device)
        with span("all_gather", group, bytes=received.nbytes):
            torch_compat.all_gather_single(received, sent.view(-1), group=group, async_op=False)
        received_WP = received.view(group.size(), -1)
        if out is None:
            return received_WP if codec is None else codec.decode(received_WP, x_N.numel())
        if codec is None:
            return out.copy_(received_WP)
        _decode_into(codec, received_WP, out)
        return out


def _decode_into(codec: Codec, payload_RP: Tensor, out_RN: Tensor, *, add: bool = False) -> None:
    """Decode into memory, RN, or add to it: without memory for what is decoded, where the codec knows how."""
    import torch

    if isinstance(codec, InPlaceCodec) and out_RN.dtype == torch.float32:
        codec.decode_into(payload_RP, out_RN, add=add)
        return
    decoded_RN = codec.decode(payload_RP, out_RN.shape[1])
    if add:
        out_RN += decoded_RN
    else:
        out_RN.copy_(decoded_RN)


@dataclass(kw_only=True, eq=False)
class Owed:
    """Residual of earlier exchanges of a gradient, which the next one sends.

    Attributes:
        sender_N: This rank's part of the mean, W times over: what encoding its gradient has lost.
        owner_N: What encoding the mean of this rank's chunk has lost. Outside of the chunk there is only what a run
            with other chunks has left.
    """

    sender_N: Tensor
    owner_N: Tensor


def mean_of_replicas(
    x_N: Tensor, codec: Codec | None, group: Any, owed: Owed | None = None, *, out: Tensor | None = None
) -> Tensor:
    """Return the mean of all ranks' tensors, the same bits on all of them: N, float32, or float64 without a codec.

    Each of W chunks goes encoded to its owner, who decodes and adds them in the order of ranks, and sends their mean,
    encoded, to all.

    Args:
        x_N: This rank's.
        codec: Of what travels; None sends the elements as they are.
        group: Process group of W ranks.
        owed: Is added, and replaced by what this exchange leaves over; None drops it.
        out: Memory that the mean may take, contiguous, N, also `x_N`'s own; it is used where the mean has its dtype,
            and N is a multiple of W.

    Memory: the payloads twice, and a chunk; the tensor once more where `out` is not used, and twice with `owed`.
    Collectives: one all-to-all, and one all-gather.
    """
    import torch

    num_ranks, numel = group.size(), x_N.numel()
    length = -(-numel // num_ranks)
    here = slice(group.rank() * length, (group.rank() + 1) * length)
    x_N = x_N.to(torch.promote_types(x_N.dtype, torch.float32))
    left_L: Tensor | None = None
    with torch_compat.without_torch_functions():
        if owed is not None:
            left_L = _padded(owed.owner_N[here].clone(), length)  # its place is emptied
            owed.owner_N[here] = 0.0
            x_N = x_N + owed.sender_N + num_ranks * owed.owner_N  # a mean is over ranks
        x_WL = _padded(x_N, num_ranks * length).view(num_ranks, length)
        mean_L = reduce_rows(x_WL, codec, group, span=torch_compat.operator_span).div_(num_ranks)
        if left_L is not None:
            mean_L += left_L
        fits = out is not None and out.dtype == x_N.dtype and numel == num_ranks * length
        out_WL = out.view(num_ranks, length) if fits and out is not None else None
        gathered_WL = gather_rows(mean_L, codec, group, span=torch_compat.operator_span, out=out_WL)
        if owed is not None:
            decoded_WL = x_WL if codec is None else codec.decode(codec.encode(x_WL), length)
            owed.sender_N.copy_(x_N - decoded_WL.reshape(-1)[:numel])
            owed.owner_N.zero_()
            owned = owed.owner_N[here]
            owned.copy_((mean_L - gathered_WL[group.rank()])[: owned.numel()])
        return out if out is not None and out_WL is not None else gathered_WL.reshape(-1)[:numel]


def _padded(x_N: Tensor, length: int) -> Tensor:
    import torch

    return x_N if x_N.numel() == length else torch.nn.functional.pad(x_N, (0, length - x_N.numel()))
