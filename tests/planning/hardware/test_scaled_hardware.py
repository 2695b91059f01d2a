"""The same cluster with faster or slower parts: which figures change, and which stay."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from composer3d.errors import ComposerError
from composer3d.planning.costs.collective_time import collective_s, group_of
from composer3d.planning.hardware.cluster import TimedCollective
from composer3d.planning.hardware.hardware_file import hardware_names, load_hardware
from composer3d.planning.hardware.scaled_hardware import SCALED_PARTS, parse_factors, scaled

H100 = load_hardware("h100")
CHANGES = {
    "flops": {"device.peaks"},
    "memory": {"device.memory_bandwidth"},
    "launch": {"device.launch_s"},
    "links": {"intra.bandwidth"},
    "network": {"inter.bandwidth"},
    "host": {"host.bandwidth"},
    "host_memory": {"host_memory.bandwidth"},
    "drive": {"drive.read", "drive.write"},
    "latency": {"intra.latency_s", "intra.base_s", "inter.latency_s", "inter.base_s"},
}


def flat(hardware):
    tables = asdict(hardware)
    rows = {
        f"{table}.{key}": value
        for table in ("device", "intra", "inter", "host", "host_memory", "drive")
        for key, value in tables[table].items()
    }
    return {**rows, "slowdown": hardware.slowdown, "devices_per_node": hardware.devices_per_node}


@pytest.mark.parametrize("part", SCALED_PARTS)
def test_a_part_changes_its_own_figures_by_the_factor(part):
    before, after = flat(H100), flat(scaled(H100, {part: 0.5}))
    assert {key for key in before if before[key] != after[key]} == CHANGES[part]
    for key in CHANGES[part] - {"device.peaks"}:
        assert after[key] == pytest.approx(0.5 * before[key])


def test_every_dtype_s_peak_is_scaled():
    peaks = scaled(H100, {"flops": 2}).device.peaks
    assert peaks == {dtype: 2 * peak for dtype, peak in H100.device.peaks.items()}


def test_collectives_that_were_timed_are_scaled_as_those_that_are_modelled():
    from dataclasses import replace

    rows = tuple(
        TimedCollective(op="all_reduce", ranks=8, bytes=size, seconds=1e-5 + size * 1e-9) for size in (2**10, 2**24)
    )
    timed = replace(H100, intra=replace(H100.intra, timed=rows))
    group, size = group_of(range(8), 8), 2**24

    def seconds(hardware):
        return collective_s("all_reduce", size, group, hardware)

    assert seconds(scaled(timed, {"links": 0.5})) == pytest.approx(2 * seconds(timed), rel=1e-2)
    assert seconds(scaled(timed, {"latency": 2.0})) == pytest.approx(seconds(timed) + rows[0].seconds, rel=1e-6)


def test_the_name_says_what_was_changed_and_nothing_changes_nothing():
    assert scaled(H100, {"network": 0.5, "flops": 2}).name == "h100 with network 0.5x, flops 2x"
    assert scaled(H100, {}) is H100


@pytest.mark.parametrize(
    ("factors", "told"),
    [
        ({"netwrok": 0.5}, 'a cluster has no part "netwrok"; did you mean "network"'),
        ({"network": 0.0}, "network = 0x: a factor is at least 0.01x and at most 100x"),
        ({"network": float("nan")}, "network = nanx: a factor is at least 0.01x"),
    ],
)
def test_what_cannot_be(factors, told):
    with pytest.raises(ComposerError) as caught:
        scaled(H100, factors)
    assert told in str(caught.value)


@pytest.mark.parametrize("text", ["network", "network=half", "=", "network="])
def test_what_is_no_factor(text):
    with pytest.raises(ComposerError, match="write for example network=0.5x"):
        parse_factors([text])


def test_every_shipped_device_says_its_power():
    devices = [name for name in hardware_names() if not name.startswith("/")]
    assert all(200 <= load_hardware(name).device.power_w <= 1500 for name in devices)
