"""Options of process groups, by axis."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Literal

__all__ = ["GroupOptions", "NCCLOptions", "override_of", "set_timeout_of"]


@dataclass(frozen=True, kw_only=True)
class NCCLOptions:
    """Options of NCCL's communicators; None leaves NCCL's own choice.

    Source: ncclConfig_t, https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api/types.html.

    Args:
        high_priority_stream: Collectives run on a CUDA stream of high priority.
        blocking: Whether making a communicator waits for all ranks.
        min_ctas: Thread blocks of a collective at least: more bandwidth, less compute beside it.
        max_ctas: Thread blocks of a collective at most.
        cga_cluster_size: Thread blocks of a cluster, on GPUs from Hopper on.
        cta_policy: What thread blocks are chosen for; `zero` has copy engines gather, where buffers are registered.
        nvls_ctas: Thread blocks of NVLink SHARP.
        collnet: Reduce in the network's switches (SHARP), where they can.
        split_share: A communicator that is split from this one shares its resources.
        net_name: Network plugin, without which making the communicator fails.
        traffic_class: Of the network's packets.
    """

    high_priority_stream: bool = False
    blocking: bool | None = None
    min_ctas: int | None = None
    max_ctas: int | None = None
    cga_cluster_size: int | None = None
    cta_policy: Literal["default", "efficiency", "zero"] | None = None
    nvls_ctas: int | None = None
    collnet: bool | None = None
    split_share: bool | None = None
    net_name: str | None = None
    traffic_class: int | None = None


@dataclass(frozen=True, kw_only=True)
class GroupOptions:
    """Options of the process group of one axis.

    Args:
        backend: For example `nccl` or `gloo`; None keeps the default group's.
        timeout_s: After which a collective of this group fails, in seconds; None takes the
            default group's.
        nccl: Of its communicator; only where the backend is NCCL.
        own_group: Make a group also where the axis has all ranks of the world, whose group it would share. A group
            with a timeout or NCCL's options is always one of its own.
    """

    backend: str | None = None
    timeout_s: float | None = None
    nccl: NCCLOptions | None = None
    own_group: bool = False


def override_of(options: GroupOptions) -> Any:
    """Return what a mesh takes as `backend_override` of an axis; None for torch's own choice."""
    from composer3d import torch_compat

    nccl = None
    if options.nccl is not None and torch_compat.nccl_fields() is not None:  # without NCCL there are fake worlds alone
        timeout = None if options.timeout_s is None else timedelta(seconds=options.timeout_s)
        nccl = torch_compat.nccl_options(asdict(options.nccl), timeout=timeout)
    own_group = options.own_group or options.timeout_s is not None or options.nccl is not None
    return torch_compat.group_override(backend=options.backend, options=nccl, own_group=own_group)


def set_timeout_of(group: Any, options: GroupOptions) -> None:
    """Set the timeout of a group that was made: the options', or the world's."""
    import torch.distributed as dist

    from composer3d import torch_compat

    if dist.get_backend() == "fake":
        return  # nobody is waited for
    if options.timeout_s is None:
        torch_compat.inherit_timeouts(group)
    else:
        torch_compat.set_group_timeout(group, timedelta(seconds=options.timeout_s))
