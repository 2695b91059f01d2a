"""Description of a cluster: a device, the links between devices of a node, and those between nodes.

These are the tables of hardware files, typed: in a file each figure has its unit, each bandwidth its direction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, Strict, ValidationInfo
from pydantic.dataclasses import dataclass

from composer3d.planning.hardware.host_parts import ASSUMED_DRIVE, ASSUMED_MEMORY, Drive, RandomAccess
from composer3d.planning.hardware.quantity import BANDWIDTH
from composer3d.planning.hardware.typed_quantities import (
    CONFIG,
    Bandwidth,
    Count,
    Memory,
    Part,
    Reserve,
    Seconds,
    Size,
    Speed,
    Watts,
    Whole,
    WholeSize,
    quantity,
    rule,
)

__all__ = [
    "BROADCAST",
    "SHORT_ROW",
    "STACKS",
    "AttentionSpeed",
    "Device",
    "Gemm",
    "Hardware",
    "Link",
    "Stack",
    "StackName",
    "TimedCollective",
    "TimedOperator",
]

StackName = Literal["eager", "compiled", "megatron"]
STACKS: tuple[StackName, ...] = ("eager", "compiled", "megatron")

# The timed operator whose second factor is one for several short rows of the first, and the length of such a row.
BROADCAST, SHORT_ROW = "aten.mul.rows", 16


def _in_python_only(value: object, info: ValidationInfo) -> object:
    """Refuse a key of files that says what each run says."""
    if info.context:
        raise ValueError(f"{value!r}; a file describes stacks, and the manifest says which one runs")
    return value


@dataclass(frozen=True, kw_only=True, config=CONFIG)
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
    m: Count
    n: Count
    k: Count
    flops_per_s: Speed = Field(validation_alias="speed")


@dataclass(frozen=True, kw_only=True, config=CONFIG)
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
    length: Count
    width: Count
    forward: Speed
    backward: Speed


@dataclass(frozen=True, kw_only=True, config=CONFIG)
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
    bytes: Size
    seconds: Seconds = Field(validation_alias="time")


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class TimedCollective:
    """A collective that was timed as steps call it, between two stretches of compute.

    Args:
        op: As in `Transfer`; `send` for messages.
        ranks: That took part.
        bytes: Of the whole buffer.
        seconds: Until the rank could go on.
    """

    op: str
    ranks: Count
    bytes: Size
    seconds: Seconds = Field(validation_alias="time")


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class Device:
    """One accelerator, or one CPU core that runs a rank.

    Args:
        name: As its maker calls it.
        memory_bytes: All that its allocator can get.
        memory_bandwidth: Bytes a second, reads and writes together.
        memory_efficiency: The part of it that long copies reach.
        peaks: Dense operations a second by dtype; a dtype that is absent is not supported.
        gemm_efficiency: The part of the peak that large, well aligned matrix products sustain, by dtype; `default` for
            all others.
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
        power_w: Rated watts of one device, at most 20 kW, for the energy of a run; 0 where they are not known.
    """

    name: str
    memory_bytes: Memory = Field(validation_alias="memory")
    memory_bandwidth: Bandwidth
    memory_efficiency: Part
    peaks: Mapping[str, Speed] = Field(
        validation_alias="peak", min_length=1, description="dense operations a second by dtype"
    )
    gemm_efficiency: Mapping[str, Part]
    attention_efficiency: Part
    attention_backward_efficiency: Part
    launch_s: Seconds = Field(validation_alias="launch")
    context_bytes: WholeSize = Field(validation_alias="context")
    reserve_factor: Reserve
    num_units: Whole = Field(default=0, ge=0)
    is_asynchronous: Annotated[bool, Strict()] = Field(default=True, validation_alias="asynchronous")
    gemms: tuple[Gemm, ...] = Field(default=(), validation_alias="gemm")
    attentions: tuple[AttentionSpeed, ...] = Field(default=(), validation_alias="attention")
    operators: tuple[TimedOperator, ...] = Field(default=(), validation_alias="operator")
    overheads: Mapping[str, Seconds] = Field(default_factory=dict, validation_alias="overhead")
    fresh_bandwidth: Annotated[float, quantity(BANDWIDTH)] = 0.0
    power_w: Watts = Field(default=0.0, ge=0, le=20_000, validation_alias="power")

    @property
    def kind(self) -> Literal["cpu", "cuda"]:
        """As `[run] device` names it; of AMD's too, as torch does."""
        return "cuda" if self.is_asynchronous else "cpu"


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class Stack:
    """Software on a device: PyTorch operator by operator, compiled, or Megatron with TransformerEngine.

    Args:
        gemm_efficiency: As of the device, by dtype; it replaces the device's for these dtypes.
        attention_efficiency: As of the device; None keeps the device's.
        attention_backward_efficiency: The same of the backward.
        pointwise: Part of what operators without products read and write that fusion leaves.
        launches: Part of the launches that is left: fused operators, captured graphs.
        wait_s: What a collective takes besides, where compute waits for it: ranks that are not ready at the same time,
            a queue that runs empty.
        tp_overlap: Part of the collectives of tensor parallelism that runs beside products.
        hidden: Part of the collectives beside compute that compute can hide.
        reserve_factor: Reserved over allocated bytes, which the allocator's version decides; None keeps the device's.
        band: By which part nine of ten published runs of this device and stack are off at most, of those that were
            held out; None where there are too few.
        source: Of the figures.
    """

    gemm_efficiency: Mapping[str, Part] = Field(default_factory=dict)
    attention_efficiency: Part | None = None
    attention_backward_efficiency: Part | None = None
    pointwise: Part = 1.0
    launches: Part = 1.0
    wait_s: Seconds = Field(default=0.0, ge=0, validation_alias="wait")
    tp_overlap: Annotated[float, rule(lambda part: 0 <= part < 1, "a part of the whole, 0 to below 1")] = 0.0
    hidden: Part = 1.0
    reserve_factor: Reserve | None = None
    band: Annotated[float, rule(lambda band: 0 < band <= 2, "a part of the step's time, above 0, at most 2")] | None = (
        None
    )
    source: str = ""


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class Link:
    """Link between devices.

    Args:
        name: Of the technology.
        bandwidth: Bytes a second while all devices of a node use theirs; see `direction` and `per`.
        direction: Of the bandwidth: `each` direction, or `both` together.
        per: Owner of the bandwidth: a `device`, or a whole `node`, whose devices share it.
        efficiency: The part of it that large collectives reach.
        latency_s: Of one step of a collective over it.
        base_s: What a collective takes besides: launch and synchronisation.
        half_bytes: Bytes at which a collective reaches half of it: smaller ones do not fill the link.
        source: Of the figures.
        timed: Collectives that were timed over it; they replace latency and bandwidth for groups of as many ranks.
    """

    name: str
    bandwidth: Bandwidth
    direction: Literal["each", "both"]
    per: Literal["device", "node"]
    efficiency: Part
    latency_s: Seconds = Field(validation_alias="latency")
    base_s: Seconds = Field(validation_alias="base")
    half_bytes: Size = Field(default=0.0, validation_alias="half")
    source: str = ""
    timed: tuple[TimedCollective, ...] = Field(default=(), validation_alias="collective")

    @property
    def reached(self) -> float:
        """Bytes a second that a large collective moves."""
        return self.bandwidth * self.efficiency

    def of_one_device(self, devices_per_node: int) -> Link:
        """Return it with the bandwidth of one device in each direction."""
        parts = (2 if self.direction == "both" else 1) * (devices_per_node if self.per == "node" else 1)
        return replace(self, bandwidth=self.bandwidth / parts, direction="each", per="device")


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class Hardware:
    """A cluster of equal nodes.

    Args:
        name: What the file says, else as it was asked for.
        device: Its accelerators.
        devices_per_node: Of them.
        intra: Between the devices of a node.
        inter: Between nodes.
        host: Between a device and its host's memory.
        drive: That the ranks of a node write to.
        host_memory: Of a node.
        slowdown: How much slower compute runs while a collective runs beside it, at least 1.
        stacks: By name, what software makes of the device.
        runs_on: The stack that runs; None for the device's own figures.
        asked: The stack to plan with, whatever a manifest runs; None where that decides.
        known: How its figures are known.
        measured: What was, of a calibrated machine.
        sources: Where the figures come from.
    """

    device: Device
    devices_per_node: Annotated[
        int, rule(lambda number: isinstance(number, int) and number >= 1, "it is a whole number of at least 1")
    ]
    intra: Link
    inter: Link
    host: Link
    sources: tuple[str, ...] = Field(min_length=1, description="a list of texts that say where the figures come from")
    drive: Drive = ASSUMED_DRIVE
    host_memory: RandomAccess = ASSUMED_MEMORY
    slowdown: Annotated[
        float, rule(lambda times: 1 <= times <= 3, "compute beside a collective takes 1 to 3 times as long")
    ] = 1.1
    stacks: Mapping[StackName, Stack] = Field(default_factory=dict, validation_alias="stack")
    runs_on: Annotated[StackName | None, BeforeValidator(_in_python_only)] = None
    asked: Annotated[StackName | None, BeforeValidator(_in_python_only)] = None
    known: Literal["assumed", "calibrated"] = "assumed"
    measured: tuple[str, ...] = ()
    name: str = ""

    def with_nodes(self, devices_per_node: int | None) -> Hardware:
        """Return the same with another number of devices a node; None changes nothing.

        The network's share of one device stays that of the file, since the adapters belong to devices.
        """
        return self if devices_per_node is None else replace(self, devices_per_node=devices_per_node)

    def shared_by(self, world_size: int) -> Hardware:
        """Return the same with one rank's part of what the ranks of a node share.

        Args:
            world_size: Ranks of the run, which fill one node after the other.
        """
        number = min(world_size, self.devices_per_node)
        return replace(self, drive=self.drive.of_one_rank(number), host_memory=self.host_memory.of_one_rank(number))

    @property
    def software(self) -> Stack:
        """The stack that runs; one that changes nothing where none was chosen, or the file says nothing of it."""
        return _PLAIN if self.runs_on is None else self.stacks.get(self.runs_on, _PLAIN)

    def with_stack(self, name: StackName) -> Hardware:
        """Return the same under a stack, whose efficiencies replace the device's.

        Args:
            name: One that the file does not describe leaves the device's figures; what was asked for comes before it.
        """
        name = self.asked or name
        stack, device = self.stacks.get(name, _PLAIN), self.device
        ahead, back = stack.attention_efficiency, stack.attention_backward_efficiency
        device = replace(
            device,
            gemm_efficiency={**device.gemm_efficiency, **stack.gemm_efficiency},
            attention_efficiency=ahead or device.attention_efficiency,
            attention_backward_efficiency=back or device.attention_backward_efficiency,
            reserve_factor=stack.reserve_factor or device.reserve_factor,
        )
        return replace(self, device=device, runs_on=name)


_PLAIN = Stack()
