"""Work of the host in a step for an accelerator: copies over its link, operators in its memory, and drives.

A plan's tensors are all on a fake CPU. What lies in host memory is known by its storage, so that an operator on it is
either the host's, or the device's with a copy of what it reads there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from composer3d import torch_compat
from composer3d.planning.tracing.calls import Calls, calls_of, flat, host_copy
from composer3d.planning.tracing.traced import (
    DISK_READ,
    DISK_WRITE,
    FROM_DEVICE,
    IN_HOST,
    TO_DEVICE,
    WAITED_COPY,
    SegmentKind,
)

if TYPE_CHECKING:
    from composer3d import HostMemory
    from composer3d.planning.tracing.storages import StorageCounter

__all__ = ["OffloadedWork", "Placed", "host_state", "state_tensors"]

_BLOCK = 4096  # of a drive, in bytes
_AFTER = ("gradients", "optimizer")  # where what is made of tensors in host memory alone stays there
_LISTS = ("aten._foreach_", "aten._fused_")  # operators that take each tensor of a list where it lies


class Placed(NamedTuple):
    """Place of an operator some of whose tensors lie in host memory.

    Args:
        inside: Its tensors in host memory.
        outside: Its other ones.
        is_host: Whether the host computes it, or the part of it that is in its memory.
        is_whole: Whether the device has no part in it.
    """

    inside: Sequence[Any]
    outside: Sequence[Any]
    is_host: bool
    is_whole: bool


class OffloadedWork:
    """Counts what the host and its drives do in a step.

    Args:
        host: What plugins tell of host memory.
        storages: Of the step.
        count: Adds calls to the open stretch.
        is_accelerated: Whether the device has memory of its own.
    """

    def __init__(
        self,
        host: HostMemory,
        storages: StorageCounter,
        count: Callable[[Calls, int], None],
        *,
        is_accelerated: bool,
    ) -> None:
        self.host, self._storages, self._count = host, storages, count
        self._is_accelerated = is_accelerated
        self._left: set[tuple[int, int]] = set()  # by the storage's clock and the offset in it
        storages.at_leaving = self._leave

    @contextlib.contextmanager
    def watching_disk(self) -> Iterator[None]:
        """Record what a drive reads and writes inside, in blocks: their number is proportional to the parameters."""

        def moved(what: str, num_bytes: int) -> None:
            name = DISK_READ if what == "read" else DISK_WRITE
            self._count((name, "", (), 0, _BLOCK), -(-num_bytes // _BLOCK))

        before, self.host.disk = self.host.disk, moved
        try:
            yield
        finally:
            self.host.disk = before

    def copied(self, args: tuple[Any, ...], result: Any) -> bool:
        """Count an operator that is a plugin's own copy between host and device; return whether it is one."""
        copies = self.host.copies if self._is_accelerated else None
        if copies is not None and copies != "beside":
            self._count(host_copy(args, result, waits=copies == "waited"), 1)
        return copies is not None

    def placed(self, name: str, operator: Any, args: Any, kwargs: Any, *, kind: SegmentKind) -> Placed | None:
        """Return where an operator is computed; None for one without tensors in host memory.

        Args:
            name: Of the operator.
            operator: The operator.
            args: Its arguments.
            kwargs: Its named arguments.
            kind: Of the stretch that it is in.
        """
        if not self._is_accelerated or self.host.copies is not None or not self._storages.num_in_host:
            return None
        tensors = [each for each in flat((*args, *kwargs.values())) if hasattr(each, "untyped_storage") and each.dim()]
        inside = [each for each in tensors if self._storages.is_in_host(each)]
        if not inside:
            return None
        outside = [each for each in tensors if not self._storages.is_in_host(each)]
        if name.startswith(_LISTS):
            return Placed(inside, outside, is_host=True, is_whole=not outside)
        if torch_compat.is_in_place(operator):
            written = flat((torch_compat.written_tensors(operator, args, kwargs),))
            is_host = any(self._storages.is_in_host(each) for each in written if hasattr(each, "untyped_storage"))
        else:
            # Gathering is the device's: what it reads in host memory comes to the device first.
            is_host = kind in _AFTER and not outside and not name.startswith("fsdp.")
        return Placed(inside, outside, is_host=is_host, is_whole=is_host)

    def count(self, placed: Placed, name: str, operator: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Count what the host does of an operator, and what is copied for it."""
        if not placed.is_host:
            for each in placed.inside:
                self._count(_copy(TO_DEVICE, each), 1)
            return
        if placed.is_whole:
            for each in placed.outside:
                self._count(_copy(WAITED_COPY, each), 1)
        _, dtype, shapes, flops, moved = calls_of(name, operator, args, kwargs, result)
        if name.startswith("aten._fused_"):  # which write gradients only where these have a scale
            moved -= sum(_bytes_of(each) for each in flat((args[1],)))
        if not placed.is_whole:
            parts = [sum(map(_bytes_of, each)) for each in (placed.inside, placed.outside)]
            moved = moved * parts[0] // sum(parts)
        self._count((f"{IN_HOST}{name}", dtype, shapes, flops, moved), 1)

    def _leave(self, clock: int, tensor: Any) -> None:
        """Count a tensor that was made on the device, and lies in host memory from now on."""
        if (clock, tensor.storage_offset()) not in self._left:
            self._left.add((clock, tensor.storage_offset()))
            self._count(_copy(FROM_DEVICE, tensor), 1)


def state_tensors(optimizer: Any) -> list[Any]:
    """Return the tensors of an optimizer's state."""
    return [leaf for state in optimizer.state.values() for leaf in _tensors(state)]


def host_state(optimizer: Any, host: HostMemory) -> list[Any]:
    """Return those of parameters that the host steps."""
    return [leaf for parameter in host.stepped for leaf in _tensors(optimizer.state.get(parameter, {}))]


def _tensors(state: Any) -> list[Any]:
    import torch

    return [leaf for leaf in torch_compat.tree_leaves(state) if isinstance(leaf, torch.Tensor)]


def _copy(name: str, tensor: Any) -> Calls:
    return name, str(tensor.dtype).removeprefix("torch."), (tuple(tensor.shape),), 0, _bytes_of(tensor)


def _bytes_of(tensor: Any) -> int:
    size: int = tensor.numel() * tensor.element_size()
    return size
