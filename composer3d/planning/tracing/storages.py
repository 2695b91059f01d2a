"""Exact bytes of storages: each counts once, from its creation until it is freed, whatever views it has."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat

if TYPE_CHECKING:
    import torch

    from composer3d import HostMemory

__all__ = ["IN_HOST", "LASTING", "MADE_FORWARD", "MADE_LATER", "StorageCounter"]

# Kinds of storages by their creation: before the step, in a forward, or anywhere else in the step; and those that lie
# in host memory, whenever they were made, which are no bytes of the device.
LASTING, MADE_FORWARD, MADE_LATER, IN_HOST = 0, 1, 2, 3


class StorageCounter:
    """Live bytes of this rank's storages, and their maximum.

    A storage counts once, from the operator that made it until its last reference is gone; a change of its size, by
    which FSDP2 frees and fills parameters, counts when it happens. Wrappers (DTensor) count by their local tensors. Not
    counted: tensors on meta, tensors of the fake mode in which DTensor computes global shapes, allocations inside
    kernels. The same class counts real and fake runs. Real and fake storages have the requested sizes; an allocator's
    rounding is not included.

    Args:
        at_growth: Called whenever live bytes grow.
        host: What plugins keep in host memory; None where the device's is the host's.

    Attributes:
        live: Bytes now, without those in host memory.
        peak: Most live bytes since `restart`.
        kinds: Bytes by `LASTING`, `MADE_FORWARD` and `MADE_LATER`, which are `live`, and `IN_HOST`.
        host_peak: Most bytes in host memory.
        num_in_host: Number of live storages there.
        at_leaving: Called with the clock of a storage that was made on the device, and a tensor of it that lies in host
            memory from now on.
        kind: Kind of storages made from now on.
        clock: Number of storages seen so far.
        is_paused: Whether DTensor is computing global shapes.
    """

    def __init__(self, at_growth: Callable[[], None] | None = None, host: HostMemory | None = None) -> None:
        self._at_growth, self._host = at_growth or (lambda: None), host
        self._sizes: dict[int, int] = {}
        self._kinds: dict[int, int] = {}
        self._births: dict[int, int] = {}
        self._references: dict[int, Any] = {}
        self.clock = 0
        self._moved: set[int] = set()  # clocks of storages that have left the device
        self.at_leaving: Callable[[int, Any], None] = lambda clock, tensor: None
        self.is_paused = False
        self._mode: Any = None
        self._is_mode_known = False
        self.live = self.peak = self.host_peak = self.num_in_host = 0
        self.kinds = [0, 0, 0, 0]
        self.kind = LASTING

    # ---- what is seen ------------------------------------------------------------------------------------------------

    def track(self, tensors: Iterable[Any]) -> None:
        """Count tensors that exist already."""
        for tensor in tensors:
            for plain in () if tensor is None else torch_compat.plain_tensors(tensor):
                self._see(plain)

    def see(self, result: Any, *, known: bool = False, is_in_host: bool = False) -> None:
        """Count what an operator returned.

        Args:
            result: Of the operator.
            known: Only update the sizes of storages that are counted already.
            is_in_host: Whether it lies in host memory.
        """
        if self.is_paused:
            return
        kind = type(result)
        if kind is tuple or kind is list:
            for item in result:
                self.see(item, known=known, is_in_host=is_in_host)
        elif hasattr(result, "untyped_storage"):
            self._see(result, known, is_in_host)

    def _see(self, tensor: torch.Tensor, is_known: bool = False, is_in_host: bool = False) -> None:
        mode = getattr(tensor, "fake_mode", None)
        if mode is not None:
            if not self._is_mode_known:
                self._mode, self._is_mode_known = torch_compat.active_fake_mode(), True
            if mode is not self._mode:
                return  # DTensor finds out global shapes in a fake mode of its own
        if (tensor.device if mode is None else tensor.fake_device).type == "meta":  # type: ignore[attr-defined]
            return  # propagation finds out global shapes on it, in the fake mode of a fake rank too
        storage = tensor.untyped_storage()
        key = storage._cdata
        size = storage.nbytes()
        known = self._sizes.get(key)
        if known is None:
            if is_known:
                return
            self.clock += 1
            is_away = is_in_host or (self._host is not None and self._host.has(storage))
            kind = IN_HOST if is_away else self.kind
            self._kinds[key], self._births[key] = kind, self.clock
            self.num_in_host += kind == IN_HOST
            self._references[key] = weakref.ref(storage, partial(self._forget, key))
            self._change(key, 0, size)
        elif known != size:
            self._change(key, known, size)

    def _change(self, key: int, before: int, after: int) -> None:
        self._sizes[key] = after
        kind = self._kinds[key]
        self.kinds[kind] += after - before
        if kind == IN_HOST:
            self.host_peak = max(self.host_peak, self.kinds[IN_HOST])
            return
        self.live += after - before
        if after > before:
            self._at_growth()
            if self.live > self.peak:
                self.peak = self.live

    def _forget(self, key: int, _: Any) -> None:
        size = self._sizes.pop(key, None)
        if size is None:
            return
        kind = self._kinds.pop(key)
        self.kinds[kind] -= size
        self.live -= 0 if kind == IN_HOST else size
        self.num_in_host -= kind == IN_HOST
        del self._births[key], self._references[key]

    @property
    def num_live(self) -> int:
        """Number of live storages, without those in host memory."""
        return len(self._sizes) - self.num_in_host

    def is_in_host(self, tensor: Any) -> bool:
        """Return whether a plain tensor lies in host memory."""
        return self._kinds.get(tensor.untyped_storage()._cdata) == IN_HOST

    # ---- questions ---------------------------------------------------------------------------------------------------

    def restart(self) -> None:
        """Reset the peak to the live bytes."""
        self.peak = self.live

    def settle(self) -> None:
        """Count all live storages as lasting."""
        self._kinds = {key: kind if kind == IN_HOST else LASTING for key, kind in self._kinds.items()}
        self.kinds = [self.live, 0, 0, self.kinds[IN_HOST]]
        self.host_peak = self.kinds[IN_HOST]

    def bytes_of(self, tensors: Iterable[Any]) -> int:
        """Return the bytes of the storages of some tensors, each once; plain, or wrappers; none in host memory."""
        return sum(size for _, size in self.births_of(tensors))

    def births_of(self, tensors: Iterable[Any]) -> list[tuple[int, int]]:
        """Return (clock at its creation, bytes) of the storages of some tensors."""
        keys = {key for tensor in tensors if tensor is not None for key in _keys(tensor)}
        mine = [key for key in keys if self._kinds.get(key, IN_HOST) != IN_HOST]
        return [(self._births[key], self._sizes[key]) for key in mine]

    def recount(self, tensors: Iterable[Any]) -> None:
        """Count storages of some tensors that forwards made as made elsewhere."""
        for key in (key for tensor in tensors for key in _keys(tensor)):
            if self._kinds.get(key) == MADE_FORWARD:
                self._kinds[key] = MADE_LATER
                self.kinds[MADE_FORWARD] -= self._sizes[key]
                self.kinds[MADE_LATER] += self._sizes[key]

    # ---- as a context ------------------------------------------------------------------------------------------------

    def __enter__(self) -> StorageCounter:
        """Subscribe to changes of storage sizes, and to DTensor's computations of global shapes."""
        self._watch = torch_compat.watch_storages(self._resized, self._pause)
        self._watch.__enter__()
        if self._host is not None:
            self._host.left = self._leave
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Unsubscribe."""
        self._watch.__exit__(kind, error, tb)
        if self._host is not None:
            self._host.left = lambda tensor: None

    def _resized(self, storage: Any) -> None:
        key = storage._cdata
        if key in self._sizes:
            self._change(key, self._sizes[key], storage.nbytes())

    def _leave(self, tensor: Any) -> None:
        """Count a tensor's storage as of host memory from now on."""
        key = tensor.untyped_storage()._cdata
        kind = self._kinds.get(key, IN_HOST)
        if kind != IN_HOST:
            size = self._sizes[key]
            self._change(key, size, 0)
            self._kinds[key] = IN_HOST
            self.num_in_host += 1
            self._change(key, 0, size)
            self._moved.add(self._births[key])
        if self._births.get(key) in self._moved:
            self.at_leaving(self._births[key], tensor)

    def _pause(self, is_paused: bool) -> None:
        self.is_paused = is_paused


def _keys(tensor: Any) -> list[int]:
    return [torch_compat.storage_key(plain) for plain in torch_compat.plain_tensors(tensor)]
