"""The verbs as functions: arguments validated alike, and a call that depends on nothing around it.

`check`, `plan`, `suggest`, `verify` and `run` have arguments of the same names, which mean the same in all of them, so
what each accepts stands once. What the caller's process has set up for its own tensors is no part of a manifest: a verb
does what its command would do in a new process.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeAlias, TypeVar

from composer3d.errors import ArgumentError, did_you_mean
from composer3d.processes import neutral_state

__all__ = ["Form", "above_zero", "as_set", "verb", "whole_number"]

P = ParamSpec("P")
R = TypeVar("R")
# Returns a value as the function takes it; raises ValueError with what is accepted.
Form: TypeAlias = Callable[[Any], Any]


def verb(**forms: Form) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return the decorator of a verb: it validates the arguments, and calls the function in a neutral state.

    None is accepted where it is the default.

    Args:
        forms: What arguments accept that other verbs do not have, or that they take otherwise.

    Raises:
        ArgumentError: An argument is none that the function takes, before anything is read.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        name, signature = function.__name__, inspect.signature(function)
        accepted = {each: {**_FORMS, **forms}[each] for each in signature.parameters}

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                stated = _accepted(signature, accepted, args, kwargs)
                with neutral_state():
                    return function(*stated.args, **stated.kwargs)
            except ArgumentError as error:
                error.function = name
                raise

        return call

    return decorate


def _accepted(
    signature: inspect.Signature, forms: Mapping[str, Form], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> inspect.BoundArguments:
    """Return the arguments as the function takes them."""
    for name, value in kwargs.items():
        if name not in forms:
            raise ArgumentError(name, f"there is no such argument; {did_you_mean(name, list(forms))}", value=value)
    try:
        stated = signature.bind(*args, **kwargs)
    except TypeError:
        raise _unbound(signature, forms, args, kwargs) from None
    for name, value in stated.arguments.items():
        if value is None and signature.parameters[name].default is None:
            continue
        try:
            stated.arguments[name] = forms[name](value)
        except ValueError as error:
            if name == "overrides":  # which may hold secrets
                raise ArgumentError(name, f"it must be {error}, and is of type {type(value).__name__}") from None
            raise ArgumentError(name, f"it must be {error}", value=value) from None
    return stated


def _unbound(
    signature: inspect.Signature, forms: Mapping[str, Form], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> ArgumentError:
    """Return what is wrong with the number of arguments."""
    first, *others = signature.parameters
    if len(args) > 1:
        return ArgumentError(first, f"it alone is given without a name; write {others[0]}=..., ...", value=args[0])
    if args and first in kwargs:
        return ArgumentError(first, "it is given twice", value=kwargs[first])
    empty = inspect.Parameter.empty
    needed = [name for name, each in signature.parameters.items() if each.default is empty]
    name = next(name for name in needed[len(args) :] if name not in kwargs)
    try:
        forms[name](None)
    except ValueError as error:
        return ArgumentError(name, f"it is missing, and must be {error}")
    raise AssertionError(f"{name} accepts None, and has no default")


def as_set(overrides: Sequence[str] | Mapping[str, Any]) -> tuple[str, ...]:
    """Return overrides as they are given to `--set`.

    Args:
        overrides: So already, or values by dotted key.
    """
    from composer3d.manifest import inline

    if not isinstance(overrides, Mapping):
        return tuple(overrides)
    return tuple(f"{key}={inline(value)}" for key, value in overrides.items())


def whole_number(least: int) -> Form:
    """Return the form of a whole number.

    Args:
        least: The smallest one.
    """

    def form(value: Any) -> int:
        whole = int(value) if not isinstance(value, bool) and isinstance(value, numbers.Integral) else least - 1
        if whole < least:
            raise ValueError(f"a whole number of at least {least}")
        return whole

    return form


def above_zero(value: Any) -> float:
    """Accept a number above 0 that is not infinite."""
    number = float(value) if not isinstance(value, bool) and isinstance(value, numbers.Real) else 0.0
    if not 0 < number < math.inf:
        raise ValueError("a number above 0, such as 2000 or 2e3")
    return number


def _bytes(value: Any) -> int:
    try:
        return whole_number(1)(value)
    except ValueError:
        raise ValueError("a whole number of bytes of at least 1, such as 80 * 2**30") from None


def _manifest(value: Any) -> str:
    """Accept a path, and not the text of a manifest."""
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str) or not path or "\n" in path:
        raise ValueError("a path, or the name of a shipped manifest")
    return path


def _name_or_path(value: Any) -> str:
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str) or not path.strip():
        raise ValueError("a shipped name, or the path of a file")
    return path


def _resume(value: Any) -> str:
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str) or not path:
        raise ValueError('"auto", "never", or the path of a checkpoint')
    return path


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("a text")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("True or False")
    return value


def _function(value: Any) -> Any:
    if not callable(value):
        raise ValueError("a function of one argument")
    return value


def _texts(example: str) -> Form:
    def form(value: Any) -> tuple[str, ...]:
        is_list = isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
        listed = tuple(value) if is_list else (None,)
        if not all(isinstance(each, str) for each in listed):
            raise ValueError(f"a list of texts, such as {example}")
        return listed

    return form


def _overrides(value: Any) -> tuple[str, ...]:
    try:
        _texts('["train.steps=5"]')(tuple(value) if isinstance(value, Mapping) else value)
        return as_set(value)
    except (ValueError, TypeError) as error:
        why = "" if isinstance(error, ValueError) else f" ({error})"
        accepted = 'a list of texts, such as ["train.steps=5"], or values by key, such as {"train.steps": 5}'
        raise ValueError(accepted + why) from None


# What the arguments of the verbs accept, by name.
_FORMS: Mapping[str, Form] = {
    "manifest": _manifest,
    "overrides": _overrides,
    "world_size": whole_number(1),
    "rank": whole_number(0),
    "strict": _flag,
    "memory_bytes": _bytes,
    "hardware": _name_or_path,
    "tokens": above_zero,
    "samples": above_zero,
    "price": above_zero,
    "currency": _text,
    "full": _flag,
    "routing_skew": above_zero,
    "keep": _texts('["tp=8", "pp<=2"]'),
    "steps": whole_number(1),
    "max_blocks": whole_number(1),
    "max_dim": whole_number(1),
    "max_ranks": whole_number(1),
    "nproc_per_node": whole_number(1),
    "nodes": whole_number(1),
    "node_rank": whole_number(0),
    "endpoint": _text,
    "resume": _resume,
    "on_problems": _function,
    "report": _function,
}
