"""Described clusters: units, directions, sources, and what a file must not leave open."""

from __future__ import annotations

import pytest
import tomli

from composer3d.errors import ComposerError
from composer3d.manifest.toml_writer import dump
from composer3d.planning.hardware import hardware_file
from composer3d.planning.hardware.hardware_file import hardware_names, load_hardware, problems_of
from composer3d.planning.hardware.quantity import BANDWIDTH, COMPUTE, SIZE, TIME, parse, show

DEVICES = [name for name in hardware_names() if not name.startswith("/")]
NETWORKS = [name for name in hardware_names() if name.startswith("/")]


def content(name):
    file = tomli.loads((hardware_file._FOLDER / f"{name}.toml").read_text())
    networks = tomli.loads((hardware_file._FOLDER / "networks.toml").read_text())["network"]
    return file | {"inter": networks[file["inter"]]}


@pytest.mark.parametrize(
    ("text", "units", "value"),
    [
        ("400 Gb/s", BANDWIDTH, 50e9),
        ("50 GB/s", BANDWIDTH, 50e9),
        ("80 GiB", SIZE, 80 * 2**30),
        ("312 TFLOP/s", COMPUTE, 312e12),
        ("3.4 us", TIME, 3.4e-6),
    ],
)
def test_quantities(text, units, value):
    assert parse(text, units) == pytest.approx(value)
    assert parse(show(value, units), units) == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize("text", ["80", 80, "80 GB/s", "GiB", "80 gib", "-1 GiB"])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match="is not a number with one of the units"):
        parse(text, SIZE)


def test_the_devices_and_networks_that_are_shipped():
    named = "a100-40 a100-80 h100 h200 b200 b300 gb200 gb300 mi300x mi325x mi355x"
    assert set(named.split()) <= set(DEVICES)
    for technology in ("ib", "efa", "roce", "ethernet"):
        assert any(name.startswith(f"/{technology}-") for name in NETWORKS)


@pytest.mark.parametrize("name", DEVICES)
def test_every_shipped_file_is_whole_and_has_sources(name):
    assert problems_of(content(name)) == []
    read = load_hardware(name)
    assert len(read.sources) >= 2
    assert read.intra.reached > read.inter.reached
    assert read.device.peaks["float16"] > read.device.peaks["float32"]


@pytest.mark.parametrize("network", NETWORKS)
def test_every_shipped_network_joins_a_device(network):
    assert load_hardware(f"h100{network}").inter.bandwidth > 0


@pytest.mark.parametrize(
    ("name", "memory_gib", "peak", "each_direction"),
    # The literature's usual mistake: 600 GB/s of A100 and 900 GB/s of H100 are both directions together.
    [
        ("a100-40", 40, 312e12, 300e9),
        ("a100-80", 80, 312e12, 300e9),
        ("h100", 80, 989e12, 450e9),
        ("h200", 141, 989e12, 450e9),
        ("b200", 180, 2250e12, 900e9),
        ("b300", 270, 2250e12, 900e9),
        ("gb200", 186, 2500e12, 900e9),
        ("gb300", 279, 2500e12, 900e9),
        ("mi300x", 192, 1307e12, 448e9),
        ("mi325x", 256, 1307e12, 448e9),
        ("mi355x", 288, 2500e12, 537.5e9),
    ],
)
def test_figures_of_data_sheets(name, memory_gib, peak, each_direction):
    read = load_hardware(name)
    assert read.device.memory_bytes / 2**30 == pytest.approx(memory_gib, rel=0.02)
    assert read.device.peaks["bfloat16"] == peak
    assert read.intra.bandwidth == each_direction


@pytest.mark.parametrize("name", ["gb200", "gb300"])
def test_an_nvlink_domain_of_72_devices(name):
    read = load_hardware(name)
    assert read.devices_per_node == 72
    assert read.host.bandwidth == 225e9  # 900 GB/s of a Grace, both directions together, for two devices


def test_a_node_shares_its_network():
    # 400 Gb/s of a p4d instance are 6.25 GB/s of each of its eight devices.
    assert load_hardware("a100-40/efa-400").inter.bandwidth == pytest.approx(6.25e9)
    assert load_hardware("h100/efa-3200").inter.bandwidth == pytest.approx(50e9)
    assert load_hardware("h100").with_nodes(4).devices_per_node == 4
    assert load_hardware("h100").with_nodes(None).devices_per_node == 8


@pytest.mark.parametrize("key", ["direction", "per"])
def test_a_bandwidth_without_direction_or_owner_is_refused(key):
    file = content("h100")
    del file["intra"][key]
    (problem,) = problems_of(file)
    assert problem.startswith(f"intra.bandwidth has no {key}: 900 GB/s may be twice or half of it; write {key} = ")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda file: file["device"].update(memory="80"), "device.memory = '80' is not a number with one of the units"),
        (lambda file: file["device"].update(memroy="1 GiB"), 'unknown key "device.memroy"; did you mean "memory"?'),
        (lambda file: file["device"].pop("launch"), "device.launch is missing"),
        (lambda file: file["device"].update(memory_efficiency=1.2), "device.memory_efficiency = 1.2; it is a part"),
        (lambda file: file["device"].update(reserve_factor=0.9), "device.reserve_factor = 0.9; reserved over"),
        (lambda file: file["intra"].update(direction="up"), "intra.direction = 'up'"),
        (lambda file: file["intra"].update(bandwidth="900 GB"), "intra.bandwidth = '900 GB' is not a number"),
        (lambda file: file.pop("sources"), "sources is missing"),
        (lambda file: file.update(devices_per_node=0), "devices_per_node = 0; it is a whole number"),
        (lambda file: file.update(known="exact"), "known = 'exact'"),
        (lambda file: file.update(slowdown=0.5), "slowdown = 0.5"),
        (lambda file: file.pop("host"), "the table [host] is missing"),
        (lambda file: file.pop("device"), "the table [device] is missing"),
        (lambda file: file["device"].update(peak={}), "the table [device.peak] is missing"),
        (lambda file: file["device"].update(gemm_efficiency={}), "device.gemm_efficiency says nothing of bfloat16"),
        (lambda file: file["device"].update(memory=80), "device.memory = 80 is not a number with one of the units"),
        (lambda file: file["device"].update(asynchronous="yes"), "device.asynchronous = 'yes'; it is true or false"),
        (lambda file: file["device"].update(gemm=[{"m": 1.5}]), "device.gemm[0].m = 1.5; it is a whole number"),
        (lambda file: file["host"].update(speed=1), 'unknown key "host.speed"; one of: '),
        (lambda file: file["device"].update(memory="0 GiB"), "device.memory = '0 GiB'; it is above 0"),
        (lambda file: file["device"]["peak"].update(bfloat16="0 FLOP/s"), "device.peak.bfloat16 = '0 FLOP/s'; it is"),
        (lambda file: file["intra"].update(bandwidth="0 GB/s"), "intra.bandwidth = '0 GB/s'; it is above 0"),
        (lambda file: file["device"].update(context="1e400 GiB"), "device.context = '1e400 GiB' is larger than any"),
        (lambda file: file["device"].update(num_units=-1), "device.num_units = -1: Input should be greater than or"),
        (lambda file: file["device"].update(power="700 kW"), "device.power = 700000.0: Input should be less than"),
    ],
)
def test_what_a_file_must_not_say(change, problem):
    file = content("h100")
    change(file)
    assert any(told.startswith(problem) for told in problems_of(file)), problems_of(file)


def test_a_file_of_ones_own(tmp_path):
    file = content("h100") | {"devices_per_node": 4}
    path = tmp_path / "mine.toml"
    path.write_text(dump(file))
    assert load_hardware(str(path)).devices_per_node == 4
    del file["inter"]["direction"]
    path.write_text(dump(file))
    with pytest.raises(ComposerError, match=r"mine\.toml: inter\.bandwidth has no direction"):
        load_hardware(str(path))
    path.write_text(dump(file | {"inter": "ib-ndr-40"}))
    with pytest.raises(
        ComposerError, match=r'mine\.toml: inter: there is no network "ib-ndr-40"; did you mean "ib-ndr-4'
    ):
        load_hardware(str(path))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h10", 'there is no hardware "h10"; did you mean "h100"?'),
        ("h100:megatronn", 'unknown stack "megatronn" in "h100:megatronn"; did you mean "megatron"?'),
        ("h100/efa", 'there is no network "efa"'),
        ("missing.toml", "missing.toml: cannot be read"),
        ("/dev/null", '/dev/null is no description of hardware: the name of its file ends in ".toml"; known: a100-40'),
        ("../mine", '../mine is no description of hardware: the name of its file ends in ".toml"; known: a100-40'),
    ],
)
def test_names_that_are_not_known(name, message):
    with pytest.raises(ComposerError, match=message.replace("?", r"\?")):
        load_hardware(name)
