"""Votes against an optimizer step: one veto, of any rank, counts for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from composer3d.hooks.blame import in_turn
from composer3d.step.guard import Guard
from composer3d.step.scaling import Scaling
from composer3d.step.step_state import StepState
from composer3d.transform import StepAction

__all__ = ["Votes"]


class Votes:
    """Votes of a run's plugins, and of its loss scaler.

    Args:
        actions: Of DECIDE.
        scaling: Whose scaler vetoes an overflow.
        guard: Carries the votes.
    """

    def __init__(self, actions: Sequence[StepAction], scaling: Scaling, guard: Guard) -> None:
        self._names = [action.name for action in actions]
        self._run: Callable[[Any], Sequence[str | None]] = in_turn([action.run for action in actions])
        self._scaling, self._guard = scaling, guard

    def vetoes(self, state: StepState) -> tuple[str, ...]:
        """Run every action, and return the names of those that veto on any rank.

        Collectives: one all-reduce, if any can veto.

        Args:
            state: Of the open step.
        """
        names, votes = self._names, [value is not None for value in self._run(state)]
        if self._scaling.scaler is not None:
            names, votes = [*names, "grad_scaler"], [*votes, self._scaling.overflow]
        if not votes:
            return ()
        with state.context.span("all_reduce", group="votes", axis="world"):
            agreed = self._guard.any(votes)
        return (
            tuple(dict.fromkeys(name for name, veto in zip(names, agreed, strict=True) if veto)) if any(agreed) else ()
        )
