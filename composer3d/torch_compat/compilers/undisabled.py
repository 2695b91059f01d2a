"""Calls of what torch keeps from its compiler, where nothing is compiled."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from composer3d.torch_compat.compilers.settings_alone import KEPT, settings_alone

__all__ = ["nothing_compiles"]

# Where torch has functions that steps, optimizers, checkpoints and kernels on meta call, and dynamo is not to trace.
_HOLDERS = (
    ("torch.distributed.tensor", "DTensor"),
    ("torch.distributed.fsdp._fully_shard._fsdp_param_group", "FSDPParamGroup"),
    ("torch.distributed.fsdp._fully_shard._fsdp_state", "FSDPState"),
    ("torch.optim", "Optimizer"),
    ("torch.utils.checkpoint", ""),
    ("torch._refs", ""),
    ("torch._refs.nn.functional", ""),
    ("torch._refs.special", ""),
)
_open = 0


@contextlib.contextmanager
def nothing_compiles() -> Iterator[None]:
    """Promise that nothing inside is compiled: what dynamo is not to trace is then called as it is.

    torch calls it by way of dynamo, for whose import the first call takes 0.8 s, and each call of a hook of FSDP2 wraps
    the hook anew. Both ways are private: a function of `torch._compile`, which keeps what it calls as an attribute of
    the function, and one of FSDP2 (torch 2.13; where FSDP2 has none, its hooks are left as they are).
    """
    global _open
    changed: list[tuple[Any, str, Any]] = []
    if not _open:
        holders = [found for found in map(_holder, _HOLDERS) if found is not None]
        functions, hooks = _found(*holders, *_modes())
        changed += [(function, KEPT, vars(function).get(KEPT)) for function in functions]
        for function in functions:
            setattr(function, KEPT, function)
        for holder, name, hook in hooks:
            setattr(holder, name, _decorated(hook))
        changed += hooks
    _open += 1
    try:
        with settings_alone():
            yield
    finally:
        _open -= 1
        for owner, name, before in changed:
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)


def _holder(place: tuple[str, str]) -> Any:
    """Return a module or a class that was imported; what was not is not called."""
    module = sys.modules.get(place[0])
    return getattr(module, place[1], None) if place[1] else module


def _modes() -> Iterator[Any]:
    """Yield torch's classes of dispatch modes, fake ones among them; who defines others says how they are called."""
    from torch.utils._python_dispatch import TorchDispatchMode

    waiting = [TorchDispatchMode]
    while waiting:
        waiting += (cls := waiting.pop()).__subclasses__()
        if cls.__module__.startswith("torch."):
            yield cls


@functools.lru_cache(maxsize=1)
def _found(*holders: Any) -> tuple[list[Any], list[tuple[Any, str, Any]]]:
    """Return the functions that keep how they are called, and the hooks of FSDP2 with their classes and names."""
    kept = _code_of("torch._compile", "_disable_dynamo")
    wrapped = _code_of("torch.distributed.fsdp._fully_shard._fsdp_common", "_dynamo_disable")
    functions: dict[int, Any] = {}  # by number: several names have one function
    hooks = []
    for holder in holders:
        for name, value in vars(holder).items():
            if getattr(value, "__code__", None) is wrapped is not None:
                hooks.append((holder, name, value))
            for each in _inside(value):
                if each.__code__ is kept:
                    functions[id(_decorated(each))] = _decorated(each)
    return [*functions.values()], hooks


def _inside(value: Any, depth: int = 4) -> Iterator[Any]:
    """Yield a function, and those that it calls by its closure: torch's decorators keep what they decorate there."""
    if isinstance(value, FunctionType) and depth:
        yield value
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty cell
                yield from _inside(cell.cell_contents, depth - 1)


def _decorated(function: Any) -> Any:
    """Return what a decorated function calls; `__wrapped__` may be what a decorator inside of it says."""
    return next(cell.cell_contents for cell in function.__closure__ if callable(cell.cell_contents))


def _code_of(module: str, decorator: str) -> Any:
    """Return the code of what a decorator returns; None where torch has no such decorator, or has not imported it."""
    decorate = getattr(sys.modules.get(module), decorator, None)
    return None if decorate is None else decorate(_nothing).__code__


def _nothing() -> None:
    """Stand for what is decorated."""
