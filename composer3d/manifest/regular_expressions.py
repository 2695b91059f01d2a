"""Regular expressions over names, matched in polynomial time for any expression.

Python's own matcher tries alternatives one after another: `(a+)+$` on a name of 30 letters takes it minutes. Here the
set of all places at which a part of the expression can end is computed from the set of those at which it begins, each
once for every part and place. Which groups took what is not known then, and not asked for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

__all__ = ["Expression", "SlowExpression", "search"]

_MANY = 2  # repetitions of unknown length that Python's matcher is trusted with, one after another
_UNBOUNDED = (op.MAX_REPEAT, op.MIN_REPEAT)
_SINGLE = (op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN)
_ANCHORS = {
    op.AT_BEGINNING: r"\A",
    op.AT_BEGINNING_STRING: r"\A",
    op.AT_END: r"$",
    op.AT_END_STRING: r"\Z",
    op.AT_BOUNDARY: r"\b",
    op.AT_NON_BOUNDARY: r"\B",
}
_CATEGORIES = {
    op.CATEGORY_DIGIT: r"\d",
    op.CATEGORY_NOT_DIGIT: r"\D",
    op.CATEGORY_SPACE: r"\s",
    op.CATEGORY_NOT_SPACE: r"\S",
    op.CATEGORY_WORD: r"\w",
    op.CATEGORY_NOT_WORD: r"\W",
}


class SlowExpression(ValueError):
    """A regular expression that nothing here matches in bounded time."""


class Expression:
    """A compiled regular expression.

    Args:
        pattern: In Python's syntax. Of what Python has, groups that are referred to later, atomic groups and possessive
            repetitions are refused where Python's own matcher could take exponentially long.

    Raises:
        ValueError: It is no regular expression, or one that is refused; the text has the reason.
    """

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        try:
            self._compiled = re.compile(pattern)
            # A list of names, which may be long, repeats nothing.
            self._tree: Any = parser.parse(pattern) if set(pattern) & set("*+{") else ()
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(str(error)) from None
        self._is_simple = _num_repetitions(self._tree) <= _MANY
        if not self._is_simple:
            _refuse(self._tree)

    def search(self, name: str) -> bool:
        """Return whether it matches anywhere in a name."""
        if self._is_simple:
            return self._compiled.search(name) is not None
        return bool(_Matcher(name=name, flags=self._tree.state.flags).ends(self._tree, range(len(name) + 1)))


@cache
def _compiled(pattern: str) -> Expression:
    return Expression(pattern)


def search(pattern: str, name: str) -> bool:
    """Return whether an expression matches anywhere in a name.

    >>> search(r"layers\\.[0-3]\\.", "layers.2.norm.weight"), search("(a+)+$", "a" * 200 + "b")
    (True, False)

    Raises:
        ValueError: See `Expression`.
    """
    return _compiled(pattern).search(name)


def _inside(argument: Any) -> Iterable[Any]:
    """Return the sequences of parts inside the argument of a part."""
    if isinstance(argument, parser.SubPattern):
        yield argument
    elif isinstance(argument, tuple | list):
        for item in argument:
            yield from _inside(item)


def _num_repetitions(tree: Any) -> int:
    """Return how many repetitions follow each other; one that holds a choice or a repetition counts as too many."""
    total = 0
    for kind, argument in tree:
        inner = [_num_repetitions(part) for part in _inside(argument)]
        repeats = kind in _UNBOUNDED and argument[1] > 1
        total += (1 if not any(inner) and _is_single(argument[2]) else _MANY + 1) if repeats else sum(inner)
    return total


def _is_single(tree: Any) -> bool:
    """Return whether a repeated part is one character, which can be matched in one way only."""
    return len(tree) == 1 and tree[0][0] in _SINGLE


def _refuse(tree: Any) -> None:
    for kind, argument in tree:
        if kind in (op.GROUPREF, op.GROUPREF_EXISTS, op.ATOMIC_GROUP, op.POSSESSIVE_REPEAT):
            raise SlowExpression(
                "it has repetitions inside or beside others, and a reference to a group, an atomic group or a "
                "possessive repetition; leave one of both out"
            )
        for part in _inside(argument):
            _refuse(part)


@dataclass(kw_only=True, eq=False)
class _Matcher:
    """Finds where parts of an expression end in one name.

    Args:
        name: Where is searched.
        flags: Of the whole expression.
    """

    name: str
    flags: int
    _known: dict[tuple[int, int, int], frozenset[int]] = field(default_factory=dict)

    def ends(self, tree: Any, starts: Iterable[int], flags: int | None = None) -> frozenset[int]:
        """Return all places at which a sequence of parts can end that begins at one of some places."""
        flags = self.flags if flags is None else flags
        places = frozenset(starts)
        for kind, argument in tree:
            if not places:
                break
            places = self._part(kind, argument, places, flags)
        return places

    def _part(self, kind: Any, argument: Any, places: frozenset[int], flags: int) -> frozenset[int]:
        if kind in _SINGLE:
            fits = _test(_one_character(kind, argument), flags & (re.I | re.A | re.S))
            return frozenset(at + 1 for at in places if at < len(self.name) and fits(self.name[at]))
        if kind is op.BRANCH:
            return frozenset().union(*(self.ends(branch, places, flags) for branch in argument[1]))
        if kind is op.SUBPATTERN:
            _, added, removed, tree = argument
            return self.ends(tree, places, (flags | added) & ~removed)
        if kind in _UNBOUNDED:
            least, most, tree = argument
            repeated = self._run if _is_single(tree) else self._repeated
            return repeated(least, most, tree, places, flags)
        if kind is op.AT:
            anchor = "^" if argument is op.AT_BEGINNING and flags & re.M else _ANCHORS[argument]
            test_at = re.compile(anchor, flags & (re.A | re.M)).match
            return frozenset(at for at in places if test_at(self.name, at))
        assert kind in (op.ASSERT, op.ASSERT_NOT), kind
        direction, tree = argument
        width = tree.getwidth()[0] if direction < 0 else 0
        holds = {
            at
            for at in places
            if at >= width and (found := self.ends(tree, (at - width,), flags)) and (direction > 0 or at in found)
        }
        return frozenset(holds if kind is op.ASSERT else places - holds)

    def _run(self, least: int, most: Any, tree: Any, places: frozenset[int], flags: int) -> frozenset[int]:
        """Return the ends of a repeated character: it fits for a while, or at no place."""
        fits = _test(_one_character(*tree[0]), flags & (re.I | re.A | re.S))
        lengths = [0] * (len(self.name) + 1)
        for at in reversed(range(len(self.name))):
            lengths[at] = lengths[at + 1] + 1 if fits(self.name[at]) else 0
        found: set[int] = set()
        for at in places:
            found.update(range(at + least, at + min(int(most), lengths[at]) + 1))
        return frozenset(found)

    def _repeated(self, least: int, most: Any, tree: Any, places: frozenset[int], flags: int) -> frozenset[int]:
        reached: frozenset[int] = frozenset()
        for count in range(min(int(most), least + len(self.name) + 1) + 1):
            if count >= least:
                if places <= reached:
                    break
                reached |= places
            before, places = places, frozenset().union(*(self._once(tree, at, flags) for at in places))
            if not places:
                break
            if places == before and count < least:  # what it can do, it does at once
                return reached | places
        return reached

    def _once(self, tree: Any, at: int, flags: int) -> frozenset[int]:
        key = (id(tree), at, flags)
        if key not in self._known:
            self._known[key] = self.ends(tree, (at,), flags)
        return self._known[key]


@cache
def _test(expression: str, flags: int) -> Callable[[str], Any]:
    return re.compile(expression, flags).match


def _one_character(kind: Any, argument: Any) -> str:
    """Return the expression of one character that a parsed part represents."""
    if kind is op.ANY:
        return "."
    if kind is op.IN:
        items = [(item, value) for item, value in argument if item is not op.NEGATE]
        negated = "^" if len(items) < len(argument) else ""
        return f"[{negated}{''.join(_in_set(item, value) for item, value in items)}]"
    return f"[{'^' if kind is op.NOT_LITERAL else ''}{re.escape(chr(argument))}]"


def _in_set(kind: Any, value: Any) -> str:
    if kind is op.RANGE:
        return f"{re.escape(chr(value[0]))}-{re.escape(chr(value[1]))}"
    return _CATEGORIES[value] if kind is op.CATEGORY else re.escape(chr(value))
