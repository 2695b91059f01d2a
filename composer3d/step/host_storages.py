"""Storages that plugins keep in host memory, told to plans: they compute on the CPU, whose memory is the host's."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

from composer3d import torch_compat

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["HostMemory"]


class HostMemory:
    """Stash of what lies in host memory: `context.stash(HostMemory)`.

    A plugin that moves tensors off the device allocates and copies them inside of its contexts. In a run they do
    nothing; a plan for an accelerator counts neither as the device's memory what was allocated so, nor as the device's
    work what was copied.

    Attributes:
        copies: In a plan, what the operators at work are: copies between host and device, on streams of their own or
            waited for, such copies beside others in the other direction, which take no time of their own, or None,
            the device's.
        pooled: Bytes that a plugin keeps in host memory for pieces, however many of them there are.
        is_allocating: Whether tensors that are made lie in host memory.
        stepped: Parameters that the host steps: the optimizer's state of them lies there too.
        left: Called with a plain tensor that lies in host memory from now on.
        disk: Called with `read` or `write` and the bytes that a drive reads or writes beside all else.
    """

    def __init__(self) -> None:
        self.copies: Literal["streams", "waited", "beside"] | None = None
        self.pooled = 0
        self.is_allocating = False
        self.stepped: set[Tensor] = set()
        self.left: Callable[[Any], None] = lambda tensor: None
        self.disk: Callable[[Literal["read", "write"], int], None] = lambda what, num_bytes: None
        self._storages: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    @contextlib.contextmanager
    def allocating(self) -> Iterator[None]:
        """Make tensors in host memory inside."""
        before, self.is_allocating = self.is_allocating, True
        try:
            yield
        finally:
            self.is_allocating = before

    @contextlib.contextmanager
    def copying(self, *, beside: bool = False, waits: bool = False) -> Iterator[None]:
        """Copy between host and device inside.

        Args:
            beside: While as much is copied in the other direction, which the link does at the same time.
            waits: Whether the device's operators wait for it, as for what stands between them on one stream.
        """
        before, self.copies = self.copies, "beside" if beside else "waited" if waits else "streams"
        try:
            yield
        finally:
            self.copies = before

    def keep(self, tensor: Tensor) -> None:
        """Note that a tensor lies in host memory from now on."""
        for plain in torch_compat.plain_tensors(tensor):
            storage = plain.untyped_storage()
            self._storages[storage._cdata] = storage
            self.left(plain)

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies in host memory, or a part of it."""
        return any(plain.untyped_storage()._cdata in self._storages for plain in torch_compat.plain_tensors(tensor))

    def has(self, storage: Any) -> bool:
        """Return whether a storage that is new to a plan lies in host memory."""
        return self.is_allocating or storage._cdata in self._storages
