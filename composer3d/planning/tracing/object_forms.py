"""State of objects beside their `__dict__`: slots, content of containers, what only `pickle` sees, tensors' values."""

from __future__ import annotations

import collections
import copyreg
import hashlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from composer3d.torch_compat import is_wrapper_subclass

__all__ = ["Form", "UnreadableStateError", "form_of_class", "reduced", "values_of_array", "values_of_tensor"]

_POINTER = object.__basicsize__ // 2
_TEXTS = (str, int, float, complex, bytes, bytearray)

_MOST_BYTES = 2**28  # of a tensor's or an array's values


class UnreadableStateError(Exception):
    """State that cannot be read by value: an open file, a generator, an object of a library without `pickle`."""


class Form(NamedTuple):
    """Places in which objects of a class hold what they hold, beside a `__dict__`.

    Args:
        slots: Names with their descriptors.
        content: Returns what a container of Python's holds; None for what is none.
        is_hidden: Whether there is more, which no Python code sees.
    """

    slots: tuple[tuple[str, Any], ...]
    content: Callable[[Any], Any] | None
    is_hidden: bool


def form_of_class(cls: type) -> Form:
    """Return the form of the objects of a class."""
    slots: list[tuple[str, Any]] = []
    for base in cls.__mro__:
        names = vars(base).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            private = name.startswith("__") and not name.endswith("__")
            mangled = f"_{base.__name__.lstrip('_')}{name}" if private else name
            if name not in ("__dict__", "__weakref__") and mangled in vars(base):
                slots.append((mangled, vars(base)[mangled]))
    references = len(slots) + (cls.__weakrefoffset__ > 0) + (cls.__dictoffset__ > 0)
    size = object.__basicsize__ + _POINTER * references
    content = next((found for base, found in _CONTENTS if issubclass(cls, base)), None)
    return Form(tuple(slots), content, content is None and (cls.__itemsize__ != 0 or cls.__basicsize__ > size))


def _exception(value: BaseException) -> list[Any]:
    return [value.args, value.__cause__, value.__context__]


def _defaults(value: collections.defaultdict[Any, Any]) -> list[Any]:
    return [value.default_factory, *(each for item in dict.items(value) for each in item)]


def _items(value: dict[Any, Any]) -> list[Any]:
    return [each for item in dict.items(value) for each in item]


_CONTENTS: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (BaseException, _exception),
    (collections.defaultdict, _defaults),
    (dict, _items),
    (collections.deque, lambda value: [value.maxlen, *collections.deque.__iter__(value)]),
    (list, lambda value: [*list.__iter__(value)]),
    (tuple, lambda value: [*tuple.__iter__(value)]),
    (set, set.copy),
    (frozenset, lambda value: {*frozenset.__iter__(value)}),
    *((base, lambda value, shown=base.__repr__: shown(value)) for base in _TEXTS),
)


def reduced(value: Any) -> list[Any]:
    """Return what `pickle` would keep of an object with state that no attribute shows.

    Raises:
        UnreadableStateError: It keeps nothing, or fails.
    """
    cls = type(value)
    try:
        reduce = copyreg.dispatch_table.get(cls)
        found: Any = value.__reduce_ex__(4) if reduce is None else reduce(value)
        parts = [found] if isinstance(found, str) else list(found)
        return [[*part] if isinstance(part, Iterator) else part for part in parts]
    except Exception as error:  # of any library's code
        raise UnreadableStateError(f"a {cls.__module__}.{cls.__qualname__} cannot be read by value: {error}") from None


def values_of_tensor(tensor: torch.Tensor) -> str:
    """Return a digest of a tensor's values.

    Raises:
        UnreadableStateError: It has none that can be read, or too many.
    """
    if is_wrapper_subclass(type(tensor)) or tensor.layout != torch.strided or tensor.is_quantized:
        raise UnreadableStateError(f"a {type(tensor).__qualname__} ({tensor.layout}) cannot be read by value")
    _refuse_large(tensor.numel() * tensor.element_size())
    try:
        with torch.no_grad():
            plain = tensor.detach().as_subclass(torch.Tensor).cpu().resolve_conj().resolve_neg()
            return _digest(plain.contiguous().reshape(-1).view(torch.uint8).numpy())
    except RuntimeError as error:  # a fake tensor, or one of another kind without values
        raise UnreadableStateError(f"a {type(tensor).__qualname__} cannot be read by value: {error}") from None


def values_of_array(array: Any) -> str:
    """Return a digest of a numpy array's values.

    Raises:
        UnreadableStateError: It has too many.
    """
    _refuse_large(array.nbytes)
    return _digest(array.tobytes())


def _refuse_large(size: int) -> None:
    if size > _MOST_BYTES:
        raise UnreadableStateError(f"{size} bytes of values are not compared; {_MOST_BYTES} are at most")


def _digest(values: Any) -> str:
    return hashlib.sha256(values).hexdigest()
