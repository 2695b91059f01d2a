"""Operators, collectives, segments and steps in time, from traces made by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from composer3d.errors import ComposerError
from composer3d.planning.costs.collective_time import Group, collective_s, group_of, message_s
from composer3d.planning.costs.figure import Figure
from composer3d.planning.costs.roofline import gemm_dims, gemm_efficiency, operator_s
from composer3d.planning.costs.step_time import communication_of, compute_s, segment_time
from composer3d.planning.costs.time_report import time_report
from composer3d.planning.costs.timing import estimate
from composer3d.planning.hardware.cluster import Gemm
from composer3d.planning.hardware.hardware_file import load_hardware
from composer3d.planning.schedules.orders import orders_of
from composer3d.planning.schedules.simulation import StageCosts, simulate
from composer3d.planning.tracing.traced import HOST_COPY, Memory, Operators, RankTrace, Segment, Transfer

H100 = load_hardware("h100")
MEMORY = Memory(
    parameters=0, gradients=0, optimizer=0, activations=0, transient=0, peak=0, moment="backward", module=""
)


def product(m, k, n, *, count=1, dtype="bfloat16"):
    return Operators(
        name="aten.mm",
        dtype=dtype,
        shapes=((m, k), (k, n)),
        count=count,
        flops=2 * m * k * n,
        bytes_moved=2 * (m * k + k * n + m * n),
    )


def transfer(op="all_gather", *, size=2**30, ranks=range(8), count=1, overlapped=True, axis="dp_shard"):
    ranks = tuple(ranks)
    return Transfer(
        op=op,
        axis=axis,
        plugin="fsdp2",
        ranks=ranks,
        dtype="bfloat16",
        count=count,
        bytes=size,
        wire_bytes=size * (len(ranks) - 1) // len(ranks) * count,
        is_overlapped=overlapped,
    )


def segment(kind="forward", *, stage=0, count=1, operators=(), transfers=()):
    return Segment(kind=kind, stage=stage, count=count, operators=tuple(operators), transfers=tuple(transfers))


def trace(*segments, rank=0, stands_for=1):
    return RankTrace(
        rank=rank, coordinates={}, stands_for=stands_for, memory=MEMORY, segments=segments, is_extrapolated=False
    )


# Operators


def test_a_large_product_is_bound_by_arithmetic_and_a_copy_by_memory():
    large = product(8192, 8192, 8192)
    reached = large.flops / operator_s(large, H100.device)
    assert 0.9 * 0.66 * 989e12 < reached <= 0.66 * 989e12
    copy = Operators(name="aten.copy_", dtype="bfloat16", shapes=((2**29,),), count=1, flops=0, bytes_moved=2**31)
    assert operator_s(copy, H100.device) == pytest.approx(2**31 / (3.35e12 * 0.85))
    thin = product(1, 8192, 8192)  # a product with a vector reads the matrix and does little with it
    assert operator_s(thin, H100.device) >= thin.bytes_moved / 3.35e12


@pytest.mark.parametrize(
    ("name", "shapes", "dims"),
    [
        ("mm", ((4, 8), (8, 16)), (4, 16, 8)),
        ("addmm", ((16,), (4, 8), (8, 16)), (4, 16, 8)),
        ("linear", ((2, 4, 8), (16, 8)), (8, 16, 8)),
        ("bmm", ((3, 4, 8), (3, 8, 16)), (4, 16, 8)),
        ("baddbmm", ((3, 4, 16), (3, 4, 8), (3, 8, 16)), (4, 16, 8)),
        ("relu", ((4, 8),), None),
    ],
)
def test_dims_of_products(name, shapes, dims):
    assert gemm_dims(name, shapes) == dims


def test_shapes_that_fit_tiles_badly_are_slower():
    whole = gemm_efficiency((4096, 4096, 4096), H100.device)
    assert gemm_efficiency((4096, 4096, 64), H100.device) < 0.7 * whole  # the sum is short
    assert gemm_efficiency((64, 64, 4096), H100.device) < 0.1 * whole  # one tile for 132 multiprocessors
    assert gemm_efficiency((4096, 4104, 4096), H100.device) < 0.9 * whole  # a multiple of 8 only
    assert gemm_efficiency((8192, 8192, 8192), H100.device) <= 1


def test_products_that_were_timed_replace_the_model():
    timed = tuple(
        Gemm(dtype="float32", m=size, n=size, k=size, flops_per_s=speed) for size, speed in ((64, 1e9), (1024, 4e9))
    )
    device = replace(H100.device, gemms=timed)
    for size, speed in ((64, 1e9), (1024, 4e9)):
        call = replace(product(size, size, size, dtype="float32"), bytes_moved=0)
        assert operator_s(call, device) == pytest.approx(call.flops / speed, rel=1e-3)
    between = replace(product(256, 256, 256, dtype="float32"), bytes_moved=0)
    assert 1e9 < between.flops / operator_s(between, device) < 4e9


def test_attention_executes_half_of_what_is_counted():
    name = "aten._scaled_dot_product_flash_attention"
    call = Operators(name=name, dtype="bfloat16", shapes=((1, 8, 64, 64),), count=1, flops=10**12, bytes_moved=0)
    assert operator_s(call, H100.device) == pytest.approx(0.5e12 / (989e12 * 0.40))
    backward = replace(call, name=f"{name}_backward")
    assert operator_s(backward, H100.device) == pytest.approx(0.5e12 / (989e12 * 0.32))


def test_launches_run_beside_kernels_on_a_device_and_add_on_a_cpu():
    small = [replace(product(8, 8, 8), count=1000)]
    assert compute_s(small, H100) == pytest.approx(1000 * 4e-6)
    device = replace(H100.device, is_asynchronous=False)
    work = 1000 * operator_s(small[0], device)
    assert compute_s(small, replace(H100, device=device)) == pytest.approx(1000 * 4e-6 + work)


def test_copies_to_the_host_go_over_its_link():
    call = Operators(name=HOST_COPY, dtype="float32", shapes=(), count=1, flops=0, bytes_moved=2**30)
    assert compute_s([call], H100) == pytest.approx(2**30 / H100.host.reached)


# Collectives


def test_groups_on_nodes():
    assert group_of(range(16), 8) == Group(num_ranks=16, num_nodes=2)
    assert group_of(range(0, 64, 8), 8) == Group(num_ranks=8, num_nodes=8)
    assert Group(num_ranks=16, num_nodes=2).per_node == 8


def test_bandwidth_of_large_collectives():
    size, node = 2**33, Group(num_ranks=8, num_nodes=1)
    gather = collective_s("all_gather", size, node, H100)
    assert gather == pytest.approx(7 / 8 * size / H100.intra.reached, rel=0.01)
    # An all-reduce is a reduce-scatter and an all-gather; a tree moves as much (not log2 N times).
    assert collective_s("all_reduce", size, node, H100) == pytest.approx(2 * gather, rel=0.01)


def test_between_nodes_the_adapters_decide():
    slow = load_hardware("h100/roce-200")
    size = 2**35  # smaller ones do not fill the adapters
    four_nodes = Group(num_ranks=32, num_nodes=4)
    assert collective_s("all_gather", size, four_nodes, slow) == pytest.approx(
        3 / 4 * size / 8 / slow.inter.reached, rel=0.01
    )
    # Groups with one rank a node have one adapter each.
    one_a_node = Group(num_ranks=4, num_nodes=4)
    assert collective_s("all_gather", size, one_a_node, slow) == pytest.approx(
        3 / 4 * size / slow.inter.reached, rel=0.01
    )
    exchanged = collective_s("all_to_all", size, four_nodes, slow)
    assert exchanged == pytest.approx(3 / 4 * size / slow.inter.reached, rel=0.01)


def test_small_collectives_cost_latency_and_trees_are_shallow():
    ring = collective_s("all_gather", 1024, Group(num_ranks=512, num_nodes=64), H100)
    tree = collective_s("all_reduce", 1024, Group(num_ranks=512, num_nodes=64), H100)
    assert tree < ring
    assert collective_s("all_reduce", 1024, Group(num_ranks=1, num_nodes=1), H100) == 0.0
    assert message_s(0, Group(num_ranks=2, num_nodes=2), H100) > message_s(0, Group(num_ranks=2, num_nodes=1), H100)


# Segments and steps


def test_overlapped_collectives_hide_behind_compute_but_for_the_first():
    compute = [product(8192, 8192, 8192, count=100)]
    busy = compute_s(compute, H100)
    one = collective_s("all_gather", 2**28, Group(num_ranks=8, num_nodes=1), H100)
    time = segment_time(segment(operators=compute, transfers=[transfer(size=2**28, count=10)]), H100)
    assert time.compute_s == pytest.approx(busy)
    assert time.exposed_s == pytest.approx(one + 0.1 * min(10 * one, busy))
    assert time.communication_s == pytest.approx(10 * one)
    blocked = segment_time(
        segment(operators=compute, transfers=[transfer(size=2**28, count=10, overlapped=False)]), H100
    )
    assert blocked.exposed_s == pytest.approx(10 * one)
    assert blocked.total_s == pytest.approx(busy + 10 * one)


def test_messages_of_a_ring_hide_behind_compute_and_those_of_stages_are_left_to_the_pipeline():
    compute = [product(8192, 8192, 8192, count=100)]
    ring = [transfer(op, size=2**28, ranks=range(2), count=4, axis="cp") for op in ("send", "receive")]
    one = message_s(2**28, Group(num_ranks=2, num_nodes=1), H100)
    time = segment_time(segment(operators=compute, transfers=ring), H100)
    assert time.communication_s == pytest.approx(4 * one)
    assert time.exposed_s == pytest.approx(one + 0.1 * min(4 * one, time.compute_s))
    stages = [transfer(op, size=2**28, ranks=range(2), axis="pp") for op in ("send", "receive")]
    assert segment_time(segment(operators=compute, transfers=stages), H100).communication_s == 0


def test_what_compute_cannot_hide_is_exposed():
    compute = [product(1024, 1024, 1024)]
    busy = compute_s(compute, H100)
    time = segment_time(segment(operators=compute, transfers=[transfer(count=8)]), H100)
    assert time.exposed_s == pytest.approx(time.communication_s - busy + 0.1 * busy)


def test_a_step_without_a_pipeline_is_the_slowest_ranks_segments():
    fast = trace(segment(count=2, operators=[product(1024, 1024, 1024)]))
    slow = trace(
        segment(count=2, operators=[product(4096, 4096, 4096)]),
        segment("optimizer", operators=[product(2048, 2048, 2048)]),
        rank=1,
    )
    found = estimate([fast, slow], H100, world_size=2, tokens=1000, model_flops=1e9)
    device = H100.device
    step = 2 * operator_s(product(4096, 4096, 4096), device)
    optimizer = operator_s(product(2048, 2048, 2048), device)
    assert found.step_s.value == pytest.approx(step + optimizer)
    assert found.optimizer_s.value == pytest.approx(optimizer)
    assert found.tokens_per_s.value == pytest.approx(1000 / (step + optimizer))
    assert found.tokens_per_s_per_device.value == pytest.approx(500 / (step + optimizer))
    assert found.mfu.value == pytest.approx(1e9 * 1000 / (2 * 989e12 * (step + optimizer)))
    executed = (2 * 2 * 1024**3 + 2 * 2 * 4096**3 + 2 * 2048**3) / 2
    assert found.hfu.value == pytest.approx(executed / (989e12 * (step + optimizer)))
    assert found.step_s.known == "modelled"
    assert found.step_s.low < found.step_s.value < found.step_s.high


def test_a_calibrated_machine_gives_narrower_bounds():
    traces = [trace(segment(operators=[product(1024, 1024, 1024)]))]
    found = estimate(traces, replace(H100, known="calibrated"), world_size=1, tokens=1)
    assert found.step_s.known == "calibrated"
    assert found.step_s.high == pytest.approx(1.15 * found.step_s.value)
    assert found.mfu is None


def test_bounds_of_a_model_that_routes_are_wider_and_say_so():
    chosen = replace(product(64, 64, 64), name="aten.topk", flops=0)
    hardware = H100.with_stack("megatron")
    plain, routed = (
        estimate([trace(segment(operators=[product(1024, 1024, 1024), *more]))], hardware, world_size=1, tokens=1)
        for more in ((), (chosen,))
    )
    band = H100.stacks["megatron"].band
    assert plain.step_s.high == pytest.approx((1 + band) * plain.step_s.value)
    assert routed.step_s.high == pytest.approx((1 + 2 * band) * routed.step_s.value)
    assert [note for note in routed.notes if note not in plain.notes] == [
        "bounds of times are 2 times as wide as those of a model that routes nothing: published runs that they stand "
        "on are of dense models"
    ]


def test_a_pipeline_is_simulated_with_each_stages_own_costs():
    sizes = (2048, 4096, 2048)
    traces = [
        trace(
            segment("forward", stage=stage, count=4, operators=[product(4096, size, 4096)]),
            segment("backward", stage=stage, count=4, operators=[product(4096, size, 4096, count=2)]),
            rank=stage,
        )
        for stage, size in enumerate(sizes)
    ]
    orders = orders_of("1F1B", degree=3, num_microbatches=4)
    found = estimate(traces, H100, world_size=3, tokens=100, orders=orders)
    unit = [operator_s(product(4096, size, 4096), H100.device) for size in sizes]
    costs = {(stage, kind): unit[stage] * (1 if kind == "F" else 2) for stage in range(3) for kind in "FB"}
    expected = simulate(orders, StageCosts(stages=costs))
    assert found.step_s.value == pytest.approx(expected.total)
    assert found.pipeline.bubble_share.value == pytest.approx(expected.bubble_share)
    assert found.pipeline.in_flight == (3.0, 2.0, 1.0)
    assert found.pipeline.imbalance == pytest.approx(3 * unit[1] / sum(unit) - 1)
    assert found.pipeline.stage_s == pytest.approx([3 * one for one in unit])
    assert found.bubble_s.value + found.compute_s.value == pytest.approx(expected.total)
    assert time_report(found)["pipeline"]["in_flight"] == [3.0, 2.0, 1.0]


def test_an_inner_stage_that_was_not_traced_is_as_the_nearest_inner_one():
    def stage(index, size):
        return trace(
            segment("forward", stage=index, operators=[product(4096, size, 4096)]),
            segment("backward", stage=index, operators=[product(4096, size, 4096)]),
            rank=index,
        )

    orders = orders_of("1F1B", degree=4, num_microbatches=4)
    some = estimate([stage(0, 2048), stage(1, 1024), stage(3, 4096)], H100, world_size=4, tokens=1, orders=orders)
    sizes = (2048, 1024, 1024, 4096)
    whole = estimate(
        [stage(index, size) for index, size in enumerate(sizes)], H100, world_size=4, tokens=1, orders=orders
    )
    assert some.step_s == whole.step_s


def test_micro_batches_that_differ_count_as_their_mean():
    def stage(index, *forwards):
        backward = segment("backward", stage=index, count=4, operators=[product(4096, 2048, 4096)])
        return trace(*forwards, backward, rank=index)

    def forward(index, count, size):
        return segment("forward", stage=index, count=count, operators=[product(4096, size, 4096)])

    orders = orders_of("1F1B", degree=2, num_microbatches=4)
    mixed = [stage(0, forward(0, 1, 8192), forward(0, 3, 2048)), stage(1, forward(1, 4, 2048))]
    found = estimate(mixed, H100, world_size=2, tokens=1, orders=orders)
    once, often = (operator_s(product(4096, size, 4096), H100.device) for size in (8192, 2048))
    assert found.pipeline.stage_s[0] == pytest.approx((once + 3 * often) / 4 + often)


def test_messages_delay_the_next_stage_and_keep_nobody_from_computing():
    def traces(ranks):
        sent = transfer("send", size=2**24, ranks=ranks, axis="pp")
        first = segment("forward", operators=[product(4096, 4096, 4096)], transfers=[sent])
        return [
            trace(first, segment("backward", operators=[product(4096, 4096, 4096)])),
            trace(
                segment("forward", stage=1, operators=[product(4096, 4096, 4096)]),
                segment("backward", stage=1, operators=[product(4096, 4096, 4096)]),
                rank=1,
            ),
        ]

    orders = orders_of("1F1B", degree=2, num_microbatches=1)
    near = estimate(traces((0, 1)), H100, world_size=2, tokens=1, orders=orders)
    far = estimate(traces((0, 8)), H100, world_size=2, tokens=1, orders=orders)
    apart = message_s(2**24, Group(num_ranks=2, num_nodes=2), H100)
    together = message_s(2**24, Group(num_ranks=2, num_nodes=1), H100)
    assert far.step_s.value - near.step_s.value == pytest.approx(2 * (apart - together))


@pytest.mark.parametrize(
    ("schedule", "degree", "microbatches", "per_rank"),
    [("1F1B", 4, 8, 1), ("GPipe", 4, 8, 1), ("Interleaved1F1B", 4, 8, 2)],
)
def test_orders_have_the_bubbles_of_the_closed_forms(schedule, degree, microbatches, per_rank):
    orders = orders_of(schedule, degree=degree, num_microbatches=microbatches, stages_per_rank=per_rank)
    stages = degree * per_rank
    costs = {(stage, kind): 1.0 if kind == "F" else 2.0 for stage in range(stages) for kind in "FB"}
    found = simulate(orders, StageCosts(stages=costs))
    assert found.bubble_relative == pytest.approx((degree - 1) / (microbatches * per_rank))


def test_communication_is_summed_by_kind():
    rows = communication_of(
        [
            segment(count=4, transfers=[transfer(count=2), transfer("all_reduce", ranks=range(0, 16, 8), axis="tp")]),
            segment("backward", count=4, transfers=[transfer(count=3)]),
        ],
        H100,
    )
    by_op = {row.op: row for row in rows}
    assert by_op["all_gather"].count == 4 * 5
    assert by_op["all_gather"].link == "NVLink 4"
    assert by_op["all_gather"].wire_bytes == 4 * 5 * (2**30 * 7 // 8)
    assert by_op["all_reduce"].link == "InfiniBand NDR"
    assert rows[0].seconds >= rows[1].seconds


def test_a_report_has_the_figures_that_are_known():
    traces = [trace(segment(operators=[product(8192, 8192, 8192, count=1000)]))]
    report = json.loads(json.dumps(time_report(estimate(traces, H100, world_size=8, tokens=10**6))))
    assert report["step_s"]["known"] == "modelled"
    assert not {"mfu", "pipeline", "training", "failures"} & report.keys()


def test_figures_keep_their_bounds():
    figure = Figure.within(10.0, 0.25, "modelled")
    assert (figure.low, figure.high) == (8.0, 12.5)
    inverse = figure.inverse(100.0)
    assert (inverse.low, inverse.value, inverse.high) == (8.0, 10.0, 12.5)
    assert Figure.exact(3).to_json() == {"value": 3, "known": "exact", "low": 3, "high": 3}


def test_nothing_to_time_is_an_error():
    with pytest.raises(ComposerError, match="there is no traced rank to time"):
        estimate([], H100, world_size=1, tokens=1)
    assert math.isfinite(
        estimate([trace(segment(operators=[product(8, 8, 8)]))], H100, world_size=1, tokens=1).hfu.value
    )
