"""Bytes that tensors hold, exactly: every storage from the operator that makes it until it is gone."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from unittest import mock

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Count the storages of plain tensors that operators make; DTensors are counted by what they hold here.

    Attributes:
        live: Bytes now.
        peak: The most since `reset`.
    """

    def __init__(self, *known):
        super().__init__()
        self.live = self.peak = 0
        self._sizes = {}
        self._stack = contextlib.ExitStack()
        for tensor in known:
            self.add(tensor)

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # nothing inside is compiled; else the first operator imports the compiler, for a second

    def __enter__(self):
        resize = torch.UntypedStorage.resize_

        def resized(storage, size):
            # FSDP2 frees and takes the memory of gathered parameters so.
            before = storage.nbytes()
            result = resize(storage, size)
            if storage._cdata in self._sizes:
                self._sizes[storage._cdata] = size
                self._change(size - before)
            return result

        self._stack.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", resized))
        return super().__enter__()

    def __exit__(self, *error):
        self._stack.close()
        return super().__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(cls, DTensor) for cls in types):
            return NotImplemented
        result = function(*args, **(kwargs or {}))
        for leaf in torch.utils._pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf)
        return result

    def add(self, tensor):
        tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        if storage._cdata not in self._sizes:
            self._sizes[storage._cdata] = storage.nbytes()
            self._change(storage.nbytes())
            weakref.finalize(storage, self._gone, storage._cdata)

    def settled(self, at_most, limit_s=5.0):
        """Bytes alive once they are no more than ``at_most``, or those of after ``limit_s`` seconds.

        Gloo's thread holds the tensors of a collective that has ended until it gets the interpreter's lock, which the
        thread that waited for the collective has.
        """
        deadline = time.monotonic() + limit_s
        while self.live > at_most and time.monotonic() < deadline:
            threading.Event().wait(0.001)
        return self.live

    def reset(self):
        self.peak = self.live

    def _gone(self, key):
        self._change(-self._sizes.pop(key))

    def _change(self, num_bytes):
        self.live += num_bytes
        self.peak = max(self.peak, self.live)
