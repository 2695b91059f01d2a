"""Tensors that a model holds beside its parameters and buffers: in containers, objects, closures and hooks."""

from __future__ import annotations

import functools
import types
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from composer3d.torch_compat import gradient_hooks, is_wrapper_subclass

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["Reached", "reachable_tensors"]

_REGISTRIES = ("_parameters", "_buffers", "_modules")
_LIBRARIES = frozenset({"torch", "torchgen", "builtins", "numpy"})
_PLAIN = frozenset({type(None), bool, bytes, float, int, str})
_CONTAINERS = frozenset({OrderedDict, dict, list, set, tuple})


@dataclass(frozen=True, kw_only=True, eq=False)
class Reached:
    """A tensor that is held elsewhere than in a module's registries.

    Args:
        path: How it is reached: the module's FQN, and attributes, indices and names from there.
        tensor: As it is held there.
        is_ordered: The path is the same in every process; sets have no order.
    """

    path: str
    tensor: Tensor
    is_ordered: bool = True


def reachable_tensors(model: nn.Module) -> Iterator[Reached]:
    """Yield each tensor that attributes, containers, closures and hooks of a model's modules and parameters hold.

    A tensor comes once a place; an object that several places hold is entered at the first. What libraries define is
    not entered, except for hooks, `functools.partial`, and instances of a user's own classes that it is passed.
    """
    walk = _Walk(registered={id(module) for module in model.modules()})
    yield from walk.enter_modules("", model)


class _Walk:
    """One walk: objects are entered once.

    Args:
        registered: Identities of modules that are visited by themselves.
    """

    def __init__(self, *, registered: set[int]) -> None:
        self._registered = registered
        self._seen: set[int] = set()
        self._is_ordered = True

    def enter_modules(self, path: str, model: nn.Module, *, is_registered: bool = True) -> Iterator[Reached]:
        """Yield the objects that a model's modules hold, including parameters and buffers that are not registered."""
        for fqn, owner in model.named_modules(prefix=path):
            prefix = f"{fqn}." if fqn else ""
            for name, value in list(vars(owner).items()):
                if name not in _REGISTRIES and not _holds_nothing(value):
                    yield from self._enter(prefix + name, value)
            for name, value in self._functions(type(owner)):
                yield from self._enter(prefix + name, value)
            for name, tensor in [*owner._parameters.items(), *owner._buffers.items()]:
                if tensor is not None:
                    if not is_registered:
                        yield Reached(path=prefix + name, tensor=tensor, is_ordered=self._is_ordered)
                    yield from self._beside(prefix + name, tensor)

    def _functions(self, cls: type) -> Iterator[tuple[str, Any]]:
        """Yield the methods of a user's class, which may be closures of what made the class; each class once."""
        for base in cls.__mro__:
            if id(base) not in self._seen and not _is_library(base):
                self._seen.add(id(base))
                yield from (item for item in list(vars(base).items()) if isinstance(item[1], types.FunctionType))

    def _beside(self, path: str, tensor: Tensor) -> Iterator[Reached]:
        """Yield what attributes and gradient hooks of a tensor hold."""
        if id(tensor) in self._seen or is_wrapper_subclass(type(tensor)):
            return
        self._seen.add(id(tensor))
        for name, value in list(vars(tensor).items()):
            yield from self._enter(f"{path}.{name}", value)
        for hooks in gradient_hooks(tensor):
            for hook in list((hooks or {}).values()):
                yield from self._enter(f"{path}.{_name(hook)}", hook)

    def _enter(self, path: str, value: Any) -> Iterator[Reached]:
        if _holds_nothing(value) or isinstance(value, str | int | float | bytes):
            return
        import torch
        from torch import nn

        if isinstance(value, torch.Tensor):
            yield Reached(path=path, tensor=value, is_ordered=self._is_ordered)
        elif id(value) in self._seen:
            return
        elif isinstance(value, nn.Module):
            if id(value) not in self._registered:
                self._seen.add(id(value))
                self._registered |= {id(module) for module in value.modules()}
                yield from self.enter_modules(path, value, is_registered=False)
        else:
            self._seen.add(id(value))
            was_ordered = self._is_ordered
            self._is_ordered = was_ordered and not isinstance(value, set | frozenset)
            for name, inner in _inside(value):
                yield from self._enter(path + name, inner)
            self._is_ordered = was_ordered


def _holds_nothing(value: Any) -> bool:
    """Return whether a value is one of what modules hold most of: numbers, names, and containers for hooks."""
    kind = type(value)
    return kind in _PLAIN or (kind in _CONTAINERS and not value)


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the objects that an object holds, and their access paths."""
    if isinstance(value, dict):
        for index, (key, inner) in enumerate(list(value.items())):
            yield f"[{key!r}]" if isinstance(key, str) else f"[{index}]", inner
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from ((f"[{index}]", inner) for index, inner in enumerate(list(value)))
    elif isinstance(value, functools.partial):
        yield from (("", inner) for inner in (value.func, *value.args, *value.keywords.values()))
    elif isinstance(value, types.MethodType):
        yield from (("", value.__func__), ("", value.__self__))
    elif isinstance(value, types.FunctionType):
        yield from _of_function(value)
    elif not isinstance(value, type | types.ModuleType) and not _is_library(type(value)):
        held = getattr(value, "__dict__", None)  # an object may answer to every name
        yield from ((f".{name}", inner) for name, inner in (list(held.items()) if isinstance(held, dict) else ()))


def _of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=True):
        try:
            yield f".{name}", cell.cell_contents
        except ValueError:  # a name that is bound later
            continue
    yield from (("", inner) for inner in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()))
    wrapped = vars(function).get("__wrapped__")
    if wrapped is not None:
        yield "", wrapped


def _is_library(cls: type) -> bool:
    root = (getattr(cls, "__module__", None) or "").partition(".")[0]
    return root in _LIBRARIES or root.startswith("composer3d")


def _name(hook: Any) -> str:
    return getattr(hook, "__qualname__", None) or type(hook).__qualname__
