"""Options of the process group of one axis, as its table has them."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from composer3d import GroupOptions, NCCLOptions, PluginError, torch_compat

__all__ = ["AxisOptions"]

# Options of the group that any backend has; all others are NCCL's.
_ANY = ("backend", "timeout_s", "own_group")
_LONGEST_S = 1_000_000.0
_BACKENDS = ("gloo", "nccl", "mpi", "ucc", "xccl")


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid", strict=True, allow_inf_nan=False))
class AxisOptions:
    """Options of the process group of one axis; those from `high_priority_stream` on are NCCL's.

    Args:
        backend: gloo, nccl, or one for each type of device, as `cpu:gloo,cuda:nccl`; default: the world's.
        timeout_s: After which a collective over the axis fails, in seconds; default: the world's.
        own_group: Make a group of its own, with its own stream and communicator, also where the axis has all ranks of
            the world and would share its group; a group with a timeout or NCCL's options is one anyway.
        high_priority_stream: Run its collectives on a stream of high priority.
        blocking: Whether making the communicator waits for all ranks.
        min_ctas: Thread blocks of a collective at least: more bandwidth, less compute beside it.
        max_ctas: Thread blocks of a collective at most.
        cga_cluster_size: Thread blocks of a cluster, on GPUs from Hopper on.
        cta_policy: What thread blocks are chosen for; zero has copy engines gather registered buffers.
        nvls_ctas: Thread blocks of NVLink SHARP.
        sharp: Reduce in the network's switches where they can (NCCL's CollNet).
        split_share: A communicator that is split from this one shares its resources.
        net_name: Network plugin of NCCL, without which its communicator fails instead of taking TCP.
        traffic_class: Of the network's packets.
        registered_buffers: Units take the buffers of their collectives from NCCL's allocator, registered with NVLink
            and the network: reductions need no copy, and can be made in switches.
    """

    backend: str | None = None
    timeout_s: float | None = Field(default=None, gt=0, le=_LONGEST_S)
    own_group: bool = False
    high_priority_stream: bool = False
    blocking: bool | None = None
    min_ctas: int | None = Field(default=None, ge=1, le=64)
    max_ctas: int | None = Field(default=None, ge=1, le=64)
    cga_cluster_size: int | None = Field(default=None, ge=0, le=8)
    cta_policy: Literal["default", "efficiency", "zero"] | None = None
    nvls_ctas: int | None = Field(default=None, ge=1, le=64)
    sharp: bool | None = None
    split_share: bool | None = None
    net_name: str | None = None
    traffic_class: int | None = Field(default=None, ge=0, le=255)
    registered_buffers: bool = False

    def of_group(self) -> GroupOptions:
        """Return the options as the mesh takes them."""
        nccl = NCCLOptions(
            high_priority_stream=self.high_priority_stream,
            blocking=self.blocking,
            min_ctas=self.min_ctas,
            max_ctas=self.max_ctas,
            cga_cluster_size=self.cga_cluster_size,
            cta_policy=self.cta_policy,
            nvls_ctas=self.nvls_ctas,
            collnet=self.sharp,
            split_share=self.split_share,
            net_name=self.net_name,
            traffic_class=self.traffic_class,
        )
        return GroupOptions(
            backend=self.backend,
            timeout_s=self.timeout_s,
            nccl=None if nccl == NCCLOptions() else nccl,
            own_group=self.own_group,
        )

    def refuse_contradictions(self, axis: str, *, backend: str, shards: str) -> None:
        """Refuse what the backend of this axis does not have.

        Args:
            axis: Its name.
            backend: Its backend for the run's device.
            shards: The axis over which units are sharded.

        Raises:
            PluginError: At the key.
        """
        stated = [name for name in self.__dataclass_fields__ if getattr(self, name) not in (None, False)]
        if not stated:
            raise PluginError(
                f"axes.{axis} gives no option", hint="remove this table, or write timeout_s", keys=("axes", axis)
            )
        if backend not in _BACKENDS and not _is_registered(backend):
            raise PluginError(
                f'backend = "{self.backend}" has none for this device',
                hint=f"write one of {', '.join(_BACKENDS)}, or one for each type of device: cpu:gloo,cuda:nccl",
                keys=("axes", axis, "backend"),
            )
        for name in stated:
            if name not in _ANY and backend != "nccl":
                raise PluginError(
                    f"{name} is an option of NCCL, and {axis} is on {backend}",
                    hint="remove it, or run on GPUs",
                    keys=("axes", axis, name),
                )
        if self.registered_buffers and axis != shards:
            raise PluginError(
                f"registered_buffers are those of sharded units, which communicate over {shards}, not over {axis}",
                hint=f"write it in axes.{shards}",
                keys=("axes", axis, "registered_buffers"),
            )
        if self.min_ctas is not None and self.max_ctas is not None and self.min_ctas > self.max_ctas:
            raise PluginError(
                f"min_ctas = {self.min_ctas} is above max_ctas = {self.max_ctas}", keys=("axes", axis, "min_ctas")
            )
        known = torch_compat.nccl_fields()
        lacking = [name for name in stated if name not in (*_ANY, "registered_buffers") and not _has(name, known)]
        if lacking:
            raise PluginError(
                f"the NCCL of this torch has no option {lacking[0]}",
                hint="remove it, or take a later torch",
                keys=("axes", axis, lacking[0]),
            )


def _has(name: str, known: frozenset[str] | None) -> bool:
    """Return whether NCCL has an option; where torch is built without, a manifest for GPUs can be checked all the same.

    Args:
        name: As in the table.
        known: From `nccl_fields`.
    """
    return known is None or {"sharp": "collnet"}.get(name, name) in known


def _is_registered(backend: str) -> bool:
    import torch.distributed as dist

    return backend in dist.Backend.backend_list and backend not in ("undefined", "fake")
