"""Callables of `[lr_schedule]` and `[evaluation]`: what a run would find when it first calls them."""

from __future__ import annotations

import inspect
import math
from typing import Any

from composer3d.errors import ComposerError, Problem, ReferenceFailure, describe_error, is_interrupt
from composer3d.manifest import Document, Manifest, resolve_reference
from composer3d.processes import running

__all__ = ["builtin_refusal", "metric_problems", "schedule_callable_problems"]


def builtin_refusal(function: Any, name: str) -> str | None:
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
    if (refusal := builtin_refusal(function, table.kind)) is not None:
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
    if (refusal := builtin_refusal(function, use)) is not None:
        return document.problem(path, refusal, hint="name a function of the model's output and the targets")
    return None
