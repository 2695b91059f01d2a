"""Manifest documents: the file, its bases and `--set` as one tree in which every value knows its file and line."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from composer3d.errors import ManifestError, Problem
from composer3d.manifest.inherited_files import seen_from
from composer3d.manifest.layers import Layer, Place, merge, override, parse
from composer3d.manifest.positions import KeyPath
from composer3d.manifest.references import note_extended
from composer3d.manifest.secret import hide, redacted, remember_secrets
from composer3d.manifest.sources import Source, find, find_base, missing, missing_base, read_source
from composer3d.manifest.toml_writer import dotted, dump
from composer3d.manifest.wording import shortened

__all__ = ["FORMAT", "Document", "Place", "read", "read_text"]

FORMAT = 1
_LONGEST_CHAIN = 32


@dataclass(frozen=True, kw_only=True)
class Document:
    """A manifest after bases and overrides are merged, before its tables are typed.

    Args:
        tables: Nested tables, in the order in which the layers bring them; without `composer3d` and `extends`.
        places: Where each key path was written.
        file: The outermost file as the user named it.
        path: The outermost file; None for text, or for a shipped manifest inside an archive.
        folder: From where references and relative paths count: the file's folder; the working folder for text and
            shipped manifests.
        stem: The file's name without folder and suffix.
        secrets: Key paths of secrets, set once the tables are typed.
        unusable: Problems of values that nothing can read, and which the tables therefore lack.
    """

    tables: Mapping[str, Any]
    places: Mapping[KeyPath, Place]
    file: str
    path: Path | None
    folder: Path
    stem: str
    secrets: frozenset[KeyPath] = frozenset()
    unusable: tuple[Problem, ...] = ()

    def place(self, key_path: Iterable[str | int]) -> Place:
        """Return where a key path was written, or its nearest ancestor that was; the file's start if none was."""
        path = tuple(key_path)
        for length in range(len(path), 0, -1):
            if path[:length] in self.places:
                return self.places[path[:length]]
        return Place(self.file, 1, 1)

    def get(self, key_path: Iterable[str | int], default: Any = None) -> Any:
        """Return the value at a key path, or the default if there is none."""
        value: Any = self.tables
        for part in key_path:
            if isinstance(value, Mapping) and part in value:
                value = value[part]
            elif isinstance(value, list) and isinstance(part, int) and 0 <= part < len(value):
                value = value[part]
            else:
                return default
        return value

    def problem(
        self,
        key_path: Iterable[str | int],
        message: str,
        *,
        hint: str | None = None,
        severity: Literal["error", "warning"] = "error",
        whole_table: bool = False,
    ) -> Problem:
        """Return a problem with its place.

        Args:
            key_path: Path of the fault; the last part is the key, the others are its table.
            message: Text of the error, without its place; secrets in it, which an exception may quote, are hidden.
            hint: How to fix it.
            severity: See `Problem`.
            whole_table: The key path is a table, and no single key of it is at fault.
        """
        path = tuple(key_path)
        place = self.place(path)
        return Problem(
            message=redacted(message),
            severity=severity,
            file=place.file,
            line=place.line,
            column=place.column,
            table=dotted(path if whole_table else path[:-1]),
            key=None if whole_table or not path else str(path[-1]),
            hint=hint,
        )

    def to_toml(self) -> str:
        """Return the merged manifest as one TOML text, which reads back equal but for secrets, which are hidden."""
        return dump({"composer3d": FORMAT, **hide(self.tables, self.secrets)})

    def digest(self) -> str:
        """Return the SHA-256 of the manifest's content, in hex, independent of key order and of secrets."""
        # Dates are no JSON; as an object, a date differs from the string that looks like it.
        text = json.dumps(
            {"composer3d": FORMAT, **hide(self.tables, self.secrets)},
            sort_keys=True,
            default=lambda date: {"date": str(date)},
        )
        return hashlib.sha256(text.encode()).hexdigest()


def read(source: str | Path, overrides: Sequence[str] = ()) -> Document:
    """Read a manifest, the manifests it extends, and overrides.

    Args:
        source: A path, or the name of a shipped manifest; a file of that name comes first.
        overrides: `key=value` as given to `--set`; the later one wins.

    Raises:
        ManifestError: With everything that is wrong with the layers: a file that is missing, unreadable, not UTF-8 or
            not TOML, another format, a cycle of `extends`, a malformed override.
    """
    found = find(source)
    if found is None:
        raise ManifestError([missing(source)])
    problems: list[Problem] = []
    layer = _read_chain((found,), problems)
    beside = found.path if found.path and not found.is_shipped else None
    return _finish(
        layer,
        overrides,
        problems,
        file=found.file,
        path=found.path,
        folder=beside.absolute().parent if beside else Path.cwd(),
        stem=Path(found.file).stem,
    )


def read_text(text: str, name: str = "<text>", overrides: Sequence[str] = ()) -> Document:
    """Read a manifest from text; paths in it count from the working folder.

    Args:
        text: TOML of a manifest, as a file would have it.
        name: Name in messages instead of a file's.
        overrides: As for `read`.

    Raises:
        ManifestError: As `read`.
    """
    problems: list[Problem] = []
    layer = _read_layer(text, (Source(file=name),), problems)
    stem = Path(name.strip("<>")).stem
    return _finish(layer, overrides, problems, file=name, path=None, folder=Path.cwd(), stem=stem)


def _finish(layer: Layer, overrides: Sequence[str], problems: list[Problem], **attributes: Any) -> Document:
    for text in overrides:
        result = override(layer, text)
        if isinstance(result, Problem):
            problems.append(result)
        else:
            layer = result
    if problems:
        raise ManifestError([*problems, *layer.problems])
    remember_secrets(layer.tables)
    return Document(tables=layer.tables, places=layer.places, unusable=layer.problems, **attributes)


def _read_chain(chain: tuple[Source, ...], problems: list[Problem]) -> Layer:
    """Read the last manifest of a chain, in which each one extends the next."""
    text = read_source(chain[-1])
    if isinstance(text, Problem):
        problems.append(text)
        return Layer(tables={}, places={})
    return _read_layer(text, chain, problems)


def _read_layer(text: str, chain: tuple[Source, ...], problems: list[Problem]) -> Layer:
    file = chain[-1].file
    layer = parse(text, file=file)
    if isinstance(layer, Problem):
        problems.append(layer)
        return Layer(tables={}, places={})
    problem = _check_format(layer, file)
    if problem is not None:
        problems.append(problem)
    tables = {key: value for key, value in layer.tables.items() if key not in ("composer3d", "extends")}
    own = Layer(tables=tables, places=layer.places, problems=layer.problems)
    if "extends" not in layer.tables:
        return own
    base = _find_base(layer.tables["extends"], chain)
    if isinstance(base, Problem):
        place = layer.places[("extends",)]
        problems.append(replace(base, file=file, line=place.line, column=place.column, table="", key="extends"))
        return own
    inherited: list[Problem] = []
    below = _beside(chain, base, _read_chain((*chain, base), inherited))
    # A base that cannot be opened has no lines of its own.
    place = layer.places[("extends",)]
    problems += [
        replace(
            problem,
            message=f'extends = "{problem.file}", which {problem.message}',
            file=file,
            line=place.line,
            column=place.column,
            table="",
            key="extends",
        )
        if problem.file == base.file and problem.line is None
        else problem
        for problem in inherited
    ]
    return merge(below, own)


def _beside(chain: tuple[Source, ...], base: Source, below: Layer) -> Layer:
    """Have modules and files that a base names found beside it too, after those beside the manifests that extend it."""
    if base.path is None or base.is_shipped or chain[-1].path is None:
        return below
    folders = [each.path.absolute().parent for each in chain if each.path and not each.is_shipped]
    other = base.path.absolute().parent
    if folders[-1] == other:
        return below
    note_extended(folders[-1], other)
    return replace(below, tables=seen_from(folders, below.tables, base=other))


def _find_base(name: Any, chain: tuple[Source, ...]) -> Source | Problem:
    if not isinstance(name, str):
        return Problem(message=f"extends = {shortened(name)} is not a string", hint="write a path or a shipped name")
    if len(chain) >= _LONGEST_CHAIN:
        return Problem(message=f"extends is a chain of more than {_LONGEST_CHAIN} manifests", hint="join some of them")
    base = find_base(name, chain[-1])
    if base is None:
        return missing_base(name, chain[-1])
    for index, source in enumerate(chain):
        if source.identity == base.identity:
            files = [link.file for link in (*chain[index:], source)]
            return Problem(message="extends forms a cycle: " + " -> ".join(files))
    return base


def _check_format(layer: Layer, file: str) -> Problem | None:
    hint = f"this version reads composer3d = {FORMAT}"
    if "composer3d" not in layer.tables:
        message = "the key composer3d is missing; it says which format the manifest has"
        hint += ": make it the first line"
        return Problem(message=message, file=file, line=1, column=1, table="", key="composer3d", hint=hint)
    value = layer.tables["composer3d"]
    if type(value) is int and value == FORMAT:
        return None
    place = layer.places[("composer3d",)]
    return Problem(
        message=f"composer3d = {shortened(value)} is not a format that this version knows",
        file=file,
        line=place.line,
        column=place.column,
        table="",
        key="composer3d",
        hint=hint,
    )
