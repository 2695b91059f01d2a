"""Manifests that name code of others: what of it hangs, raises, or ends the process, as a problem with its line."""

from __future__ import annotations

import base64
import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from composer3d.errors import ForkError, HookError, ManifestError, Problem
from composer3d.manifest import read
from composer3d.processes import Child, ForeignCodeError

if TYPE_CHECKING:
    from composer3d.manifest import Document

__all__ = ["apart", "names_foreign_code", "problem_of", "problem_of_hook", "watched"]

T = TypeVar("T")

_REFERENCE = re.compile(r"[^\W\d][\w.]*:[^\W\d][\w.]*")
# What these packages name neither hangs nor ends a process.
_TRUSTED = ("composer3d.", "torch.optim")


def names_foreign_code(source: str, overrides: Sequence[str]) -> bool:
    """Return whether a manifest names modules, or a folder of Hugging Face, that are not composer3d's or torch's."""
    try:
        document = read(source, overrides)
    except ManifestError:
        return False  # nothing of it is imported
    return any(
        isinstance(value, str) and _REFERENCE.fullmatch(value) and not value.startswith(_TRUSTED)
        for _, value in _leaves(document.tables)
    )


def watched(function: Callable[[], Mapping[str, Any]], source: str, overrides: Sequence[str]) -> Mapping[str, Any]:
    """Compute a JSON object in a child that is ended where code of others hangs, or here where no child is possible.

    Args:
        function: What computes it.
        source: The manifest.
        overrides: As given to `--set`.

    Raises:
        ManifestError: The child ended, or was ended, while code ran that the manifest names.
        ChildError: It failed otherwise.
    """
    try:
        child = Child(function)
    except ForkError:  # this process has computed with tensors, as a notebook's
        return function()
    try:
        return child.result()
    except ForeignCodeError as error:
        raise ManifestError([problem_of(error, source, overrides)]) from error


def apart(function: Callable[[], T], sources: Sequence[str], overrides: Sequence[str]) -> T:
    """Call a function in a child that is watched, where manifests name code of others, so that it may hang or leave.

    In this process where they name none, as those of models that composer3d ships, or where no child is possible.

    Args:
        function: Its result is pickled, and needs nothing of what the manifests name.
        sources: Manifests that it reads.
        overrides: As given to `--set`.

    Raises:
        ManifestError: One has problems; the child ended, or was ended, while code ran that it names.
        ComposerError: The function raised it.
    """
    foreign = [source for source in sources if names_foreign_code(source, overrides)]
    if not foreign:
        return function()
    try:
        child = Child(lambda: _packed(function), called="the process that builds the model")
    except ForkError:  # this process has computed with tensors, as a notebook's
        return function()
    try:
        answer = child.result()
    except ForeignCodeError as error:
        named = [source for source in foreign if _path_of(error.code.reference, read(source, overrides))]
        raise ManifestError([problem_of(error, (named or foreign)[0], overrides)]) from error
    if "problems" in answer:
        raise ManifestError([Problem(**problem) for problem in answer["problems"]])
    result: T = pickle.loads(base64.b64decode(answer["pickled"]))
    return result


def _packed(function: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"pickled": base64.b64encode(pickle.dumps(function())).decode()}
    except ManifestError as error:
        return {"problems": [problem.to_json() for problem in error.problems]}


def problem_of(error: ForeignCodeError, source: str, overrides: Sequence[str]) -> Problem:
    """Return an error as a problem at the line that names the code."""
    document = read(source, overrides)
    return document.problem(_path_of(error.code.reference, document) or ("model",), str(error))


def _path_of(reference: str, document: Document) -> tuple[str | int, ...] | None:
    """Return the key that names a piece of code."""
    return next((path for path, value in _leaves(document.tables) if value == reference), None)


def problem_of_hook(error: HookError, document: Document) -> Problem:
    """Return what a plugin raised as a problem at its table."""
    return document.problem(error.path, error.message, whole_table=True)


def _leaves(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, index))
    else:
        yield path, value
