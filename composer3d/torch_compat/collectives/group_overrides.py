"""Options of the process groups of a mesh's dims, as torch takes them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

__all__ = ["backend_of", "group_override", "nccl_fields", "nccl_options"]

# Field of NCCL's configuration for each option whose name differs.
_FIELDS = {"collnet": "collnet_enable"}
_POLICIES = {"default": 0, "efficiency": 1, "zero": 2}  # NCCL_CTA_POLICY_*, bit masks of nccl.h


def nccl_fields() -> frozenset[str] | None:
    """Return the options that this torch's NCCL has; None in a build without NCCL.

    Which fields of ncclConfig_t are bound depends on the NCCL that torch was built with; the stubs list four of ten
    (torch 2.11-2.15).
    """
    import torch.distributed as dist

    if not dist.is_nccl_available():
        return None
    config = dist.ProcessGroupNCCL.Options().config
    names = {name for name in dir(config) if not name.startswith("_") and not callable(getattr(config, name))}
    other = {field: name for name, field in _FIELDS.items()}
    return frozenset({"high_priority_stream", *(other.get(name, name) for name in names)})


def nccl_options(values: Mapping[str, Any], *, timeout: timedelta | None) -> Any:
    """Return `ProcessGroupNCCL.Options` with these values; None keeps NCCL's choice.

    The class is there in builds with NCCL only, its timeout under an underscored name (torch 2.11-2.15).

    Args:
        values: By the names of `NCCLOptions`.
        timeout: Of collectives; None takes torch's own.

    Raises:
        AttributeError: This build has no such option.
    """
    import torch.distributed as dist

    options: Any = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = bool(values.get("high_priority_stream"))
    for name, value in values.items():
        if value is None or name == "high_priority_stream":
            continue
        field = _FIELDS.get(name, name)
        if not hasattr(options.config, field):
            raise AttributeError(f"this build's NCCL has no option {name}")
        setattr(options.config, field, _POLICIES[value] if name == "cta_policy" else _plain(value))
    if timeout is not None:
        options._timeout = timeout
    return options


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, bool) else value


def group_override(*, backend: str | None, options: Any, own_group: bool) -> Any:
    """Return what `init_device_mesh` takes as `backend_override` of a dim; None for torch's own choice.

    Torch gives a dim of all ranks the world's group unless it is told a backend (torch 2.11-2.15). In a fake world all
    groups are fake.

    Args:
        backend: Of the group; None is the world's.
        options: From `nccl_options`, or None.
        own_group: The dim is to have a group of its own.
    """
    import torch.distributed as dist

    if dist.get_backend() == "fake":
        return "fake" if own_group or backend is not None or options is not None else None
    if backend is None and options is None and not own_group:
        return None
    named = backend or _world_backend()
    return named if options is None else (named, options)


def _world_backend() -> str:
    """Return the world's backend: one name, or those of all types of devices where they differ."""
    import torch.distributed as dist

    config = dist.get_backend_config()
    names = {part.rpartition(":")[2] for part in config.split(",")}
    return names.pop() if len(names) == 1 else config


def backend_of(group: Any, device: Any) -> str:
    """Return the name of the backend that a group has for a device, for example `gloo`.

    `dist.get_backend` names one of several; the debug level DETAIL wraps backends in another (torch 2.11-2.15).
    """
    import torch

    backend = group._get_backend(torch.device(device))
    return str(getattr(backend, "wrapped_pg", backend).name())
