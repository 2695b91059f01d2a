"""Ends of groups as JSON, between machines of a run: a report, and a value of one rank; nothing is pickled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from composer3d.runner.launching.launcher import LaunchResult
from composer3d.runner.reporting.failures import FailureReport

if TYPE_CHECKING:
    from pydantic import TypeAdapter

__all__ = ["result_from_json", "result_to_json"]

_OUTCOMES = ("finished", "preempted", "interrupted", "failed")
_MOST_CHARACTERS = 40_000  # of a result: a line is at most 64 KiB


def result_to_json(result: LaunchResult) -> dict[str, Any]:
    """Return how a group, or the run, has ended, as JSON values that fit a line.

    Args:
        result: Of which the value of rank 0 is kept, which is JSON itself; texts of a long report are shortened.
    """
    report, limit = result.report, _MOST_CHARACTERS
    while report is not None and len(json.dumps(asdict(report))) > _MOST_CHARACTERS:
        limit //= 2
        report = _shortened(report, limit)
    return {
        "outcome": result.outcome,
        "report": None if report is None else asdict(report),
        "value": result.values.get(0),
        "restarts": result.num_restarts,
        "is_passing": result.is_passing,
    }


def result_from_json(content: Mapping[str, Any]) -> LaunchResult:
    """Return what `result_to_json` has written.

    Raises:
        KeyError: A key is missing.
        ValueError: It is something else.
    """
    if content["outcome"] not in _OUTCOMES:
        raise ValueError(content["outcome"])
    stated, value = content["report"], content["value"]
    return LaunchResult(
        outcome=content["outcome"],
        report=None if stated is None else _reports().validate_json(json.dumps(stated)),
        values={} if value is None else {0: value},
        num_restarts=int(content["restarts"]),
        is_passing=bool(content["is_passing"]),
    )


@cache
def _reports() -> TypeAdapter[FailureReport]:
    """Return what checks the fields of a report, types included."""
    from pydantic import TypeAdapter

    return TypeAdapter(FailureReport)


def _shortened(report: FailureReport, limit: int) -> FailureReport:
    """Return a report whose texts have so many characters at most; ranks beside the first have no traceback."""
    others = tuple(replace(_shortened(other, limit), traceback="") for other in report.others[: max(1, limit // 100)])
    return replace(
        report,
        message=report.message[:limit],
        traceback=report.traceback[-limit:],
        witness=report.witness[:limit],
        advice=report.advice[:limit],
        others=others,
    )
