"""Stages that differ in their number of equal blocks alone: one of them is traced, and the others' traces follow."""

from __future__ import annotations

import pytest
from support.planned_runs import Case, one_f_one_b, tracer_of

from composer3d.planning.schedules.simulation import Costs, simulate
from composer3d.planning.tracing import rank_tracer
from composer3d.planning.tracing.enough_microbatches import short_step
from composer3d.planning.tracing.rank_roles import chosen_ranks
from composer3d.planning.tracing.rank_tracer import Tracer

TEXT = """[mesh]
pp = 5
dp_shard = 2
[sharding.fsdp2]
[scheduling.pipeline]
split = {split}
[scheduling.activation_checkpoint]
"""
NUM_MICROBATCHES, MIDDLE = 9, (2, 4, 6)


def case_of(*firsts, num_layers, more=""):
    split = [f"layers.{first}" for first in firsts]
    text = TEXT.format(split=split) + more
    return Case(text, world_size=10, num_layers=num_layers, num_microbatches=NUM_MICROBATCHES)


def enough(position, can_hold_fewer):
    return short_step(
        lambda number: one_f_one_b(5, number), NUM_MICROBATCHES, position=position, can_hold_fewer=can_hold_fewer
    )


@pytest.fixture
def traced(monkeypatch):
    ranks, run = [], Tracer._run
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    monkeypatch.setattr(
        Tracer, "_run", lambda self, rank, *args, **options: ranks.append(rank) or run(self, rank, *args, **options)
    )
    return ranks


def test_a_stage_like_another_has_the_trace_of_its_own(traced, tmp_path):
    case = case_of(2, 7, 13, 19, num_layers=21)
    found = tracer_of(case, tmp_path, enough=enough).trace_all(dict.fromkeys(MIDDLE, 2))
    assert {*traced} == {0, 2}, "the first rank for the shapes that it sends"
    assert [trace.rank for trace in found] == [*MIDDLE]
    assert len({trace.memory.parameters for trace in found}) == 2, "of five blocks, of six, and of six"
    for trace in found[1:]:
        assert trace == tracer_of(case, tmp_path, enough=enough).trace(trace.rank, stands_for=2)


def test_a_stage_of_as_many_blocks_as_the_longer_trace_is_traced_once(monkeypatch, tmp_path):
    recorded = []
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    sketch_of = rank_tracer.sketch_of
    monkeypatch.setattr(rank_tracer, "sketch_of", lambda *args: recorded.append(args) or sketch_of(*args))
    case = case_of(4, 8, 12, 16, num_layers=20)
    found = tracer_of(case, tmp_path, enough=enough).trace_all(dict.fromkeys((0, *MIDDLE), 2))
    # Before the last position three stages of four blocks hold as many micro-batches in what is traced.
    assert len(recorded) == 2, "the first stage, and one between"
    for trace in found:
        whole = tracer_of(case, tmp_path, enough=enough)
        monkeypatch.setattr(whole, "_cuts", False)
        assert trace == whole.trace(trace.rank, stands_for=2)


@pytest.mark.parametrize(
    ("more", "own"),
    [
        pytest.param('units = ["layers.?"]\n', {2, 6}, id="not recomputed"),
        pytest.param("[precision.mixed]\n", {2}, id="alike"),
    ],
)
def test_a_stage_that_a_transform_treats_otherwise_is_traced(more, own, traced, tmp_path):
    tracer_of(case_of(2, 6, 10, 14, num_layers=16, more=more), tmp_path, enough=enough).trace_all(
        dict.fromkeys(MIDDLE, 2)
    )
    assert {*traced} - {0} == own


@pytest.mark.parametrize(
    ("more", "chosen"),
    [
        pytest.param("", {0: 2, 2: 6, 8: 2}, id="all recomputed"),
        # The stage with the most in flight is the one that is recomputed: the next one may hold more than it.
        pytest.param('units = ["layers.2", "layers.3", "layers.4", "layers.5"]\n', {0: 2, 2: 2, 4: 4, 8: 2}, id="one"),
        pytest.param('units = ["layers.[6-9]"]\n', {0: 2, 2: 4, 4: 2, 8: 2}, id="another"),
    ],
)
def test_a_stage_stands_for_those_that_are_treated_alike(more, chosen, tmp_path):
    tracer = tracer_of(case_of(2, 6, 10, 14, num_layers=16, more=more), tmp_path, enough=enough)
    layout = tracer._preparation.context.layout
    simulation = simulate(one_f_one_b(5, NUM_MICROBATCHES), Costs())
    assert chosen_ranks(layout, simulation, "worst", tracer.contents()) == chosen
