"""Text of code: functions with the globals that they read, classes, and modules; of what is installed the names."""

from __future__ import annotations

import functools
import os
import sys
import types
from typing import Any

from composer3d import torch_compat
from composer3d.planning.tracing.code_reads import MAKERS, MISSING, CodeReads
from composer3d.planning.tracing.code_state import is_own, is_own_file
from composer3d.planning.tracing.object_forms import UnreadableStateError
from composer3d.planning.tracing.value_text import ATOMS, ValueText
from composer3d.processes import own_attribute

__all__ = ["CodeText"]

# Of classes: what is there for readers, or for libraries that have made methods of it.
_UNREAD = frozenset(
    """__abstractmethods__ __annotate__ __annotate_func__ __annotations__ __annotations_cache__ __dataclass_fields__
    __dataclass_params__ __dict__ __doc__ __firstlineno__ __match_args__ __module__ __orig_bases__ __parameters__
    __signature__ __static_attributes__ __type_params__ __weakref__ _abc_impl _autograd_function_id""".split()
)


class CodeText(ValueText):
    """Text of functions, classes and modules.

    Attributes:
        reads: What the user's functions read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads = CodeReads()
        self._users: dict[str, bool] = {}
        self._looked_at: set[int] = set()

    def _is_users(self, module: Any) -> bool:
        name = module if isinstance(module, str) else ""
        found = self._users.get(name)
        if found is None:
            found = self._users[name] = is_own(name)
        return found

    def _add_name(self, value: Any) -> None:
        """Add what is all in its name: functions of C, descriptors, loggers, locks."""
        owner = getattr(value, "__objclass__", None) or getattr(value, "__module__", None)
        name = getattr(value, "__qualname__", None) or getattr(value, "name", None)
        self._out.append(f"{type(value).__name__} {getattr(owner, '__qualname__', owner)} {name}")

    def _add_builtin(self, value: Any) -> None:
        self._add_name(value)
        holder = getattr(value, "__self__", None)
        if holder is not None and not isinstance(holder, type | types.ModuleType):
            self.add(holder)

    def _add_module_file(self, value: types.ModuleType) -> None:
        name = str(own_attribute(value, "__name__"))
        self._out.append(f"module {name}")
        if self._is_users(name) and self._is_new(value):
            self._named([(key, each) for key, each in list(vars(value).items()) if not _is_dunder(key)])

    def _add_function(
        self, function: types.FunctionType, *, name: str = "", owner: type | None = None, is_called: bool = True
    ) -> None:
        is_users = self._is_users(function.__globals__.get("__name__"))
        if is_users:
            self.reads.meet(function, name=name or function.__name__, owner=owner, is_called=is_called)
        if not self._is_new(function):
            return
        self._out.append(f"def {function.__module__} {function.__qualname__}")
        if not is_users and self._is_found_by_name(function):
            return
        self._out.append(str(self._constant(function.__code__)))
        for each in (function.__defaults__, function.__kwdefaults__, vars(function) or None):
            self.add(each)
        self._named(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        if is_users:
            self._add_globals(function)

    def _add_globals(self, function: types.FunctionType) -> None:
        for name, value in self.reads.globals_of(function):
            self._out.append(name)
            try:
                if value is MISSING or type(value) is type(os.environ):
                    self._out.append("missing" if value is MISSING else "environment")  # read whole, where it is read
                elif isinstance(value, types.FunctionType):
                    self._add_function(value, name=name.rpartition(".")[2], is_called=False)
                else:
                    self.add(value)
            except UnreadableStateError as error:
                raise UnreadableStateError(f"{function.__module__}.{name}: {error}") from None

    def _is_found_by_name(self, value: Any) -> bool:
        """Return whether something of a library is what its module has under its name."""
        if self._is_users(value.__module__):
            return False
        found: Any = sys.modules.get(value.__module__ or "")
        for name in value.__qualname__.split("."):
            space = getattr(found, "__dict__", {})
            found = space.get(name)
        return found is value

    def add_replaced(self, module: types.ModuleType | type) -> None:
        """Add the user's functions and classes in a library's module or class, which are called in place of its own."""
        if id(module) not in self._looked_at:
            self._looked_at.add(id(module))
            self._named([(name, each) for name, each in list(vars(module).items()) if self._is_users_code(each)])

    def add_operators(self) -> None:
        """Add the functions of operators that the user's code has defined, or given functions, by `torch.library`.

        Raises:
            UnreadableStateError: Nobody keeps a function, as of `Library.impl`.
        """
        text, names = "\n".join(self._out), self.reads.names()
        for operator in torch_compat.python_operators():
            namespace, _, name = operator.name.partition("::")
            is_named = not names.isdisjoint((namespace, name)) or any(
                each in text for each in (operator.name, f"{namespace}.{name}", repr(namespace))
            )
            if not is_named and (operator.schema == "" or is_own_file(operator.schema)):
                continue  # no code that a step runs has it; an operator of others is called by other names, too
            for file in sorted(operator.files):
                if is_own_file(file) if file else is_named:
                    where = file or "a file that torch does not name"
                    raise UnreadableStateError(
                        f"{operator.name} has a function of {where} that cannot be read by value"
                    )
            for file, function in operator.functions:
                if is_own_file(file):
                    self._out.append(operator.name)
                    self.add(function)

    def _is_users_code(self, value: Any) -> bool:
        if type(value) is types.FunctionType:
            return self._is_users(value.__globals__.get("__name__"))
        return isinstance(value, type) and self._is_users(value.__module__)

    def _add_class(self, cls: type) -> None:
        if not self._is_new(cls):
            return
        self._out.append(f"class {cls.__module__}.{cls.__qualname__}")
        is_installed = self._is_found_by_name(cls)
        if is_installed and cls.__module__ in sys.modules:
            self.add_replaced(sys.modules[cls.__module__])
        self._each(cls.__bases__)
        if not is_installed and type(cls) is not type:
            self.add(type(cls))
        bases = [base for base in cls.__mro__ if base is not object and not self._is_users(base.__module__)]
        for name, member in list(vars(cls).items()):
            if name in _UNREAD or name.startswith("__pydantic_"):
                continue
            if not is_installed:
                self._out.append(name)
                self._add_member(cls, name, member, bases)
            elif any(map(self._is_users_code, _functions_of(member))):
                self._out.append(name)  # the user has put it there
                self.add(member)
            elif type(member) in ATOMS and not _is_dunder(name):
                self._out.append(f"{name} {member!r}")

    def _add_member(self, cls: type, name: str, member: Any, bases: list[type]) -> None:
        is_called = name not in MAKERS and (
            _is_dunder(name) or name.startswith("composer3d_") or any(name in vars(base) for base in bases)
        )
        self._out.append(type(member).__name__)
        for each in _functions_of(member):
            if isinstance(each, types.FunctionType):
                self._add_function(each, name=name, owner=cls, is_called=is_called)
            elif not _is_dunder(name) or type(each) in ATOMS:
                try:
                    self.add(each)
                except UnreadableStateError as error:
                    raise UnreadableStateError(f"{cls.__module__}.{cls.__qualname__}.{name}: {error}") from None


def _functions_of(member: Any) -> tuple[Any, ...]:
    """Return what runs where a member of a class is called or read."""
    kind = type(member)
    if kind is types.FunctionType:
        return (member,)
    if isinstance(member, staticmethod | classmethod):
        return (member.__func__,)
    if isinstance(member, property):
        return (member.fget, member.fset, member.fdel)
    return (member.func,) if isinstance(member, functools.cached_property) else (member,)


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")
