"""Actions of a rank that a longer step repeats: from a shorter step and where they end the longer one follows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from composer3d.interfaces import Action

__all__ = ["RepeatedActions", "repeated_actions"]


class RepeatedActions(NamedTuple):
    """Actions that a longer step runs again, of later micro-batches, before it continues as the shorter one.

    Args:
        before: Actions of the shorter step that come before them.
        actions: The repeated ones, in order.
        num_microbatches: Micro-batches that they are of.
    """

    before: Sequence[Action]
    actions: Sequence[Action]
    num_microbatches: int


def repeated_actions(short: Sequence[Action], whole: Sequence[Action], *, more: int) -> RepeatedActions | None:
    """Return the actions that make the whole step of a rank from a short one; None where none do.

    Among them is no backward of the first micro-batch, which makes gradients, nor of the last one of the short step,
    which may reduce them: others of equal kind leave the same behind.

    Args:
        short: A rank's actions of a step.
        whole: Of the same with more micro-batches.
        more: How many more.
    """
    added = len(whole) - len(short)
    pairs = enumerate(zip(short, whole, strict=False))
    alike = next((place for place, (one, other) in pairs if one != other), len(short))
    for place in range(alike, 0, -1):
        if list(whole[place + added :]) != _later(short[place:], more):
            continue
        for number in range(1, more + 1):
            length = added * number // more
            if more % number == 0 and added * number % more == 0 and length < place:
                window, turns = short[place - length : place], range(1, more // number + 1)
                again = [action for turn in turns for action in _later(window, turn * number)]
                if _is_inner(window, short) and list(whole[place : place + added]) == again:
                    return RepeatedActions(short[: place - length], window, number)
    return None


def _is_inner(window: Sequence[Action], short: Sequence[Action]) -> bool:
    """Return whether backwards are among some actions, and are neither of the first micro-batch nor of the last."""
    backwards = {action.microbatch for action in window if action.kind != "F"}
    return bool(backwards) and 0 < min(backwards) and max(backwards) < max(action.microbatch for action in short)


def _later(actions: Sequence[Action], by: int) -> list[Action]:
    return [action._replace(microbatch=action.microbatch + by) for action in actions]
