"""Transforms of `torch.func` around a forward: vmap, grad, jvp."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

__all__ = ["outside_transforms", "untransformed"]


def outside_transforms() -> AbstractContextManager[Any]:
    """Return a context in which operators are not transformed; for work of our own inside of a transformed forward.

    functorch's own, which takes the transforms off its stack and puts them back; private (torch 2.11-2.15).
    """
    import torch

    if torch._C._functorch.peek_interpreter_stack() is None:
        return nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    cleared: AbstractContextManager[Any] = temporarily_clear_interpreter_stack()
    return cleared


def untransformed(tensor: Any) -> Any:
    """Return the whole tensor of which a transform passes a function one sample, or a dual number; others as they are.

    Private (torch 2.11-2.15).
    """
    import torch

    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor
