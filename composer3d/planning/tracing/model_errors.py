"""Errors of a model's own code in a trace, as problems of its manifest, in the words of `check` where it has them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from composer3d.errors import ComposerError, ManifestError, Problem, describe_error
from composer3d.observation import raised_in
from composer3d.processes import machine_error, running

if TYPE_CHECKING:
    from composer3d.checking import Inspection
    from composer3d.manifest import Manifest

__all__ = ["tracing_model"]

# A trace of four blocks of the largest models takes seconds, and one of all blocks minutes.
_MOST_SECONDS, _MOST_SECONDS_IN_FULL = 600.0, 86_400.0


@contextmanager
def tracing_model(manifest: Manifest, found: Inspection, *, in_full: bool) -> Iterator[None]:
    """Trace a model inside; what its code raises becomes a problem of the manifest, and whoever watches knows it runs.

    Args:
        manifest: With what its tokenizer says.
        found: Of it, without errors.
        in_full: Whether every block is traced, which takes as long as there are blocks.

    Raises:
        ManifestError: Code that is neither composer3d's nor torch's raised, or called what did; what `check` says of
            the first samples, where it says anything.
    """
    table = manifest.tables["model"]
    limit_s = _MOST_SECONDS_IN_FULL if in_full else _MOST_SECONDS
    try:
        with running("called", table.hf or table.reference, limit_s=limit_s):
            yield
    except ComposerError:
        raise
    except (Exception, SystemExit) as error:
        place = raised_in(error)
        if place is None or machine_error(error) is not None:
            raise
        raise ManifestError(_checked(manifest, found) or [_told(error, place, manifest)]) from error


def _told(error: BaseException, place: str, manifest: Manifest) -> Problem:
    said = describe_error(error).partition("\n")[0]
    path = ("model", "use" if manifest.tables["model"].hf is None else "hf")
    hint = "a step is traced on tensors with shapes and no values, of one rank with all that the manifest does to it"
    return manifest.document.problem(path, f"a step of it cannot be traced: {said}, at {place}", hint=hint)


def _checked(manifest: Manifest, found: Inspection) -> list[Problem]:
    """Return the errors that `check` has of the first samples."""
    from composer3d.checking import find_factory, first_forward_problems

    factory, _ = find_factory(manifest)
    assert factory is not None and found.preparation is not None, "the inspection has found it"
    factory.learn(found.preparation.model)
    problems, _ = first_forward_problems(manifest, factory, found.preparation)
    return [problem for problem in problems if problem.severity == "error"]
