"""Modes that the caller has entered: turned off for a while, with the default device, which is one of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from composer3d.torch_compat.compilers.captured_graphs import outside_function_modes

__all__ = ["outside_modes"]


@contextmanager
def outside_modes() -> Iterator[None]:
    """Leave all modes of torch functions and of operators, and the default device.

    `torch.set_default_device(None)` inside `with torch.device(...)` takes the wrong one of the two from the stack, and
    the other stays. The stacks, and the object of the default device, are private (torch 2.11-2.15).
    """
    import torch
    from torch.utils import _device, _python_dispatch

    stated = torch._GLOBAL_DEVICE_CONTEXT
    before, current = getattr(stated, "device_context", None), _device.CURRENT_DEVICE
    is_seen = torch._C._len_torch_dispatch_stack() > 0
    with outside_function_modes(), _python_dispatch._disable_current_modes() if is_seen else nullcontext():
        stated.device_context, _device.CURRENT_DEVICE = None, None
        try:
            yield
        finally:
            stated.device_context, _device.CURRENT_DEVICE = before, current
