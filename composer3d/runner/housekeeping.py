"""Process settings of a run, its seeds and garbage collection, and the record of its environment."""

from __future__ import annotations

import gc
import os
import platform
import random
import socket
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from composer3d import Composition
    from composer3d.manifest import Manifest
    from composer3d.runner.runner_tables import RunTable

__all__ = [
    "GarbageCollection",
    "configure_torch",
    "environment",
    "requested_device",
    "seed_step",
    "set_timeout",
]


def configure_torch(table: RunTable, *, seed: int) -> None:
    """Set determinism, matmul precision, debugging and seeds; before any process group is made.

    Args:
        table: `[run]`.
        seed: Of the run.
    """
    import torch
    import torch.distributed as dist

    if table.deterministic:
        # cuBLAS is deterministic only with a workspace of its own, and reads this when it starts.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    if table.matmul_precision is not None:
        torch.set_float32_matmul_precision(table.matmul_precision)
    if table.debug:
        dist.set_debug_level(dist.DebugLevel.DETAIL)  # type: ignore[attr-defined]  # public, and not in __all__
    torch.manual_seed(seed)
    seed_step(seed, 0)


def seed_step(seed: int, step: int) -> None:
    """Seed Python's and numpy's random state for a step, so that a resumed run draws what the run would have drawn.

    torch's generators are seeded by the composition, for every micro-batch.
    """
    import numpy as np

    mixed = (seed * 1_000_003 + step) % 2**32
    random.seed(mixed)
    np.random.seed(mixed)


def requested_device(table: RunTable) -> torch.device | None:
    """Return the device of `[run] device`, None for the machine's own choice."""
    import torch

    if table.device == "cuda":
        from composer3d.processes import device_index

        return torch.device("cuda", device_index(torch.accelerator.device_count()))
    return torch.device("cpu") if table.device == "cpu" else None


def set_timeout(run: Composition, timeout_s: float | None) -> None:
    """Set after how many seconds a collective fails, for the world and for every axis; None leaves torch's.

    Args:
        run: The composition, whose process groups get it.
        timeout_s: In seconds; None leaves torch's.
    """
    from datetime import timedelta

    from composer3d import torch_compat

    if timeout_s is None:
        return
    timeout = timedelta(seconds=timeout_s)
    torch_compat.set_group_timeout(None, timeout)
    for axis in run.mesh.mesh_dim_names or ():
        torch_compat.set_group_timeout(run.mesh.get_group(axis), timeout)


class GarbageCollection:
    """Holds Python's garbage collector, so that all ranks collect in the same step.

    Left to itself it stops each rank at another moment, and every such stop is waited for by all others. What exists
    at the start is taken out of its view for good; what a step leaves behind is nearly all freed by reference counts.
    Source: https://github.com/pytorch/torchtitan, which found that ranks wait for each other so.

    Args:
        every: Steps between collections; 0 leaves everything to Python.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._was_enabled = gc.isenabled()

    def __enter__(self) -> GarbageCollection:
        if self._every:
            gc.collect()
            gc.freeze()
            gc.disable()
        return self

    def step(self, step: int) -> None:
        """Collect, if it is time; young garbage only: what survives two collections rarely is garbage at all."""
        if self._every and (step + 1) % self._every == 0:
            gc.collect(1)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._every:
            gc.unfreeze()
            if self._was_enabled:
                gc.enable()


_NETWORK_VARIABLES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "FI_", "RDMAV_")


def environment(manifest: Manifest, run: Composition, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is needed to know later how a run was made.

    Args:
        manifest: Of the run.
        run: The composition, for its layout and device.
        data: The data source's record.
    """
    import torch

    device, folder = run.context.device, manifest.document.folder
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "composer3d": 1,
        "manifest": {
            "file": manifest.document.file,
            "folder": str(folder.absolute()),
            "sha256": manifest.document.digest(),
        },
        "data": dict(data),
        "world_size": run.context.world_size,
        "mesh": dict(run.context.degrees),
        "plan": run.describe().splitlines(),
        "device": {"type": device.type, "name": name, "threads": torch.get_num_threads()},
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "packages": _packages(),
        "commit": _commit(folder),
        # What NCCL, libfabric, verbs and gloo read.
        "network": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(_NETWORK_VARIABLES)},
    }


def _packages() -> dict[str, str]:
    found = {str(distribution.name): distribution.version for distribution in metadata.distributions()}
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def _commit(folder: Path) -> str | None:
    """Return the git commit that the manifest's folder is at, None where there is none."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
