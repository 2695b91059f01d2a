"""The suite as checks that a test is parametrised with, and as a report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer3d.errors import ComposerError, RankError
from composer3d.manifest import inline
from composer3d.processes import temporary_folder
from composer3d.testing.conformance.conformance_case import Conformance
from composer3d.testing.conformance.headings import REFUSED, NonConformance, Suite

__all__ = ["HEADINGS", "ConformanceCheck", "Finding", "conformance_checks", "run_conformance"]

# In this order: what others build on comes first.
HEADINGS = (
    "effect",
    "numerics",
    "collectives",
    "state",
    "refusals",
    "order",
    "plan",
    "purpose",
    "overhead",
    "matrix",
)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Outcome of a check.

    Args:
        heading: One of `HEADINGS`.
        options: The plugin's table.
        ok: Whether it holds.
        verdict: `holds`, or the name of what does not, such as `wrong numbers`.
        detail: What was found.
    """

    heading: str
    options: str
    ok: bool
    verdict: str
    detail: str


@dataclass(frozen=True, kw_only=True)
class ConformanceCheck:
    """One heading of a suite, to be called.

    Args:
        case: Of the plugin.
        heading: One of `HEADINGS`.
        options: The plugin's table.
    """

    case: Conformance
    heading: str
    options: Mapping[str, Any]

    def __call__(self) -> str:
        """Return what was found.

        Raises:
            NonConformance: It does not hold; an AssertionError whose `verdict` is the name of what does not.
        """
        with temporary_folder("conformance") as folder:
            return _call(Suite(self.case, self.options, Path(folder)), self.heading)

    def __str__(self) -> str:
        table = inline(dict(self.options)) if self.options else "defaults"
        return f"{self.heading}: {table}"


def conformance_checks(case: Conformance, *, headings: Sequence[str] = HEADINGS) -> list[ConformanceCheck]:
    """Return a plugin's suite, for `pytest.mark.parametrize("check", conformance_checks(case), ids=str)`.

    Every table of options is tried under every heading but `matrix`, which takes the first. A test calls `check()`.

    Args:
        case: The plugin, and what its author states of it.
        headings: Of `HEADINGS`, those to check.
    """
    return [
        ConformanceCheck(case=case, heading=heading, options=options)
        for heading in headings
        for options in (case.options[:1] if heading == "matrix" else case.options)
    ]


def run_conformance(case: Conformance, *, headings: Sequence[str] = HEADINGS) -> Iterator[Finding]:
    """Yield a finding for every check of a suite as it ends; tables share what several headings need."""
    for number, options in enumerate(case.options):
        with temporary_folder("conformance") as folder:
            suite = Suite(case, options, Path(folder))
            for heading in headings:
                if heading != "matrix" or number == 0:
                    found = _found(suite, heading, options)
                    yield found
                    if found.verdict == REFUSED:  # by every other heading, too
                        break


def _call(suite: Suite, heading: str) -> str:
    suite.refuse_what_check_refuses()
    try:
        found: str = getattr(suite, heading)()
    except (RankError, ComposerError) as error:
        raise NonConformance("does not run", str(error)) from None
    return found


def _found(suite: Suite, heading: str, options: Mapping[str, Any]) -> Finding:
    table = inline(dict(options)) if options else "{}"
    try:
        detail = _call(suite, heading)
    except NonConformance as error:
        detail = str(error).removeprefix(f"{error.verdict}: ")
        return Finding(heading=heading, options=table, ok=False, verdict=error.verdict, detail=detail)
    return Finding(heading=heading, options=table, ok=True, verdict="holds", detail=detail)
