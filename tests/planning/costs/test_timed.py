"""Times between the sizes that were timed, and what stands for what was not."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from composer3d.planning.costs.collective_time import Group, collective_s, message_s
from composer3d.planning.costs.roofline import operator_s
from composer3d.planning.costs.step_time import compute_s, segment_time
from composer3d.planning.costs.timed import fresh_s, interpolated_s
from composer3d.planning.hardware.cluster import BROADCAST, AttentionSpeed, Gemm, TimedCollective, TimedOperator
from composer3d.planning.hardware.hardware_file import load_hardware
from composer3d.planning.tracing.summary import sent_over
from composer3d.planning.tracing.traced import DISPATCH, Memory, Operators, RankTrace, Segment, Transfer

H100 = load_hardware("h100")
CPU = replace(
    H100.device,
    is_asynchronous=False,
    memory_bandwidth=1e9,
    memory_efficiency=1.0,
    operators=(
        TimedOperator(name="aten.mul", dtype="float32", bytes=1e4, seconds=1e-6),
        TimedOperator(name="aten.mul", dtype="float32", bytes=1e6, seconds=1e-3),
        TimedOperator(name="aten.mul", dtype="bfloat16", bytes=1e6, seconds=2e-3),
        TimedOperator(name="aten.copy_", dtype="float32", bytes=1e6, seconds=3e-3),
        TimedOperator(name="aten.silu", dtype="float32", bytes=1e6, seconds=4e-3),
    ),
    attentions=(
        AttentionSpeed(dtype="float32", length=64, width=32, forward=1e9, backward=2e9),
        AttentionSpeed(dtype="float32", length=1024, width=32, forward=4e9, backward=8e9),
    ),
)
TWO = Group(num_ranks=2, num_nodes=1)
GLOO = replace(
    H100,
    device=CPU,
    intra=replace(
        H100.intra,
        timed=(
            TimedCollective(op="all_gather", ranks=2, bytes=1e4, seconds=1e-4),
            TimedCollective(op="all_gather", ranks=2, bytes=1e6, seconds=1e-2),
            TimedCollective(op="send", ranks=2, bytes=1e4, seconds=2e-4),
        ),
    ),
)


NOTHING = Memory(
    parameters=0, gradients=0, optimizer=0, activations=0, transient=0, peak=0, moment="forward", module=""
)


def call(name, *, moved=10**6, dtype="float32", flops=0, shapes=()):
    return Operators(name=name, dtype=dtype, shapes=shapes, count=1, flops=flops, bytes_moved=moved)


def gather(size=10**6, *, count=1, is_overlapped=True):
    return Transfer(
        op="all_gather",
        axis="dp_shard",
        plugin="fsdp2",
        ranks=(0, 1),
        dtype="float32",
        count=count,
        bytes=size,
        wire_bytes=size // 2 * count,
        is_overlapped=is_overlapped,
    )


@pytest.mark.parametrize(
    ("size", "seconds"),
    [(1e4, 1e-6), (1e6, 1e-3), (1e5, 10**-4.5), (1e3, 1e-7), (1e8, 1e-1)],  # at, at, between, below, beyond
)
def test_times_lie_on_lines_in_logarithms_and_are_proportional_outside(size, seconds):
    assert interpolated_s(size, [(1e6, 1e-3), (1e4, 1e-6)]) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("name", "dtype", "seconds"),
    [
        ("aten.silu", "float32", 4e-3),
        ("aten.silu", "bfloat16", 4e-3),  # timed in another dtype only
        ("aten.add", "float32", 1e-3),
        ("aten.add", "bfloat16", 2e-3),
        ("aten.add", "", 1e-3),
        ("fsdp.split_with_sizes_copy", "float32", 3e-3),
        ("fsdp.chunk_cat", "bfloat16", 3e-3),
    ],
)
def test_what_was_not_timed_is_like_a_copy_or_a_multiplication(name, dtype, seconds):
    assert operator_s(call(name, dtype=dtype), CPU) == pytest.approx(seconds)


def test_memory_that_is_only_taken_takes_no_time():
    for device in (CPU, H100.device):
        assert operator_s(call("aten.empty"), device) == 0
        assert operator_s(call("aten.zeros"), device) > 0


def test_a_product_that_was_timed_has_its_traffic_in_its_time():
    timed = replace(CPU, gemms=(Gemm(dtype="float32", m=8, n=8, k=8, flops_per_s=1e9),))
    product = call("aten.mm", shapes=((8, 8), (8, 8)), flops=1024, moved=10**9)
    assert operator_s(product, timed) == pytest.approx(1024 / 1e9, rel=1e-5)
    assert operator_s(product, CPU) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("shapes", "longer"),
    [
        (((64, 8, 16), (64, 1, 16)), 1.0),  # for all heads of a position, as it was timed
        (((64, 8, 64), (64, 1, 64)), 1 / 4),
        (((64, 512), (64, 1)), 1 / 32),  # a number for every row
        (((64, 128), (128,)), 1 / 8),  # a row for all
        (((64, 1, 16), (64, 1, 16)), 0.0),
        (((64, 16), ()), 0.0),
        (((64, 16),), 0.0),
    ],
)
def test_a_factor_that_several_rows_share_ends_a_loop_with_every_row(shapes, longer):
    rows = TimedOperator(name=BROADCAST, dtype="float32", bytes=1e6, seconds=5e-3)
    known = replace(CPU, operators=(*CPU.operators, rows))
    for name in ("aten.mul", "aten.add", "aten.mul_"):
        assert operator_s(call(name, shapes=shapes), known) == pytest.approx(1e-3 + 4e-3 * longer)
    assert operator_s(call("aten.index_put", shapes=shapes), known) == pytest.approx(3e-3)
    assert operator_s(call("aten.mul", shapes=shapes), CPU) == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("length", "forward"), [(64, 1e9), (1024, 4e9), (256, 2e9), (128, 2**0.5 * 1e9), (16, 1e9), (4096, 4e9)]
)
def test_attention_is_as_fast_as_at_its_length(length, forward):
    shape = (2, 4, length, 32)
    name = "aten._scaled_dot_product_flash_attention_for_cpu"
    ahead = call(name, shapes=(shape,) * 3, flops=10**9)
    assert operator_s(ahead, CPU) == pytest.approx(0.5e9 / forward, rel=1e-4)
    back = call(f"{name}_backward", shapes=(shape,) * 5, flops=10**9)
    assert operator_s(back, CPU) == pytest.approx(0.25e9 / forward, rel=1e-4)


def test_attention_lies_between_the_timed_lengths_and_widths():
    rows = [(64, 32, 1e9), (64, 64, 2e9), (1024, 32, 4e9), (1024, 64, 16e9)]
    timed = tuple(
        AttentionSpeed(dtype="float32", length=length, width=width, forward=speed, backward=speed)
        for length, width, speed in rows
    )
    ahead = call("aten._scaled_dot_product_flash_attention_for_cpu", shapes=((2, 4, 256, 45),) * 3, flops=10**9)
    part = math.log2(45 / 32)
    speed = (1e9 * 4e9) ** ((1 - part) / 2) * (2e9 * 16e9) ** (part / 2)
    assert operator_s(ahead, replace(CPU, attentions=timed)) == pytest.approx(0.5e9 / speed)


def test_a_collective_that_was_timed_replaces_the_link_for_as_many_ranks():
    assert collective_s("all_gather", 1e5, TWO, GLOO) == pytest.approx(1e-3)
    assert collective_s("all_gather", 8, TWO, GLOO) == pytest.approx(1e-4)  # no less than the least that was timed
    assert collective_s("broadcast", 1e6, TWO, GLOO) == pytest.approx(1e-2)
    assert message_s(1e4, TWO, GLOO) == pytest.approx(2e-4)
    four = Group(num_ranks=4, num_nodes=1)
    assert collective_s("all_gather", 1e6, four, GLOO) == collective_s("all_gather", 1e6, four, H100)
    assert collective_s("all_reduce", 1e6, TWO, GLOO) == collective_s("all_reduce", 1e6, TWO, H100)


def test_the_largest_results_of_a_stretch_are_memory_handed_out_anew():
    logits = call("aten.mm", shapes=((512, 64), (64, 2048)), moved=4 * (512 * 64 + 64 * 2048 + 512 * 2048))
    values = replace(call("aten._log_softmax", shapes=((512, 2048),), moved=8 * 512 * 2048), count=3)
    small = call("aten.mul", shapes=((512, 512), (512, 512)), moved=12 * 512 * 512)
    in_place = call("aten.mul_", shapes=((2048, 1024), (2048, 1024)), moved=12 * 2048 * 1024)
    fresh = replace(CPU, fresh_bandwidth=1e9)
    assert fresh_s([logits, values, small, in_place], fresh) == pytest.approx(4 * (4 * 512 * 2048) / 1e9)
    assert fresh_s([logits, values], CPU) == 0
    assert fresh_s([small], fresh) == 0


def test_hooks_and_dispatch_add_to_what_the_host_does():
    known = replace(GLOO, device=replace(CPU, launch_s=1e-5, overheads={"fsdp": 2e-4, "dtensor": 5e-5}))
    dispatch = replace(call(DISPATCH, moved=0, dtype=""), count=4)
    assert compute_s([dispatch], known) == pytest.approx(4 * 5e-5)  # the operators that it becomes have launches
    copies = call("fsdp.chunk_cat")
    assert compute_s([copies], known) == pytest.approx(3e-3 + 1e-5 + 2e-4)
    assert compute_s([dispatch], H100) == 0


@pytest.mark.parametrize("is_overlapped", [True, False])
def test_on_a_cpu_no_collective_runs_beside_compute(is_overlapped):
    segment = Segment(
        kind="forward",
        stage=0,
        count=1,
        operators=(call("aten.mul"),),
        transfers=(gather(count=3, is_overlapped=is_overlapped),),
    )
    found = segment_time(segment, GLOO)
    assert found.exposed_s == found.communication_s == pytest.approx(3e-2)
    assert found.compute_s == pytest.approx(1e-3 + CPU.launch_s)


def test_on_gpus_a_reduce_scatter_sends_what_a_ring_does():
    traced = replace(gather(), op="reduce_scatter", wire_bytes=10**6)  # over gloo, an all-reduce inside
    segment = Segment(kind="backward", stage=0, count=1, operators=(), transfers=(traced, gather()))
    trace = RankTrace(rank=0, coordinates={}, stands_for=1, memory=NOTHING, segments=(segment,), is_extrapolated=False)
    (found,) = sent_over(trace, gloo=False).segments
    assert [each.wire_bytes for each in found.transfers] == [5 * 10**5, 5 * 10**5]
    (found,) = sent_over(replace(trace, segments=(found,)), gloo=True).segments
    assert [each.wire_bytes for each in found.transfers] == [10**6, 5 * 10**5]
