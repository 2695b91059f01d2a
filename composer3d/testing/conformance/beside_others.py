"""Pairs of a plugin with each other installed one: refused with a reason, or proven beside one device."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from composer3d.errors import ComposerError, RankError
from composer3d.registry import Catalogue
from composer3d.testing.conformance.conformance_case import Conformance, Written
from composer3d.testing.conformance.manifest_proof import prove_manifest

__all__ = ["judge_pairs"]

# How a problem begins that no plugin has stated: a hook has raised.
_RAISED = re.compile(r"(composer3d_\w+|\w+) of \w+ raised \w+")


def judge_pairs(
    case: Conformance, written: Written, options: Mapping[str, Any], raising: Callable[[str, str], Exception]
) -> str:
    """Return how many pairs were proven, and how many refused; bounded by the case's `matrix_minutes`.

    Args:
        case: Of the plugin.
        written: Its manifests.
        options: The plugin's table.
        raising: Makes the error from a verdict and what was found.

    Raises:
        AssertionError: Made by `raising`; names the other plugin.
    """
    began, proven, refused, left = time.monotonic(), [], [], []
    for name, table, degrees in _others(case, written):
        if time.monotonic() - began > 60 * case.matrix_minutes:
            left.append(name)
            continue
        if _problems(written, None, table, degrees):
            continue  # it needs more than this model has, without the plugin too
        said = _problems(written, options, table, degrees)
        stated = [line for line in said if _RAISED.search(line)]
        if stated:
            raise raising("fails beside another", f"{name}: {stated[0]}")
        if said:
            refused.append(name)
            continue
        _prove(written, options, name, table, degrees, raising)
        proven.append(name)
    parts = [f"{len(proven)} proven ({', '.join(proven)})" if proven else "none proven"]
    parts += [f"{len(refused)} refused with a reason ({', '.join(refused)})"] if refused else []
    parts += [f"{len(left)} not reached in {case.matrix_minutes:g} min ({', '.join(left)})"] if left else []
    return "; ".join(parts)


def _others(case: Conformance, written: Written) -> Iterator[tuple[str, str, dict[str, int]]]:
    """Yield the other plugins: name, table, and degrees of the axes that they own and nobody has yet."""
    own = case.table.partition(".")[2]
    # Those that shard come first: where time is short they matter most.
    for name, _, info in sorted(Catalogue.installed().classes(), key=lambda found: not found[2].owns):
        table = f"{info.family}.{name}"
        if name == own or table == written.default or table in case.beside:
            continue
        free = [axis for axis in info.owns if axis not in written.degrees]
        if any(axis in written.degrees for axis in info.owns):
            free = []
        yield name, f"{table} = {{}}", {axis: 2 for axis in free[:1]}


def _problems(written: Written, options: Mapping[str, Any] | None, table: str, degrees: Mapping[str, int]) -> list[str]:
    from composer3d import check

    found = check(written.manifest(options, more=table, degrees=degrees))
    return [str(problem) for problem in found.problems if problem.severity == "error"]


def _prove(
    written: Written,
    options: Mapping[str, Any],
    name: str,
    table: str,
    degrees: Mapping[str, int],
    raising: Callable[[str, str], Exception],
) -> None:
    path = written.manifest(options, more=table, degrees=degrees)
    try:
        verdict = prove_manifest(path)
    except (RankError, ComposerError) as error:
        raise raising("fails beside another", f"{name}: {error}") from None
    if not verdict.ok:
        raise raising("wrong beside another", "\n".join([f"{name}: {verdict.failures[0]}", *verdict.failures[1:]]))
