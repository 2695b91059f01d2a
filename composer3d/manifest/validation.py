"""Validation of tables by pydantic: each of its errors becomes a sentence at the line of its key."""

from __future__ import annotations

import datetime
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_origin

from pydantic import ValidationError
from pydantic_core.core_schema import ErrorType

from composer3d.errors import KeyFault, Problem, did_you_mean
from composer3d.manifest.descriptions import describe_keys, fields
from composer3d.manifest.positions import KeyPath
from composer3d.manifest.secret import HIDDEN, Secret, hide, names_a_secret
from composer3d.manifest.toml_writer import dotted, inline
from composer3d.manifest.wording import alternatives, bare, choices, count, describe, expected, seconds_in

if TYPE_CHECKING:
    from composer3d.manifest.document import Document

__all__ = ["secret_paths", "validate"]

T = TypeVar("T")

_BOUNDS = {
    "greater_than": "greater than",
    "greater_than_equal": "at least",
    "less_than": "less than",
    "less_than_equal": "at most",
    "multiple_of": "a multiple of",
    "finite_number": "a finite number",
}
_MOST_OF_A_LIST = 5  # whose faults are told one by one
LARGEST = 10**12  # of integers without a bound of their own
_AUTHORED = ("value_error", "assertion_error")


@dataclass(frozen=True, kw_only=True)
class _Fault:
    """One error of pydantic, put back onto the table that the user wrote.

    Args:
        kind: pydantic's error type.
        context: What pydantic adds to it: bounds, lengths, the exception of a validator.
        said: pydantic's message; shown only where a validator's author wrote it.
        path: Inside the table.
        annotation: Expected type; None for an unknown key.
        owner: The class whose key is the last part of the path, if a class it is.
        value: Value found.
        union: The path at which a union was entered, and which member of it pydantic tried.
    """

    kind: str
    context: Mapping[str, Any]
    said: str
    path: KeyPath
    annotation: Any
    owner: Any
    value: Any
    union: tuple[KeyPath, str] | None


def validate(
    document: Document, key_path: Iterable[str | int], cls: type[T], value: Any
) -> tuple[T | None, list[Problem]]:
    """Make an instance of a table class from a table of a manifest.

    The table is validated as JSON: in this mode pydantic's strictness is about what a text format can say, so a list
    is good for a tuple or a set, a string for an enum or a path, an integer for a float, and nothing else is converted.

    Args:
        document: Document that locates keys.
        key_path: Path of the table in the document.
        cls: A pydantic dataclass, see `table`.
        value: The table, as read from TOML.

    Returns:
        The instance, or None and all problems.
    """
    base = tuple(key_path)
    if value is False:
        message = f"{dotted(base)} = false removes an inherited table, and there is none"
        return None, [document.problem(base, message, hint="remove this line")]
    if not isinstance(value, Mapping):
        hint = f"its keys are {', '.join(fields(cls))}: write {dotted(base)}.{next(iter(fields(cls)))} = ..."
        return None, [document.problem(base, f"{dotted(base)} must be a table, not {describe(value)}", hint=hint)]
    dates = list(_dates(value, ()))
    problems = [
        document.problem(base + path, f"{dotted(base + path)} must not be a date or time", hint="put it in quotes")
        for path in dates
    ]
    faults = [*_mistaken_literals(cls, value), *_meaningless(cls, value)]
    instance = None
    try:
        instance = cls.__pydantic_validator__.validate_json(json.dumps(value, default=str))  # type: ignore[attr-defined]
    except ValidationError as error:
        known = {fault.path for fault in faults}
        found = _select([_trace(cls, value, details) for details in error.errors(include_url=False)])
        faults += [fault for fault in found if fault.path not in known]
    problems += _problems(document, base, [fault for fault in faults if fault.path not in dates])
    return (None, list(dict.fromkeys(problems))) if problems else (instance, [])


def _problems(document: Document, base: KeyPath, faults: Sequence[_Fault]) -> Iterable[Problem]:
    """Yield the problem of each fault, of those in one list the first few."""
    seen: Counter[KeyPath] = Counter()
    for fault in faults:
        place = next((index for index, part in enumerate(fault.path) if isinstance(part, int)), None)
        path = fault.path[:place]
        seen[path] += place is not None
        if place is None or seen[path] <= _MOST_OF_A_LIST:
            yield _problem(document, base, fault)
    for path, number in seen.items():
        if (more := number - _MOST_OF_A_LIST) > 0:
            yield document.problem(base + path, f"{dotted(base + path)} has {count(more, 'more such fault')}")


def secret_paths(annotation: Any, value: Any, path: KeyPath) -> Iterable[KeyPath]:
    """Yield the key paths below a path whose values are secrets by their type.

    Args:
        annotation: A table class, or the annotation of a key.
        value: Value in the manifest.
        path: Path of the value.
    """
    for member in map(bare, alternatives(annotation)):
        if member is Secret:
            yield path
        elif isinstance(value, Mapping):
            for key, item in value.items():
                known = fields(member)
                inside = _inside(member, key) if key in known or not known else None
                yield from () if inside is None else secret_paths(inside, item, (*path, key))
        elif isinstance(value, list):
            for index, item in enumerate(value):
                inside = _inside(member, index)
                yield from () if inside is None else secret_paths(inside, item, (*path, index))


def _holds_secrets(annotation: Any) -> bool:
    plain = bare(annotation)
    return plain is Secret or any(_holds_secrets(argument) for argument in get_args(plain))


def _dates(value: Any, path: KeyPath) -> Iterable[KeyPath]:
    if isinstance(value, datetime.date | datetime.time):
        yield path
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _dates(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _dates(item, (*path, index))


def _mistaken_literals(annotation: Any, value: Any, path: KeyPath = ()) -> Iterable[_Fault]:
    """Yield the values that equal a literal of another type: to pydantic `true` and `1.0` are the literal 1."""
    members = alternatives(annotation)
    if isinstance(value, bool | float):
        allowed = choices(annotation)
        others = [member for member in members if not choices(member) and bare(member) in (bool, float)]
        if value in allowed and not others and type(value) not in {type(one) for one in allowed if one == value}:
            yield _Fault(
                kind="literal_error",
                context={},
                said="",
                path=path,
                annotation=annotation,
                owner=None,
                value=value,
                union=None,
            )
        return
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        for member in map(bare, members):
            known = fields(member)
            inside = _inside(member, key) if key in known or not known else None
            if inside is not None:
                yield from _mistaken_literals(inside, item, (*path, key))


def _meaningless(annotation: Any, value: Any, path: KeyPath = ()) -> Iterable[_Fault]:
    """Yield texts that are empty, and integers so large that no bound was stated for them: slips of the pen."""
    members = [bare(member) for member in alternatives(annotation)]
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        for member in members:
            known = fields(member)
            inside = _inside(member, key) if key in known or not known else None
            if inside is None:
                continue
            kinds = [bare(kind) for kind in alternatives(inside)]
            fault = _Fault(
                kind="",
                context={},
                said="",
                path=(*path, key),
                annotation=inside,
                owner=member,
                value=item,
                union=None,
            )
            # An empty FQN in a list is the model itself.
            default = known[str(key)].default if known else ""
            if item == "" and str in kinds and "" not in (*choices(inside), default):
                yield replace(fault, kind="string_too_short", context={"min_length": 1})
            elif (
                type(item) is int and item > LARGEST and int in kinds and float not in kinds and not _is_bounded(inside)
            ):
                yield replace(fault, kind="less_than_equal", context={"le": LARGEST})
            yield from _meaningless(inside, item, (*path, key))


def _is_bounded(annotation: Any) -> bool:
    stated = [*getattr(annotation, "__metadata__", ()), *getattr(bare(annotation), "__metadata__", ())]
    return any(getattr(bound, name, None) is not None for bound in stated for name in ("le", "lt"))


def _trace(cls: type, value: Any, details: Any) -> _Fault:
    """Walk an error's location down the annotations; pydantic mixes keys with the names of union members it tried."""
    wanted, kind = list(details["loc"]), details["type"]
    if wanted[-1:] == ["[key]"]:
        wanted, kind = wanted[:-1], "key"
    annotation: Any = cls
    owner: Any = None
    path: KeyPath = ()
    union: tuple[KeyPath, str] | None = None
    while wanted:
        members = alternatives(annotation)
        if len(members) > 1:
            tag = str(wanted.pop(0))
            union = union or (path, tag)
            if wanted:
                annotation = _member(members, tag, value)
            continue
        owner = bare(members[0])
        if kind == "missing" and len(wanted) == 1 and isinstance(wanted[0], int):  # an item of a list of fixed length
            break
        part = wanted.pop(0)
        annotation = get_args(owner)[0] if kind == "key" and not wanted else _inside(owner, part)
        path, value = (*path, part), _item(value, part)
    return _Fault(
        kind=kind,
        context=details.get("ctx", {}),
        said=details["msg"],
        path=path,
        annotation=annotation,
        owner=owner,
        value=value,
        union=union,
    )


def _member(members: Sequence[Any], tag: str, value: Any) -> Any:
    """Return the member of a union that a tag names; only members with content have one."""
    named = [member for member in members if getattr(bare(member), "__name__", None) == tag]
    fitting = [member for member in members if expected(member).startswith(describe(value))]
    return [*named, *fitting, None][0]


def _inside(annotation: Any, part: Any) -> Any:
    """Return the annotation of one key or item; None where there is none."""
    if part in fields(annotation):
        info = fields(annotation)[part]
        return Annotated[(info.annotation, *info.metadata)] if info.metadata else info.annotation
    arguments = get_args(annotation)
    if get_origin(annotation) is tuple and Ellipsis not in arguments:
        return arguments[part] if isinstance(part, int) and part < len(arguments) else None
    # The values of a table come last, the items of a list first.
    return next(iter(arguments[1:2] or arguments), None) if isinstance(part, str) else next(iter(arguments), None)


def _item(value: Any, part: Any) -> Any:
    if isinstance(value, Mapping):
        return value.get(part)
    return value[part] if isinstance(value, list) and isinstance(part, int) and part < len(value) else None


def _select(faults: Sequence[_Fault]) -> list[_Fault]:
    """Combine pydantic's faults of each member of a union into one.

    A validator's own words come first; then what is wrong inside a member of the right kind; else the whole union is
    what was expected.
    """
    groups: dict[Any, list[_Fault]] = {}
    for index, fault in enumerate(faults):
        groups.setdefault(fault.union[0] if fault.union else index, []).append(fault)
    selected: list[_Fault] = []
    for key, group in groups.items():
        if not isinstance(key, tuple):
            selected += group
            continue
        authored = [fault for fault in group if fault.kind in _AUTHORED]
        inner = [fault for fault in group if len(fault.path) > len(key)]
        tags = [fault.union[1] for fault in inner if fault.union]
        if authored:
            selected += authored
        elif inner:
            best = min(dict.fromkeys(tags), key=tags.count)
            selected += [fault for fault in inner if fault.union and fault.union[1] == best]
        else:
            selected.append(replace(group[0], kind="union_type"))
    return selected


def _problem(document: Document, base: KeyPath, fault: _Fault) -> Problem:
    path = base + fault.path
    is_secret = _holds_secrets(fault.annotation) or any(map(names_a_secret, path))
    # The text of a secret at the wrong place is a secret too.
    value = HIDDEN if is_secret and not isinstance(fault.value, Mapping | list) else hide(fault.value)
    message, hint = _sentence(replace(fault, value=value), path)
    error = fault.context.get("error")
    key = (error.key,) if isinstance(error, KeyFault) else ()
    return document.problem(path + key, message, hint=hint, whole_table=not fault.path and not key)


def _sentence(fault: _Fault, path: KeyPath) -> tuple[str, str | None]:
    kind, context, name = fault.kind, fault.context, dotted(path)
    if kind in ("unexpected_keyword_argument", "extra_forbidden", "key"):
        known = choices(fault.annotation) if kind == "key" else list(fields(fault.owner))
        return f"unknown key {inline(str(path[-1]))}", did_you_mean(str(path[-1]), [str(key) for key in known])
    if kind == "missing" and fields(fault.owner):
        description = describe_keys(fault.owner).get(str(path[-1]))
        return f'needs the key "{path[-1]}"', description.rstrip(".") if description else None
    if kind in _AUTHORED:
        said = str(context["error"])
        return (f"{name}: {said}" if fault.path else said), None
    if kind in _BOUNDS:
        bound = "".join(f" {inline(value)}" for value in context.values())
        return f"{name} must be {_BOUNDS[kind]}{bound}, not {inline(fault.value)}", None
    if kind in ("missing", "too_short", "too_long", "string_too_short", "string_too_long"):
        return _length_sentence(fault, name), None
    if kind == "string_pattern_mismatch":
        return f"{name} must match the pattern {context['pattern']}, not {inline(fault.value)}", None
    if kind.endswith("_type") or kind in ("literal_error", "enum", "pattern_regex"):
        return _type_sentence(fault, path)
    # An error type that is not pydantic's own was made by the author of the table, with its text.
    return (
        f"{name} = {inline(fault.value)} is not allowed" if kind in get_args(ErrorType) else f"{name}: {fault.said}"
    ), None


def _length_sentence(fault: _Fault, name: str) -> str:
    phrase, noun = expected(fault.annotation), "character" if fault.kind.startswith("string") else "item"
    members = map(bare, alternatives(fault.annotation))
    if any(get_origin(member) is tuple and Ellipsis not in get_args(member) for member in members):
        return f"{name} must be {phrase}, not of {len(fault.value)}"
    limit = fault.context.get("min_length", fault.context.get("max_length"))
    side = "at least" if "min_length" in fault.context else "at most"
    return f"{name} must have {side} {count(limit, noun)}, not {len(fault.value)}"


def _type_sentence(fault: _Fault, path: KeyPath) -> tuple[str, str | None]:
    allowed = choices(fault.annotation)
    near = _nearest(fault.value, [choice for choice in allowed if isinstance(choice, str)])
    hint = f'did you mean "{near}"?' if near else None
    is_scalar = not isinstance(fault.value, Mapping | list)
    if is_scalar and all(choices(member) for member in alternatives(fault.annotation)):
        listed = ", ".join(inline(choice) for choice in allowed)
        start = max(index for index, part in enumerate(path) if isinstance(part, str))
        return f"{dotted(path[start:])} = {inline(fault.value)} is not one of {listed}", hint
    hint = hint or _number_in_quotes(fault) or seconds_in(fault.value, path[-1])
    return f"{dotted(path)} must be {expected(fault.annotation)}, not {describe(fault.value)}", hint


def _number_in_quotes(fault: _Fault) -> str | None:
    """Return the number that a text holds, where numbers alone are allowed; a percentage as a fraction."""
    kinds = {bare(member) for member in alternatives(fault.annotation)}
    found = re.fullmatch(r"\s*([-+]?\d[\d_]*(?:\.\d+)?(?:e[-+]?\d+)?)\s*(%?)\s*", str(fault.value), re.IGNORECASE)
    if not isinstance(fault.value, str) or found is None or not kinds & {int, float}:
        return None
    number = float(found[1]) / 100 if found[2] else float(found[1])
    if number.is_integer() and int in kinds and not found[2]:
        return f"write {int(number)}, without quotes"
    return f"write {number:g}, without quotes" if float in kinds else None


def _nearest(word: Any, words: Sequence[str]) -> str | None:
    """Return the choice nearest to a word, ignoring case."""
    if not isinstance(word, str):
        return None
    by_lower = {choice.lower(): choice for choice in words}
    near = get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[near[0]] if near else None
