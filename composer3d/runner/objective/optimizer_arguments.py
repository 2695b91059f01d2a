"""Validation of `[optimizer]` arguments: values of another type, and those that the class itself refuses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from inspect import signature
from typing import TYPE_CHECKING, Any, get_type_hints

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError

from composer3d.torch_compat.compilers import nothing_compiles

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from composer3d.runner.runner_tables import OptimizerTable

__all__ = ["refused_arguments"]

KeyPath = tuple[str | int, ...]


def refused_arguments(
    table: OptimizerTable, cls: type[Optimizer], arguments: Mapping[str, Any]
) -> Iterator[tuple[KeyPath, str]]:
    """Yield what a class does not take of its arguments and of its groups' hyperparameters, with key path and reason.

    Types are those that the class annotates: torch itself takes the string "no" for true. Values are refused by torch's
    classes and ours when they are made, which is tried; a class of the user's may need more than a parameter for that.

    Args:
        table: `[optimizer]`; key paths begin inside it.
        cls: Of the optimizer.
        arguments: All that it is called with.
    """
    for key in ("lr", "weight_decay"):
        if key in table.args:
            yield ("args", key), f"{key} is a key of [optimizer]; write it without args"
    if reason := _unusable(cls):
        yield ("use",), reason
        return
    places = {key: ("args", key) if key in table.args else (key,) for key in arguments}
    mistyped = {key: reason for key in table.args if (reason := _other_type(cls, key, table.args[key]))}
    yield from ((places[key], reason) for key, reason in mistyped.items())
    is_known = cls.__module__.partition(".")[0] in ("torch", "composer3d") and not mistyped
    made = _made(cls, arguments) if is_known else None
    if isinstance(made, Exception):
        yield places.get(_culprit(cls, arguments), ("use",)), f"{cls.__name__}: {made}"
    for index, group in enumerate(table.groups):
        own = {} if group.weight_decay is None else {"weight_decay": group.weight_decay}
        for key, value in (own | group.args).items():
            place = ("groups", index, "args", key) if key in group.args else ("groups", index, key)
            if key in group.args and key in ("lr", "weight_decay"):
                yield place, f"{key} is a key of the group; write it without args"
            elif reason := _other_type(cls, key, value):
                yield place, reason
            elif made is None or isinstance(made, Exception):
                continue
            elif key not in made.defaults:
                hint = ", ".join(made.defaults)
                yield place, f'{cls.__name__} has no hyperparameter "{key}"; it has {hint}'
            elif isinstance(error := _made(cls, {**arguments, key: value}), Exception):
                yield place, f"{cls.__name__}: {error}"


def _unusable(cls: type[Optimizer]) -> str:
    """Return why no composed step can run an optimizer of this class; empty where nothing is known against it."""
    import torch

    closure = signature(cls.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        return f"{cls.__name__} calls a closure again, and a composed step runs once; use an optimizer that does not"
    if issubclass(cls, torch.optim.SparseAdam):
        return f"{cls.__name__} takes sparse gradients alone, and gradients that ranks reduce are dense; use adamw"
    return ""


def _other_type(cls: type[Optimizer], key: str, value: Any) -> str:
    """Return what is wrong with an argument's type; empty where nothing is, or the class does not say."""
    try:
        allowed = get_type_hints(cls.__init__).get(key, Any)
        adapter = TypeAdapter(allowed, config=ConfigDict(strict=True, arbitrary_types_allowed=True))
    except (NameError, TypeError, PydanticUserError):  # annotations of the user's may be for readers alone
        return ""
    for form in [value, tuple(value)] if isinstance(value, list) else [value]:  # TOML knows no tuples
        try:
            adapter.validate_python(form)
        except ValidationError:
            continue
        return ""
    return f"{cls.__name__} takes as {key} a value of type {getattr(allowed, '__name__', allowed)}, not {value!r}"


def _made(cls: type[Optimizer], arguments: Mapping[str, Any]) -> Optimizer | Exception:
    import torch

    try:
        with nothing_compiles():
            return cls([torch.nn.Parameter(torch.zeros(2, 2))], **arguments)
    except Exception as error:  # torch compares and multiplies whatever it is given, and asserts
        return error


def _culprit(cls: type[Optimizer], arguments: Mapping[str, Any]) -> str:
    """Return the argument without which the class can be made; empty where there is no single one."""
    for key in arguments:
        others = {other: value for other, value in arguments.items() if other != key}
        if not isinstance(_made(cls, others), Exception):
            return key
    return ""
