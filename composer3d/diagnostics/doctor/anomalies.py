"""The first module whose output was not finite, over all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from composer3d.diagnostics.doctor.run_folder import Evidence

__all__ = ["first_anomaly", "tell_anomaly"]

_ORDER = ("input", "output", "gradient", "weight gradient")  # as a step goes


def first_anomaly(rows: tuple[Mapping[str, Any], ...], step: int | None) -> Mapping[str, Any] | None:
    """Return the earliest finding of a step, or of any if none is of that step.

    Every rank reports the first that it saw itself. Forwards come before backwards and earlier stages before later
    ones; in backwards it is the other way round.

    Args:
        rows: Of the plugin that finds such modules, of all ranks.
        step: The step that was judged.
    """
    here = [row for row in rows if row["step"] == step] or list(rows)

    def place(row: Mapping[str, Any]) -> tuple[Any, ...]:
        forward = row["what"] in ("input", "output")
        late = 0 if forward else 1 if row["what"] == "gradient" else 2
        return row["step"], late, row["microbatch"], row["stage"] if forward else -row["stage"], row["rank"]

    return min(here, key=place, default=None)


def tell_anomaly(evidence: Evidence, step: int | None) -> tuple[str, ...]:
    """Say which module was first.

    Args:
        evidence: Of the run.
        step: The step that was judged.
    """
    row = first_anomaly(evidence.anomalies, step)
    if row is None:
        return ()
    weights = row["weights_not_finite"]
    because = (
        f"its {' and '.join(weights)} {'are' if len(weights) > 1 else 'is'} not finite, before it computes"
        if weights
        else {
            "input": "what came before it, between modules, made it",
            "output": "its weights and what it was given are finite",
            "gradient": "what came after it was still finite in the forward",
            "weight gradient": "all gradients of outputs were finite",
        }[row["what"]]
    )
    name = f"{row['fqn'] or 'the whole model'} ({row['class']})"
    # Steps are told as the run's own lines do, which begin with 1.
    when = "in that step" if row["step"] == step else f"in step {row['step'] + 1}"
    return (
        f"the first that is not finite is the {row['what']} of {name}, {when}, "
        f"micro-batch {row['microbatch']}, on {evidence.who(row['rank'])}; {because}",
    )
