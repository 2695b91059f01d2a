"""Places in the manifest of what plugins raise: a plugin's table, or the key that holds what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from composer3d.errors import ComposerError, ManifestError, PatternError, PluginError, Problem

if TYPE_CHECKING:
    from composer3d.context import RunContext
    from composer3d.registry import Registered
    from composer3d.transform import Transform

__all__ = ["asking", "at_plugin", "located", "named_in"]


@contextmanager
def located(problems: list[Problem], locate: Callable[[ComposerError], Problem]) -> Iterator[None]:
    """Collect what is raised inside, as the problem that `locate` makes of it.

    Args:
        problems: Extended.
        locate: Gives an error its place in the manifest; those of a ManifestError have theirs.
    """
    try:
        yield
    except ManifestError as error:
        problems += error.problems
    except ComposerError as error:
        problems.append(locate(error))


@contextmanager
def asking(problems: list[Problem], registered: Registered, context: RunContext) -> Iterator[None]:
    """Locate a plugin's error at its table."""
    with located(problems, partial(at_plugin, registered, context)):
        yield


def at_plugin(registered: Registered, context: RunContext, error: ComposerError) -> Problem:
    """Locate an error at its plugin's table, or at the key that holds the offending pattern."""
    document = context.manifest.document
    path: tuple[Any, ...] = (registered.info.family, registered.name)
    if isinstance(error, PatternError):
        path = _path_of_value(document.get(path), error.pattern, path) or path
    if isinstance(error, PluginError):
        path = (*path, *error.keys)
    whole = len(path) == 2
    if isinstance(error, PluginError):
        return document.problem(path, error.message, hint=error.hint, whole_table=whole)
    return document.problem(path, str(error), whole_table=whole)


def named_in(text: str, collected: Sequence[tuple[Registered, Transform]]) -> Registered:
    """Return the plugin whose transform a message quotes first."""
    places = {text.find(f'"{transform.name}"'): registered for registered, transform in collected}
    return min(((place, registered) for place, registered in places.items() if place >= 0), key=lambda pair: pair[0])[1]


def _path_of_value(value: Any, wanted: str, path: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Find where in a table a string stands, as a value or as a key."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key == wanted or item == wanted:
                return (*path, key)
            inner = _path_of_value(item, wanted, (*path, key))
            if inner is not None:
                return inner
    if isinstance(value, list) and wanted in value:
        return path
    return None
