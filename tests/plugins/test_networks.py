"""The network that a run names beside the files, devices and variables of machines: those of clouds, and others'."""

from __future__ import annotations

import pytest
from composer3d_plugins.communication.process_groups.networks import NETWORKS, Machine, complaints, read_by_network
from support.models import composed

from composer3d import ManifestError
from composer3d.testing import run_ranks

EFA = {"NCCL_SOCKET_IFNAME": "en", "NCCL_NET": "AWS Libfabric"}
TCPXO_IFS = [f"eth{number}" for number in range(1, 9)]
TCPXO = {
    "NCCL_FASTRAK_CTRL_DEV": "eth0",
    "NCCL_FASTRAK_IFNAME": ",".join(TCPXO_IFS),
    "NCCL_SOCKET_IFNAME": "eth0",
    "NCCL_FASTRAK_LLCM_DEVICE_DIRECTORY": "/dev/aperture_devices",
}


def machine(root, environment, *, files=(), interfaces=("lo", "ens5"), ports=(), is_named=False):
    """Make a machine of files below a folder; ports are (device, link layer)."""
    for name in interfaces:
        (root / "sys/class/net" / name).mkdir(parents=True)
    for device, layer in ports:
        port = root / "sys/class/infiniband" / device / "ports/1"
        port.mkdir(parents=True)
        (port / "link_layer").write_text(f"{layer}\n")
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).touch()
    return Machine(environment=environment, root=root, is_named=is_named)


RIGHT = {
    "efa": (
        EFA,
        {
            "files": ("opt/amazon/efa/lib64/libfabric.so.1", "opt/amazon/ofi-nccl/lib/libnccl-net.so"),
            "ports": [("rdmap0s6", "Unspecified")],
        },
    ),
    "gcp-tcpxo": (
        TCPXO,
        {
            "files": ("var/lib/tcpxo/lib64/libnccl-net.so", "dev/aperture_devices"),
            "interfaces": ("lo", "eth0", *TCPXO_IFS),
        },
    ),
    "infiniband": ({}, {"files": ("usr/lib64/libibverbs.so.1",), "ports": [("mlx5_0", "InfiniBand")]}),
    "roce": (
        {"NCCL_IB_GID_INDEX": "3", "NCCL_SOCKET_IFNAME": "=ens5", "LD_LIBRARY_PATH": "/own/lib"},
        {"files": ("own/lib/libibverbs.so",), "ports": [("mlx5_0", "Ethernet")]},
    ),
    "ethernet": ({"NCCL_SOCKET_IFNAME": "^docker", "GLOO_SOCKET_IFNAME": "ens5", "NCCL_NET": "Socket"}, {}),
}


@pytest.mark.parametrize("network", RIGHT)
def test_a_machine_of_the_network_has_all_of_it(network, tmp_path):
    environment, parts = RIGHT[network]
    assert complaints(NETWORKS[network], machine(tmp_path, environment, **parts), backends=["nccl"]) == []


@pytest.mark.parametrize(
    ("network", "wanted"),
    [
        ("efa", ["libfabric", "aws-ofi-nccl", "rdmap or efa", "NCCL_SOCKET_IFNAME is not set", "NCCL_NET is not set"]),
        (
            "gcp-tcpxo",
            ["Google's NCCL plugin", "FASTRAK_CTRL_DEV", "FASTRAK_IFNAME", "SOCKET_IFNAME", "LLCM_DEVICE_DIRECTORY"],
        ),
        ("infiniband", ["libibverbs", "a port of InfiniBand"]),
        ("roce", ["libibverbs", "a port of Ethernet"]),
        ("ethernet", []),
    ],
)
def test_what_an_empty_machine_lacks_is_named_with_its_source(network, wanted, tmp_path):
    found = complaints(NETWORKS[network], machine(tmp_path, {}), backends=["nccl"])
    assert len(found) == len(wanted)
    assert all(part in said and "(" in said and "https://" in said for part, said in zip(wanted, found, strict=True))


@pytest.mark.parametrize(
    ("network", "more", "said"),
    [
        ("efa", {"NCCL_FASTRAK_IFNAME": "eth1"}, "NCCL_FASTRAK_IFNAME is set, which is another cloud's"),
        ("efa", {"RDMAV_FORK_SAFE": "1"}, "RDMAV_FORK_SAFE=1: EFA has its own"),
        ("efa", {"NCCL_NET": "FasTrak"}, 'NCCL_NET="FasTrak" is another network'),
        ("efa", {"NCCL_SOCKET_IFNAME": "eth"}, "NCCL_SOCKET_IFNAME=eth: no interface eth among ens5, lo"),
        ("gcp-tcpxo", {"FI_PROVIDER": "efa"}, "FI_PROVIDER is set, which is another cloud's"),
        ("gcp-tcpxo", {"NCCL_FASTRAK_IFNAME": "eth1,eth9"}, "NCCL_FASTRAK_IFNAME=eth1,eth9: no interface eth9"),
        (
            "gcp-tcpxo",
            {"NCCL_FASTRAK_LLCM_DEVICE_DIRECTORY": "/dev/other"},
            "NCCL_FASTRAK_LLCM_DEVICE_DIRECTORY=/dev/other, which is not there",
        ),
        ("infiniband", {"NCCL_IB_DISABLE": "1"}, "NCCL_IB_DISABLE=1: it switches verbs off"),
        ("infiniband", {"FI_EFA_USE_HUGE_PAGE": "0"}, "FI_EFA_USE_HUGE_PAGE is set, which is another cloud's"),
        ("roce", {"NCCL_NET": "Socket"}, 'NCCL_NET="Socket" is another network'),
        ("ethernet", {"GLOO_SOCKET_IFNAME": "eth0"}, "GLOO_SOCKET_IFNAME=eth0: no interface eth0 among ens5, lo"),
    ],
)
def test_one_thing_that_is_wrong_is_all_that_is_told(network, more, said, tmp_path):
    environment, parts = RIGHT[network]
    (found,) = complaints(NETWORKS[network], machine(tmp_path, environment | more, **parts), backends=["nccl"])
    assert found.startswith(said) and "https://" in found


def test_a_plugin_that_an_axis_names_needs_no_variable(tmp_path):
    environment, parts = RIGHT["efa"]
    there = machine(tmp_path, {"NCCL_SOCKET_IFNAME": "en"}, **parts, is_named=True)
    assert complaints(NETWORKS["efa"], there, backends=["nccl"]) == []


def test_gloo_reads_its_own_variable_alone(tmp_path):
    there = machine(tmp_path, {"NCCL_SOCKET_IFNAME": "eth7", "NCCL_NET": "IB"})
    assert complaints(NETWORKS["ethernet"], there, backends=["gloo"]) == []


def test_variables_of_the_network_are_those_that_are_recorded():
    environment = {"NCCL_DEBUG": "INFO", "FI_PROVIDER": "efa", "GLOO_SOCKET_IFNAME": "en", "HOME": "/", "FIRST": "1"}
    assert list(read_by_network(environment)) == ["FI_PROVIDER", "GLOO_SOCKET_IFNAME", "NCCL_DEBUG"]


def refused(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ManifestError) as caught:
        composed('[sharding.fsdp2]\n[communication.process_groups]\nnetwork = "ethernet"\n')
    return str(caught.value).partition("run.toml")[2]


def test_a_run_is_refused_with_the_line_and_what_to_do(monkeypatch):
    for said in run_ranks(refused, 2, monkeypatch, {"GLOO_SOCKET_IFNAME": "no_such0", "NCCL_FASTRAK_CTRL_DEV": "eth0"}):
        assert said.startswith(':4:1: [communication.process_groups] network = "ethernet", and on ')
        assert "NCCL_FASTRAK_CTRL_DEV is set, which is another cloud's (unset NCCL_FASTRAK_CTRL_DEV" in said
        assert "GLOO_SOCKET_IFNAME=no_such0: no interface no_such0" in said
        assert "nothing is set for you: export these where ranks are started" in said
