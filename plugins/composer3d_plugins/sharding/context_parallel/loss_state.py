"""State that a loss function reads besides its arguments: where it changes, the function may relate positions anew."""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch

__all__ = ["COLLECTIONS", "PLAIN", "held_by", "is_library", "state_of"]

PLAIN = (type(None), bool, int, float, complex, str, bytes)
COLLECTIONS = (list, tuple, set, frozenset, deque)
# Objects that are looked at; a loss may hold a trainer, and that everything.
MOST = 2000
# What is known not to change what a loss does, or is the code of libraries.
LEFT_OUT = (torch.Tensor, type, types.ModuleType, torch.device, torch.dtype)
LIBRARIES = ("torch", "numpy", "composer3d", "builtins")


def state_of(loss: Any) -> list[Any]:
    """Return the numbers, strings and flags that a loss function can read: of itself, of closures, and of globals.

    Args:
        loss: A function, a partial, a method, or an object that is called.
    """
    seen: set[int] = set()
    found: list[Any] = []
    waiting = deque([loss])
    while waiting and len(seen) < MOST:
        value = waiting.popleft()
        if isinstance(value, PLAIN):
            found.append(value)
        elif not isinstance(value, LEFT_OUT) and id(value) not in seen:
            seen.add(id(value))
            held = list(held_by(value))
            found.append((type(value).__name__, len(held)))
            waiting.extend(held)
    return found


def is_library(name: str | None) -> bool:
    """Return whether a module of this name is of a library."""
    return (name or "").partition(".")[0] in LIBRARIES


def held_by(value: Any) -> Iterator[Any]:
    """Yield what an object holds, in an order that stays."""
    if isinstance(value, Mapping):
        yield from value
        yield from value.values()
    elif isinstance(value, COLLECTIONS):
        yield from value
    elif isinstance(value, types.FunctionType):
        if not is_library(value.__module__):
            yield from _read_by(value)
    elif isinstance(value, types.MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, functools.partial | functools.partialmethod):
        yield from (value.func, value.args, value.keywords)
    else:
        yield from dict(getattr(value, "__dict__", {})).values()
        yield from (getattr(value, name) for name in getattr(type(value), "__slots__", ()) if hasattr(value, name))
        yield from (cls.__dict__["__call__"] for cls in type(value).__mro__ if "__call__" in cls.__dict__)


def _read_by(function: types.FunctionType) -> Iterator[Any]:
    """Yield what a function's code names: variables of functions around it, defaults and globals."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            yield None
    yield from (function.__defaults__, function.__kwdefaults__)
    names = _names(function.__code__)
    for value in (function.__globals__[name] for name in names if name in function.__globals__):
        if not isinstance(value, types.ModuleType):
            yield value
        elif not is_library(value.__name__):
            yield from (vars(value)[name] for name in names if name in vars(value))


def _names(code: types.CodeType) -> list[str]:
    """Return the names that code reads, and the functions inside of it."""
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return [*code.co_names, *(name for each in inner for name in _names(each))]
