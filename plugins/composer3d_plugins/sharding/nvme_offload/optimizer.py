"""An optimizer of any class whose moments are on disk, and in memory a few pieces at a time."""

from __future__ import annotations

import contextlib
import inspect
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from composer3d_plugins.sharding.nvme_offload.disk import StateFile
from composer3d_plugins.sharding.nvme_offload.memory import Buffer, Buffers
from composer3d_plugins.sharding.nvme_offload.pieces import Fields, Layout, Member, cut, cut_as, local, moments

if TYPE_CHECKING:
    from concurrent.futures import Future

    import torch
    from torch import Tensor
    from torch.optim import Optimizer

__all__ = ["on_disk"]


def on_disk(cls: type[Optimizer], *, file: StateFile, piece_bytes: int, depth: int, device: torch.device) -> Any:
    """Return a subclass, of the same name, that steps pieces of its parameters one after the other.

    Args:
        cls: Any optimizer whose parameters do not look at each other.
        file: Where the moments are.
        piece_bytes: Parameters of at most this size are stepped at once.
        depth: So many pieces are read ahead, and as many may still be on their way back.
        device: On which it steps.
    """
    base: Any = cls
    # The bare step: hooks on the optimizer run once a step, not once a piece.
    inner = inspect.unwrap(base.step)
    fields = Fields(file)
    buffers = Buffers(2 * depth + 1, device)

    class OnDisk(base):
        param_groups: list[dict[str, Any]]

        def step(self, closure: Any = None) -> None:
            """Step every piece while the next ones are read and the last ones written."""
            import torch

            assert closure is None, "the composition refuses closures"
            groups = self.param_groups
            fields.keep_only(self.state)
            pieces = list(cut(groups, piece_bytes, cls))
            reads: deque[tuple[Buffer, Layout, list[Future[None]]]] = deque()
            try:
                with torch.no_grad():
                    for index in range(len(pieces)):
                        while len(reads) + index < min(index + depth + 1, len(pieces)):
                            reads.append(self._fetch(pieces[index + len(reads)]))
                        buffer, layout, requests = reads.popleft()
                        file.wait(requests)
                        self._step_piece(pieces[index], buffer, layout)
                buffers.drain(file)
            finally:
                self.param_groups = groups
                buffers.abandon()

        def _fetch(self, piece: list[Member]) -> tuple[Buffer, Layout, list[Future[None]]]:
            layout = fields.reading(piece)
            buffer = buffers.take(layout.num_bytes, file)
            return buffer, layout, file.read(layout.ranges, buffer.memory)

        def _step_piece(self, piece: list[Member], buffer: Buffer, layout: Layout) -> None:
            for member, name, position, dtype in layout.places:
                view = buffer.view(position, member.num_elements, dtype).view(member.shape)
                self.state[member.key][name] = member.like(view.to(device, non_blocking=True))
            for member in piece:
                member.begin(self.state)
            self.param_groups = [
                {**group, "params": [member.key for member in piece if member.group is group]}
                for group in {id(member.group): member.group for member in piece}.values()
            ]
            inner(self)
            self._store(piece, buffer, layout)

        def _store(self, piece: list[Member], buffer: Buffer, before: Layout) -> None:
            values = {member: moments(member, self.state) for member in piece}
            for member in piece:
                fields.add(member, values[member])
            layout = fields.writing(piece, values)
            if layout != before:  # the step made state that was not there
                buffers.give(buffer, [])
                buffer = buffers.take(layout.num_bytes, file)
            for member, name, position, dtype in layout.places:
                view, value = buffer.view(position, member.num_elements, dtype), local(values[member][name])
                if view.data_ptr() != value.data_ptr():
                    view.view(member.shape).copy_(value, non_blocking=True)
            for member in piece:
                member.end(self.state)
            buffer.synchronise()
            buffers.give(buffer, file.write(layout.ranges, buffer.memory))

        @contextlib.contextmanager
        def plain_state(self, *, write: bool) -> Iterator[None]:
            """Show the moments as tensors for a checkpoint: the file as memory, read as it is used."""
            import torch

            fields.keep_only(self.state)
            memory = file.map() if file.num_bytes else None
            shown = list(fields.written())
            try:
                for parameter, name, field in shown:
                    here = local(parameter)
                    assert memory is not None, "there are fields"
                    value: Tensor = (
                        torch.frombuffer(memory, dtype=field.dtype, count=here.numel(), offset=field.offset)
                        if here.numel()
                        else torch.empty(0, dtype=field.dtype)
                    ).view(here.shape)
                    self.state[parameter][name] = cut_as(parameter, value)
                yield
                if write and memory is not None:
                    memory.flush()
            finally:
                for parameter, name, _ in shown:
                    self.state[parameter].pop(name, None)

    OnDisk.__name__ = OnDisk.__qualname__ = cls.__name__
    return OnDisk
