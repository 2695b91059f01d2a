"""Votes against an optimizer step: one veto, of any rank, counts for all of them."""

from __future__ import annotations

from collections.abc import Iterable

from composer3d.step.guard import Guard
from composer3d.step.scaling import Scaling
from composer3d.step.step_state import StepState
from composer3d.transform import StepAction

__all__ = ["vetoes_of"]


def vetoes_of(state: StepState, actions: Iterable[StepAction], *, scaling: Scaling, guard: Guard) -> tuple[str, ...]:
    """Run every action of DECIDE, and return the names of those that veto on any rank.

    Collectives: one all-reduce, if any can veto.

    Args:
        state: Of the open step.
        actions: Of DECIDE.
        scaling: Whose scaler vetoes an overflow.
        guard: Carries the votes.
    """
    votes = {action.name: action.run(state) is not None for action in actions}
    votes |= {} if scaling.scaler is None else {"grad_scaler": scaling.overflow}
    if not votes:
        return ()
    with state.context.span("all_reduce", group="votes", axis="world"):
        agreed = guard.any(list(votes.values()))
    return tuple(name for name, veto in zip(votes, agreed, strict=True) if veto)
