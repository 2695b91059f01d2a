"""`composer3d calibrate`: a file that describes this machine, and that plans of this machine can be made with."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from composer3d.cli import main
from composer3d.planning.costs.collective_time import Group, collective_s
from composer3d.planning.hardware.calibration import Measurement, hardware_tables, mean_of
from composer3d.planning.hardware.cpu_operators import REFERENCES
from composer3d.planning.hardware.hardware_file import load_hardware, problems_of

MEASURED = Measurement(
    device="CPU core",
    memory_bytes=2**33,
    gemms=(("float32", 64, 64, 64, 1e9), ("float32", 512, 512, 512, 4e9), ("bfloat16", 64, 64, 64, 2e9)),
    attention=(("float32", 64, 16, 0.5e9, 0.25e9), ("float32", 256, 32, 1.5e9, 0.75e9)),
    bandwidth=1e10,
    host_bandwidth=5e9,
    launch_s=5e-6,
    collectives=tuple(
        (name, size, 1e-4 * passes + passes * size * 3 / 4 / 1e9)
        for size in (4096, 2**24)
        for name, passes in (("all_reduce", 2), ("all_gather", 1), ("reduce_scatter", 1))
    ),
    num_ranks=4,
    per_node=4,
    operators=(("aten.mul", "float32", 2**16, 4e-6), ("aten.mul", "float32", 2**20, 1e-4)),
)


def test_the_machine_is_measured_by_all_its_ranks(tmp_path):
    # In a process of its own: this one may have run operators, and cannot be forked then.
    output = tmp_path / "mine.toml"
    command = ["calibrate", "--minutes", "0.02", "--nproc-per-node", "2", "-o", str(output)]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "composer3d", *command], capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stderr
    expected = "measured: products, attention, memory bandwidth, launches, operators, collectives of a node"
    assert expected in done.stdout
    found = load_hardware(str(output))
    assert found.known == "calibrated"
    assert found.devices_per_node == 2
    assert not found.device.is_asynchronous
    assert {gemm.dtype for gemm in found.device.gemms} == {"float32", "bfloat16"}
    assert all(gemm.flops_per_s > 1e6 for gemm in found.device.gemms)
    assert 1e8 < found.device.memory_bandwidth < 1e12
    assert 1e-8 < found.device.launch_s < 1e-2
    assert {timed.name for timed in found.device.operators} == {each.name for each in REFERENCES}
    assert {timed.dtype for timed in found.device.attentions} == {"float32", "bfloat16"}
    assert {timed.op for timed in found.intra.timed} == {"all_reduce", "all_gather", "reduce_scatter", "send"}
    assert all(timed.seconds > 1e-7 for timed in found.intra.timed)


def test_what_was_measured_is_in_the_file(tmp_path):
    tables = hardware_tables(MEASURED, machine="a machine", is_cpu=True)
    assert problems_of(tables) == []
    assert tables["inter"]["name"] == "not measured: as in a node"
    from composer3d.manifest.toml_writer import dump

    (tmp_path / "mine.toml").write_text(dump(tables))
    found = load_hardware(str(tmp_path / "mine.toml"))
    group = Group(num_ranks=4, num_nodes=1)
    for name, size, seconds in MEASURED.collectives:
        assert collective_s(name, size, group, found) == pytest.approx(seconds, rel=1e-5)
        if size > 2**20:  # groups of another size have the link's latency and bandwidth
            link = replace(found, intra=replace(found.intra, timed=()))
            assert collective_s(name, size, group, link) == pytest.approx(seconds, rel=0.05)
    times = [(timed.name, timed.dtype, timed.bytes, timed.seconds) for timed in found.device.operators]
    for told, row in zip(times, MEASURED.operators, strict=True):
        assert told[:2] == row[:2]
        assert told[2:] == pytest.approx(row[2:], rel=1e-5)
    assert found.device.peaks == {"bfloat16": 2e9, "float32": 4e9}
    assert found.device.attention_efficiency == pytest.approx(0.25)


def test_ranks_are_averaged_and_the_middle_collective_counts():
    other = replace(
        MEASURED,
        bandwidth=3e10,
        gemms=tuple((*row[:4], 3 * row[4]) for row in MEASURED.gemms),
        collectives=tuple((name, size, 2 * seconds) for name, size, seconds in MEASURED.collectives),
        operators=tuple((*row[:3], 3 * row[3]) for row in MEASURED.operators),
    )
    mean = mean_of([MEASURED, other])
    assert mean.bandwidth == pytest.approx(2e10)
    assert mean.gemms[0][4] == pytest.approx(2e9)
    assert mean.operators[0] == ("aten.mul", "float32", 2**16, pytest.approx(8e-6))
    # One of three that came early and waited for the others says nothing of the collective.
    late = replace(other, collectives=tuple((name, size, 9 * seconds) for name, size, seconds in MEASURED.collectives))
    assert mean_of([late, MEASURED, other]).collectives == other.collectives


@pytest.mark.parametrize("minutes", ["0", "6", "x", "-1"])
def test_minutes_that_are_none(minutes, capsys):
    assert main(["calibrate", "--minutes", minutes]) == 2
    assert "is not a number of minutes above 0 and up to 5" in capsys.readouterr().err
