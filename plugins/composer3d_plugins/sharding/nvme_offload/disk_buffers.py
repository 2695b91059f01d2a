"""Buffers for disk requests: page-aligned, pinned where there is an accelerator, and limited in number."""

from __future__ import annotations

import mmap
from collections import deque
from typing import TYPE_CHECKING, Any

from composer3d import HostMemory, torch_compat
from composer3d_plugins.sharding.nvme_offload.disk import BLOCK, StateFile

if TYPE_CHECKING:
    from concurrent.futures import Future

    import torch
    from torch import Tensor

__all__ = ["Buffer", "Buffers", "Copies"]


class Buffer:
    """One piece's memory.

    Args:
        num_bytes: A multiple of a page.
        device: The device that steps; its copies are awaited before the disk reads the memory.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        import torch

        self.num_bytes = num_bytes
        self._device = device
        if torch_compat.active_fake_mode() is not None:  # of a plan, in which nothing has values
            self._bytes = torch.empty(num_bytes, dtype=torch.uint8)
            self.memory = memoryview(b"")
            return
        if device.type == "cuda":
            # What CUDA pins is page-aligned, as a mapping is.
            self._bytes = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
            assert self._bytes.data_ptr() % BLOCK == 0, "pinned memory begins at a page"
        else:
            self._bytes = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
        array: Any = self._bytes.numpy()
        self.memory = memoryview(array)

    def view(self, position: int, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return a run of it as a tensor of one dim."""
        return self._bytes[position : position + num_elements * dtype.itemsize].view(dtype)

    def synchronise(self) -> None:
        """Block until the device's copies into this buffer are done."""
        if self._device.type == "cuda":
            import torch

            torch.cuda.current_stream(self._device).synchronize()


class Copies:
    """Copies between buffers and the device that steps, on its own stream, so that what is stepped waits for them.

    Args:
        device: That steps.
        host: Told of copies and buffers.
        is_planned: Whether this is a plan of an accelerator's run, whose fake tensors are all of one memory.
    """

    def __init__(self, device: torch.device, host: HostMemory, *, is_planned: bool) -> None:
        self.device, self.host = device, host
        self._is_planned = is_planned

    def here(self, view: Tensor) -> Tensor:
        """Return a part of a buffer on the device: itself, where both are one memory."""
        with self.host.copying(waits=True):
            return view.clone() if self._is_planned else view.to(self.device, non_blocking=True)

    def away(self, view: Tensor, value: Tensor) -> None:
        """Copy a value into a part of a buffer."""
        with self.host.copying(waits=True):
            view.copy_(value, non_blocking=True)


class Buffers:
    """Pool of buffers, one per piece under way; taking one more waits for the oldest that is being written.

    Args:
        limit: Most buffers.
        device: See `Buffer`.

    Attributes:
        num_bytes: Of all of them.
        largest: Bytes that one of them had to have.
    """

    def __init__(self, limit: int, device: torch.device) -> None:
        self._limit, self._device = limit, device
        self._free: list[Buffer] = []
        self._writing: deque[tuple[Buffer, list[Future[None]]]] = deque()
        self._num_taken = 0
        self.num_bytes = self.largest = 0

    def most_bytes(self, num_pieces: int) -> int:
        """Return the bytes of all buffers where a disk is so slow that every one is in use, each for any piece."""
        return min(num_pieces, self._limit) * self.largest

    def take(self, num_bytes: int, file: StateFile) -> Buffer:
        """Return a buffer of at least this size."""
        while self._writing and (self._is_written() or not self._free and self._num_made() >= self._limit):
            buffer, requests = self._writing.popleft()
            file.wait(requests)
            self._free.append(buffer)
        self._num_taken += 1
        self.largest = max(self.largest, num_bytes, BLOCK)
        fitting = next((buffer for buffer in self._free if buffer.num_bytes >= num_bytes), None)
        if fitting is not None:
            self._free.remove(fitting)
            return fitting
        if self._free:  # too small: a larger one takes its place
            self.num_bytes -= self._free.pop().num_bytes
        made = Buffer(max(num_bytes, BLOCK), self._device)
        self.num_bytes += made.num_bytes
        return made

    def _is_written(self) -> bool:
        return all(request.done() for request in self._writing[0][1])

    def _num_made(self) -> int:
        return self._num_taken + len(self._writing) + len(self._free)

    def give(self, buffer: Buffer, writes: list[Future[Any]]) -> None:
        """Take a buffer back, once it is written."""
        self._num_taken -= 1
        self._writing.append((buffer, writes))

    def drain(self, file: StateFile) -> None:
        """Block until everything is written."""
        while self._writing:
            buffer, requests = self._writing.popleft()
            file.wait(requests)
            self._free.append(buffer)

    def abandon(self) -> None:
        """After an error: wait for all requests, so that none uses a buffer that is taken again."""
        for _, requests in self._writing:
            for request in requests:
                request.cancel()
        if self._writing or self._num_taken:
            self._writing.clear()
            self._free.clear()
            self._num_taken = self.num_bytes = 0
