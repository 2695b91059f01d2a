"""Callables that a manifest names: whether they can be called, and what a run would find when it first calls them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from typing import Any

from composer3d.errors import ComposerError, Problem, ReferenceFailure, describe_error, did_you_mean, is_interrupt
from composer3d.manifest import Document, Manifest, resolve_reference
from composer3d.processes import running

__all__ = ["argument_problems", "metric_problems", "resolve", "schedule_callable_problems", "uncallable"]


def _builtin_refusal(function: Any, name: str) -> str | None:
    """Return why something is nothing that a run calls; functions that are built into Python, as os.abort, are not."""
    if not callable(function):
        return f'"{name}" cannot be called: it is of type {type(function).__name__}'
    module = getattr(function, "__module__", None) or ""
    is_foreign = inspect.isbuiltin(function) and not module.startswith("torch")
    return f'"{name}" is built into Python' if is_foreign else None


def schedule_callable_problems(manifest: Manifest) -> list[Problem]:
    """Call a learning-rate schedule of one's own for the first, a middle and the last step."""
    document, table = manifest.document, manifest.tables["lr_schedule"]
    path = ("lr_schedule", "use" if table.use else "name")
    try:
        function = resolve_reference(table.kind, document.folder)
    except ReferenceFailure as error:
        return [document.problem(path, error.message, hint=error.hint)]
    if (refusal := _builtin_refusal(function, table.kind)) is not None:
        return [document.problem(path, refusal, hint="name a function of (step, steps) that returns the multiple")]
    steps = getattr(manifest.tables.get("train"), "steps", 1)
    for step in dict.fromkeys((0, steps // 2, steps - 1)):
        try:
            with running("called", table.kind):
                value = float(function(step, steps, **(table.args or {})))
        except BaseException as error:
            if is_interrupt(error):
                raise
            said = str(error) if isinstance(error, ComposerError) else describe_error(error)
            message = f'"{table.kind}" fails for step {step} of {steps}: {said}'
            hint = "it is called with (step, steps), and args by name, and returns the multiple of the rate, a number"
            return [document.problem(path, message, hint=hint)]
        if not math.isfinite(value):
            return [document.problem(path, f'"{table.kind}" is {value} for step {step} of {steps}, not a number')]
    return []


def metric_problems(manifest: Manifest) -> list[Problem]:
    """Import the metrics of an evaluation: the run's ranks would find out at its first one."""
    document = manifest.document
    metrics = getattr(manifest.tables.get("evaluation"), "metrics", None) or {}
    found = [_metric_problem(name, use, document) for name, use in metrics.items() if ":" in str(use)]
    return [problem for problem in found if problem is not None]


def _metric_problem(name: str, use: str, document: Document) -> Problem | None:
    path = ("evaluation", "metrics", name)
    try:
        function = resolve_reference(use, document.folder)
    except ReferenceFailure as error:
        return document.problem(path, error.message, hint=error.hint)
    if (refusal := _builtin_refusal(function, use)) is not None:
        return document.problem(path, refusal, hint="name a function of the model's output and the targets")
    return None


def resolve(reference: str, document: Document) -> Any:
    """Import what a reference of the manifest names; see `resolve_reference`."""
    return resolve_reference(reference, document.folder)


def uncallable(function: Any, name: str, document: Document, place: tuple[str | int, ...]) -> Problem | None:
    """Return the problem of what cannot be called for a model or data; `sys:exit` and `os:abort` are not tried."""
    refusal = _builtin_refusal(function, name)
    if refusal is None:
        return None
    return document.problem((*place, "use"), refusal, hint="name a class or a function")


def argument_problems(
    function: Any,
    name: str,
    args: Mapping[str, Any],
    document: Document,
    place: tuple[str | int, ...],
    *,
    derived: Mapping[str, Any],
) -> Iterator[Problem]:
    """Compare a table `args`, and what is derived where it is silent, with the signature of what it is for."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin without a signature: the call itself tells
        return
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    by_name = {
        key: parameter
        for key, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    for key in args:
        if key not in by_name and not takes_any:
            hint = did_you_mean(key, list(by_name)) or "it takes none"
            yield document.problem((*place, "args", key), f'{name} takes no argument "{key}"', hint=hint)
    for key, parameter in by_name.items():
        if parameter.default is parameter.empty and key not in args and key not in derived:
            key_path = (*place, "args" if args else "use")
            yield document.problem(
                key_path, f'{name} needs the argument "{key}"', hint=f"write {place[0]}.args.{key} = ..."
            )
