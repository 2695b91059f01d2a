"""State outside of modules that their code writes to, put back after a forward that only looks.

Code of mixtures of experts appends losses to a list of its file, or of an object there, and a loss function adds them
up: what a forward on meta leaves in these is no loss.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from composer3d.propagation.python_settings import Surroundings, is_configuration, is_library
from composer3d.torch_compat.hook_registrations import FollowedHook

__all__ = ["OutsideState"]

_CONTAINERS = (dict, list, set, deque)
_DEPTH = 4  # of objects and containers in each other
_MOST = 4096  # entries of one container: longer ones are tables
_LEFT_OUT = (torch.Tensor, nn.Module, types.ModuleType, types.FunctionType, types.MethodType, type)


class OutsideState:
    """Containers, and attributes of objects and classes, that code of modules and their hooks names outside of these.

    Memory: none of tensors. Collectives: none.

    Args:
        modules: Whose code it is.
        hooks: Others than those that the modules have.
    """

    def __init__(self, modules: Iterable[nn.Module], *, hooks: Iterable[Any] = ()) -> None:
        owners = list(modules)
        called = [*(hook for module in owners for hook in _forward_hooks(module)), *hooks]
        self._hooks = [part for hook in called for part in _parts(hook)]
        functions = [each for each in self._hooks if isinstance(each, types.FunctionType)]
        self._surroundings = Surroundings.of(owners, functions)
        kinds = dict.fromkeys(kind for module in owners for kind in type(module).__mro__)
        classes = dict.fromkeys([*kinds, *self._surroundings.classes])
        self._classes = [kind for kind in classes if not is_library(kind.__module__)]

    def now(self) -> Callable[[], None]:
        """Return what puts back all that is there now."""
        seen: set[int] = set()
        held: list[tuple[Any, Any]] = []
        spaces = [(kind, {n: v for n, v in vars(kind).items() if _is_assigned(n, v)}) for kind in self._classes]
        # Names that code binds anew, as `global total; total = total + loss` does.
        bound = [(space, name, space[name]) for space, name in self._surroundings.globals if name in space]
        for value in [each for kind in self._classes for each in vars(kind).values()] + self._surroundings.values():
            _note(value, held, seen, 0)
        for value in [*self._hooks, *(cell for part in self._hooks for cell in _closed_over(part))]:
            for each in _attributes(value) if isinstance(value, nn.Module) else (value,):
                _note(each, held, seen, 0)
        return functools.partial(_restore, spaces, bound, held)


def _forward_hooks(module: nn.Module) -> list[Any]:
    hooks: list[Any] = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    return [hook for hook in hooks if not str(getattr(hook, "__module__", "")).startswith("composer3d")]


def _parts(hook: Any) -> list[Any]:
    """Return the functions that a hook calls, and the objects that it is called with beside what torch passes."""
    if isinstance(hook, FollowedHook):
        return _parts(hook.own_hook)
    if isinstance(hook, types.MethodType):
        return [hook.__func__, hook.__self__]
    if isinstance(hook, functools.partial):
        return [*_parts(hook.func), *hook.args, *hook.keywords.values()]
    if isinstance(hook, types.FunctionType):
        return [hook]
    return [hook, *(vars(kind)["__call__"] for kind in type(hook).__mro__ if "__call__" in vars(kind))]


def _closed_over(part: Any) -> list[Any]:
    """Return the modules that a hook's function names from outside: it may note something in its model."""
    cells = (part.__closure__ or ()) if isinstance(part, types.FunctionType) else ()
    return [cell.cell_contents for cell in cells if _is_module(cell)]


def _is_module(cell: types.CellType) -> bool:
    try:
        return isinstance(cell.cell_contents, nn.Module)
    except ValueError:  # it is empty
        return False


def _attributes(module: nn.Module) -> list[Any]:
    return [value for name, value in vars(module).items() if not name.startswith("_")]


def _restore(
    spaces: Sequence[tuple[type, dict[str, Any]]],
    bound: Sequence[tuple[Any, str, Any]],
    held: Sequence[tuple[Any, Any]],
) -> None:
    for kind, before in spaces:
        now = {name: value for name, value in vars(kind).items() if _is_assigned(name, value)}
        for name in now.keys() - before.keys():
            delattr(kind, name)
        for name, value in before.items():
            if now.get(name) is not value:
                setattr(kind, name, value)
    for space, name, value in bound:
        if space.get(name) is not value:
            space[name] = value
    for value, content in held:
        _put_back(value, content)


def _note(value: Any, found: list[tuple[Any, Any]], seen: set[int], depth: int) -> None:
    """Append what a container, or an object of a loop's own, holds, and what these hold."""
    if depth > _DEPTH or id(value) in seen or isinstance(value, _LEFT_OUT):
        return
    if type(value) in _CONTAINERS:
        if len(value) > _MOST:
            return
        held = dict(value) if isinstance(value, dict) else list(value)
        inner: Iterable[Any] = list(held.values()) if isinstance(held, dict) else held
    elif isinstance(getattr(value, "__dict__", None), dict) and is_configuration(value):
        held, inner = dict(vars(value)), list(vars(value).values())
    else:
        return
    seen.add(id(value))
    found.append((value, held))
    for each in inner:
        _note(each, found, seen, depth + 1)


def _is_assigned(name: str, value: Any) -> bool:
    """Return whether an attribute of a class may be written to by its code: a number, a tensor or none."""
    return not name.startswith("__") and isinstance(value, bool | int | float | torch.Tensor | type(None))


def _put_back(value: Any, before: Any) -> None:
    now = value if type(value) in _CONTAINERS else vars(value)
    if isinstance(now, dict):
        if len(now) != len(before) or not all(now.get(key, now) is before[key] for key in before):
            now.clear()
            now.update(before)
    elif len(now) != len(before) or not all(one is other for one, other in zip(now, before, strict=True)):
        now.clear()
        (now.update if isinstance(now, set) else now.extend)(before)
