"""Layers of TOML that merge into one manifest: bases, the file, the command line; each value keeps its place."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tomli

from composer3d.errors import Problem
from composer3d.manifest.positions import KeyPath, NestedTooDeeply, locate, split_key
from composer3d.manifest.secret import HIDDEN, hide_passwords, names_a_secret
from composer3d.manifest.toml_writer import dotted

__all__ = ["SUGAR_TABLES", "Layer", "Place", "merge", "override", "parse", "stated_by"]

# `name = "value"` at the top of a manifest is short for `[name] use = "value"`.
SUGAR_TABLES = ("data", "lr_schedule", "model", "optimizer")
# Two keys of a table that say the same in other units: a layer that states one replaces the inherited other.
_ALTERNATIVES: Mapping[KeyPath, KeyPath] = {
    ("train", "accumulate"): ("train", "global_batch"),
    ("train", "global_batch"): ("train", "accumulate"),
}
# Integers beyond 64 bits are none that TOML promises, and Python refuses to print long ones.
_LARGEST = 1 << 63
_BEYOND = "beyond 64 bits"
_LONG_NUMBER = re.compile(r"(?<![0-9A-Za-z_\"'])[+-]?[0-9][0-9_]{99,}")
_LOOKALIKES = {
    "\u201c": "a curly quote",
    "\u201d": "a curly quote",
    "\u2018": "a curly quote",
    "\u2019": "a curly quote",
    "\u00a0": "a no-break space",
    "\u2013": "a dash",
    "\u2212": "a minus sign of typography",
}
_PLAIN = {"\u201c": '"', "\u201d": '"', "\u2018": "'", "\u2019": "'", "\u2013": "-", "\u2212": "-"}
_WORDS = {
    **dict.fromkeys(("True", "yes", "on"), "write true"),
    **dict.fromkeys(("False", "no", "off"), "write false"),
}


@dataclass(frozen=True)
class Place:
    """Place of something in a manifest.

    Args:
        file: The manifest as the user named it, or `--set KEY=VALUE`.
        line: 1-based; None for `--set`.
        column: 1-based; None for `--set`.
    """

    file: str
    line: int | None = None
    column: int | None = None


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Nested tables, the place of every key path in them, and what no manifest can hold: see `_unusable`."""

    tables: Mapping[str, Any]
    places: Mapping[KeyPath, Place]
    problems: tuple[Problem, ...] = ()


def parse(text: str, *, file: str) -> Layer | Problem:
    """Read one TOML text, or return what tomli has against it with the line it stumbled over."""
    try:
        located = locate(text)
        tables = tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        # tomli prints key paths as Python tuples.
        said = re.sub(r"\('(.*?)',?\)", lambda match: match[1].replace("', '", "."), error.msg)
        written = error.doc.split("\n")[error.lineno - 1].strip()[:80]
        return Problem(
            message=f"not valid TOML: {said[:1].lower()}{said[1:]}",
            file=file,
            line=error.lineno,
            column=error.colno,
            hint=_slip(error.doc.split("\n")[error.lineno - 1], error.msg)
            or _table_before(error.doc.split("\n")[: error.lineno])
            or _shown(written),
        )
    except NestedTooDeeply as error:
        return Problem(message=f"nested too deeply: {error}", file=file, line=error.line, column=error.column)
    except ValueError:  # Python's limit of digits
        found = _LONG_NUMBER.search(text)
        before = text[: found.start()] if found else ""
        line, column = before.count("\n") + 1, len(before.rpartition("\n")[2]) + 1
        return Problem(message=f"an integer {_BEYOND}", file=file, line=line, column=column)
    places = {path: Place(file, line, column) for path, (line, column) in located.items()}
    unusable = list(_unusable(tables, places, ()))
    kept = _without(tables, [path for path, _ in unusable], ())
    return _expand(Layer(tables=kept, places=places, problems=tuple(problem for _, problem in unusable)))


def _table_before(lines: Sequence[str]) -> str | None:
    """Return where the table of the last line stands already, if the same heading does; None otherwise."""
    heading = re.fullmatch(r"\s*\[([^\[\]]+)\]\s*(#.*)?", lines[-1])
    if heading is None:
        return None
    same = re.compile(rf"\s*\[\s*{re.escape(heading[1].strip())}\s*\]\s*(#.*)?")
    first = next((number for number, line in enumerate(lines[:-1], start=1) if same.fullmatch(line)), None)
    return None if first is None else f"[{heading[1].strip()}] stands on line {first}; write its keys there"


def _slip(line: str, said: str) -> str | None:
    """Return what to write instead of what other formats, or a text's editor, make of TOML."""
    if said.startswith("Cannot overwrite a value"):
        return "the key stands in the file twice; remove one of them"
    for character, name in _LOOKALIKES.items():
        if character in line:
            return f"the line holds {name} (U+{ord(character):04X}); write {_PLAIN.get(character, 'a space')}"
    word = re.search(r"=\s*(True|False|None|null|nil|yes|no|on|off)\s*[,}\]#]?", line)
    if word is not None:
        return _WORDS.get(word[1], "TOML has no such value: leave the key out")
    return None


def _shown(line: str) -> str:
    """Return a hint that shows a line, unless it may hold a secret."""
    if any(map(names_a_secret, re.findall(r"[\w-]+", line))):
        return "the line is not shown: it names a secret"
    return f"the line reads: {hide_passwords(line)}" if line else "the line is empty"


def merge(base: Layer, top: Layer) -> Layer:
    """Merge one layer into another: tables merge, keys override, `table = false` removes an inherited table.

    A key also overrides the inherited one that says the same in other units.
    """
    places = dict(base.places)
    tables = _merge(base.tables, top.tables, (), places)
    return Layer(tables=tables, places=places | dict(top.places), problems=(*base.problems, *top.problems))


def override(layer: Layer, text: str) -> Layer | Problem:
    """Override a layer by `key=value` from the command line.

    Args:
        layer: Content of the files.
        text: A dotted TOML key, `=`, and a TOML value; any other text is a string.
    """
    file = f"--set {hide_passwords(text)}"
    try:
        found = split_key(text)
    except NestedTooDeeply as error:
        return Problem(message=f"nested too deeply: {error}", file=file[:200])
    if found is None:
        return Problem(message="does not start with a key", file=file, hint="write --set table.key=value")
    path, end = found
    value = text[end + 1 :].strip()
    if any(map(names_a_secret, path)):
        file = f"--set {text[:end]}={HIDDEN}"
    if text[end : end + 1] != "=" or not value:
        return Problem(message="has no value", file=file, hint="write --set table.key=value")
    if path[0] in ("composer3d", "extends"):
        return Problem(message=f"{path[0]} cannot be set here", file=file, hint="write it in the manifest")
    tables: dict[str, Any] = {path[-1]: _value(value)}
    for name in reversed(path[:-1]):
        tables = {name: tables}
    places: dict[KeyPath, Place] = {path: Place(file)}
    for _, problem in _unusable(tables, places, ()):
        return problem
    merged = merge(layer, _expand(Layer(tables=tables, places=places)))
    ancestors = {path[:length]: Place(file) for length in range(1, len(path))}
    return replace(merged, places=ancestors | dict(merged.places))


def stated_by(overrides: Iterable[str]) -> tuple[Mapping[str, Any], list[str]]:
    """Return the tables that overrides state by themselves, and the keys of secrets among them, which are left out.

    Args:
        overrides: As `override` takes them; malformed ones state nothing.
    """
    layer, secrets = Layer(tables={}, places={}), []
    for text in overrides:
        found = override(layer, text)
        if isinstance(found, Problem):
            continue
        key = split_key(text)
        if key is not None and any(map(names_a_secret, key[0])):
            secrets.append(dotted(key[0]))
        else:
            layer = found
    return layer.tables, secrets


def _value(text: str) -> Any:
    try:
        locate(f"value = {text}")
        values = tomli.loads(f"value = {text}")
    except (ValueError, NestedTooDeeply):
        return text
    # More than one key: the text had a line break and went on as a document.
    return values["value"] if len(values) == 1 else text


def _expand(layer: Layer) -> Layer:
    tables, places = dict(layer.tables), dict(layer.places)
    for name in SUGAR_TABLES:
        if isinstance(tables.get(name), str):
            tables[name] = {"use": tables[name]}
            places[(name, "use")] = places[(name,)]
    return Layer(tables=tables, places=places, problems=layer.problems)


def _unusable(value: Any, places: Mapping[KeyPath, Place], path: KeyPath) -> Iterator[tuple[KeyPath, Problem]]:
    """Yield path and problem of every value that TOML can hold and nothing that reads a manifest can use."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            here = (*path, key)
            if "\0" in key:
                yield here, _unusable_problem("a key holds the character NUL", places, here)
            yield from _unusable(item, places, here)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _unusable(item, places, (*path, index))
    elif isinstance(value, int) and not -_LARGEST <= value < _LARGEST:
        yield path, _unusable_problem(f"{dotted(path)} is an integer {_BEYOND}", places, path)
    elif isinstance(value, str) and "\0" in value:
        yield path, _unusable_problem(f"{dotted(path)} holds the character NUL", places, path)


def _without(value: Any, paths: Sequence[KeyPath], path: KeyPath) -> Any:
    """Return tables without the keys at paths; a list loses its key where one of its items would be left out."""
    if not isinstance(value, Mapping) or not any(each[: len(path)] == path for each in paths):
        return value
    return {
        key: _without(item, paths, (*path, key))
        for key, item in value.items()
        if (*path, key) not in paths
        and not (isinstance(item, list) and any(each[: len(path) + 1] == (*path, key) for each in paths))
    }


def _unusable_problem(message: str, places: Mapping[KeyPath, Place], path: KeyPath) -> Problem:
    place = next(places[path[:length]] for length in range(len(path), 0, -1) if path[:length] in places)
    key = next((str(part) for part in reversed(path) if isinstance(part, str)), None)
    return Problem(
        message=message, file=place.file, line=place.line, column=place.column, table=dotted(path[:-1]), key=key
    )


def _merge(
    base: Mapping[str, Any], top: Mapping[str, Any], path: KeyPath, places: dict[KeyPath, Place]
) -> dict[str, Any]:
    result = dict(base)
    for key, value in top.items():
        here = (*path, key)
        inherited = base.get(key)
        if isinstance(inherited, Mapping) and isinstance(value, Mapping):
            result[key] = _merge(inherited, value, here, places)
            continue
        if isinstance(inherited, Mapping | list):
            for known in [known for known in places if known[: len(here)] == here]:
                del places[known]
        else:
            places.pop(here, None)
        if isinstance(inherited, Mapping) and value is False:
            del result[key]
        else:
            result[key] = value
        other = _ALTERNATIVES.get(here)
        if other is not None and other[-1] not in top:
            result.pop(str(other[-1]), None)
            places.pop(other, None)
    return result
