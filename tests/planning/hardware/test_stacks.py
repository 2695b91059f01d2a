"""Stacks of hardware files: what software makes of a device, and what a file must not say of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tomli

from composer3d.errors import ComposerError
from composer3d.planning.costs.roofline import format_of, gemm_speed
from composer3d.planning.costs.step_time import segment_time
from composer3d.planning.hardware import hardware_file
from composer3d.planning.hardware.cluster import STACKS, Stack
from composer3d.planning.hardware.hardware_file import hardware_names, load_hardware, problems_of
from composer3d.planning.tracing.traced import Operators, Segment, Transfer

DEVICES = [name for name in hardware_names() if not name.startswith("/")]
H100 = load_hardware("h100")


def problems_with(**stacks):
    file = tomli.loads((hardware_file._FOLDER / "h100.toml").read_text())
    inter = tomli.loads((hardware_file._FOLDER / "networks.toml").read_text())["network"]["ib-ndr-400"]
    return problems_of(file | {"inter": inter, "stack": stacks})


@pytest.mark.parametrize("name", DEVICES)
def test_every_shipped_device_has_every_stack_with_a_source(name):
    stacks = load_hardware(name).stacks
    assert set(stacks) == set(STACKS)
    assert all(stack.source for stack in stacks.values())


@pytest.mark.parametrize(
    ("stacks", "message"),
    [
        (
            {"compile": {}},
            'unknown stack "compile" in [stack]; did you mean "compiled"? (known: eager, compiled, megatron)',
        ),
        ({"eager": {"pointwise": 2}}, "stack.eager.pointwise = 2; it is a part of the whole, above 0 and at most 1"),
        ({"eager": {"hiden": 1}}, 'unknown key "stack.eager.hiden"; did you mean "hidden"?'),
        ({"megatron": {"wait": 3}}, "stack.megatron.wait = 3 is not a number with one of the units s, ms, us, ns"),
        ({"megatron": {"tp_overlap": 1.0}}, "stack.megatron.tp_overlap = 1.0; a part of the whole, 0 to below 1"),
        ({"eager": {"band": 0}}, "stack.eager.band = 0; a part of the step's time, above 0, at most 2"),
        ({"eager": {"reserve_factor": 3}}, "stack.eager.reserve_factor = 3; reserved over allocated bytes, 1 to 2"),
    ],
)
def test_what_a_file_must_not_say_of_a_stack(stacks, message):
    assert problems_with(**stacks) == [message]


def test_a_file_does_not_say_which_stack_runs():
    file = tomli.loads((hardware_file._FOLDER / "h100.toml").read_text())
    (problem,) = problems_of(file | {"inter": H100.inter, "runs_on": "eager"})
    assert problem == "runs_on = 'eager'; a file describes stacks, and the manifest says which one runs"


def test_a_stack_that_is_asked_for_is_planned_whatever_a_manifest_runs(tmp_path):
    asked = load_hardware("h100/efa-3200:megatron")
    assert (asked.name, asked.inter) == ("h100/efa-3200:megatron", load_hardware("h100/efa-3200").inter)
    for runs in ("eager", "compiled"):
        assert asked.with_stack(runs).software == H100.stacks["megatron"]
        assert H100.with_stack(runs).software == H100.stacks[runs]
    file = tmp_path / "own.toml"
    text = (hardware_file._FOLDER / "h100.toml").read_text()
    file.write_text(text[: text.index("[stack.eager]")])
    assert load_hardware(str(file)).asked is None
    with pytest.raises(ComposerError, match=r'own\.toml has no stack "eager"; it describes none'):
        load_hardware(f"{file}:eager")


def test_a_stack_replaces_the_figures_that_it_states():
    described = replace(H100, stacks={"megatron": Stack(gemm_efficiency={"float8": 0.5}, attention_efficiency=0.6)})
    under = described.with_stack("megatron")
    assert under.device.gemm_efficiency == {**H100.device.gemm_efficiency, "float8": 0.5}
    assert under.device.attention_efficiency == 0.6
    assert under.device.attention_backward_efficiency == H100.device.attention_backward_efficiency
    assert described.with_stack("eager").device == H100.device


def product(dtype, scales=()):
    shapes = ((4096, 4096), (4096, 4096), *scales)
    return Operators(name="aten._scaled_mm", dtype=dtype, shapes=shapes, count=1, flops=2 * 4096**3, bytes_moved=0)


@pytest.mark.parametrize(
    ("scales", "known"),
    [
        ((), "float8_e4m3fn"),
        (((), ()), "float8_e4m3fn"),
        (((4096, 1), (1, 4096)), "float8_rowwise"),
        (((4096, 128), (4096, 128)), "float8_e4m3fn"),
    ],
)
def test_rowwise_scales_are_told_from_those_of_a_tensor(scales, known):
    assert format_of(product("float8_e4m3fn", scales)) == known


def test_rowwise_products_are_slower_and_four_bits_faster_than_a_tensors_scale():
    device = H100.with_stack("compiled").device
    dims = (8192, 8192, 8192)
    assert gemm_speed(dims, "float8_rowwise", device) < gemm_speed(dims, "float8_e4m3fn", device)
    device = load_hardware("gb200").with_stack("megatron").device
    assert gemm_speed(dims, "float4_e2m1fn_x2", device) > gemm_speed(dims, "float8_e4m3fn", device)


def segment(*, operators=(), transfers=(), kind="forward"):
    return Segment(kind=kind, stage=0, count=1, operators=operators, transfers=transfers)


def pointwise(kind="forward"):
    call = Operators(name="aten.mul", dtype="bfloat16", shapes=((1,),), count=1, flops=0, bytes_moved=10**9)
    return segment(operators=(call,), kind=kind)


def transfer(axis, overlapped):
    return Transfer(
        op="all_reduce",
        axis=axis,
        plugin=None,
        ranks=tuple(range(8)),
        dtype="bfloat16",
        count=4,
        bytes=10**8,
        wire_bytes=0,
        is_overlapped=overlapped,
    )


def under(**figures):
    return replace(H100, stacks={"eager": Stack(**figures)}).with_stack("eager")


def test_fusion_lessens_the_traffic_of_the_model_and_not_of_the_optimizer():
    plain, fused = under(), under(pointwise=0.25)
    assert segment_time(pointwise(), fused).compute_s == pytest.approx(segment_time(pointwise(), plain).compute_s / 4)
    step = pointwise("optimizer")
    assert segment_time(step, fused).compute_s == segment_time(step, plain).compute_s


def test_a_collective_that_compute_waits_for_waits_for_ranks_too():
    waited = segment(transfers=(transfer("tp", overlapped=False),))
    plain = segment_time(waited, under()).exposed_s
    assert segment_time(waited, under(wait_s=1e-3)).exposed_s == pytest.approx(plain + 4e-3)
    assert segment_time(waited, under(tp_overlap=0.5)).exposed_s == pytest.approx(plain / 2)
    other = segment(transfers=(transfer("dp_shard", overlapped=False),))
    assert segment_time(other, under(tp_overlap=0.5)).exposed_s == pytest.approx(plain)


def test_compute_hides_no_more_of_a_collective_than_the_stack_lets_it():
    call = Operators(name="aten.mul", dtype="bfloat16", shapes=((1,),), count=1, flops=0, bytes_moved=10**12)
    beside = segment(operators=(call,), transfers=(transfer("dp_shard", overlapped=True),))
    whole = segment_time(beside, under()).communication_s
    first = whole / 4 + (H100.slowdown - 1) * whole
    assert segment_time(beside, under()).exposed_s == pytest.approx(first)
    assert segment_time(beside, under(hidden=0.4)).exposed_s == pytest.approx(0.6 * whole + 0.1 * whole)
