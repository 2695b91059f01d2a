"""Observable effects of a plugin: the first thing that differs from the composition without it."""

from __future__ import annotations

from collections.abc import Sequence

from composer3d.testing.conformance.observed_steps import Observed

__all__ = ["effect_of"]

# Answers to these reach the core or torch by themselves; transforms and actions count by what they change.
_QUERIES = (
    "composer3d_parameter_mesh",
    "composer3d_offload_policy",
    "composer3d_split",
    "composer3d_schedule",
    "composer3d_dtypes",
    "composer3d_load_parameter",
    "composer3d_grad_scaler",
    "composer3d_optimizer",
    "composer3d_group_options",
    "composer3d_replicas",
    "composer3d_recorder",
)


def effect_of(mine: Sequence[Observed], other: Sequence[Observed] | None, *, is_owner: bool) -> str | None:
    """Return what the plugin did, in words; None where nothing is seen.

    Args:
        mine: What every rank saw with it.
        other: The same without it; None where its axes have no other owner.
        is_owner: Whether it owns axes.
    """
    one = mine[0]
    answered = [name for name in one.answers if name in _QUERIES]
    if answered:
        return f"answers {', '.join(answered)}"
    written = [what for found in mine for what in found.files]
    if written:
        return f"writes: {written[0]}"
    if other is None:
        owned = [f"{op} over {axis}" for op, axis in one.collectives[-1] if axis != "world"]
        return f"communicates: {', '.join(owned)}" if is_owner and owned else None
    return _apart(mine, other)


def _apart(mine: Sequence[Observed], other: Sequence[Observed]) -> str | None:
    one, two = mine[0], other[0]
    new = sorted(set(one.metrics) - set(two.metrics))
    if new:
        return f"reports {', '.join(new)}"
    if one.collectives != two.collectives:
        return "changes collectives"
    for rank, (here, there) in enumerate(zip(mine, other, strict=False)):
        if here.gradients != there.gradients:
            return f"changes gradients (rank {rank})"
        if here.parameters != there.parameters:
            return f"changes updated parameters (rank {rank})"
        more = [
            name
            for name in here.operators.keys() | there.operators
            if here.operators.get(name) != there.operators.get(name)
        ]
        if more:
            return f"changes the operators of a step, as {min(more)} (rank {rank})"
    return None
