"""Signals to a process and all that it has started."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def tree_of(pid):
    """Return a process and all that it has started."""
    children = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended
            parent = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1]
            children.setdefault(int(parent), []).append(int(name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found


def send_to_tree(pid, number):
    """Send a signal to a process and all that it has started."""
    for each in tree_of(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, number)
