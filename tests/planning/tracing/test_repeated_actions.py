"""Steps of many micro-batches from shorter ones, for schedules of several stages a rank."""

from __future__ import annotations

import pytest
from support.planned_runs import Case, figures, tracer_of

from composer3d import torch_compat
from composer3d.errors import ComposerError
from composer3d.interfaces import Action
from composer3d.planning.tracing.enough_microbatches import enough_microbatches, short_step
from composer3d.planning.tracing.repeated_actions import repeated_actions

ROUNDS = ("Interleaved1F1B", "InterleavedZeroBubble")
FAST = ("ZBVZeroBubble", "Interleaved1F1B")
SCHEDULES = (*ROUNDS, "LoopedBFS", "ZBVZeroBubble", "DualPipeV")


def orders_of(schedule, degree):
    """Return what lists the actions of a step with a number of micro-batches."""

    def of(number):
        if number < 2 * degree or (schedule in ROUNDS and number % degree):
            raise ComposerError("micro-batches that the schedule does not run")
        orders = torch_compat.pipeline_orders(schedule, degree, number, 2)
        return [[Action(*action) for action in order] for order in orders]

    return of


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_long_step_is_a_short_one_with_actions_repeated(schedule, degree):
    of = orders_of(schedule, degree)
    number = enough_microbatches(of, 24)
    assert (number == 24) == (schedule == "LoopedBFS"), "which holds all micro-batches"
    for position in range(degree):
        step = short_step(of, 24, position=position)
        assert step.num_microbatches == number
        if step.repeated is None:
            assert number == 24
            continue
        before, actions, period = step.repeated
        rest = of(number)[position][len(before) + len(actions) :]
        turns = range((24 - number) // period + 1)
        again = [(stage, kind, index + turn * period) for turn in turns for stage, kind, index in actions]
        later = [(stage, kind, index + 24 - number) for stage, kind, index in rest]
        assert of(24)[position] == [*before, *again, *later]
        assert {index for _, kind, index in actions if kind != "F"}.isdisjoint({0, number - 1})


def test_steps_that_do_not_continue_each_other_repeat_nothing():
    one = [Action(0, kind, index) for index in range(3) for kind in "FB"]
    other = [Action(0, kind, index) for kind in "FB" for index in range(5)]
    assert repeated_actions(one, other, more=2) is None


@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param(name, marks=() if name in ("ZBVZeroBubble", "Interleaved1F1B") else pytest.mark.slow)
        for name in SCHEDULES
    ],
)
def test_what_each_micro_batch_leaves_is_in_a_plan_of_many(schedule, tmp_path):
    number = 10
    case = Case(f'mesh.pp = 2\n[scheduling.pipeline]\nschedule = "{schedule}"\n', num_microbatches=number)
    of = orders_of(schedule, 2)

    def enough(position, can_hold_fewer):
        return short_step(of, number, position=position, can_hold_fewer=can_hold_fewer)

    default, full = tracer_of(case, tmp_path, enough=enough), tracer_of(case, tmp_path, extrapolate=False)
    untraced = number - enough(0, False).num_microbatches
    assert untraced or schedule == "LoopedBFS"
    for rank in range(2):
        one, other = figures(default.trace(rank)), figures(full.trace(rank))
        # Beside what it holds, a step numbers its micro-batches: 8 bytes each.
        assert 0 <= other["memory"].pop("peak") - one["memory"].pop("peak") <= 8 * untraced
        assert one == other
