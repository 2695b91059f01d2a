"""Objects that code can reach: of modules, of lists and objects in these, of closures, and of globals that it names."""

from __future__ import annotations

import functools
import types
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["PLAIN", "held_by", "reached_from", "tensors_of"]

PLAIN = (type(None), bool, int, float, complex, str, bytes)
_COLLECTIONS = (list, tuple, set, frozenset, deque)
# Objects that are searched, once: of a module there are some twenty.
_MOST = 200_000
_LEFT_OUT = (Tensor, *PLAIN, torch.device, torch.dtype, types.ModuleType)
# Tensors on meta in a dry run, whether a forward leaves them there or not.
_OWN = ("_parameters", "_buffers")
_LIBRARIES = ("torch", "numpy", "builtins")
# Most of what modules hold: nothing is reached from it, nor from an empty container of Python's own.
_ENDS = frozenset(PLAIN)
_CONTAINERS = frozenset({dict, OrderedDict, *_COLLECTIONS})


def reached_from(root: Any) -> Iterator[tuple[Any, str, Any]]:
    """Yield what is reached from an object, each with what holds it, and by which name; of modules but parameters.

    Numbers, texts and empty containers are left out.
    """
    seen: set[int] = set()
    waiting: deque[tuple[Any, str, Any]] = deque([(None, "", root)])
    while waiting and len(seen) < _MOST:
        owner, name, value = waiting.popleft()
        yield owner, name, value
        if isinstance(value, _LEFT_OUT) or id(value) in seen:
            continue
        seen.add(id(value))
        waiting.extend(
            (value, inner or name, each)
            for inner, each in _named(value)
            if type(each) not in _ENDS and (type(each) not in _CONTAINERS or each)
        )


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield a tensor, or those that a container holds itself."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple | set | deque):
        yield from (x for x in (value.values() if isinstance(value, Mapping) else value) if isinstance(x, Tensor))


def held_by(value: Any) -> Iterator[Any]:
    """Yield what an object holds, in an order that stays."""
    if isinstance(value, Mapping):
        yield from value
        yield from value.values()
    elif isinstance(value, _COLLECTIONS):
        yield from value
    elif isinstance(value, types.FunctionType):
        if not _is_library(value.__globals__.get("__name__")):  # a wrapper has the name of what it wraps
            yield from _read_by(value)
    elif isinstance(value, types.MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, functools.partial | functools.partialmethod):
        yield from (value.func, value.args, value.keywords)
    else:
        yield from dict(getattr(value, "__dict__", {})).values()
        yield from (getattr(value, name) for name in getattr(type(value), "__slots__", ()) if hasattr(value, name))
        yield from (cls.__dict__["__call__"] for cls in type(value).__mro__ if "__call__" in cls.__dict__)


def _named(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object, or a class of a loop's own, holds, each with its name."""
    if isinstance(value, type):
        if not _is_library(value.__module__):
            kinds = (Tensor, types.FunctionType, dict, *_COLLECTIONS)
            yield from ((name, each) for name, each in vars(value).items() if isinstance(each, kinds))
            yield from (("", each) for each in value.__bases__)
        return
    if isinstance(value, nn.Module):
        yield from ((name, each) for name, each in vars(value).items() if name not in _OWN)
    elif isinstance(attributes := getattr(value, "__dict__", None), dict) and not isinstance(value, types.FunctionType):
        names = {id(each): name for name, each in attributes.items()}
        yield from ((names.get(id(each), ""), each) for each in held_by(value))
    else:
        yield from (("", each) for each in held_by(value))
    yield "", type(value)


def _is_library(name: str | None) -> bool:
    root = (name or "").partition(".")[0]
    return root in _LIBRARIES or root.startswith("composer3d")


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
        elif not _is_library(value.__name__):
            yield from (vars(value)[name] for name in names if name in vars(value))


def _names(code: types.CodeType) -> list[str]:
    """Return the names that code reads, and the functions inside of it."""
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return [*code.co_names, *(name for each in inner for name in _names(each))]
