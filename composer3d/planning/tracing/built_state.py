"""Digest by value of what was built: models, losses and plugins, with all that their code can read, in any process.

Nothing of an object's identity enters but where it is met again. Of modules, objects and classes of the user's all
attributes are read; of functions the instructions, defaults, closures, and the globals that they name; of what is
installed the names, and what the user's code has put in its place. Of tensors on meta, and of parameters and buffers,
shapes stand for values.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import pathlib
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch

from composer3d import torch_compat
from composer3d.planning.tracing.code_text import CodeText
from composer3d.planning.tracing.object_forms import (
    Form,
    UnreadableStateError,
    form_of_class,
    reduced,
    values_of_array,
    values_of_tensor,
)
from composer3d.planning.tracing.value_text import ATOMS

__all__ = ["OF_MODULES", "BuiltState", "UnreadableStateError"]

_TEXTS = (torch.dtype, torch.device, torch.layout, torch.memory_format, pathlib.PurePath)
_CUSTOM: type = torch.library.CustomOpDef  # type: ignore[attr-defined]  # documented as torch.library's
_OPERATORS = (type(torch.ops.aten.relu), type(torch.ops.aten.relu.default), _CUSTOM)
_NAMED = (
    logging.Logger,
    type(threading.Lock()),
    type(threading.RLock()),
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.ClassMethodDescriptorType,
)
_HASHES = frozenset(("_original_object_hash",))  # of transformers: another one in every process
OF_MODULES = frozenset(vars(torch.nn.Module())) - {"training"}


class BuiltState(CodeText):
    """Digest of several values, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self._forms: dict[type, Form] = {}
        self._ways: dict[type, Callable[[BuiltState, Any], None]] = {}

    def add(self, value: Any) -> None:
        """Read a value.

        Raises:
            UnreadableStateError: Part of it cannot be read by value.
        """
        kind = type(value)
        if kind in ATOMS:
            self._out.append(repr(value))
            return
        way = self._ways.get(kind)
        if way is None:
            way = self._ways[kind] = next(found for base, found in _WAYS if issubclass(kind, base))
        way(self, value)

    def digest(self) -> str:
        """Return the digest of all that was added.

        Raises:
            UnreadableStateError: A step may call code that reads files, or that imports what is not loaded.
        """
        reads_environment, unknown = self.reads.outside()
        if unknown is not None:
            raise UnreadableStateError(unknown)
        environment = sorted(item for item in os.environ.items() if item[0] != "_") if reads_environment else []
        return hashlib.sha256(f"{self.digest_here()} {environment}".encode()).hexdigest()

    def digest_here(self) -> str:
        """Return the digest of all that was added, for comparison in this process: what else code reads is the same."""
        return hashlib.sha256("\n".join(self._out).encode()).hexdigest()

    def _add_tuple(self, value: tuple[Any, ...]) -> None:
        text = self._constant(value) if type(value) is tuple else None
        if text is not None:
            self._out.append(text)
        elif type(value) is not tuple:
            self._add_object(value)
        elif self._is_new(value):
            self._each(value, "()")

    def _add_list(self, value: list[Any]) -> None:
        if type(value) is not list:
            self._add_object(value)
        elif self._is_new(value):
            self._each(value)

    def _add_dict(self, value: dict[Any, Any]) -> None:
        if type(value) not in (dict, OrderedDict):
            self._add_object(value)
        elif self._is_new(value):
            self._pairs(value)

    def _pairs(self, value: Any) -> None:
        if all(type(key) in ATOMS for key in value):
            self._named(value.items())
        else:
            self._each((each for item in value.items() for each in item), "{}")

    def _add_set(self, value: Any) -> None:
        if type(value) not in (set, frozenset):
            self._add_object(value)
        elif self._is_new(value):
            self._members(value)

    def _members(self, value: Iterable[Any]) -> None:
        """Add the members of a set in an order that is that of all processes."""

        def own_text(member: Any) -> str:
            text = self._constant(member)
            if text is None:
                alone = BuiltState()
                alone.add(member)
                text = "\n".join(alone._out)
            return text

        self._each(sorted(value, key=own_text), "<>")

    def _add_text(self, value: Any) -> None:
        self._out.append(f"{type(value).__name__} {value}")

    def _add_object(self, value: Any) -> None:
        if not self._is_new(value):
            return
        cls = type(value)
        form = self._form_of(cls)
        self.add(cls)
        try:
            held = object.__getattribute__(value, "__dict__")
        except AttributeError:
            held = {}
        self._named([item for item in held.items() if item[0] not in _HASHES])
        self._add_slots(value, form)
        if form.is_hidden:  # after the attributes: a partial makes a dict for these when it is asked
            self._each(reduced(value))
        elif form.content is not None:
            content = form.content(value)
            (self._members if type(content) is set else self._each)(content)

    def _form_of(self, cls: type) -> Form:
        found = self._forms.get(cls)
        if found is None:
            found = self._forms[cls] = form_of_class(cls)
        return found

    def _add_slots(self, value: Any, form: Form) -> None:
        for name, descriptor in form.slots:
            try:
                self._named([(name, descriptor.__get__(value, type(value)))])
            except AttributeError:
                self._out.append(f"{name} is unset")

    def _add_module(self, module: torch.nn.Module) -> None:
        if not self._is_new(module):
            return
        self.add(type(module))
        self._add_slots(module, self._form_of(type(module)))
        held = vars(module)
        hooks = {name: held[name] for name in OF_MODULES & held.keys() if "_hooks" in name and held[name]}
        numbers = sorted({key for each in hooks.values() for key in each})
        order = {key: number for number, key in enumerate(numbers)}  # torch counts hooks through all of a process
        self._out.append("{")
        for name, value in list(held.items()):
            if name in OF_MODULES and not value:
                continue
            self._out.append(name)
            try:
                if name in hooks:
                    self._each((each for key in value for each in (order[key], value[key])), "{}")
                elif name in ("_parameters", "_buffers"):
                    for key, tensor in value.items():
                        self._out.append(key)
                        self._add_tensor(tensor, by_value=False) if tensor is not None else self.add(None)
                else:
                    self.add(value)
            except UnreadableStateError as error:
                raise UnreadableStateError(f"{name}.{error}" if name == "_modules" else f"{name}: {error}") from None
        self._out.append("}")

    def _add_tensor(self, tensor: torch.Tensor, *, by_value: bool = True) -> None:
        if not self._is_new(tensor):
            return
        cls, trained = type(tensor), tensor.requires_grad
        self._out.append(f"{cls.__qualname__} {tuple(tensor.shape)} {tensor.dtype} {tensor.device.type} {trained}")
        if cls not in (torch.Tensor, torch.nn.Parameter):
            self.add(cls)
        if attributes := vars(tensor):
            self._named(list(attributes.items()))
        for hooks in torch_compat.gradient_hooks(tensor):
            self._each((hooks or {}).values())
        if by_value and tensor.device.type != "meta":
            self._out.append(values_of_tensor(tensor))

    def _add_array(self, value: Any) -> None:
        if self._is_new(value):
            self._out.append(f"{type(value).__qualname__} {value.dtype.str} {value.dtype.descr} {value.shape}")
            self.add(value.tolist() if value.dtype.hasobject else values_of_array(value))


def _parts(*names: str) -> Callable[[BuiltState, Any], None]:
    """Return what adds attributes of an object of C in the place of its own."""

    def add(state: BuiltState, value: Any) -> None:
        if state._is_new(value):
            state._out.append(type(value).__name__)
            state._each([getattr(value, name, None) for name in names])

    return add


def _add_cell(state: BuiltState, cell: types.CellType) -> None:
    if state._is_new(cell):
        try:
            state.add(cell.cell_contents)
        except ValueError:
            state._out.append("empty")


def _add_reference(state: BuiltState, value: weakref.ref[Any]) -> None:
    state._each([value()])


def _add_variable(state: BuiltState, variable: ContextVar[Any]) -> None:
    state._each([variable.name, variable.get(None)])


_WAYS: tuple[tuple[type, Callable[[BuiltState, Any], None]], ...] = (
    (torch.nn.Module, BuiltState._add_module),
    (torch.Tensor, BuiltState._add_tensor),
    (types.FunctionType, BuiltState._add_function),
    (types.MethodType, _parts("__func__", "__self__")),
    (types.CellType, _add_cell),
    (types.CodeType, lambda state, value: state._out.append(str(state._constant(value)))),
    (type, BuiltState._add_class),
    (types.ModuleType, BuiltState._add_module_file),
    *((kind, BuiltState._add_text) for kind in _TEXTS),
    *((kind, BuiltState._add_name) for kind in _NAMED),
    (types.BuiltinFunctionType, BuiltState._add_builtin),
    (types.MethodWrapperType, BuiltState._add_builtin),
    (types.MappingProxyType, lambda state, value: state._pairs(value)),
    (property, _parts("fget", "fset", "fdel")),
    (staticmethod, _parts("__func__")),
    (classmethod, _parts("__func__")),
    (functools.cached_property, _parts("func", "attrname")),
    (type(functools.lru_cache(len)), _parts("__wrapped__")),
    (weakref.ref, _add_reference),
    (ContextVar, _add_variable),
    (np.ndarray, BuiltState._add_array),
    *((kind, BuiltState._add_text) for kind in _OPERATORS),  # whose functions `add_operators` reads
    (tuple, BuiltState._add_tuple),
    (list, BuiltState._add_list),
    (dict, BuiltState._add_dict),
    (set, BuiltState._add_set),
    (frozenset, BuiltState._add_set),
    (object, BuiltState._add_object),
)
