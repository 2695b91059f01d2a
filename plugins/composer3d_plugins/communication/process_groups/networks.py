"""Requirements of networks: libraries, devices, variables and interfaces of a machine, each with its source."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

__all__ = ["NETWORKS", "Machine", "Network", "complaints", "read_by_network"]

NCCL = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
EFA = "https://github.com/aws-samples/awsome-distributed-training/blob/main/1.architectures/efa-cheatsheet.md"
TCPXO = "https://docs.cloud.google.com/cluster-toolkit/docs/machine-learning/a3-mega-enable-gpudirect-tcpxo"
GLOO = "https://docs.pytorch.org/docs/stable/distributed.html#choosing-the-network-interface-to-use"

# What NCCL, libfabric, its verbs and gloo read; GLOO_SOCKET_IFNAME among them.
_READ = ("NCCL_", "TORCH_NCCL_", "GLOO_", "FI_", "RDMAV_")
_FOLDERS = (
    *("lib", "lib64", "usr/lib", "usr/lib64", "usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu"),
    *("usr/local/lib", "usr/local/lib64", "opt/amazon/efa/lib", "opt/amazon/efa/lib64"),
    *("opt/amazon/ofi-nccl/lib", "opt/amazon/ofi-nccl/lib/x86_64-linux-gnu", "opt/aws-ofi-nccl/lib"),
    *("var/lib/tcpxo/lib64", "usr/local/fastrak/lib64"),
)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine as the files under a root and an environment show it.

    Args:
        environment: Variables of this process, and below them those of NCCL's own file.
        root: Of its files.
        host: Its name.
        is_named: Whether the run names NCCL's network plugin itself.
    """

    environment: Mapping[str, str]
    root: Path = Path("/")
    host: str = "this machine"
    is_named: bool = False

    @classmethod
    def this(cls, *, named: bool) -> Machine:
        """Return the machine at hand."""
        root = Path("/")
        path = Path(os.environ.get("NCCL_CONF_FILE", root / "etc/nccl.conf"))
        return cls(environment={**_settings(path), **os.environ}, host=socket.gethostname(), is_named=named)

    def has_library(self, pattern: str) -> bool:
        """Return whether a shared library lies in the library path or the usual folders."""
        stated = self.environment.get("LD_LIBRARY_PATH", "").split(":")
        folders = [self.root / folder.lstrip("/") for folder in (*filter(None, stated), *_FOLDERS)]
        return any(next(folder.glob(pattern), None) is not None for folder in folders if folder.is_dir())

    def interfaces(self) -> tuple[str, ...]:
        """Return the names of the network interfaces."""
        return tuple(sorted(path.name for path in self._entries("sys/class/net")))

    def verbs(self, link_layer: str | None = None) -> tuple[str, ...]:
        """Return the devices with verbs, those with a port of a link layer (InfiniBand or Ethernet) if one is given."""
        found = self._entries("sys/class/infiniband")
        layers = {path.name: {_text(file) for file in path.glob("ports/*/link_layer")} for path in found}
        return tuple(sorted(name for name, kinds in layers.items() if link_layer is None or link_layer in kinds))

    def exists(self, path: str) -> bool:
        """Return whether a file or folder is there."""
        return (self.root / path.lstrip("/")).exists()

    def _entries(self, folder: str) -> list[Path]:
        path = self.root / folder
        return sorted(path.iterdir()) if path.is_dir() else []


@dataclass(frozen=True, kw_only=True)
class Network:
    """Requirements of a network.

    Args:
        source: Of what is stated here.
        libraries: File patterns by what they are.
        link_layer: Of the devices with verbs that there must be; None asks for none.
        devices: Prefixes of their names, one of which there must be.
        variables: That must be set, with an example.
        paths: Variables whose value is a path that must exist.
        interfaces: Variables whose values are names of interfaces; those that are set are compared.
        nets: Values that NCCL_NET may have.
        must_name: Whether NCCL_NET must be set: else NCCL takes TCP where its plugin is missing, and says nothing.
        foreign: Prefixes of variables that are another network's.
        harmful: Variables that must not be set, with the reason.
    """

    source: str
    libraries: Mapping[str, str] = field(default_factory=dict)
    link_layer: str | None = None
    devices: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    paths: tuple[str, ...] = ()
    interfaces: tuple[str, ...] = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
    nets: tuple[str, ...] = ()
    must_name: bool = False
    foreign: tuple[str, ...] = ()
    harmful: Mapping[str, str] = field(default_factory=dict)


_GOOGLE = ("NCCL_FASTRAK_", "NCCL_GPUDIRECTTCPX_")
_AMAZON = ("FI_EFA_", "FI_PROVIDER")
_OFF = "it switches verbs off, and NCCL would take TCP"

NETWORKS: Mapping[str, Network] = MappingProxyType(
    {
        "efa": Network(
            source=EFA,
            libraries={"libfabric 1.18 or later": "libfabric.so*", "aws-ofi-nccl 1.7 or later": "libnccl-net*.so*"},
            devices=("rdmap", "efa"),
            variables={"NCCL_SOCKET_IFNAME": "en"},
            nets=("aws libfabric", "libfabric", "ofi"),
            must_name=True,
            foreign=_GOOGLE,
            harmful={
                "RDMAV_FORK_SAFE": "EFA has its own, and forks may corrupt memory with both",
                "NCCL_MIN_CHANNELS": "the plugin's tuner chooses",
                "NCCL_BUFFSIZE": "the plugin's tuner chooses",
            },
        ),
        "gcp-tcpxo": Network(
            source=TCPXO,
            libraries={"Google's NCCL plugin": "libnccl-net*.so*"},
            variables={
                "NCCL_FASTRAK_CTRL_DEV": "enp0s12 (eth0 on GKE)",
                "NCCL_FASTRAK_IFNAME": "enp6s0,enp7s0,enp13s0,enp14s0,enp134s0,enp135s0,enp141s0,enp142s0",
                "NCCL_SOCKET_IFNAME": "enp0s12 (eth0 on GKE)",
                "NCCL_FASTRAK_LLCM_DEVICE_DIRECTORY": "/dev/aperture_devices",
            },
            paths=("NCCL_FASTRAK_LLCM_DEVICE_DIRECTORY",),
            interfaces=("NCCL_FASTRAK_CTRL_DEV", "NCCL_FASTRAK_IFNAME", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"),
            nets=("fastrak", "gpudirecttcpx", "tcpxo"),
            foreign=_AMAZON,
        ),
        "infiniband": Network(
            source=NCCL,
            libraries={"libibverbs": "libibverbs.so*"},
            link_layer="InfiniBand",
            nets=("ib",),
            foreign=(*_GOOGLE, *_AMAZON),
            harmful={"NCCL_IB_DISABLE": _OFF},
        ),
        "roce": Network(
            source=NCCL,
            libraries={"libibverbs": "libibverbs.so*"},
            link_layer="Ethernet",
            nets=("ib",),
            foreign=(*_GOOGLE, *_AMAZON),
            harmful={"NCCL_IB_DISABLE": _OFF},
        ),
        "ethernet": Network(source=NCCL, nets=("socket",), foreign=(*_GOOGLE, *_AMAZON)),
    }
)


def complaints(network: Network, machine: Machine, *, backends: Sequence[str] | set[str]) -> list[str]:
    """Return what a machine lacks for a network, and what it has of another, each with its source.

    Args:
        network: From `NETWORKS`.
        machine: Where.
        backends: Of the run's axes; gloo reads GLOO_SOCKET_IFNAME alone.
    """
    found = list(_foreign(network, machine))
    if "nccl" in backends:
        found += [*_lacking(network, machine), *_named_otherwise(network, machine)]
    found += _interfaces(network, machine, backends)
    return found


def _foreign(network: Network, machine: Machine) -> Iterator[str]:
    for name in sorted(machine.environment):
        if name.startswith(network.foreign):
            yield f"{name} is set, which is another cloud's (unset {name}; {network.source})"
    for name, reason in network.harmful.items():
        value = machine.environment.get(name, "0")
        if value not in ("0", ""):
            yield f"{name}={value}: {reason} (unset {name}; {network.source})"


def _lacking(network: Network, machine: Machine) -> Iterator[str]:
    for what, pattern in network.libraries.items():
        if not machine.has_library(pattern):
            yield f"{what} ({pattern}) is in no library folder ({network.source})"
    if network.link_layer is not None and not machine.verbs(network.link_layer):
        yield f"/sys/class/infiniband has no device with a port of {network.link_layer} ({network.source})"
    if network.devices and not any(name.startswith(network.devices) for name in machine.verbs()):
        yield f"/sys/class/infiniband has no device {' or '.join(network.devices)}* ({network.source})"
    for name, example in network.variables.items():
        if not machine.environment.get(name):
            yield f"{name} is not set; for example {example} ({network.source})"
    for name in network.paths:
        value = machine.environment.get(name)
        if value and not machine.exists(value):
            yield f"{name}={value}, which is not there ({network.source})"


def _named_otherwise(network: Network, machine: Machine) -> Iterator[str]:
    net = machine.environment.get("NCCL_NET")
    if net is None and network.must_name and not machine.is_named:
        yield (
            "NCCL_NET is not set, nor net_name of an axis: without its plugin NCCL would take TCP, and say nothing; "
            f'for example NCCL_NET="AWS Libfabric" ({NCCL})'
        )
    if net is not None and network.nets and net.lower() not in network.nets:
        yield f'NCCL_NET="{net}" is another network (unset it, or {" or ".join(network.nets)}; {NCCL})'


def _interfaces(network: Network, machine: Machine, backends: Sequence[str] | set[str]) -> Iterator[str]:
    there = machine.interfaces()
    for name in network.interfaces:
        value = machine.environment.get(name)
        if not value or (name.startswith("NCCL_") and "nccl" not in backends):
            continue
        is_exact = not name.startswith("NCCL_SOCKET")
        unknown = [entry for entry in _entries(value) if not _matches(entry, there, is_exact=is_exact)]
        if unknown:
            source = GLOO if name.startswith("GLOO") else network.source
            yield f"{name}={value}: no interface {unknown[0]} among {', '.join(there)} ({source})"


def _entries(value: str) -> list[str]:
    """Return the interfaces that a variable names; those that NCCL is to leave out need not be there."""
    return [] if value.startswith("^") else [part.strip() for part in value.split(",") if part.strip()]


def _matches(entry: str, there: Sequence[str], *, is_exact: bool) -> bool:
    # NCCL takes a prefix, or with = the whole name.
    if is_exact or entry.startswith("="):
        return entry.lstrip("=").partition(":")[0] in there
    return any(name.startswith(entry.partition(":")[0]) for name in there)


def read_by_network(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that NCCL, libfabric, verbs and gloo read, sorted."""
    return {name: environment[name] for name in sorted(environment) if name.startswith(_READ)}


def _settings(path: Path) -> dict[str, str]:
    """Return the variables of NCCL's own file, which count where the environment has none."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    found = (re.match(r"\s*(NCCL_\w+)\s*=\s*(.*?)\s*$", line) for line in lines)
    return {match[1]: match[2] for match in found if match}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
