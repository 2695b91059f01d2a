"""Surroundings of a function: transforms of `torch.func`, a model's own autograd functions, modes, autocast."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

__all__ = [
    "autocast_question",
    "calling_function",
    "enter_mode_below",
    "function_mode_counter",
    "is_transforming",
    "outside_transforms",
    "untransformed",
]


def is_transforming() -> bool:
    """Return whether a transform is at work; private (torch 2.11-2.15)."""
    import torch

    return torch._C._functorch.peek_interpreter_stack() is not None


def calling_function() -> type | None:
    """Return the innermost `torch.autograd.Function` whose forward is at work; None where none is.

    By the frame of the method that calls all of them, since models keep it bound (`scan = Scan.apply`).
    """
    import torch

    frame: Any = sys._getframe()
    code = vars(torch.autograd.Function)["apply"].__func__.__code__
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return None if frame is None else frame.f_locals["cls"]


def outside_transforms() -> AbstractContextManager[Any]:
    """Return a context in which operators are not transformed; for work of our own inside of a transformed forward.

    functorch's own, which takes the transforms off its stack and puts them back; private (torch 2.11-2.15).
    """
    if not is_transforming():
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


def function_mode_counter() -> Callable[[], int]:
    """Return what tells how many modes of torch functions are on, for code that asks before every function.

    The stack of modes is private (torch 2.11-2.15).
    """
    import torch

    return torch._C._len_torch_function_stack


def autocast_question() -> Callable[[], bool]:
    """Return what tells whether autocast is on for any device; public only for the compiler (torch 2.11-2.15)."""
    import torch

    return torch._C._is_any_autocast_enabled


def enter_mode_below(mode: Any) -> None:
    """Turn a mode of torch functions on as the outermost one, so that those around it are left first (2.11-2.15)."""
    from torch import overrides

    stack = overrides._get_current_function_mode_stack()
    for _ in stack:
        overrides._pop_mode()
    for each in (mode, *stack):
        overrides._push_mode(each)
