"""Optimizer of any class whose moments are on disk, with a few pieces at a time in memory."""

from __future__ import annotations

import contextlib
import inspect
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat
from composer3d_plugins.sharding.nvme_offload.disk import StateFile
from composer3d_plugins.sharding.nvme_offload.disk_buffers import Buffer, Buffers, Copies
from composer3d_plugins.sharding.nvme_offload.file_layout import (
    Fields,
    Layout,
    Member,
    moments,
    sharded_as,
    split_groups,
)

if TYPE_CHECKING:
    from concurrent.futures import Future

    from torch import Tensor
    from torch.optim import Optimizer

__all__ = ["on_disk"]


def on_disk(cls: type[Optimizer], *, file: StateFile, piece_bytes: int, depth: int, device: Copies) -> Any:
    """Return a subclass, of the same name, that steps pieces of its parameters one after the other.

    Args:
        cls: Any optimizer that updates each parameter independently.
        file: Holds the moments.
        piece_bytes: Most bytes of parameters that are stepped at once.
        depth: Number of pieces read ahead, and of those that may still be on their way back.
        device: Copies between buffers and the device on which the optimizer steps.
    """
    base: Any = cls
    stepper = Stepper(cls, file=file, piece_bytes=piece_bytes, depth=depth, device=device)

    class OnDisk(base):
        def step(self, closure: Any = None) -> None:
            """Step every piece while the next ones are read and the last ones written."""
            assert closure is None, "the composition refuses closures"
            stepper.step(self)

        def plain_state(self, *, write: bool) -> contextlib.AbstractContextManager[None]:
            """Present the moments as tensors for a checkpoint; see `composer3d.checkpoint`."""
            return stepper.plain_state(self, write=write)

    OnDisk.__name__ = OnDisk.__qualname__ = cls.__name__
    return OnDisk


class Stepper:
    """Steps an optimizer piece by piece.

    Args:
        cls: The optimizer's own class.
        file: Holds the moments.
        piece_bytes: Most bytes of parameters that are stepped at once.
        depth: Number of pieces read ahead.
        device: Copies between buffers and the device on which the optimizer steps.
    """

    def __init__(self, cls: type[Optimizer], *, file: StateFile, piece_bytes: int, depth: int, device: Copies) -> None:
        # The bare step: hooks on the optimizer run once a step, not once a piece.
        self._inner, self._cls = inspect.unwrap(cls.step), cls
        self._file, self._piece_bytes, self._depth, self._device = file, piece_bytes, depth, device
        self._fields = Fields(file)
        self._buffers = Buffers(2 * depth + 1, device.device)

    def step(self, optimizer: Any) -> None:
        """Step every piece while the next ones are read and the last ones written."""
        import torch

        groups = optimizer.param_groups
        self._fields.keep_only(optimizer.state)
        pieces = list(split_groups(groups, self._piece_bytes, self._cls))
        reads: deque[tuple[Buffer, Layout, list[Future[None]]]] = deque()
        try:
            with torch.no_grad():
                for index, piece in enumerate(pieces):
                    while len(reads) <= self._depth and index + len(reads) < len(pieces):
                        reads.append(self._fetch(pieces[index + len(reads)]))
                    buffer, layout, requests = reads.popleft()
                    self._file.wait(requests)
                    self._step_piece(optimizer, piece, buffer, layout)
            self._buffers.drain(self._file)
            self._device.host.pooled = self._buffers.most_bytes(len(pieces))
        finally:
            optimizer.param_groups = groups
            self._buffers.abandon()

    def _fetch(self, piece: list[Member]) -> tuple[Buffer, Layout, list[Future[None]]]:
        layout = self._fields.reading(piece)
        buffer = self._buffers.take(layout.num_bytes, self._file)
        return buffer, layout, self._file.read(layout.ranges, buffer.memory)

    def _step_piece(self, optimizer: Any, piece: list[Member], buffer: Buffer, layout: Layout) -> None:
        for member, name, position, dtype in layout.places:
            view = buffer.view(position, member.num_elements, dtype).view(member.shape)
            optimizer.state[member.key][name] = member.like(self._device.here(view))
        for member in piece:
            member.begin(optimizer.state)
        optimizer.param_groups = [
            {**group, "params": [member.key for member in piece if member.group is group]}
            for group in {id(member.group): member.group for member in piece}.values()
        ]
        self._inner(optimizer)
        self._store(optimizer, piece, buffer, layout)

    def _store(self, optimizer: Any, piece: list[Member], buffer: Buffer, before: Layout) -> None:
        values = {member: moments(member, optimizer.state) for member in piece}
        for member in piece:
            self._fields.add(member, values[member])
        layout = self._fields.writing(piece, values)
        if layout != before:  # the step made state that was not there
            buffer.synchronise()  # the device may still be reading what was
            self._buffers.give(buffer, [])
            buffer = self._buffers.take(layout.num_bytes, self._file)
        for member, name, position, dtype in layout.places:
            view, value = buffer.view(position, member.num_elements, dtype), torch_compat.local_of(values[member][name])
            if not _is_same(view, value):
                self._device.away(view.view(member.shape), value)
        for member in piece:
            member.end(optimizer.state)
        buffer.synchronise()
        self._buffers.give(buffer, self._file.write(layout.ranges, buffer.memory))

    @contextlib.contextmanager
    def plain_state(self, optimizer: Any, *, write: bool) -> Iterator[None]:
        """Present the moments as tensors for a checkpoint: the file mapped as memory."""
        import torch

        self._fields.keep_only(optimizer.state)
        memory = self._file.map() if self._file.num_bytes else None
        shown = list(self._fields.written())
        try:
            for parameter, name, field in shown:
                here = torch_compat.local_of(parameter)
                assert memory is not None, "there are fields"
                value: Tensor = (
                    torch.frombuffer(memory, dtype=field.dtype, count=here.numel(), offset=field.offset)
                    if here.numel()
                    else torch.empty(0, dtype=field.dtype)
                ).view(here.shape)
                optimizer.state[parameter][name] = sharded_as(parameter, value)
            yield
            if write and memory is not None:
                memory.flush()
        finally:
            for parameter, name, _ in shown:
                optimizer.state[parameter].pop(name, None)


def _is_same(view: Tensor, value: Tensor) -> bool:
    """Return whether two tensors of one dtype are the same memory, which has no address in a plan."""
    same_storage = torch_compat.storage_key(view) == torch_compat.storage_key(value)
    return same_storage and view.storage_offset() == value.storage_offset()
