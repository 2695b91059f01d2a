"""Text of values, of which a digest is made: constants by value, other objects by number where they are met again."""

from __future__ import annotations

import hashlib
import types
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from composer3d.planning.tracing.object_forms import UnreadableStateError

__all__ = ["ATOMS", "ValueText"]

ATOMS = frozenset((int, float, complex, bool, str, bytes, type(None), type(Ellipsis), type(NotImplemented)))
_CONSTANTS = frozenset((tuple, frozenset, types.CodeType))


class ValueText(ABC):
    """Text of several values, in their order."""

    def __init__(self) -> None:
        self._out: list[str] = []
        self._numbers: dict[int, int] = {}
        self._held: list[Any] = []  # so that no other object has an id again
        self._constants: dict[int, str | None] = {}

    @abstractmethod
    def add(self, value: Any) -> None:
        """Add a value."""

    def _is_new(self, value: Any) -> bool:
        number = self._numbers.get(id(value))
        if number is not None:
            self._out.append(f"#{number}")
            return False
        self._numbers[id(value)] = len(self._numbers)
        self._held.append(value)
        return True

    def _each(self, values: Iterable[Any], form: str = "[]") -> None:
        self._out.append(form[0])
        for value in values:
            self.add(value)
        self._out.append(form[1])

    def _named(self, items: Iterable[tuple[Any, Any]]) -> None:
        self._out.append("{")
        for name, value in items:
            self._out.append(repr(name))
            try:
                self.add(value)
            except UnreadableStateError as error:
                raise UnreadableStateError(f"{name}: {error}") from None
        self._out.append("}")

    def _constant(self, value: Any) -> str | None:
        """Return a text of what is made of constants alone; equal constants may be one object or several."""
        kind = type(value)
        if kind in ATOMS:
            return repr(value)
        if kind not in _CONSTANTS:
            return None
        if id(value) not in self._constants:
            self._held.append(value)
            self._constants[id(value)] = self._text_of(value)
        return self._constants[id(value)]

    def _text_of(self, value: Any) -> str | None:
        if isinstance(value, types.CodeType):
            counts = (value.co_argcount, value.co_posonlyargcount, value.co_kwonlyargcount, value.co_flags)
            names = (value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars)
            text = f"{value.co_code!r} {value.co_exceptiontable!r} {counts} {names} {self._constant(value.co_consts)}"
        else:
            parts = [self._constant(each) for each in value]
            if None in parts:
                return None
            texts = sorted(map(str, parts)) if isinstance(value, frozenset) else map(str, parts)
            text = f"{type(value).__name__}({','.join(texts)})"
        return text if len(text) < 200 else hashlib.sha256(text.encode()).hexdigest()
