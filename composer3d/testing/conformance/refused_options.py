"""Refusals of a plugin: options that cannot be are refused by `check`, and what `check` accepts composes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from composer3d.errors import ComposerError, RankError
from composer3d.processes import temporary_folder
from composer3d.registry import options_of
from composer3d.testing.conformance.conformance_case import Conformance, Written
from composer3d.testing.conformance.observed_steps import observe
from composer3d.testing.plugin_options import DEFAULT, OFF, installed_options

__all__ = ["accepted_options", "judge_refusals", "refusal"]

_UNKNOWN = "no_such_key"


def accepted_options(case: Conformance) -> tuple[Mapping[str, Any], str]:
    """Return a plugin's defaults, or where `check` refuses them the first table of one option that it accepts.

    Args:
        case: Of the plugin; tables beside it are part of what is checked.

    Returns:
        The table, and why it is not the defaults: empty where it is.
    """
    with temporary_folder("conformance") as folder:
        written = Written.of(case, Path(folder))
        refused = refusal(written, {})
        others = (table for table in _possible(case) if not refusal(written, table)) if refused else iter(())
        return next(others, {}), refused


def refusal(written: Written, options: Mapping[str, Any]) -> str:
    """Return the first problem that `check` finds in a table, without its place in the suite's file; empty for none.

    Args:
        written: Manifests of the plugin.
        options: Its table.
    """
    return next(iter(_check(written, options)), "")


def judge_refusals(
    case: Conformance, written: Written, options: Mapping[str, Any], raising: Callable[[str, str], Exception]
) -> str:
    """Return how many tables were refused and accepted.

    Args:
        case: Of the plugin.
        written: Its manifests.
        options: A table that `check` accepts.
        raising: Makes the error from a verdict and what was found.

    Raises:
        AssertionError: Made by `raising`.
    """
    wrong = list(_impossible(case.plugin))
    for impossible, key in wrong:
        said = _check(written, {**options, **impossible})
        if not any(key in line for line in said):
            raise raising(
                "accepts what cannot be", f"{impossible} is not refused" + (f", but: {said[0]}" if said else "")
            )
    for table, pattern in case.refused:
        said = _check(written, {**options, **table})
        if not any(re.search(pattern, line) for line in said):
            raise raising("accepts what cannot be", f"{dict(table)}: {said[0] if said else 'accepted'}; not {pattern}")
    accepted = 0
    for table in _possible(case):
        if _check(written, {**options, **table}):
            continue
        accepted += 1
        _compose(case, written, {**options, **table}, raising)
    return f"{len(wrong) + len(case.refused)} tables refused with their line, {accepted} accepted ones compose"


def _check(written: Written, options: Mapping[str, Any]) -> list[str]:
    """Return what `check` says against a table, a line each."""
    from composer3d import check

    found = check(written.manifest(options))
    return [
        str(replace(problem, file=None, line=None, column=None))
        for problem in found.problems
        if problem.severity == "error"
    ]


def _impossible(plugin: type) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield tables that no plugin with such fields can have, with the key that a message must name."""
    yield {_UNKNOWN: 1}, _UNKNOWN
    for name, schema in options_of(plugin).get("properties", {}).items():
        alternatives = schema.get("anyOf", [schema])
        if len(alternatives) > 1 or "$ref" in schema:
            continue  # what one form refuses another may take
        if "enum" in schema:
            yield {name: "no such value"}, name
        elif schema.get("type") in ("integer", "number", "boolean"):
            yield {name: "text"}, name
            for bound, step in (("minimum", -1), ("exclusiveMinimum", 0), ("maximum", 1), ("exclusiveMaximum", 0)):
                if bound in schema:
                    yield {name: schema[bound] + step}, name


def _possible(case: Conformance) -> Iterator[dict[str, Any]]:
    """Yield tables with one option each, of the values that a matrix of plugins tries."""
    found = installed_options(used={case.table.partition(".")[2]: case.plugin})
    for key, values in found.items():
        if key.startswith(f"{case.table}."):
            field = key.rpartition(".")[2]
            yield from ({field: json.loads(value)} for value in values if value not in (OFF, DEFAULT))


def _compose(
    case: Conformance, written: Written, options: Mapping[str, Any], raising: Callable[[str, str], Exception]
) -> None:
    path = written.manifest(options)
    try:
        observe(path, case.plugin, world_size=written.world_size, purpose="verify")
    except (RankError, ComposerError) as error:
        raise raising("fails after check", f"{dict(options)}: {error}") from None
