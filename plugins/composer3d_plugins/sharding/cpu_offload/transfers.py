"""Copies between host and device: on separate streams where there are streams, else synchronous."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from composer3d import HostMemory, torch_compat

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from composer3d import RunContext

__all__ = ["HostTransfers", "StreamTransfers", "Transfers", "transfers_for"]


def transfers_for(context: RunContext, *, ahead_bytes: int = 0, stores_beside: bool = False) -> Transfers:
    """Return the transfers of a run's device.

    Args:
        context: Of the run, or of a plan.
        ahead_bytes: See `StreamTransfers`.
        stores_beside: See `HostTransfers`.
    """
    if context.device.type == "cuda":
        return StreamTransfers(context.device, ahead_bytes)
    return HostTransfers(context.stash(HostMemory), stores_beside=stores_beside)


class Transfers(ABC):
    """Moves the tensors of numbered pieces; DTensors keep their placements."""

    def fetch(self, index: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Start copying a piece to the device, and return its tensors, valid after `wait`."""
        return [_with_local(tensor, local) for tensor, local in zip(tensors, self._fetch(index, tensors), strict=True)]

    def store(self, index: int, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Start copying a piece back, as (host, device) pairs; complete after `finish`."""
        self._store(index, [(torch_compat.local_of(host), torch_compat.local_of(tensor)) for host, tensor in pairs])

    def allocate(self, tensor: Tensor) -> Tensor:
        """Return host memory for a device tensor, with its placements."""
        return _with_local(tensor, self._allocate(torch_compat.local_of(tensor)))

    @abstractmethod
    def wait(self, index: int) -> None:
        """Make the computing stream wait for the piece."""

    @abstractmethod
    def finish(self) -> None:
        """Block until all stored pieces are in host memory."""

    @abstractmethod
    def _fetch(self, index: int, tensors: Sequence[Tensor]) -> list[Tensor]: ...

    @abstractmethod
    def _store(self, index: int, pairs: Sequence[tuple[Tensor, Tensor]]) -> None: ...

    @abstractmethod
    def _allocate(self, local: Tensor) -> Tensor: ...


class HostTransfers(Transfers):
    """Transfers without an accelerator: every copy is made at once, so that tests can check their order.

    Args:
        host: What a plan is told of host memory.
        stores_beside: Whether as much is fetched while a piece is stored.

    Attributes:
        log: (what, piece) of the last step.
        largest_bytes: Most bytes on the device at once.
    """

    def __init__(self, host: HostMemory, *, stores_beside: bool) -> None:
        self._host, self._stores_beside = host, stores_beside
        self.log: list[tuple[str, int]] = []
        self.largest_bytes = 0
        self._here: dict[int, int] = {}

    def wait(self, index: int) -> None:
        """Do nothing: no copy is under way."""
        self.log.append(("wait", index))

    def finish(self) -> None:
        """Do nothing: no copy is under way."""
        self.log.append(("finish", len(self._here)))

    def _fetch(self, index: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        if index == 0:
            self.log.clear()
        self.log.append(("fetch", index))
        with self._host.copying():
            moved = [torch_compat.local_of(tensor).clone() for tensor in tensors]
        self._here[index] = sum(each.numel() * each.element_size() for each in moved)
        self.largest_bytes = max(self.largest_bytes, sum(self._here.values()))
        return moved

    def _store(self, index: int, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.log.append(("store", index))
        with self._host.copying(beside=self._stores_beside):
            for host, local in pairs:
                host.copy_(local)
        self._here.pop(index, None)

    def _allocate(self, local: Tensor) -> Tensor:
        import torch

        with self._host.allocating():
            made = torch.empty_like(local)
        self._host.keep(made)
        return made


class StreamTransfers(Transfers):
    """Pinned host memory, and two streams beside the computing one, so that both directions overlap.

    The host runs ahead of the device. So copied tensors are kept until a stream that will reuse their memory waits for
    the copy: memory is bounded in the order of the streams, and nothing waits on the host. Tensors that were fetched
    are used and freed on the computing stream, for which every fetch waits.

    Args:
        device: Of all streams.
        ahead_bytes: Bytes that may be on their way to the host beside the last piece.
    """

    def __init__(self, device: torch.device, ahead_bytes: int) -> None:
        import torch

        self._device, self._ahead_bytes = device, ahead_bytes
        self._in, self._out = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._arrived: dict[int, torch.cuda.Event] = {}
        self._stored: dict[int, torch.cuda.Event] = {}
        self._leaving: deque[tuple[torch.cuda.Event, int, list[Tensor]]] = deque()

    def wait(self, index: int) -> None:
        """Make the computing stream wait for the piece."""
        import torch

        torch.cuda.current_stream(self._device).wait_event(self._arrived.pop(index))

    def finish(self) -> None:
        """Block until all copies are done: a checkpoint may read them next."""
        self._out.synchronize()
        self._leaving.clear()
        self._stored.clear()

    def _fetch(self, index: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        import torch

        self._release()
        self._in.wait_stream(torch.cuda.current_stream(self._device))
        if index in self._stored:
            self._in.wait_event(self._stored[index])
        with torch.cuda.stream(self._in):
            moved = [torch_compat.local_of(tensor).to(self._device, non_blocking=True) for tensor in tensors]
            self._arrived[index] = self._in.record_event()
        return moved

    def _store(self, index: int, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        import torch

        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            for host, local in pairs:
                host.copy_(local, non_blocking=True)
            event = self._stored[index] = self._out.record_event()
        self._leaving.append((event, sum(local.nbytes for _, local in pairs), [local for _, local in pairs]))
        self._release()

    def _release(self) -> None:
        """Release tensors copied before the last piece, as far as more than `ahead_bytes` are on their way."""
        import torch

        while len(self._leaving) > 1 and sum(size for _, size, _ in self._leaving) > self._ahead_bytes:
            event, _, _ = self._leaving.popleft()
            self._in.wait_event(event)
            torch.cuda.current_stream(self._device).wait_event(event)

    def _allocate(self, local: Tensor) -> Tensor:
        import torch

        return torch.empty(local.shape, dtype=local.dtype, pin_memory=True)


def _with_local(tensor: Any, local: Tensor) -> Tensor:
    """Return a tensor with another one's placements and other local memory."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return local
    made: Tensor = torch_compat.with_local(tensor, local)
    return made
