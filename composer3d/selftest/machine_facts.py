"""Facts of a machine that a report may share: versions, processors, memory, GPUs; no names of hosts or users."""

from __future__ import annotations

import getpass
import os
import platform
import re
import socket
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

__all__ = ["machine_facts", "scrubbed"]

_PACKAGES = ("composer3d", "torch", "torchao", "numpy", "transformers")


def machine_facts(*, with_host: bool = False) -> dict[str, Any]:
    """Return versions, operating system, cores, memory and GPUs; computes nothing on a GPU.

    Args:
        with_host: Add the machine's name.
    """
    import torch

    cuda = torch.cuda.is_available()
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())] if cuda else []
    facts: dict[str, Any] = {
        "versions": {name: found for name in _PACKAGES if (found := _version(name))},
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": [{"name": gpu.name, "memory_gib": round(gpu.total_memory / 2**30, 1)} for gpu in gpus],
        "cuda": torch.version.cuda if cuda else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
    }
    return {**facts, "host": socket.gethostname()} if with_host else facts


def scrubbed(text: str) -> str:
    """Return a text without the names of this machine and user, without paths of theirs, and without addresses."""
    for name, stand_in in _names():
        text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", stand_in, text)
    return re.sub(r"\b\d{1,3}(\.\d{1,3}){3}\b", "ADDRESS", text)


def _names() -> list[tuple[str, str]]:
    """Return what is replaced, longest first: of paths the whole goes before a part of it."""
    package = Path(__file__).resolve().parent.parent.parent
    names = {tempfile.gettempdir(): "TMP", str(Path.home()): "HOME", str(package): "SITE", str(Path.cwd()): "HERE"}
    names |= {socket.gethostname(): "HOST"}
    try:
        names[getpass.getuser()] = "USER"
    except (OSError, KeyError):  # a user id without an entry, in a container
        pass
    return sorted(((name, to) for name, to in names.items() if len(name) > 1), key=lambda item: -len(item[0]))


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
