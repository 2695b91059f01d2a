"""Modules inside a unit of FSDP2 that are entered otherwise than by the unit's forward."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["Entries", "entries_of"]

Enter = Callable[[Callable[..., Any], Any, Any], Any]


class Entries:
    """Attributes of modules that take the place of their class's while their unit is sharded.

    Calls inside of a unit's forward, where it is gathered, find modules as they are, and cost nothing.

    Args:
        attributes: For each module its `__dict__`, a name, the value, and the value that it had, if any.
    """

    def __init__(self, attributes: list[tuple[dict[str, Any], str, Any, Any]]) -> None:
        self._attributes = attributes
        self.shut()

    def shut(self) -> None:
        """Let calls gather the unit: it was resharded."""
        for attributes, name, value, _ in self._attributes:
            attributes[name] = value

    def open(self) -> None:
        """Let calls pass: the unit is gathered."""
        for attributes, name, _, own in self._attributes:
            if own is None:
                attributes.pop(name, None)
            else:
                attributes[name] = own


def entries_of(unit: Any, group: Any, enter: Enter) -> Entries:
    """Return the entries of a group's modules: calls, and methods that name one of the module's own parameters.

    A loop calls `model.encode(x)`, `model.head(h)` or `block.up(x)`: FSDP2 gathers in the hooks of `unit` only, and
    torch has `register_fsdp_forward_method` for methods that somebody has listed. What a module's parameters are, and
    `Module.__call__`'s look at `_compiled_call_impl`, are private (torch 2.11-2.15).

    Args:
        unit: The module of the group.
        group: FSDP2's.
        enter: Called with a function and its arguments; calls it with the unit gathered.
    """
    owned: dict[Any, set[str]] = {}
    for parameter in group.fsdp_params:
        info = parameter._module_info
        for module, name in (
            (info.module, info.param_name),
            *zip(info.shared_modules, info.shared_param_names, strict=True),
        ):
            owned.setdefault(module, set()).add(name)
    attributes: list[tuple[dict[str, Any], str, Any, Any]] = []
    for module, names in owned.items():
        own = vars(module)
        if module is not unit and not hasattr(module, "_get_fsdp_state"):
            compiled = own.get("_compiled_call_impl")
            call = compiled or module._call_impl
            attributes.append((own, "_compiled_call_impl", functools.partial(_entered, enter, call), compiled))
        for name, function in _methods_reading(type(module), names):
            bound = functools.wraps(function)(functools.partial(_entered, enter, types.MethodType(function, module)))
            attributes.append((own, name, bound, own.get(name)))
    return Entries(attributes)


def _entered(enter: Enter, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return enter(call, args, kwargs)


def _methods_reading(cls: type, names: set[str]) -> Iterator[tuple[str, types.FunctionType]]:
    """Yield a class's methods that take arguments and whose code names an attribute among `names`.

    Not `forward`, nor what torch's classes have: ranks may call `extra_repr` for a print, or count parameters, alone.
    """
    from torch import nn

    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if not base.__module__.startswith("torch."):
            found |= vars(base)
    for name, function in found.items():
        if not isinstance(function, types.FunctionType) or hasattr(nn.Module, name) or name == "forward":
            continue
        code = inspect.unwrap(function).__code__
        takes = code.co_argcount + code.co_kwonlyargcount > 1 or bool(code.co_flags & inspect.CO_VARARGS)
        if takes and not code.co_flags & inspect.CO_GENERATOR and names & set(_names(code)):
            yield name, function


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
