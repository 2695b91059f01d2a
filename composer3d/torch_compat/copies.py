"""Torch names for copies of composed models."""

from __future__ import annotations

import contextlib
import copy
import copyreg
import functools
import operator
import types
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["class_before_units", "copy_modules", "unchanged_versions"]

_CONTAINERS = frozenset({OrderedDict, dict, set, list})
# Most of what modules hold, of which a copy is the very same.
_PLAIN = frozenset({bool, float, int, str, type(None)})


def class_before_units(module: Any) -> Any:
    """Return the class that a module had before FSDP2, or its kind of DDP, gave it one that is made for each class.

    That one inherits from `FSDPModule` and the module's own, which torch gives no access to (torch 2.11-2.15).
    """
    from torch.distributed.fsdp import FSDPModule

    return next(cls for cls in type(module).__mro__ if not issubclass(cls, FSDPModule))


def copy_modules(model: nn.Module, memo: dict[int, Any]) -> Any:
    """Return what `copy.deepcopy` does of a model, in a third of the time: modules hold little that is copied.

    Of three dozen attributes of a module most are numbers, or containers for hooks without any; and a copy takes each
    `OrderedDict` apart and puts it together again. Modules that say how they are copied are asked.

    Args:
        model: Not changed.
        memo: Of `copy.deepcopy`; what stands in it is not copied.
    """
    found = memo.get(id(model))
    if found is not None:
        return found
    cls: Any = type(model)
    if not _is_plain(cls) or "__deepcopy__" in vars(model):
        return copy.deepcopy(model, memo)
    twin = memo[id(model)] = cls.__new__(cls)
    state = dict(model.__getstate__())
    for name, value in state.items():
        kind = type(value)
        if kind in _CONTAINERS and not value:
            made = memo.get(id(value))
            state[name] = memo.setdefault(id(value), kind()) if made is None else made
        elif kind not in _PLAIN:
            state[name] = _copied(value, memo)
    twin.__setstate__(state)
    return twin


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    found = memo.get(id(value))
    if found is not None:
        return found
    kind: Any = type(value)
    if kind is dict and all(type(name) is str for name in value):
        made: dict[str, Any] = {}
        memo[id(value)] = made
        for name, each in value.items():
            made[name] = each if type(each) in _PLAIN else _copied(each, memo)
        return made
    if _is_plain(kind):
        return copy_modules(value, memo)
    if kind in (list, tuple, set, dict) and value:
        return _copied_container(value, memo)
    return _copied_or_shared(value, memo)


def _copied_container(value: Any, memo: dict[int, Any]) -> Any:
    """Copy a container of Python's; one that holds itself is left to `copy.deepcopy`."""
    kind = type(value)
    if kind is tuple:
        made = tuple(_copied(each, memo) for each in value)
        return memo.setdefault(id(value), value if all(map(operator.is_, made, value)) else made)
    twin = memo[id(value)] = kind()
    if kind is list:
        twin.extend(_copied(each, memo) for each in value)
    elif kind is set:
        twin.update(_copied(each, memo) for each in value)
    else:
        twin.update((_copied(key, memo), _copied(each, memo)) for key, each in value.items())
    return twin


def _copied_or_shared(value: Any, memo: dict[int, Any]) -> Any:
    """Copy an object; one that has no copy, as locks, files, generators and what holds them, is the twin's too.

    What holds modules or tensors is copied, or cannot be.
    """
    size = len(memo)
    try:
        return copy.deepcopy(value, memo)
    except TypeError:
        while len(memo) > size:
            memo.popitem()  # what was copied of it
        if _holds_state(value, set()):
            raise
    return memo.setdefault(id(value), value)


def _holds_state(value: Any, seen: set[int]) -> bool:
    """Return whether a module or a tensor is in an object, in its attributes, or in what these hold."""
    import torch

    if type(value) in _PLAIN or isinstance(value, type | types.ModuleType) or id(value) in seen:
        return False
    if isinstance(value, torch.nn.Module | torch.Tensor):
        return True
    seen.add(id(value))
    inside: list[Any] = [*value] if isinstance(value, list | tuple | set | frozenset) else []
    named = (value, getattr(value, "__dict__", None))  # an object may answer to every name
    inside += [each for names in named if isinstance(names, dict) for each in names.values()]
    return any(_holds_state(each, seen) for each in inside)


@functools.lru_cache(maxsize=256)
def _is_plain(cls: Any) -> bool:
    """Return whether a class is one of modules that are copied by their attributes, as torch's own are."""
    from torch import nn

    ways = ("__setstate__", "__getstate__", "__reduce__", "__reduce_ex__")
    return (
        issubclass(cls, nn.Module)
        and all(next(each for each in cls.__mro__ if name in vars(each)) in (nn.Module, object) for name in ways)
        and cls not in copyreg.dispatch_table
        and not any(hasattr(cls, name) for name in ("__deepcopy__", "__getnewargs__", "__getnewargs_ex__"))
        and not any("__slots__" in vars(each) for each in cls.__mro__)
    )


@contextlib.contextmanager
def unchanged_versions(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Let writes into tensors count for nothing: a graph that has saved them takes them for what they were.

    For writes that are taken back before the graph is used. Private (torch 2.11-2.15).
    """
    from torch.autograd import _unsafe_preserve_version_counter  # type: ignore[attr-defined]

    with _unsafe_preserve_version_counter(tuple(tensors)):
        yield
