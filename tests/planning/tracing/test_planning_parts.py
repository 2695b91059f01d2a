"""The pieces of a plan: storages, roles, enough micro-batches, allocations."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from support.planned_runs import Case, figures, one_f_one_b, tracer_of

from composer3d import torch_compat
from composer3d.errors import ComposerError
from composer3d.interfaces import Action
from composer3d.mesh import AXES, resolve
from composer3d.planning.costs.allocator import allocate, judge
from composer3d.planning.schedules.simulation import Costs, simulate
from composer3d.planning.tracing.enough_microbatches import ShortStep, enough_microbatches, short_step
from composer3d.planning.tracing.rank_roles import chosen_ranks
from composer3d.planning.tracing.rank_tracer import Tracer
from composer3d.planning.tracing.second_process import Beside, halve
from composer3d.planning.tracing.storages import StorageCounter
from composer3d.torch_compat import dispatch_mode


def counting(counter):
    def handle(operator, types, args, kwargs):
        result = operator(*args, **kwargs)
        counter.see(result, known=torch_compat.is_view(operator) or torch_compat.is_in_place(operator))
        return result

    return dispatch_mode(handle)


def test_a_storage_counts_once_until_its_last_view_is_gone():
    with StorageCounter() as counter, counting(counter):
        tensor = torch.zeros(100)
        view = tensor[10:]
        assert counter.live == 400
        del tensor
        view.add_(1)
        assert counter.live == 400
        other = view * 2
        assert (counter.live, counter.peak) == (760, 760)
        del view, other
    assert (counter.live, counter.peak) == (0, 760)


def test_a_storage_that_is_emptied_by_hand_is_not_counted():
    with StorageCounter() as counter, counting(counter):
        tensor = torch.zeros(100)
        tensor.untyped_storage().resize_(0)
        assert (counter.live, counter.peak) == (0, 400)
        tensor.untyped_storage().resize_(400)
        assert counter.live == 400


def test_fake_and_real_storages_count_alike():
    def work():
        tensor = torch.zeros(30, 7)
        return (tensor @ tensor.t()).relu().sum()

    peaks = []
    for mode in (torch_compat.fake_tensors(), torch.no_grad()):
        with mode, StorageCounter() as counter, counting(counter):
            work()
        peaks.append(counter.peak)
    assert peaks == [2 * 30 * 30 * 4 + 30 * 7 * 4] * 2


def test_no_more_microbatches_are_traced_than_differ():
    assert enough_microbatches(lambda number: one_f_one_b(4, number), 64) == 5
    assert enough_microbatches(lambda number: None, 64) == 3
    # GPipe holds all of them.
    gpipe = lambda number: [[Action(r, k, i) for k in "FB" for i in range(number)] for r in range(2)]  # noqa: E731
    assert enough_microbatches(gpipe, 6) == 6


@pytest.mark.parametrize(
    ("position", "num_microbatches", "without", "short"),
    [
        (0, 64, 17, (3, 2, 14)),
        (0, 30, 17, (4, 3, 13)),
        (0, 16, 16, (3, 3, 13)),
        (13, 64, 5, (3, 2, 1)),
        (15, 64, 3, (3, 1, 0)),
    ],
)
def test_a_step_of_one_stage_is_traced_with_few_microbatches_in_flight(position, num_microbatches, without, short):
    def orders_of(number):
        return one_f_one_b(16, number)

    assert short_step(orders_of, num_microbatches, position=position) == ShortStep(num_microbatches=without)
    step = short_step(orders_of, num_microbatches, position=position, can_hold_fewer=True)
    assert (step.num_microbatches, step.most_in_flight, step.fewer_in_flight) == short


RECOMPUTED = "[scheduling.activation_checkpoint]\n"


@pytest.mark.parametrize(
    ("rank", "num_microbatches", "more", "in_flight"),
    [
        pytest.param(0, 9, "", 2),
        pytest.param(2, 9, "", 2, marks=pytest.mark.slow),
        pytest.param(6, 9, "", 1, marks=pytest.mark.slow),
        pytest.param(0, 4, "", 3, marks=pytest.mark.slow),
        pytest.param(0, 5, "", 3, marks=pytest.mark.slow),
        pytest.param(0, 7, "", 2, marks=pytest.mark.slow),
        pytest.param(2, 4, "", 3, marks=pytest.mark.slow),
        pytest.param(0, 9, RECOMPUTED, 2, marks=pytest.mark.slow),
        pytest.param(0, 6, RECOMPUTED, 3, marks=pytest.mark.slow),
        pytest.param(0, 4, RECOMPUTED, 3, marks=pytest.mark.slow),
        pytest.param(2, 9, RECOMPUTED, 2, marks=pytest.mark.slow),
    ],
)
def test_fewer_microbatches_in_flight_show_what_more_of_them_keep(rank, num_microbatches, more, in_flight, tmp_path):
    """Bytes that differ are numbers kept for every micro-batch: losses, indices."""
    text = f"[mesh]\npp = 4\ndp_shard = 2\n[sharding.fsdp2]\n{more}[scheduling.pipeline]\n"
    case = Case(text, world_size=8, num_layers=20, num_microbatches=num_microbatches)

    def enough(position, can_hold_fewer):
        step = short_step(
            lambda number: one_f_one_b(4, number), num_microbatches, position=position, can_hold_fewer=can_hold_fewer
        )
        assert position != rank // 2 or step.most_in_flight == in_flight
        return step

    short = tracer_of(case, tmp_path, enough=enough).trace(rank)
    whole = tracer_of(case, tmp_path, extrapolate=False).trace(rank)
    one, other = figures(short), figures(whole)
    assert (one["collectives"], one["flops"]) == (other["collectives"], other["flops"])
    assert short.memory.module == whole.memory.module
    assert abs(short.memory.peak - whole.memory.peak) <= 16 * case.num_microbatches
    assert abs(short.memory.activations - whole.memory.activations) <= 16 * case.num_microbatches
    same = ("parameters", "gradients", "optimizer", "buffers")
    assert [getattr(short.memory, name) for name in same] == [getattr(whole.memory, name) for name in same]


@pytest.mark.parametrize("position", [None, 0, 1])
def test_many_microbatches_are_looked_at_a_few_times(position):
    asked = []

    def gpipe(number):
        asked.append(number)
        return [[Action(r, k, i) for k in "FB" for i in range(number)] for r in range(2)]

    assert enough_microbatches(gpipe, 4096, position=position) == 4096
    assert len(asked) <= 2

    def limited(number):
        asked.append(number)
        if number < 9:
            raise ComposerError("too few")
        return one_f_one_b(4, number)

    del asked[:]
    assert enough_microbatches(limited, 512, position=position) == 9
    assert len(asked) <= 10


def test_one_rank_of_each_role_is_visited():
    layout = resolve({"pp": 4, "dp_shard": 2, "tp": 2}, axes=AXES, world_size=None, default=None)
    simulation = simulate(one_f_one_b(4, 8), Costs())
    assert chosen_ranks(layout, simulation, "worst") == {0: 4, 4: 8, 12: 4}
    assert chosen_ranks(layout, simulation, "all") == dict.fromkeys((0, 4, 8, 12), 4)
    assert chosen_ranks(layout, simulation, 7) == {7: 1}


def test_a_fuller_stage_behind_is_visited_too():
    layout = resolve({"pp": 5, "dp_shard": 2}, axes=AXES, world_size=None, default=None)
    simulation = simulate(one_f_one_b(5, 8), Costs())
    contents = [Counter(block=number) for number in (1, 1, 2, 1, 2)]
    assert chosen_ranks(layout, simulation, "worst", contents) == {0: 2, 2: 4, 4: 2, 8: 2}
    other = [Counter(block=1), Counter(block=1, a=1), Counter(block=1, b=1), Counter(block=1, a=1), Counter(block=1)]
    assert chosen_ranks(layout, simulation, "worst", other) == {0: 2, 2: 4, 4: 2, 8: 2}


def test_the_rank_with_the_highest_peak_is_visited(tmp_path):
    case = Case(
        'mesh.pp = 4\n[scheduling.pipeline]\nsplit = ["layers.1", "layers.2", "layers.5"]\n',
        world_size=4,
        num_microbatches=4,
        num_layers=6,
    )
    tracer = tracer_of(case, tmp_path)
    contents = tracer.contents()
    numbers = [sum(number for form, number in each.items() if form[0].startswith("layers.*.")) for each in contents]
    assert [number / numbers[1] for number in numbers] == [1, 1, 3, 1]
    layout = resolve({"pp": 4}, axes=AXES, world_size=None, default=None)
    chosen = chosen_ranks(layout, simulate(one_f_one_b(4, 4), Costs()), "worst", contents)
    peaks = {trace.rank: trace.memory.peak for trace in tracer.trace_all(dict.fromkeys(range(4), 1))}
    assert max(peaks, key=peaks.__getitem__) == 2
    assert chosen == {0: 1, 1: 1, 2: 1, 3: 1}


def test_what_a_backend_that_fuses_nothing_compiles_is_planned_as_it_is_written(tmp_path):
    plain = "mesh.dp_shard = 2\n[sharding.fsdp2]\n"
    compiled = plain + '[scheduling.compile]\nbackend = "eager"\n'
    fused = plain + "[scheduling.compile]\n"
    one, other, last = (
        tracer_of(Case(text, num_layers=2), tmp_path, extrapolate=False).trace(0) for text in (plain, compiled, fused)
    )
    assert figures(one) == figures(other)
    assert one.notes == other.notes == ()
    assert len(last.notes) == 1 and last.notes[0].startswith(
        "modules that are compiled were traced as they are written"
    )


def test_an_allocation_is_rounded_up_and_judged(tmp_path):
    trace = tracer_of(Case("mesh.dp_shard = 2\n[sharding.fsdp2]\n"), tmp_path).trace(0)
    allocation = allocate(trace)
    assert allocation.allocated > trace.memory.peak
    assert allocation.reserved % (2 << 20) == 0 and allocation.reserved > allocation.allocated
    assert judge(allocation, 2 * allocation.total) == "fits"
    assert judge(allocation, allocation.total) == "tight"
    assert judge(allocation, allocation.total - 1) == "does not fit"


EXTRAPOLATED = {
    "zero3": Case("mesh.dp_shard = 2\n[sharding.fsdp2]\n", num_layers=7, num_microbatches=5),
    "zero2": Case("mesh.dp_shard = 2\n[sharding.fsdp2]\nzero = 2\n", num_layers=7, num_microbatches=5),
    "recompute": Case(
        "mesh.dp_shard = 2\n[sharding.fsdp2]\n[scheduling.activation_checkpoint]\n", num_layers=7, num_microbatches=5
    ),
    "sp": Case(
        '[mesh]\ndp_shard = 2\ntp = 2\n[sharding.fsdp2]\n[sharding.tensor_parallel]\nplan = "auto"\n'
        "sequence_parallel = true\n",
        world_size=4,
        num_layers=6,
    ),
    "recomputed_pipeline": Case(
        "[mesh]\npp = 2\ndp_shard = 2\n[sharding.fsdp2]\n[scheduling.pipeline]\n[scheduling.activation_checkpoint]\n",
        world_size=4,
        num_layers=12,
        num_microbatches=6,
    ),
    "pipeline": Case(
        "[mesh]\npp = 2\ndp_shard = 2\n[sharding.fsdp2]\n[scheduling.pipeline]\n",
        world_size=4,
        num_layers=12,
        num_microbatches=7,
    ),
}


def pytest_generate_tests(metafunc):
    if "extrapolated" in metafunc.fixturenames:
        # What recomputes and what pipelines are in one case.
        slow = ("zero2", "recompute", "pipeline")
        marked = [pytest.param(name, marks=[pytest.mark.slow] * (name in slow)) for name in EXTRAPOLATED]
        metafunc.parametrize("extrapolated", marked)


def test_what_is_extrapolated_is_what_is_there(extrapolated, tmp_path):
    """Bytes that differ are numbers kept for every micro-batch: losses, indices."""
    case = EXTRAPOLATED[extrapolated]
    enough = 3 if case.world_size == 2 else 4
    short = tracer_of(case, tmp_path, enough=enough).trace(0)
    whole = tracer_of(case, tmp_path, extrapolate=False).trace(0)
    one, other = figures(short), figures(whole)
    assert short.is_extrapolated and not whole.is_extrapolated
    assert (one["collectives"], one["flops"]) == (other["collectives"], other["flops"])
    assert short.memory.module == whole.memory.module
    assert abs(short.memory.peak - whole.memory.peak) <= 64 * case.num_microbatches
    same = ("parameters", "gradients", "optimizer", "buffers")
    assert [getattr(short.memory, name) for name in same] == [getattr(whole.memory, name) for name in same]


# Schedules that run other actions between a message and what it is for, and some backwards whole and others in halves.
@pytest.mark.parametrize(
    ("schedule", "rank"),
    [pytest.param("InterleavedZeroBubble", 1, marks=pytest.mark.slow), ("ZBVZeroBubble", 1), ("DualPipeV", 0)],
)
def test_further_microbatches_send_and_receive_what_the_others_do(schedule, rank, tmp_path):
    text = f'mesh.pp = 2\n[scheduling.pipeline]\nschedule = "{schedule}"\n'
    case = Case(text, num_layers=4, num_microbatches=8)
    short = tracer_of(case, tmp_path, enough=4).trace(rank)
    whole = tracer_of(case, tmp_path, extrapolate=False).trace(rank)
    assert short.is_extrapolated and not whole.is_extrapolated
    one, other = figures(short), figures(whole)
    assert (one["collectives"], one["flops"]) == (other["collectives"], other["flops"])


def test_work_is_halved_between_two_processes():
    costs = {"a3": 18, "a4": 24, "b3": 12, "b4": 16, "c3": 9, "c4": 12}
    assert halve(costs, begin=("a3", "a4")) == (["a3", "b4", "c4"], ["a4", "b3", "c3"])
    assert halve({"a3": 3, "a4": 4}, begin=("a3", "a4")) == (["a3"], ["a4"])


def test_what_a_second_process_leaves_is_any_value_or_none(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    with Beside(lambda: {(0, 3): torch.float64}) as beside:
        assert beside.result() == {(0, 3): torch.float64}
    with Beside(lambda: 1 // 0) as beside:
        assert beside.result() is None


def test_one_process_finds_what_two_do(monkeypatch, tmp_path):
    case, chosen = EXTRAPOLATED["recomputed_pipeline"], {0: 2, 2: 2}
    two = tracer_of(case, tmp_path).trace_all(chosen)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    one = tracer_of(case, tmp_path).trace_all(chosen)
    assert [figures(trace) for trace in one] == [figures(trace) for trace in two]
    assert [(trace.rank, trace.stands_for) for trace in two] == [(0, 2), (2, 2)]


@pytest.mark.parametrize("more", ["[scheduling.activation_checkpoint]\nevery = 2\n", "gather_early = 2\n"])
def test_blocks_that_are_not_alike_are_all_traced(more, tmp_path):
    case = replace(EXTRAPOLATED["zero3"], text=EXTRAPOLATED["zero3"].text + more)
    assert not tracer_of(case, tmp_path).trace(0).is_extrapolated


def test_stages_of_unequal_lengths_are_traced_whole_and_only_so(monkeypatch, tmp_path):
    text = '[mesh]\npp = 2\n[scheduling.pipeline]\nschedule = "Interleaved1F1B"\nstages_per_rank = 2\n'
    case = Case(text, num_layers=14, num_microbatches=2)
    traced, run = [], Tracer._run
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    monkeypatch.setattr(Tracer, "_run", lambda *args, **options: traced.append(run(*args, **options)) or traced[-1])
    (found,) = tracer_of(case, tmp_path).trace_all({0: 2})
    assert sum(each.sketch is not None for each in traced) == 1
    assert figures(found) == figures(tracer_of(case, tmp_path, extrapolate=False).trace(0))
