"""The mesh of a manifest on real ranks, its links measured with the run's backends and options."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from composer3d import torch_compat
from composer3d.diagnostics.network.link_report import NetworkReport, report_of
from composer3d.diagnostics.network.link_timing import Link, ping, time_links
from composer3d.errors import ComposerError, ManifestError

__all__ = ["measure", "probe"]

_LARGE_ON_CPU, _LARGE_ON_GPU = 1 << 20, 1 << 26  # bytes, which fill a link
_JOIN_S = 300.0


def probe(source: str, *, world_size: int | None) -> NetworkReport | None:
    """Measure the links of a manifest's axes; return the report, on the first rank alone.

    Under torchrun its ranks measure together. Elsewhere ranks are started on this machine, as a run starts them.

    Args:
        source: A manifest: a path, or the name of a shipped one.
        world_size: Ranks to start; None takes what the manifest's degrees multiply to. Under torchrun, its ranks.

    Raises:
        ManifestError: The manifest is wrong, or lacks what this machine needs for it.
        ComposerError: A rank failed.

    Memory: a message of 64 MiB a rank on GPUs, of 1 MiB on CPU. Collectives: messages between all pairs of an axis.
    """
    from composer3d.checking import device_of, open_manifest
    from composer3d.composition import layout_of
    from composer3d.hooks import Hooks
    from composer3d.processes import temporary_folder
    from composer3d.runner import is_rank, launch_local

    if is_rank():
        return measure(source)
    opened = open_manifest(source, ())
    if opened.problems:
        raise ManifestError(opened.problems)
    layout = layout_of(opened.manifest, Hooks(opened.manifest.plugins), world_size=world_size)
    if layout.world_size == 1:
        raise ComposerError(f"{source}: a mesh of one rank has no links; --world-size N starts more")
    with temporary_folder("network") as folder:
        kind: Any = "cpu" if device_of(opened.manifest).type == "cpu" else "cuda"
        result = launch_local(measure, (source,), num_ranks=layout.world_size, device=kind, output=folder)
    if result.report is not None:
        raise ComposerError(result.report.render().rstrip())
    if 0 not in result.values:
        raise ComposerError("interrupted: nothing was measured")
    found: NetworkReport = result.values[0]
    return found


def measure(source: str, trip: Callable[..., None] = ping) -> NetworkReport | None:
    """Measure on this rank, while all others do the same; return the report on the first rank.

    Args:
        source: The manifest.
        trip: A round trip, as `ping` makes it.
    """
    import torch
    import torch.distributed as dist

    from composer3d.checking import device_of, inspect, open_manifest
    from composer3d.composition import build_mesh
    from composer3d.processes import all_gather_json, join_world

    opened = open_manifest(source, ())
    kind = device_of(opened.manifest).type
    device = torch.device("cpu") if kind == "cpu" else torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")))
    found = inspect(opened, world_size=int(os.environ["WORLD_SIZE"]), rank=int(os.environ["RANK"]), device=device)
    if not found.ok(strict=False) or found.preparation is None:
        raise ManifestError(found.ordered())
    release = join_world(device, timeout_s=_JOIN_S)
    try:
        build_mesh(found.preparation)
        context = found.preparation.context
        degrees = {axis.name: context.degrees[axis.name] for axis in context.layout.dense_axes}
        groups = {axis: context.mesh.get_group(axis) for axis, degree in degrees.items() if degree > 1}
        links = _timed(groups, device=device, trip=trip)
        gathered = all_gather_json({"links": [asdict(link) for link in links], "host": socket.gethostname()})
        backends = {axis: torch_compat.backend_of(group, device) for axis, group in groups.items()}
        rank = dist.get_rank()
    finally:
        release()
    everyone = [Link(**{**link, "ranks": tuple(link["ranks"])}) for each in gathered for link in each["links"]]
    hosts = {number: each["host"] for number, each in enumerate(gathered)}
    return None if rank else report_of(everyone, degrees=degrees, backends=backends, hosts=hosts)


def _timed(groups: Any, *, device: Any, trip: Callable[..., None]) -> Sequence[Link]:
    """Measure one axis after the other; all ranks begin each together."""
    import torch.distributed as dist

    links: list[Link] = []
    for axis, group in groups.items():
        dist.barrier()
        num_bytes = _LARGE_ON_CPU if device.type == "cpu" else _LARGE_ON_GPU
        links += time_links(axis, group, device=device, num_bytes=num_bytes, trip=trip)
    return links
