"""Stages of which one sends something else than another: what each receives is what the stage before it sends."""

from __future__ import annotations

import pytest
from support.planned_runs import MICROBATCH, SEQ, Case, figures, one_f_one_b, tracer_of

from composer3d.mesh import AXES, resolve
from composer3d.planning.schedules.simulation import Costs, simulate
from composer3d.planning.tracing.enough_microbatches import short_step
from composer3d.planning.tracing.rank_roles import chosen_ranks
from composer3d.planning.tracing.rank_tracer import Tracer

VALUE = MICROBATCH * SEQ * 32 * 4  # bytes of a hidden state
# What travels between two stages of a block each.
BOUNDARIES = {"kept": (VALUE, 2 * VALUE, 3 * VALUE), "shrinking": (VALUE // 2, VALUE // 2, VALUE // 4)}
NUM_MICROBATCHES = 9
RECEIVED = ("receive", "pp")


def case_of(source, pp, *, num_layers=4, schedule="1F1B", split="auto"):
    split = f'"{split}"' if isinstance(split, str) else list(split)
    return Case(
        f'mesh.pp = {pp}\n[scheduling.pipeline]\nschedule = "{schedule}"\nsplit = {split}\n',
        world_size=pp,
        source=source,
        num_layers=num_layers,
        num_microbatches=NUM_MICROBATCHES,
    )


def enough(position, can_hold_fewer):
    return short_step(
        lambda number: one_f_one_b(5, number), NUM_MICROBATCHES, position=position, can_hold_fewer=can_hold_fewer
    )


def received(trace):
    return sum(size for (op, axis, _), (_, size) in figures(trace)["collectives"].items() if (op, axis) == RECEIVED)


@pytest.mark.parametrize("extrapolate", [False, True])
@pytest.mark.parametrize("source", BOUNDARIES)
def test_a_rank_alone_receives_what_the_stage_before_it_sends(source, extrapolate, tmp_path):
    case = case_of(source, 4)
    sides = (0, *BOUNDARIES[source], 0)
    for rank in range(4):
        # Values of the stage before, and gradients of the stage behind, which have their form.
        expected = NUM_MICROBATCHES * (sides[rank] + sides[rank + 1])
        assert received(tracer_of(case, tmp_path, extrapolate=extrapolate).trace(rank)) == expected


def test_no_gradient_comes_back_to_frozen_stages(tmp_path):
    case = case_of("frozen", 4)
    # Values come to all but the first; of the four stages the third is the first that is trained.
    for rank, number in enumerate((0, 1, 2, 1)):
        assert received(tracer_of(case, tmp_path, extrapolate=False).trace(rank)) == NUM_MICROBATCHES * number * VALUE


def test_stages_dealt_round_are_heard_in_turn(tmp_path):
    case = case_of("kept", 2, schedule="Interleaved1F1B")
    case = Case(**vars(case) | {"num_microbatches": 4})
    for rank in range(2):
        # Rank 0 has stages 0 and 2, rank 1 has 1 and 3: each boundary is between the two.
        assert received(tracer_of(case, tmp_path, extrapolate=False).trace(rank)) == 4 * sum(BOUNDARIES["kept"])


def test_equal_boundaries_are_heard_once(monkeypatch, tmp_path):
    ranks, run = [], Tracer._run
    monkeypatch.setattr(
        Tracer, "_run", lambda self, rank, *args, **options: ranks.append(rank) or run(self, rank, *args, **options)
    )
    tracer_of(case_of("composer3d", 4, num_layers=8), tmp_path).trace(3)
    assert ranks == [3, 0]
    ranks.clear()
    tracer_of(case_of("kept", 4), tmp_path).trace(3)
    assert ranks == [3, 2, 1, 0], "three boundaries of one, two and three values"


def test_a_stage_that_computes_more_between_its_blocks_is_like_no_other(monkeypatch, tmp_path):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    # The forward squares behind block 5: in the stage of blocks 6 to 9, which has the parameters of its neighbours.
    case = case_of("squared", 5, num_layers=20, split=[f"layers.{first}" for first in (2, 6, 10, 14)])
    found = tracer_of(case, tmp_path, enough=enough).trace_all(dict.fromkeys((1, 2, 3), 1))
    flops = [figures(trace)["flops"] for trace in found]
    assert flops[0] < flops[2] < flops[1], "the stage behind computes it too, and discards it"
    for trace in found:
        assert figures(trace) == figures(tracer_of(case, tmp_path, enough=enough).trace(trace.rank))
    layout = resolve({"pp": 5}, axes=AXES, world_size=None, default=None)
    simulation = simulate(one_f_one_b(5, NUM_MICROBATCHES), Costs())
    contents = tracer_of(case, tmp_path).contents()
    assert chosen_ranks(layout, simulation, "worst", contents) == {0: 1, 1: 1, 2: 1, 3: 1, 4: 1}
