"""Simulated steps against the closed forms of the literature, at transfer cost 0."""

from __future__ import annotations

import math

import pytest
from composer3d_plugins.scheduling.pipeline import Pipeline

from composer3d import Action
from composer3d.errors import ComposerError
from composer3d.mesh import AXES, Layout
from composer3d.planning import Costs, simulate


class Context:
    """What listing actions needs of a run."""

    def __init__(self, degree):
        self.degrees = {"pp": degree}
        self.layout = Layout(axes=AXES, degrees={axis.name: degree if axis.name == "pp" else 1 for axis in AXES})


def orders(schedule, degree, num_microbatches, per_rank=None):
    return Pipeline(schedule=schedule, stages_per_rank=per_rank).composer3d_actions(Context(degree), num_microbatches)


def step(schedule, degree, num_microbatches, per_rank=None, **costs):
    return simulate(orders(schedule, degree, num_microbatches, per_rank), Costs(**costs))


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize(("degree", "num_microbatches"), [(2, 2), (2, 8), (4, 4), (4, 16), (8, 9)])
@pytest.mark.parametrize(("forward", "backward"), [(1.0, 2.0), (1.5, 1.5), (2.0, 5.0)])
def test_one_stage_a_rank(schedule, degree, num_microbatches, forward, backward):
    # Bubble time (p - 1)(F + B): (p - 1) / m of the ideal, (p - 1) / (m + p - 1) of the step.
    result = step(schedule, degree, num_microbatches, forward=forward, backward=backward)
    assert result.total == pytest.approx((num_microbatches + degree - 1) * (forward + backward))
    assert result.bubble_relative == pytest.approx((degree - 1) / num_microbatches)
    assert result.bubble_share == pytest.approx((degree - 1) / (num_microbatches + degree - 1))
    expected = [num_microbatches if schedule == "GPipe" else min(num_microbatches, degree - i) for i in range(degree)]
    assert list(result.in_flight) == expected


@pytest.mark.parametrize(("degree", "rounds", "stages"), [(2, 1, 2), (4, 2, 2), (4, 4, 2), (4, 2, 4), (8, 2, 3)])
def test_interleaving_divides_the_bubble(degree, rounds, stages):
    num_microbatches = degree * rounds
    result = step("Interleaved1F1B", degree, num_microbatches, stages)
    assert result.total == pytest.approx(3.0 * num_microbatches + (degree - 1) * 3.0 / stages)
    assert result.bubble_relative == pytest.approx((degree - 1) / (num_microbatches * stages))
    if rounds > 1:
        flights = [((stages - 1) * degree + 2 * (degree - i) - 1) / stages for i in range(degree)]
        assert list(result.in_flight) == pytest.approx(flights)
        assert result.in_flight[0] == pytest.approx(degree * (1 + (degree - 1) / (degree * stages)))


@pytest.mark.parametrize(("degree", "num_microbatches", "stages"), [(2, 4, 2), (4, 8, 2), (4, 8, 4), (8, 16, 3)])
def test_breadth_first_has_the_bubble_of_interleaving_and_holds_every_microbatch(degree, num_microbatches, stages):
    result = step("LoopedBFS", degree, num_microbatches, stages)
    assert result.total == pytest.approx(3.0 * num_microbatches + (degree - 1) * 3.0 / stages)
    assert result.total == pytest.approx(step("Interleaved1F1B", degree, num_microbatches, stages).total)
    assert list(result.in_flight) == [float(num_microbatches)] * degree


@pytest.mark.parametrize("schedule", ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
@pytest.mark.parametrize(("degree", "num_microbatches"), [(2, 4), (4, 8), (4, 16), (8, 16)])
def test_halves_of_backwards_fill_bubbles(schedule, degree, num_microbatches):
    # F = I = W, two stages a rank: of (p - 1)(F + B) / 2 is left ZB-H1's (p - 1)(F + I - W) / 2, a third.
    costs = {"forward": 2.0, "backward": 4.0, "weight": 2.0}
    result = step(schedule, degree, num_microbatches, **costs)
    ideal = 6.0 * num_microbatches
    assert result.total == pytest.approx(ideal + (degree - 1) * 1.0)
    assert step("Interleaved1F1B", degree, num_microbatches, **costs).total == pytest.approx(ideal + (degree - 1) * 3.0)
    assert result.bubble_share == pytest.approx(1 - ideal / result.total)
    # As many as 1F1B's first rank holds, on every rank; DualPipeV one of its 2 p stages more.
    held = degree + 0.5 if schedule == "DualPipeV" else degree
    assert list(result.in_flight) == [held] * degree


@pytest.mark.parametrize(("degree", "num_microbatches"), [(2, 4), (4, 16), (8, 16)])
@pytest.mark.parametrize(("forward", "backward", "weight"), [(2.0, 5.0, 2.0), (4.0, 6.0, 2.0)])
def test_what_weights_gradients_cannot_fill(degree, num_microbatches, forward, backward, weight):
    # ZB-H1: (p - 1)(F + I - W), over two stages a rank.
    result = step("InterleavedZeroBubble", degree, num_microbatches, forward=forward, backward=backward, weight=weight)
    bubble = (degree - 1) * (forward + (backward - weight) - weight) / 2
    assert result.total == pytest.approx(num_microbatches * (forward + backward) + bubble)


def test_zero_bubble_one_stage_of_the_same_size():
    # ZB-H1: (p - 1)(F + I - W), a third of 1F1B's (p - 1)(F + B) where F = I = W; the whole of it over two stages here.
    zero_bubble, plain = step("InterleavedZeroBubble", 4, 8), step("Interleaved1F1B", 4, 8)
    assert zero_bubble.bubble_relative == pytest.approx(plain.bubble_relative / 3)


def test_transfers_delay_and_do_not_block():
    # The first activation and the last gradient cross every boundary once.
    without, with_transfer = step("GPipe", 4, 8), step("GPipe", 4, 8, transfer=0.5)
    assert with_transfer.total == pytest.approx(without.total + 2 * 3 * 0.5)
    assert with_transfer.busy == without.busy


def test_stages_on_one_rank_hand_over_at_once():
    delayed = step("ZBVZeroBubble", 2, 4, transfer=0.5)
    between = {(cell.action.kind, cell.action.stage, cell.action.microbatch): cell for r in delayed.ranks for cell in r}
    assert between["F", 2, 0].start == between["F", 1, 0].end
    assert between["F", 1, 0].start == between["F", 0, 0].end + 0.5


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "ZBVZeroBubble", "DualPipeV"])
def test_every_action_waits_for_what_it_needs(schedule):
    result = step(schedule, 4, 8, transfer=0.25)
    cells = {(c.action.kind, c.action.stage, c.action.microbatch): c for rank in result.ranks for c in rank}
    owner = {cell.action.stage: rank for rank, row in enumerate(result.ranks) for cell in row}
    num_stages = len(owner)
    for (kind, stage, microbatch), cell in cells.items():
        if kind == "F" and stage:
            wait = 0.25 * (owner[stage] != owner[stage - 1])
            assert cell.start >= cells["F", stage - 1, microbatch].end + wait
        if kind in "BI":
            assert cell.start >= cells["F", stage, microbatch].end
            later = cells.get(("B", stage + 1, microbatch)) or cells.get(("I", stage + 1, microbatch))
            assert (later is None) == (stage == num_stages - 1)
            assert later is None or cell.start >= later.end
        if kind == "W":
            assert cell.start >= cells["I", stage, microbatch].end
    assert sum(kind == "F" for kind, *_ in cells) == num_stages * 8
    for rank in result.ranks:
        assert all(first.end <= second.start for first, second in zip(rank, rank[1:], strict=False))


def test_orders_that_cannot_be():
    waiting = [[Action(0, "F", 0), Action(0, "B", 0)], [Action(1, "B", 0), Action(1, "F", 0)]]
    with pytest.raises(ComposerError, match=r"^the schedule cannot run: rank 0 waits at B0 of stage 0 for ever$"):
        simulate(waiting, Costs())


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ({"transfer": -1.0}, "the transfer cost is -1, which is no time that a transfer takes"),
        ({"forward": 0.0}, "the forward cost is 0, which is no time that a forward takes"),
        ({"backward": math.inf}, "the backward cost is inf, which is no time that a backward takes"),
        ({"weight": 3.0}, "the weight cost 3 is a part of the backward cost, which is only 2"),
    ],
)
def test_costs_that_cannot_be(costs, message):
    with pytest.raises(ComposerError) as caught:
        Costs(**costs)
    assert str(caught.value) == message
