"""Cluster descriptions from TOML files: a device, the links between devices of a node, and those between nodes.

Each figure has its unit, each bandwidth its direction, each file its sources. Shipped files describe devices and
networks; `h100/efa-3200` is the device `h100` with the network `efa-3200`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import tomli

from composer3d.errors import ComposerError, did_you_mean
from composer3d.planning.hardware.quantity import BANDWIDTH, COMPUTE, SIZE, TIME, parse

__all__ = [
    "AttentionSpeed",
    "Device",
    "Gemm",
    "Hardware",
    "Link",
    "TimedCollective",
    "TimedOperator",
    "hardware_names",
    "load_hardware",
]

Known = Literal["assumed", "calibrated"]
_FOLDER = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Gemm:
    """A matrix product that was timed.

    Args:
        dtype: Of its inputs, without `torch.`.
        m: Rows of the result.
        n: Columns of the result.
        k: What is summed over.
        flops_per_s: Two operations for a multiplication with its addition.
    """

    dtype: str
    m: int
    n: int
    k: int
    flops_per_s: float


@dataclass(frozen=True, kw_only=True)
class AttentionSpeed:
    """A causal attention that was timed, in operations a second of those that the kernel executes.

    Args:
        dtype: Of its inputs, without `torch.`.
        length: Of the sequence.
        width: Of a head.
        forward: Half of what is counted, over the time.
        backward: The same of the backward.
    """

    dtype: str
    length: int
    width: int
    forward: float
    backward: float


@dataclass(frozen=True, kw_only=True)
class TimedOperator:
    """An operator without products that was timed.

    Args:
        name: As it is traced, such as `aten.silu`.
        dtype: Of its inputs, without `torch.`.
        bytes: Of all its inputs and results.
        seconds: Without what comes with every operator, its launch.
    """

    name: str
    dtype: str
    bytes: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class TimedCollective:
    """A collective that was timed as steps call it, between two stretches of compute.

    Args:
        op: As in `Transfer`; `send` for messages.
        ranks: That took part.
        bytes: Of the whole buffer.
        seconds: Until the rank could go on.
    """

    op: str
    ranks: int
    bytes: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator, or one CPU core that runs a rank.

    Args:
        name: As its maker calls it.
        memory_bytes: What its allocator can get, all told.
        memory_bandwidth: Bytes a second, reads and writes together.
        memory_efficiency: The part of it that long copies reach.
        peaks: Dense operations a second by dtype; a dtype that is absent is not supported.
        gemm_efficiency: The part of the peak that large, well aligned matrix products sustain.
        attention_efficiency: The same of fused attention's forward, counting the operations that it executes.
        attention_backward_efficiency: The same of its backward.
        num_units: Multiprocessors over which tiles of a product are spread; 0 where that is not known.
        launch_s: Least time from one kernel to the next.
        is_asynchronous: Whether operators are queued: launches then run beside the kernels, else they add to them.
        context_bytes: Driver context and communicators, outside of the allocator.
        reserve_factor: Reserved over allocated bytes: rounding and fragmentation.
        gemms: Products that were timed; where there are any, they replace `gemm_efficiency`.
        attentions: The same of attention.
        operators: Those that were timed; where there are any, they replace bytes over bandwidth.
        overheads: What the host does for an operator besides a launch, in seconds, by the first part of its name:
            `fsdp` for the hooks around gathering and reducing, `dtensor` for what finds an operator's placements.
        fresh_bandwidth: Bytes a second at which the system hands memory out that was given back; 0 where an allocator
            keeps it.
    """

    name: str
    memory_bytes: int
    memory_bandwidth: float
    memory_efficiency: float
    peaks: Mapping[str, float]
    gemm_efficiency: Mapping[str, float]
    attention_efficiency: float
    attention_backward_efficiency: float
    num_units: int
    launch_s: float
    is_asynchronous: bool
    context_bytes: int
    reserve_factor: float
    gemms: tuple[Gemm, ...] = ()
    attentions: tuple[AttentionSpeed, ...] = ()
    operators: tuple[TimedOperator, ...] = ()
    overheads: Mapping[str, float] = field(default_factory=dict)
    fresh_bandwidth: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Link:
    """What joins devices, as one device sees it.

    Args:
        name: Of the technology.
        bandwidth: Bytes a second in each direction for one device, while all devices of its node use theirs.
        efficiency: The part of it that large collectives reach.
        latency_s: Of one step of a collective over it.
        base_s: What a collective takes besides: launch and synchronisation.
        timed: Collectives that were timed over it; they replace latency and bandwidth for groups of as many ranks.
    """

    name: str
    bandwidth: float
    efficiency: float
    latency_s: float
    base_s: float
    timed: tuple[TimedCollective, ...] = ()

    @property
    def reached(self) -> float:
        """Bytes a second and direction that a large collective moves."""
        return self.bandwidth * self.efficiency


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A cluster of equal nodes.

    Args:
        name: As it was asked for.
        device: Its accelerators.
        devices_per_node: Of them.
        intra: Between the devices of a node.
        inter: Between nodes.
        host: Between a device and its host's memory.
        slowdown: How much slower compute runs while a collective runs beside it, at least 1.
        known: How its figures are known.
        sources: Where they come from.
    """

    name: str
    device: Device
    devices_per_node: int
    intra: Link
    inter: Link
    host: Link
    slowdown: float
    known: Known = "assumed"
    sources: tuple[str, ...] = field(default=())

    def with_nodes(self, devices_per_node: int | None) -> Hardware:
        """Return the same with another number of devices a node; None changes nothing.

        The network's share of one device stays that of the file, since the adapters belong to devices.
        """
        return self if devices_per_node is None else replace(self, devices_per_node=devices_per_node)


def hardware_names() -> tuple[str, ...]:
    """Return the shipped devices, and after them the networks that may follow one behind a slash."""
    networks = _read(_FOLDER / "networks.toml")
    devices = sorted(path.stem for path in _FOLDER.glob("*.toml") if path.stem != "networks")
    return (*devices, *(f"/{name}" for name in sorted(networks["network"])))


def load_hardware(name: str) -> Hardware:
    """Read a description of a cluster.

    Args:
        name: A file that ends in `.toml`, or a shipped device such as `h100`, with another network than its usual one
            behind a slash: `h100/roce-200`.

    Raises:
        ComposerError: There is no such description, or it lacks something, with the key and what is allowed.
    """
    from composer3d.planning.hardware.file_rules import problems_of

    path = Path(name)
    network = None
    if path.suffix != ".toml":
        stem, _, network = name.lower().partition("/")
        path = _FOLDER / f"{stem}.toml"
        known = [known for known in hardware_names() if not known.startswith("/")]
        if stem not in known:
            raise ComposerError(
                f'there is no hardware "{stem}"; {did_you_mean(stem, known)} (known: {", ".join(known)})'
            )
    content = _read(path)
    networks = _read(_FOLDER / "networks.toml")["network"]
    if isinstance(content.get("inter"), str):
        content["inter"] = _network(network or content["inter"], networks)
    elif network:
        content["inter"] = _network(network, networks)
    problems = problems_of(content)
    if problems:
        raise ComposerError("\n".join(f"{path}: {problem}" for problem in problems))
    return _build(content, name)


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomli.load(file)
    except OSError as error:
        raise ComposerError(f"{path}: cannot be read: {error.strerror}") from error
    except tomli.TOMLDecodeError as error:
        raise ComposerError(f"{path}: is not TOML: {error}") from error


def _network(name: str, networks: Mapping[str, Any]) -> Any:
    if name not in networks:
        raise ComposerError(f'there is no network "{name}"; {did_you_mean(name, sorted(networks))}')
    return networks[name]


def _build(content: Mapping[str, Any], name: str) -> Hardware:
    num_devices = content["devices_per_node"]
    return Hardware(
        name=name,
        device=_device(content["device"]),
        devices_per_node=num_devices,
        intra=_link(content["intra"], num_devices),
        inter=_link(content["inter"], num_devices),
        host=_link(content["host"], num_devices),
        slowdown=float(content.get("slowdown", 1.1)),
        known=content.get("known", "assumed"),
        sources=tuple(content.get("sources", ())),
    )


def _device(table: Mapping[str, Any]) -> Device:
    return Device(
        name=table["name"],
        memory_bytes=int(parse(table["memory"], SIZE)),
        memory_bandwidth=parse(table["memory_bandwidth"], BANDWIDTH),
        memory_efficiency=float(table["memory_efficiency"]),
        peaks={dtype: parse(text, COMPUTE) for dtype, text in table["peak"].items()},
        gemm_efficiency={dtype: float(part) for dtype, part in table["gemm_efficiency"].items()},
        attention_efficiency=float(table["attention_efficiency"]),
        attention_backward_efficiency=float(table["attention_backward_efficiency"]),
        num_units=int(table.get("num_units", 0)),
        launch_s=parse(table["launch"], TIME),
        is_asynchronous=bool(table.get("asynchronous", True)),
        context_bytes=int(parse(table["context"], SIZE)),
        reserve_factor=float(table["reserve_factor"]),
        gemms=tuple(
            Gemm(dtype=row["dtype"], m=row["m"], n=row["n"], k=row["k"], flops_per_s=parse(row["speed"], COMPUTE))
            for row in table.get("gemm", ())
        ),
        attentions=tuple(_attention(row) for row in table.get("attention", ())),
        operators=tuple(
            TimedOperator(
                name=row["name"], dtype=row["dtype"], bytes=parse(row["bytes"], SIZE), seconds=parse(row["time"], TIME)
            )
            for row in table.get("operator", ())
        ),
        fresh_bandwidth=parse(table["fresh_bandwidth"], BANDWIDTH) if "fresh_bandwidth" in table else 0.0,
        overheads={name: parse(text, TIME) for name, text in table.get("overhead", {}).items()},
    )


def _attention(row: Mapping[str, Any]) -> AttentionSpeed:
    return AttentionSpeed(
        dtype=row["dtype"],
        length=row["length"],
        width=row["width"],
        forward=parse(row["forward"], COMPUTE),
        backward=parse(row["backward"], COMPUTE),
    )


def _link(table: Mapping[str, Any], devices_per_node: int) -> Link:
    bandwidth = parse(table["bandwidth"], BANDWIDTH)
    if table["direction"] == "both":
        bandwidth /= 2
    if table["per"] == "node":
        bandwidth /= devices_per_node
    return Link(
        name=table["name"],
        bandwidth=bandwidth,
        efficiency=float(table["efficiency"]),
        latency_s=parse(table["latency"], TIME),
        base_s=parse(table["base"], TIME),
        timed=tuple(
            TimedCollective(
                op=row["op"], ranks=row["ranks"], bytes=parse(row["bytes"], SIZE), seconds=parse(row["time"], TIME)
            )
            for row in table.get("collective", ())
        ),
    )
