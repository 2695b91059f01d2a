"""Storages that plugins keep in host memory, told to plans: they compute on the CPU, whose memory is the host's."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

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
        copies: In a plan, what the operators at work are: copies between host and device, such copies beside others in
            the other direction, which take no time of their own, or None, the device's.
        is_allocating: Whether tensors that are made lie in host memory.
        stepped: Parameters that the host steps: the optimizer's state of them lies there too.
        left: Called with a storage that now lies in host memory.
    """

    def __init__(self) -> None:
        self.copies: bool | None = None
        self.is_allocating = False
        self.stepped: set[Tensor] = set()
        self.left: Callable[[Any], None] = lambda storage: None
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
    def copying(self, *, beside: bool = False) -> Iterator[None]:
        """Copy between host and device inside.

        Args:
            beside: While as much is copied in the other direction, which the link does at the same time.
        """
        before, self.copies = self.copies, not beside
        try:
            yield
        finally:
            self.copies = before

    def keep(self, tensor: Tensor) -> None:
        """Note that a tensor lies in host memory from now on."""
        for plain in torch_compat.plain_tensors(tensor):
            storage = plain.untyped_storage()
            self._storages[storage._cdata] = storage
            self.left(storage)

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies in host memory, or a part of it."""
        return any(plain.untyped_storage()._cdata in self._storages for plain in torch_compat.plain_tensors(tensor))

    def has(self, storage: Any) -> bool:
        """Return whether a storage that is new to a plan lies in host memory."""
        return self.is_allocating or storage._cdata in self._storages
