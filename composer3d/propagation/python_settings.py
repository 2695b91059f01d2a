"""Python values that a module's code reads beside its tensors: of objects that it holds, and of its surroundings."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from composer3d.propagation.decision_cache import HASHABLE, NUMBERS

__all__ = ["SETTINGS", "Surroundings", "is_configuration", "is_library", "settings_in"]

# What a setting may be; tensors are by identity.
SETTINGS = (*NUMBERS, *HASHABLE)
# Configurations hold configurations, and long tables, such as of labels or tokens, are none.
MOST_LEVELS, MOST_ENTRIES = 4, 256
# Code of a model calls functions of its own; more than these are of a library.
MOST_FUNCTIONS = 64
LIBRARIES = frozenset({"torch", "composer3d", "numpy", "math"})
# Objects of Python itself in which people keep settings.
NAMESPACES = frozenset({"SimpleNamespace", "Namespace"})


def settings_in(value: Any, *, levels: int = MOST_LEVELS) -> tuple[Any, ...]:
    """Return the settings that an object holds: a configuration, a list or a dict, and what lies in these."""
    if isinstance(value, SETTINGS):
        return ((type(value), value),)
    if isinstance(value, Tensor):
        return (id(value),)
    if levels == 0 or callable(value) or isinstance(value, nn.Module | types.ModuleType):
        return ()
    if isinstance(value, Mapping):
        inner: Sequence[Any] = [*value, *value.values()] if len(value) <= MOST_ENTRIES else ()
    elif isinstance(value, list | tuple | set | frozenset):
        inner = [*value] if len(value) <= MOST_ENTRIES else ()
    else:
        inner = [*getattr(value, "__dict__", {}).values()] if is_configuration(value) else ()
    return tuple(setting for each in inner for setting in settings_in(each, levels=levels - 1))


def is_configuration(value: Any) -> bool:
    """Return whether an object may be one: a logger, or a lock, keeps what changes by itself."""
    kind = type(value)
    is_standard = kind.__module__.partition(".")[0] in sys.stdlib_module_names and kind.__name__ not in NAMESPACES
    return not is_standard and not is_library(kind.__module__)


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """Values that code reads by name outside of its module: globals of its file and of modules it names, and closures.

    Args:
        globals: (namespace, name) of each.
        cells: Of closures.
        classes: Classes that code names, whose attributes it may write to.
    """

    globals: tuple[tuple[Mapping[str, Any], str], ...]
    cells: tuple[Any, ...]
    classes: tuple[type, ...] = ()

    @classmethod
    def of(cls, modules: Sequence[nn.Module], others: Sequence[types.FunctionType] = ()) -> Surroundings:
        """Return those of the forwards of modules, of other functions, and of functions and methods that these name."""
        found: dict[tuple[int, str], tuple[Mapping[str, Any], str]] = {}
        cells: dict[int, Any] = {}
        classes: dict[type, None] = {}
        for function in _functions_of(modules, others):
            for cell in function.__closure__ or ():
                cells.setdefault(id(cell), cell)
            names = _names_in(function.__code__)
            for name in names & function.__globals__.keys():
                value = function.__globals__[name]
                if isinstance(value, types.ModuleType):
                    if value.__name__.partition(".")[0] not in LIBRARIES:
                        space = vars(value)
                        found |= {(id(space), each): (space, each) for each in names & space.keys()}
                elif isinstance(value, type):
                    classes[value] = None
                elif not callable(value) and not isinstance(value, nn.Module):
                    found[id(function.__globals__), name] = function.__globals__, name
        return cls(globals=tuple(found.values()), cells=tuple(cells.values()), classes=tuple(classes))

    def settings(self) -> tuple[Any, ...]:
        """Return the settings there now."""
        return tuple(map(settings_in, self.values()))

    def values(self) -> list[Any]:
        """Return what code finds there now."""
        held = [space[name] for space, name in self.globals if name in space]
        return held + [cell.cell_contents for cell in self.cells if _is_full(cell)]


def _functions_of(modules: Sequence[nn.Module], others: Sequence[types.FunctionType]) -> Iterator[types.FunctionType]:
    """Yield the functions of Python that others, and the forwards of modules of others' classes, call by name."""
    kinds = dict.fromkeys(type(module) for module in modules)
    left: list[tuple[Any, Any]] = [
        (kind, inspect.unwrap(kind.forward)) for kind in kinds if not is_library(kind.__module__)
    ]
    left += [(object, function) for function in others]
    seen: set[Any] = set()
    while left and len(seen) < MOST_FUNCTIONS:
        owner, function = left.pop()
        if not isinstance(function, types.FunctionType) or function in seen or is_library(function.__module__):
            continue
        seen.add(function)
        yield function
        names = _names_in(function.__code__)
        called = [getattr(owner, name, None) for name in names] + [function.__globals__.get(name) for name in names]
        left += [(owner, inspect.unwrap(each)) for each in called if isinstance(each, types.FunctionType)]


def is_library(name: str | None) -> bool:
    """Return whether a module of this name is a library's."""
    return (name or "").partition(".")[0] in LIBRARIES


def _names_in(code: types.CodeType) -> set[str]:
    """Return the names of globals and attributes in a function, and in functions and comprehensions inside of it."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names_in(constant)
    return names


def _is_full(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # nothing is in it yet
        return False
