"""`composer3d calibrate`: a file that describes this machine, and that plans of this machine can be made with."""

from __future__ import annotations

import subprocess
import sys

import pytest

from composer3d.cli import main
from composer3d.planning.costs.collectives import Group, collective_s
from composer3d.planning.hardware.calibration import Measurement, hardware_tables, mean_of
from composer3d.planning.hardware.cluster import load_hardware
from composer3d.planning.hardware.rules import problems_of

MEASURED = Measurement(
    device="CPU core",
    memory_bytes=2**33,
    gemms=(("float32", 64, 64, 64, 1e9), ("float32", 512, 512, 512, 4e9), ("bfloat16", 64, 64, 64, 2e9)),
    attention=1e9,
    attention_backward=5e8,
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
)


def test_the_machine_is_measured_by_all_its_ranks(tmp_path):
    # In a process of its own: this one may have run operators, and cannot be forked then.
    output = tmp_path / "mine.toml"
    command = ["calibrate", "--minutes", "0.02", "--nproc-per-node", "2", "-o", str(output)]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "composer3d", *command], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "measured: products, attention, memory bandwidth, launches, collectives of a node" in done.stdout
    found = load_hardware(str(output))
    assert found.known == "calibrated"
    assert found.devices_per_node == 2
    assert not found.device.is_asynchronous
    assert {gemm.dtype for gemm in found.device.gemms} == {"float32", "bfloat16"}
    assert all(gemm.flops_per_s > 1e6 for gemm in found.device.gemms)
    assert 1e8 < found.device.memory_bandwidth < 1e12
    assert 1e-8 < found.device.launch_s < 1e-2


def test_links_are_fitted_to_what_was_measured(tmp_path):
    tables = hardware_tables(MEASURED, machine="a machine", is_cpu=True)
    assert problems_of(tables) == []
    assert tables["inter"]["name"] == "not measured: as in a node"
    from composer3d.manifest.writer import dump

    (tmp_path / "mine.toml").write_text(dump(tables))
    found = load_hardware(str(tmp_path / "mine.toml"))
    group = Group(num_ranks=4, num_nodes=1)
    for name, size, seconds in MEASURED.collectives:
        if size > 2**20:
            assert collective_s(name, size, group, found) == pytest.approx(seconds, rel=0.05)
    assert found.device.peaks == {"bfloat16": 2e9, "float32": 4e9}
    assert found.device.attention_efficiency == pytest.approx(0.25)


def test_ranks_are_averaged_and_the_slowest_collective_counts():
    from dataclasses import replace

    other = replace(
        MEASURED,
        bandwidth=3e10,
        gemms=tuple((*row[:4], 3 * row[4]) for row in MEASURED.gemms),
        collectives=tuple((name, size, 2 * seconds) for name, size, seconds in MEASURED.collectives),
    )
    mean = mean_of([MEASURED, other])
    assert mean.bandwidth == pytest.approx(2e10)
    assert mean.gemms[0][4] == pytest.approx(2e9)
    assert mean.collectives == other.collectives


@pytest.mark.parametrize("minutes", ["0", "6", "x", "-1"])
def test_minutes_that_are_none(minutes, capsys):
    assert main(["calibrate", "--minutes", minutes]) == 2
    assert "is not a number of minutes above 0 and up to 5" in capsys.readouterr().err
