"""Reports of a verdict as JSON and as text."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

from composer3d.verification.restored_run import text_of_restored
from composer3d.verification.verdict import Evidence, Kind, Verdict

__all__ = ["to_json", "to_text"]

_SHOWN = 10


def to_json(verdict: Verdict) -> dict[str, Any]:
    """Return the object that `--json` prints; infinities and NaN are strings."""
    base: dict[str, Any] = {"ok": verdict.ok, "steps": verdict.num_steps}
    tail = {
        "failures": list(verdict.failures),
        "diagnosis": list(verdict.diagnosis),
        "reduced": list(verdict.reduced),
        "notes": list(verdict.notes),
    }
    evidence = verdict.evidence
    if evidence is None:
        empty: dict[str, Any] = {"loss": None, "gradients": None, "grad_norm": None, "collectives": [], "tolerance": {}}
        return base | empty | tail
    which = next(iter(evidence.reference.tolerances))
    return _plain(
        {
            **base,
            "world_size": evidence.layout.world_size,
            **_numbers(evidence, which),
            "gradients": {
                "max_rel": evidence.largest("gradients", which),
                "worst": [
                    {"fqn": row.fqn, "rel": row.gradient, "placement": row.placement}
                    for row in verdict.table()[:_SHOWN]
                ],
            },
            "parameters": {"max_rel": evidence.largest("parameters", which)},
            "collectives": [
                {
                    "op": row.op,
                    "axis": row.axis,
                    "count": row.count,
                    "bytes": row.bytes,
                    "expected": row.expected if _traced(evidence) else None,
                    "expected_bytes": row.expected_bytes if _traced(evidence) else None,
                    "rank": row.rank,
                }
                for row in evidence.rows
            ],
            "replicas": [
                {"what": drift.what, "fqn": drift.fqn, "axes": list(drift.axes), "ranks": list(drift.ranks)}
                for drift in evidence.drifts
            ],
            "random": [
                {"site": fault.site, "kind": fault.kind, "axis": fault.axis, "ranks": list(fault.ranks)}
                for fault in evidence.streams
            ],
            "tolerance": {name: dict(limits) for name, limits in evidence.reference.tolerances.items()},
            "own_dtype": _own(evidence),
            "resumed": next(iter(text_of_restored(evidence)), None),
            "degrees": dict(evidence.layout.degrees),
            **tail,
        }
    )


def _numbers(evidence: Evidence, which: str) -> dict[str, Any]:
    loss, norm = evidence.number("loss", which), evidence.number("grad_norm", which)
    return {
        "loss": {
            "reference": loss.reference,
            "composed": loss.composed,
            "abs": abs(loss.composed - loss.reference),
            "rel": loss.rel,
        },
        "grad_norm": {"reference": norm.reference, "composed": norm.composed, "rel": norm.rel},
    }


def _own(evidence: Evidence) -> dict[str, Any] | None:
    if "own" not in evidence.reference.tolerances:
        return None
    largest = {kind: {"max_rel": evidence.largest(kind, "own")} for kind in ("gradients", "parameters")}
    return {**_numbers(evidence, "own"), **largest}


def _traced(evidence: Evidence) -> bool:
    return all(report.traced is not None for report in evidence.ranks)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def to_text(verdict: Verdict) -> str:
    """Return the text report: reductions, the worst parameters, collectives, and failures."""
    lines = [f"reduced: {line}" for line in verdict.reduced]
    evidence = verdict.evidence
    if evidence is not None:
        size = evidence.layout.world_size
        lines.append(f"{evidence.layout} = {size} ranks, {verdict.num_steps} steps, against one device")
        lines += [*_text_of_numbers(evidence), *text_of_restored(evidence)]
        rows = verdict.table()
        lines += ["", *_columns(("parameter", "placement", "gradient", "update"), _cells(verdict))]
        if len(rows) > _SHOWN:
            lines.append(f"... {len(rows)} parameters in all, the worst first")
        lines += ["", *_columns(("collective", "axis", "count", "expected", "bytes"), _collective_cells(evidence))]
    lines += [f"note: {line}" for line in verdict.notes]
    lines += ["", *(f"differs: {line}" for line in verdict.failures)] if verdict.failures else []
    lines += [f"likely: {line}" for line in verdict.diagnosis]
    if verdict.failures and not verdict.diagnosis:
        lines.append("likely: nothing that is known; the first parameters of the table are where to look")
    lines.append(_conclusion(verdict))
    return "\n".join(lines)


def _conclusion(verdict: Verdict) -> str:
    if not verdict.ok:
        return "not proven"
    relates = verdict.evidence is not None and bool(verdict.evidence.reference.mixing.model)
    which = " on the same micro-batches, whose samples the model relates" if relates else ""
    return f"proven: the composition computes what one device computes{which}"


def _text_of_numbers(evidence: Evidence) -> list[str]:
    lines = []
    for which, limits in evidence.reference.tolerances.items():
        label = "float64" if which == "float64" else "own dtype"
        numbers = _numbers(evidence, which)
        found = {
            "loss": (numbers["loss"]["rel"], limits["loss"]),
            "gradient norm": (numbers["grad_norm"]["rel"], limits["grad_norm"]),
            "gradients": _nearest(evidence, "gradients", which),
            "parameters": _nearest(evidence, "parameters", which),
        }
        shown = ", ".join(f"{name} {value:.2g} (at most {limit:.2g})" for name, (value, limit) in found.items())
        lines.append(f"{label}: {shown}")
    return lines


def _nearest(evidence: Evidence, kind: Kind, which: str) -> tuple[float, float]:
    """Return the deviation with the largest ratio to its own limit, and that limit."""
    found = (
        (math.inf if math.isnan(deviation.rel) else deviation.rel, evidence.limit(kind, which, step, fqn))
        for step, _, fqn, deviation in evidence.deviations(kind, which)
    )
    return max(
        found,
        key=lambda pair: pair[0] / (pair[1] or sys.float_info.min),
        default=(0.0, evidence.reference.tolerances[which][kind]),
    )


def _cells(verdict: Verdict) -> list[tuple[str, ...]]:
    return [(row.fqn, row.placement, f"{row.gradient:.2g}", f"{row.update:.2g}") for row in verdict.table()[:_SHOWN]]


def _collective_cells(evidence: Evidence) -> list[tuple[str, ...]]:
    traced = _traced(evidence)
    return [
        (row.op, row.axis, str(row.count), str(row.expected) if traced else "-", str(row.bytes))
        for row in evidence.rows
    ]


def _columns(heading: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    cells = [heading, *rows]
    widths = [max(len(line[index]) for line in cells) for index in range(len(heading))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
