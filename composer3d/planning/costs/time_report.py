"""The time model's answer as JSON: each figure with how it is known and between which bounds it lies."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from composer3d.planning.costs.timing import Estimate
from composer3d.planning.costs.whole_run import Reliability, Training

__all__ = ["time_report"]

_FIGURES = (
    "step_s",
    "compute_s",
    "exposed_s",
    "bubble_s",
    "optimizer_s",
    "tokens_per_s",
    "tokens_per_s_per_device",
    "mfu",
    "hfu",
)


def time_report(found: Estimate, run: Training | None = None, failures: Reliability | None = None) -> dict[str, Any]:
    """Return what `--json` prints below `time`.

    Args:
        found: The time of a step.
        run: What a token budget takes; None leaves it out.
        failures: What failures cost; None leaves them out.
    """
    figures = {name: getattr(found, name) for name in _FIGURES}
    report: dict[str, Any] = {name: figure.to_json() for name, figure in figures.items() if figure is not None}
    report |= {
        "convention": found.convention,
        "peak_flops": found.peak_flops,
        "communication": [asdict(row) for row in found.communication],
        "notes": list(found.notes),
    }
    if found.offloading:
        report["offloading"] = [asdict(term) for term in found.offloading]
    if found.pipeline is not None:
        report["pipeline"] = {
            "bubble_share": found.pipeline.bubble_share.to_json(),
            "bubble_relative": found.pipeline.bubble_relative.to_json(),
            "in_flight": list(found.pipeline.in_flight),
            "stage_s": list(found.pipeline.stage_s),
            "imbalance": found.pipeline.imbalance,
        }
    if run is not None:
        report["training"] = run.to_json()
    if failures is not None:
        report["failures"] = failures.to_json()
    return report
