"""The slow rank, from when ranks came to collectives; times written by hand, in milliseconds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from composer3d.diagnostics.doctor.examine import examine
from composer3d.diagnostics.doctor.lateness import compare_paces
from composer3d.diagnostics.doctor.run_folder import Evidence, Span, Witness
from composer3d.observation.hang_report import Account, RecordedCollective

MS = 1_000_000


def witness(rank, spans, arrivals, num_ranks=3):
    """Return what a rank tells: spans as (name, step, start, end), arrivals at the collectives 0, 1, ..."""
    peers = tuple(range(num_ranks))
    rows = tuple(
        RecordedCollective(
            axis="dp", ranks=peers, number=number, op="all_reduce", sizes=((1,),), time_ns=round(at * MS)
        )
        for number, at in enumerate(arrivals)
    )
    account = Account(rank=rank, step=0, inside=False, spans=(), place="", own=None, collectives=rows)
    return Witness(
        rank=rank,
        who=f"rank {rank}",
        host="here",
        state="ended",
        time_ns=0,
        account=account,
        opened=(),
        spans=tuple(
            Span(name=name, step=step, start_ns=round(start * MS), end_ns=round(end * MS))
            for name, step, start, end in spans
        ),
        owners={},
        memory={},
        device="cpu",
    )


def ranks(forward, backward, wait=(0.0, 0.0, 0.0), num_steps=6):
    """Return three ranks that meet once after the data, once in the middle of a backward, and at its end.

    Args:
        forward: Milliseconds of own work, by rank.
        backward: Likewise.
        wait: For data.
    """
    spans, arrivals = [[] for _ in range(3)], [[0.0] for _ in range(3)]
    now = [0.0, 0.0, 0.0]
    for step in range(num_steps):
        data = now
        here = [data[rank] + wait[rank] for rank in range(3)]
        met = [max(here)] * 3
        middle = [met[rank] + forward[rank] + backward[rank] / 2 for rank in range(3)]
        after = [max(middle) + backward[rank] / 2 for rank in range(3)]
        for rank in range(3):
            spans[rank] += [
                ("data_wait", step, data[rank], here[rank]),
                ("forward", step, met[rank], met[rank] + forward[rank]),
                ("backward", step, met[rank] + forward[rank], after[rank]),
            ]
            arrivals[rank] += [here[rank], middle[rank], after[rank]]
        now = [max(after)] * 3
    return {rank: witness(rank, spans[rank], arrivals[rank]) for rank in range(3)}


@pytest.mark.parametrize(
    ("work", "phase", "own_ms", "others_ms"),
    [
        (ranks((10, 50, 10), (20, 20, 20)), "forward", 50, 10),
        (ranks((10, 10, 10), (20, 100, 20)), "backward", 100, 20),
        (ranks((10, 10, 10), (20, 20, 20), wait=(1, 90, 1)), "data_wait", 90, 1),
    ],
)
def test_the_slow_rank_and_its_phase(work, phase, own_ms, others_ms):
    late = compare_paces(work).straggler
    assert (late.rank, late.phase, late.num_steps) == (1, phase, 5)
    assert (late.own_s, late.others_s) == pytest.approx((own_ms / 1e3, others_ms / 1e3))
    assert late.waited_s == pytest.approx((own_ms - others_ms) / 1e3)
    assert late.ratio == pytest.approx(own_ms / others_ms)


def test_waiting_is_no_work():
    """All spans of a backward end together: only what a rank does itself tells them apart."""
    work = ranks((10, 10, 10), (20, 100, 20))
    assert work[0].spans[2].end_ns - work[0].spans[2].start_ns == 60 * MS
    assert compare_paces(work).straggler.others_s == pytest.approx(0.02)


def delayed(steps):
    """Return two ranks of which rank 1 works 20 ms instead of 10 in some of ten steps."""
    spans, arrivals, now = [[], []], [[0.0], [0.0]], 0.0
    for step in range(10):
        own = [10, 20 if step in steps else 10]
        for rank in range(2):
            spans[rank].append(("forward", step, now, now + own[rank]))
            arrivals[rank].append(now + own[rank])
        now += max(own)
    return {rank: witness(rank, spans[rank], arrivals[rank], num_ranks=2) for rank in range(2)}


@pytest.mark.parametrize(
    ("work", "known"),
    [
        (ranks((10, 14, 10), (20, 22, 20)), True),
        (delayed({1, 3, 4, 5, 7, 8}), True),
        (ranks((10, 50, 10), (20, 20, 20), num_steps=3), False),
        ({0: witness(0, [("forward", step, step, step + 1) for step in range(9)], [])}, False),
        ({}, False),
    ],
    ids=["nearly alike", "now and then", "too few steps", "one rank", "nobody"],
)
def test_nobody_is_slow(work, known):
    pace = compare_paces(work)
    assert (pace.straggler, pace.known) == (None, known)


def test_a_rank_that_is_slow_in_nearly_every_step():
    assert compare_paces(delayed(set(range(10)) - {5})).straggler.rank == 1


@pytest.mark.parametrize(("hosts", "drained"), [("aba", "drain b, one of 2"), ("aaa", "")])
def test_the_node_of_a_slow_rank_is_named_where_there_are_several(hosts, drained):
    work = ranks((10, 50, 10), (20, 20, 20))
    evidence = Evidence(
        run=Path("out"),
        error=None,
        witnesses={rank: replace(each, host=hosts[rank]) for rank, each in work.items()},
        seen={},
        moved=False,
        anomalies=(),
        findings=(),
        snapshots={},
        damaged={},
        world_size=3,
        layout=None,
    )
    found = examine(evidence)
    assert (found.kind, found.rank) == ("straggler", 1)
    assert [line for line in found.advice if "drain" in line] == (
        [f"if it stays slow with other data too, it is its node: {drained}"] if drained else []
    )
