"""Small vectors of numbers that ranks reduce in every step: counts, losses, norms, votes and metrics."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["ControlNumbers", "all_reduce", "host_vector"]


class ControlNumbers:
    """Numbers that ranks exchange in every step, in memory that Python and torch share where that is the host's.

    A step writes them and reads the result without an operator of torch beside the collective: making a tensor of a
    few numbers, and reading it, take longer than sending them within a machine.

    Args:
        dtype: float64 or int64.
        device: Of what is sent; anything but host memory gets new tensors in every step, and so do fake tensors, of
            which torch alone knows the values. The mode that is on now is the one in which steps run.
        group: A process group; None is the world.

    Attributes:
        is_host: Whether Python writes and reads what is sent.

    Memory: 8 bytes for each of the most numbers that were sent, and for each that was gathered last.
    """

    def __init__(self, *, dtype: torch.dtype, device: torch.device, group: Any) -> None:
        import torch.distributed as dist

        self._dtype, self._device = dtype, device
        self._group: Any = group or dist.group.WORLD
        self._code = "d" if dtype.is_floating_point else "q"
        self.is_host = device.type == "cpu" and torch_compat.active_fake_mode() is None
        self._held: Any = array(self._code)
        self._sent: Tensor | None = None  # the same memory
        self._views: dict[int, list[Tensor]] = {}  # its first numbers, as many as are sent
        self._everyone: tuple[Any, list[Tensor]] = array(self._code), []
        self._form = 0, 0  # of the last gather: ranks, and numbers of each

    def all_reduce(self, numbers: Sequence[float], *, takes_maximum: bool = False) -> list[Any]:
        """Return the sums of every rank's numbers, as many on all ranks. Collectives: one all-reduce.

        Args:
            numbers: Of this rank, at least one.
            takes_maximum: Take the largest of each number, and not their sum.
        """
        sent = self.reduce_unread(numbers, takes_maximum=takes_maximum)
        found: list[Any] = self._held[: len(numbers)].tolist() if self.is_host else sent[0].tolist()
        return found

    def reduce_unread(self, numbers: Sequence[float], *, takes_maximum: bool = False) -> list[Tensor]:
        """Reduce as `all_reduce` does, and return the tensor in a list: reading a fake one runs operators.

        Args:
            numbers: As for `all_reduce`.
            takes_maximum: As for `all_reduce`.

        Collectives: one all-reduce.
        """
        sent = self._filled(numbers)
        _reduce(sent, self._group, takes_maximum=takes_maximum)
        return sent

    def all_gather(self, numbers: Sequence[float], *, num_ranks: int) -> list[Any]:
        """Return the numbers of every rank, one rank after another. Collectives: one all-gather.

        Args:
            numbers: Of this rank, at least one, as many on all ranks.
            num_ranks: Of the group.
        """
        size = len(numbers)
        if not self.is_host or self._form != (num_ranks, size):
            held, everyone = self._room(num_ranks * size)
            self._everyone, self._form = (held, list(everyone.view(num_ranks, size).unbind())), (num_ranks, size)
        held, pieces = self._everyone
        if self.is_host:  # a rank's own are sent from where they stand in the result
            own = self._group.rank()
            held[own * size : (own + 1) * size] = array(self._code, numbers)
            work = self._group.allgather([pieces], [pieces[own]])
        else:
            work = self._group.allgather([pieces], self._filled(numbers))
        if work is not None:
            work.wait()
        found: list[Any] = held.tolist()
        return found

    def _filled(self, numbers: Sequence[float]) -> list[Tensor]:
        """Return the tensor to send, in a list. Memory of the longest is kept, which a plan counts, too."""
        import torch

        size = len(numbers)
        if not self.is_host:
            tensor = torch.tensor(numbers, dtype=self._dtype, device=self._device)
            if self._sent is None or size >= self._sent.numel():
                self._sent = tensor
            return [tensor]
        if size > len(self._held):
            (self._held, self._sent), self._views = self._room(size), {}
        self._held[:size] = array(self._code, numbers)
        if size not in self._views:
            assert self._sent is not None, "numbers are one at least"
            self._views[size] = [self._sent[:size]]
        return self._views[size]

    def _room(self, size: int) -> tuple[Any, Tensor]:
        import torch

        if not self.is_host:
            tensor = torch.empty(size, dtype=self._dtype, device=self._device)
            return tensor, tensor
        held = array(self._code, bytes(8 * size))
        return held, torch.frombuffer(held, dtype=self._dtype)


def host_vector(numbers: Sequence[float], *, dtype: torch.dtype) -> Tensor:
    """Return numbers, at least one, in a buffer that Python has filled: that takes a third of `torch.tensor`.

    Args:
        numbers: Of Python; no fake mode is on.
        dtype: float64 or int64.
    """
    import torch

    return torch.frombuffer(array("d" if dtype is torch.float64 else "q", numbers), dtype=dtype)


def all_reduce(numbers: Tensor, *, group: Any, takes_maximum: bool = False) -> None:
    """Reduce a tensor in place over a process group; None is the world.

    The method of the group is called: `torch.distributed.all_reduce` first examines its arguments, for longer than the
    call takes.

    Args:
        numbers: Of any shape, alike on all ranks of the group.
        group: A process group.
        takes_maximum: Take the largest of each number, and not their sum.

    Collectives: one all-reduce.
    """
    import torch.distributed as dist

    _reduce([numbers], group or dist.group.WORLD, takes_maximum=takes_maximum)


def _reduce(tensors: list[Tensor], group: Any, *, takes_maximum: bool) -> None:
    work = group.allreduce(tensors, _maximum()) if takes_maximum else group.allreduce(tensors)
    if work is not None:
        work.wait()


@functools.cache
def _maximum() -> Any:
    import torch.distributed as dist

    options: Any = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    return options
