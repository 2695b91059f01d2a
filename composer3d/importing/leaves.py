"""Leaves of a source file: every key that holds a value, with its line."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from composer3d.errors import Problem

__all__ = ["MOST_LEAVES", "Leaf", "SourceTree", "TreeBuilder", "UnreadableSource"]

KeyPath: TypeAlias = tuple[str, ...]

MOST_LEAVES = 10_000
MAX_DEPTH = 32
_MOST_BITS = 4096


class UnreadableSource(Exception):
    """A source file is no text of its format; the problem says where and why."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        super().__init__(str(problem))


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """A key that holds a value: anything but a table with keys in it. A list is one value.

    Args:
        path: Keys from the top of the file.
        value: Text, number, boolean, None, list, or an empty table.
        line: Where its key stands, from 1.
        column: The same.
        written: The key as the source writes it, where its system has several spellings; default: the path.
    """

    path: KeyPath
    value: Any
    line: int
    column: int = 1
    written: str | None = None

    @property
    def key(self) -> str:
        """The path with dots between its keys, by which tables and rules know it."""
        return ".".join(self.path)

    @property
    def shown(self) -> str:
        """The key as the report names it."""
        return self.key if self.written is None else self.written


@dataclass(frozen=True, kw_only=True)
class SourceTree:
    """A source file, read.

    Args:
        file: How the user named it.
        leaves: By dotted key, in the order of the file.
        problems: Mistakes of the file that its own system passes over, or not.
        text: The text, by which its system is recognised.
    """

    file: str
    leaves: Mapping[str, Leaf]
    problems: tuple[Problem, ...] = ()
    text: str = ""

    def values(self) -> dict[str, Any]:
        """Return nested tables of the values, without places."""
        result: dict[str, Any] = {}
        for leaf in self.leaves.values():
            inner = result
            for part in leaf.path[:-1]:
                inner = inner.setdefault(part, {})
                if not isinstance(inner, dict):  # a key with dots in its name, beside such a table
                    inner = {}
            inner[leaf.path[-1]] = leaf.value
        return result

    def below(self, block: str) -> Iterator[Leaf]:
        """Yield the leaf of that key, or those inside of it."""
        for key, leaf in self.leaves.items():
            if key == block or key.startswith(f"{block}."):
                yield leaf


@dataclass(kw_only=True)
class TreeBuilder:
    """Collects leaves while a file is read, and refuses what no configuration is.

    Args:
        file: Named in problems.
    """

    file: str
    leaves: dict[str, Leaf] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def fail(self, message: str, line: int, column: int = 1, *, hint: str | None = None) -> UnreadableSource:
        """Return the error of a place."""
        return UnreadableSource(Problem(message=message, file=self.file, line=line, column=column, hint=hint))

    def add(
        self,
        path: KeyPath,
        value: Any,
        line: int,
        column: int = 1,
        *,
        severity: str = "error",
        written: str | None = None,
    ) -> None:
        """Add a leaf; of a key that is there twice the last value counts, and the first is a problem.

        Args:
            path: Keys from the top.
            value: A leaf's, or a table, whose leaves are added.
            line: Of the key.
            column: The same.
            severity: Of a key that is there twice.
            written: The key as the source writes it.

        Raises:
            UnreadableSource: There are too many keys, or a number no machine computes with.
        """
        if len(path) > MAX_DEPTH:
            raise self.fail(f"keys are nested deeper than {MAX_DEPTH} levels", line, column)
        if isinstance(value, Mapping) and value:
            for key, item in value.items():
                self.add((*path, str(key)), item, line, column, severity=severity)
            return
        if any(map(_is_beyond, _numbers(value))):
            raise self.fail(f"{path[-1]} holds a number that is not finite or too large", line, column)
        leaf = Leaf(path=path, value=value, line=line, column=column, written=written)
        if leaf.key in self.leaves:
            first = self.leaves.pop(leaf.key).line
            self.problems.append(
                Problem(
                    message=f"{leaf.shown} stands twice, in line {first} too",
                    file=self.file,
                    line=line,
                    column=column,
                    severity="error" if severity == "error" else "warning",
                    hint="remove one of them",
                )
            )
        self.leaves[leaf.key] = leaf
        if len(self.leaves) > MOST_LEAVES:
            raise self.fail(f"there are more than {MOST_LEAVES} keys", line, column)

    def tree(self, text: str) -> SourceTree:
        """Return what was collected."""
        return SourceTree(file=self.file, leaves=self.leaves, problems=tuple(self.problems), text=text)


def _numbers(value: Any) -> Iterator[int | float]:
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for item in value:
            yield from _numbers(item)


def _is_beyond(number: int | float) -> bool:
    return not math.isfinite(number) if isinstance(number, float) else number.bit_length() > _MOST_BITS
