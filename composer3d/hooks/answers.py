"""Validation of hooks' return values: nested types as the spec annotates them, and rules beyond types.

The return annotation of a spec in `composer3d.hookspecs` is what is checked, with the annotations of the dataclasses
and protocols in it, so that a new hook is checked as soon as it is written.
"""

from __future__ import annotations

import collections.abc
import enum
import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, Literal

from composer3d import interfaces, mesh, transform
from composer3d.hookspecs import HookSpecs
from composer3d.replicas import ReplicaPolicy

if TYPE_CHECKING:
    from composer3d.interfaces import Batch

__all__ = ["Fault", "expected_of", "fault_finder", "mismatch", "predicate_of", "returned_by"]

_LONGEST = 60  # maximum characters of a quoted value
_LONGEST_TIMEOUT_S = 10**9
_KINDS: Mapping[Any, tuple[type, ...]] = {float: (float, int), str: (str,), int: (int,), bool: (bool,)}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Fault in a hook's return value.

    Args:
        found: Value found, and its place in the return value.
        allowed: Values allowed there.
    """

    found: str
    allowed: str

    def __str__(self) -> str:
        return f"{self.found}, not {self.allowed}"


def fault_finder(hook: str) -> Callable[[Any, Mapping[str, Any]], Fault | None]:
    """Return a function of a hook's return value and the arguments of its call.

    It returns the value's fault; None if the value is valid.
    """
    expected = expected_of(hook)
    fits, values = predicate_of(expected), _VALUES.get(hook)

    def find(answer: Any, arguments: Mapping[str, Any]) -> Fault | None:
        if not fits(answer) and (found := mismatch(answer, expected)) is not None:
            return found
        return None if answer is None or values is None else next(iter(values(answer, arguments)), None)

    return find


@functools.cache
def expected_of(hook: str) -> Any:
    """Return the type that a hook's spec states for its answer."""
    return _hints(getattr(HookSpecs, hook))["return"]


@functools.cache
def returned_by(protocol: type) -> Mapping[str, Any]:
    """Return the types that a protocol states for what its methods return, by method."""
    return {name: _hints(getattr(protocol, name))["return"] for name in _methods(protocol)}


def mismatch(value: Any, expected: Any, at: tuple[str, ...] = ()) -> Fault | None:
    """Return where a value is not of a type, as annotations state it; None where it is.

    Args:
        value: Of any type.
        expected: A type, resolved: classes, protocols, literals, unions and generic containers.
        at: Path of the value in the answer, outermost first.
    """
    origin, inner = typing.get_origin(expected), typing.get_args(expected)
    if expected is Any:
        return None
    if origin in (typing.Union, types.UnionType):
        return _of_union(value, expected, at)
    if not _is_of(value, expected):
        return Fault(found=_shown(value, at), allowed=_allowed(expected))
    for place, item, wanted in _items(value, expected, origin, inner):
        found = mismatch(item, wanted, (*at, place))
        if found is not None:
            return found
    return None


@functools.cache
def predicate_of(expected: Any) -> Callable[[Any], bool]:
    """Return a quick predicate for answers in every step: whether a value is of a type all the way down.

    False is not final: of subclasses, and of containers of other kinds, `mismatch` decides.
    """
    origin, inner = typing.get_origin(expected), typing.get_args(expected)
    if expected is Any:
        return lambda value: True
    if origin in (typing.Union, types.UnionType):
        kinds = [predicate_of(each) for each in inner if each is not type(None)]
        if len(kinds) == len(inner) - 1 == 1:
            (fits_other,) = kinds
            return lambda value: value is None or fits_other(value)
        return lambda value: (value is None and len(kinds) < len(inner)) or any(fits(value) for fits in kinds)
    if expected in _KINDS:
        known = _KINDS[expected]
        return lambda value: type(value) in known
    if origin is Literal and all(type(each) is str for each in inner):
        words = frozenset(inner)
        return lambda value: type(value) is str and value in words
    if is_dataclass(expected):
        return _fits_dataclass(expected)
    if origin in (tuple, collections.abc.Sequence):
        fits_item = predicate_of(inner[0])
        kind = (tuple,) if origin is tuple else (list, tuple)
        return lambda value: isinstance(value, kind) and (inner[0] is Any or all(map(fits_item, value)))
    if origin is collections.abc.Mapping:
        fits_key, fits_value = map(predicate_of, inner)
        return lambda value: (
            isinstance(value, dict) and all(map(fits_key, value)) and all(map(fits_value, value.values()))
        )
    if origin is None and isinstance(expected, type) and not getattr(expected, "_is_protocol", False):
        return lambda value: type(value) is expected
    return functools.partial(_is_of, expected=expected)


def _fits_dataclass(expected: Any) -> Callable[[Any], bool]:
    """Return the predicate of a dataclass; a loop, because a generator costs twice as much where microseconds count."""
    hints = _hints(expected)
    parts = [
        (each.name, _KINDS.get(hints[each.name], ()), predicate_of(hints[each.name]))
        for each in fields(expected)
        if hints[each.name] is not Any
    ]

    def fits(value: Any) -> bool:
        if not isinstance(value, expected):
            return False
        for name, kinds, fits_field in parts:
            found = getattr(value, name)
            if type(found) not in kinds and not fits_field(found):
                return False
        return True

    return fits


def _of_union(value: Any, expected: Any, at: tuple[str, ...]) -> Fault | None:
    """Return where a value is of none of several types: inside of it, if its outermost type is one of them."""
    faults = [(kind, mismatch(value, kind, at)) for kind in typing.get_args(expected)]
    if any(fault is None for _, fault in faults):
        return None
    near = [fault for kind, fault in faults if _is_of(value, kind)]
    return near[0] if near else Fault(found=_shown(value, at), allowed=_allowed(expected))


def _is_of(value: Any, expected: Any) -> bool:
    """Return whether a value's outermost type matches, without checking its content."""
    origin = typing.get_origin(expected)
    if expected is None or expected is type(None):
        return value is None
    if origin is Literal:
        return any(value == each and type(value) is type(each) for each in typing.get_args(expected))
    if expected is float:
        return _is_number(value)
    if expected is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if getattr(expected, "_is_protocol", False):
        return not isinstance(value, type) and all(callable(getattr(value, name, None)) for name in _methods(expected))
    kind = origin or expected
    if kind is collections.abc.Callable:
        return callable(value)
    if kind in (collections.abc.Sequence, collections.abc.Collection) and isinstance(value, str | bytes):
        return False
    return isinstance(value, kind)


def _is_number(value: Any) -> bool:
    """Return whether a value is one real number: Python's, numpy's, or a tensor without dims."""
    if isinstance(value, str | bytes) or getattr(value, "shape", ()) != () or not hasattr(value, "__float__"):
        return False
    return not isinstance(value, complex)


def _items(value: Any, expected: Any, origin: Any, inner: tuple[Any, ...]) -> Iterable[tuple[str, Any, Any]]:
    """Yield the items of a value: place, item and expected type."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return
    if is_dataclass(expected):
        hints = _hints(typing.cast(Any, expected))
        for each in fields(expected):
            yield each.name, getattr(value, each.name), hints[each.name]
    elif origin is not None and isinstance(value, Mapping):
        for key, item in value.items():
            yield f"key {_quoted(key)}", key, inner[0]
            yield f"entry {_quoted(key)}", item, inner[1]
    elif origin in (tuple, collections.abc.Sequence, collections.abc.Collection):
        for index, item in enumerate(value):
            yield f"item {index}", item, inner[0]


@functools.cache
def _hints(annotated: Any) -> dict[str, Any]:
    """Return the resolved annotations of a hook, a method or a dataclass."""
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from composer3d.communication import GroupOptions

    known = {**vars(interfaces), **vars(transform), **vars(mesh)}
    known |= {"torch": torch, "nn": torch.nn, "Tensor": torch.Tensor, "Optimizer": torch.optim.Optimizer}
    known |= {"ReplicaPolicy": ReplicaPolicy, "GroupOptions": GroupOptions}
    return typing.get_type_hints(annotated, localns={**known, "DeviceMesh": DeviceMesh, "RunContext": object})


@functools.cache
def _methods(protocol: type) -> tuple[str, ...]:
    return tuple(name for name, member in vars(protocol).items() if inspect.isfunction(member) and name[0] != "_")


# ---- words -----------------------------------------------------------------------------------------------------------


def _quoted(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _shown(value: Any, at: tuple[str, ...]) -> str:
    is_plain = value is None or isinstance(value, str | bytes | int | float | complex) or _is_dtype(value)
    if isinstance(value, type):
        what = f"the class {value.__name__}"
    else:
        what = _quoted(value) if is_plain else f"a value of type {type(value).__name__}"
    return f"{what} as {' of '.join(reversed(at))}" if at else what


def _is_dtype(value: Any) -> bool:
    import torch

    return isinstance(value, torch.dtype)


def _allowed(expected: Any) -> str:
    """Return a type in words."""
    return _either(_alternatives(expected))


def _alternatives(expected: Any) -> list[str]:
    origin, inner = typing.get_origin(expected), typing.get_args(expected)
    if origin in (typing.Union, types.UnionType):
        return [words for each in inner for words in _alternatives(each)]
    if origin is Literal:
        return [f'"{each}"' for each in inner]
    if isinstance(expected, enum.EnumMeta):
        return [f"{expected.__name__}.{member.name}" for member in typing.cast(type[enum.Enum], expected)]
    if origin is None:
        return [_allowed_class(expected)]
    if origin is collections.abc.Callable:
        return ["a function"]
    kind, item = "list", inner[0]
    if origin in (collections.abc.Mapping, tuple):
        kind, item = ("dictionary", inner[1]) if origin is not tuple else ("tuple", inner[0])
    return [f"a {kind}" if item is Any else f"a {kind} of which every item is {_allowed(item)}"]


def _allowed_class(expected: Any) -> str:
    words = {type(None): "None", str: "text", int: "a whole number", float: "a number", bool: "True or False"}
    if expected in words:
        return words[expected]
    name = expected.__name__
    shown = f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"
    if getattr(expected, "_is_protocol", False):
        return f"{shown} (an object with {_either(_methods(expected), 'and')})"
    return shown


def _either(words: Sequence[str], last: str = "or") -> str:
    return f"{', '.join(words[:-1])} {last} {words[-1]}" if len(words) > 1 else words[0]


# ---- rules beyond types ----------------------------------------------------------------------------------------------


def _group_options(answer: Any, arguments: Mapping[str, Any]) -> Iterable[Fault]:
    import torch.distributed as dist

    names = [] if answer.backend is None else [part.rpartition(":")[2].lower() for part in answer.backend.split(",")]
    if not all(dist.is_backend_available(name) for name in names):
        # These two do not communicate.
        real = [name for name in dist.Backend.backend_list if name not in ("undefined", "fake")]
        there = [name for name in real if dist.is_backend_available(name)]
        yield Fault(found=f"{_quoted(answer.backend)} as backend", allowed=_either([f'"{name}"' for name in there]))
    if answer.nccl is not None and names and "nccl" not in names:
        yield Fault(found=f"{_quoted(answer.backend)} as backend beside options of NCCL", allowed='"nccl"')
    if answer.timeout_s is not None and not 0 < answer.timeout_s <= _LONGEST_TIMEOUT_S:
        yield Fault(
            found=f"{answer.timeout_s!r} as timeout_s", allowed=f"seconds above 0, at most {_LONGEST_TIMEOUT_S:,}"
        )


def _dtypes(answer: Any, arguments: Mapping[str, Any]) -> Iterable[Fault]:
    for each in fields(answer):
        dtype = getattr(answer, each.name)
        if dtype is not None and not dtype.is_floating_point:
            yield Fault(found=f"{dtype} as {each.name}", allowed="a floating-point dtype")


def _measure(answer: Any, arguments: Mapping[str, Any]) -> Iterable[Fault]:
    return _of_names(tuple([metric.name for metric in answer]))


@functools.lru_cache(maxsize=1024)  # in every step the same names
def _of_names(names: tuple[str, ...]) -> tuple[Fault, ...]:
    found = []
    for index, name in enumerate(names):
        if not name.strip() or not name.isprintable():
            found.append(Fault(found=f"{_quoted(name)} as name of item {index}", allowed="a text that can be shown"))
        elif name in names[:index]:
            places = f"{names.index(name)} and {index}"
            found.append(Fault(found=f"{_quoted(name)} as name of items {places}", allowed="two names"))
    return tuple(found)


def _split(answer: Any, arguments: Mapping[str, Any]) -> Iterable[Fault]:
    if not answer.parts:
        yield Fault(found="no parts", allowed="at least one")
    for number, part in enumerate(answer.parts):
        if not 0 <= part.index < part.num_stages:
            found = f"{part.index} as index of item {number} of parts"
            yield Fault(found=found, allowed=f"a stage of {part.num_stages}, counted from 0")


def _offload_policy(answer: Any, arguments: Mapping[str, Any]) -> Iterable[Fault]:
    from torch.distributed.fsdp import OffloadPolicy

    if not isinstance(answer, OffloadPolicy):
        yield Fault(found=_shown(answer, ()), allowed="an OffloadPolicy of torch.distributed.fsdp")


def _place_batch(answer: Batch, arguments: Mapping[str, Any]) -> Iterable[Fault]:
    given, found = (_num_samples([batch.args, batch.kwargs, batch.target]) for batch in (arguments["batch"], answer))
    if found < given and not arguments["context"].claimants("samples"):
        yield Fault(
            found=f"{found} of {given} samples",
            allowed=f'all {given} (a plugin that leaves samples to others says context.claim("samples", by=self) in '
            "composer3d_configure)",
        )


def _num_samples(value: Any) -> int:
    """Return the length of the first tensor with dims in nested containers; 0 where there is none."""
    if getattr(value, "ndim", 0):
        return int(value.shape[0])
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return next((length for length in map(_num_samples, items) if length), 0)


def _optimizer(answer: Any, arguments: Mapping[str, Any]) -> Iterable[Fault]:
    held = {id(parameter) for group in answer.param_groups for parameter in group["params"]}
    asked = [parameter for group in arguments["groups"] for parameter in group["params"] if parameter.requires_grad]
    left = [parameter for parameter in asked if id(parameter) not in held]
    if left:
        names = {id(p): fqn for part in arguments["context"].parts for fqn, p in part.module.named_parameters()}
        shown = [f'"{names[id(parameter)]}"' for parameter in left if id(parameter) in names][:4]
        more = f", among them {', '.join(shown)}" if shown else ""
        found = f"a {type(answer).__name__} without {len(left)} of {len(asked)} parameters{more}"
        yield Fault(found=found, allowed="an optimizer that steps all of `groups`")


_VALUES: Mapping[str, Callable[[Any, Mapping[str, Any]], Iterable[Fault]]] = {
    "composer3d_dtypes": _dtypes,
    "composer3d_group_options": _group_options,
    "composer3d_measure": _measure,
    "composer3d_offload_policy": _offload_policy,
    "composer3d_optimizer": _optimizer,
    "composer3d_place_batch": _place_batch,
    "composer3d_split": _split,
}
