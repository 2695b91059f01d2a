"""Number of micro-batches to trace: after it, every further one only repeats what others do."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from composer3d.errors import ComposerError
from composer3d.planning.schedules.simulation import peak_held
from composer3d.planning.tracing.repeated_actions import RepeatedActions, repeated_actions

if TYPE_CHECKING:
    from composer3d.interfaces import Action

__all__ = ["OrdersOf", "ShortStep", "enough_microbatches", "short_step"]

# Without a pipeline the first micro-batch makes gradients, the last one may reduce them, and one is neither.
_ALONE = 3
# In flight: what one more adds is the difference of two forwards before the first backward.
_IN_FLIGHT = 2
OrdersOf = Callable[[int], "Sequence[Sequence[Action]] | None"]


@dataclass(frozen=True, kw_only=True)
class ShortStep:
    """Step of a rank that is traced in place of a longer one.

    Args:
        num_microbatches: Of it.
        most_in_flight: Micro-batches that the rank holds at most; None: as many as the schedule says.
        fewer_in_flight: How many fewer than in the whole step those are.
        repeated: What the whole step runs more, of a rank with several stages; None where it is this one, or of one
            stage.
    """

    num_microbatches: int
    most_in_flight: int | None = None
    fewer_in_flight: int = 0
    repeated: RepeatedActions | None = None


def short_step(orders_of: OrdersOf, num_microbatches: int, *, position: int, can_hold_fewer: bool = False) -> ShortStep:
    """Return the shortest step of a rank from which the whole one follows.

    A rank of one stage that runs some forwards, then a backward and a forward in turn, then the backwards that are left
    (1F1B) has the same step with any number of micro-batches in flight, but for what these keep.

    What a rank sent last before its first backward is kept until all forwards have run. In a long step it is kept
    beside as many micro-batches as the rank ever holds, and in the shortest step with two in flight too. In others it
    is not, nor is it with three in flight.

    Args:
        orders_of: As for `enough_microbatches`.
        num_microbatches: Of the whole step.
        position: Of the rank along the pipeline.
        can_hold_fewer: Whether the schedule can begin its backwards earlier than it says.
    """
    orders = orders_of(num_microbatches) if can_hold_fewer else None
    order = [] if orders is None else orders[position]
    held = peak_held(order)
    most = min(held, _IN_FLIGHT if num_microbatches >= 2 * held - 1 else _IN_FLIGHT + 1)
    number = max(_ALONE, most + (num_microbatches > held))
    is_followed = (
        number + held - most <= num_microbatches
        and len({action.stage for action in order}) == 1
        and [action.kind for action in order] == [*"F" * held, *"BF" * (num_microbatches - held), *"B" * held]
    )
    if not is_followed:
        enough = enough_microbatches(orders_of, num_microbatches, position=position)
        return ShortStep(
            num_microbatches=enough, repeated=_repeated(orders_of, enough, num_microbatches, position=position)
        )
    return ShortStep(num_microbatches=number, most_in_flight=most, fewer_in_flight=held - most)


def enough_microbatches(orders_of: OrdersOf, num_microbatches: int, *, position: int | None = None) -> int:
    """Return the fewest micro-batches after which every further one only repeats what others do.

    A rank holds no fewer of more micro-batches, so that few numbers have to be looked at: time grows as the number
    does for GPipe, which holds all of them, and for the others with one list of actions. Of ranks with several stages
    it is also known which actions are repeated: each micro-batch leaves something until the step ends, such as what was
    sent.

    Args:
        orders_of: Gives the pipeline's actions for a number of micro-batches, by rank along its axis; None without one.
        num_microbatches: Of the step.
        position: Of the rank along the pipeline that it is asked for; default: for all of them.
    """
    orders = orders_of(num_microbatches)
    if orders is None:
        return min(num_microbatches, _ALONE)
    # Of schedules of several stages a rank, torch runs whole rounds of micro-batches.
    has_one_stage = _has_one_stage(orders)
    step = 1 if has_one_stage else len(orders)
    fewest, own = len(orders) + step, slice(None)
    if has_one_stage and position is not None:
        # A rank holds as many as it ever will, one more follows, and behind the first rank one more is received.
        fewest = max(_ALONE, peak_held(orders[position]) + (1 if position == 0 else 2))
        own = slice(position, position + 1)
    held = [peak_held(order) for order in orders[own]]

    def is_enough(number: int) -> bool:
        try:
            fewer = orders_of(number)
        except ComposerError:  # too few for the schedule, or none but its own
            return False
        if fewer is None or [peak_held(order) for order in fewer[own]] != held:
            return False
        more = num_microbatches - number
        pairs = zip(fewer, orders, strict=True)
        return has_one_stage or all(repeated_actions(short, whole, more=more) is not None for short, whole in pairs)

    found = _first(range(fewest, num_microbatches, step), is_enough)
    return found if found is not None and is_enough(found) else num_microbatches


def _has_one_stage(orders: Sequence[Sequence[Action]]) -> bool:
    return len({action.stage for action in orders[0]}) == 1


def _repeated(orders_of: OrdersOf, number: int, num_microbatches: int, *, position: int) -> RepeatedActions | None:
    """Return what a rank of several stages runs more in a step than in a shorter one."""
    short, whole = orders_of(number), orders_of(num_microbatches)
    if short is None or whole is None or number == num_microbatches or _has_one_stage(whole):
        return None
    return repeated_actions(short[position], whole[position], more=num_microbatches - number)


def _first(numbers: Sequence[int], holds: Callable[[int], bool]) -> int | None:
    """Return the first of rising numbers from which something holds on; it is asked of few, and of small ones first."""
    if not numbers or not holds(numbers[-1]):
        return None
    low, high = 0, 1
    while high < len(numbers) and not holds(numbers[high - 1]):
        low, high = high, 2 * high
    return numbers[bisect.bisect_left(numbers, True, low, min(high, len(numbers)) - 1, key=holds)]
