"""States in the memory of a node whose run is gone: they would fill it until the machine starts again."""

from __future__ import annotations

import fcntl
import shutil
from contextlib import suppress
from pathlib import Path
from typing import IO

__all__ = ["claim_states", "remove_abandoned_states"]

_RUN = "run"  # beside a run's states: where its folder is; locked while one of its ranks lives


def claim_states(base: Path, output: Path) -> IO[str]:
    """Note whose states a folder holds, and keep others from removing them until the returned file is closed.

    Args:
        base: Folder of the run's states on this node.
        output: The run's folder.
    """
    file = (base / _RUN).open("a+")
    fcntl.flock(file, fcntl.LOCK_SH)
    (base / _RUN).write_text(str(output.absolute()))
    return file


def remove_abandoned_states(parent: Path) -> None:
    """Remove states that nobody can go on from: no rank of their run lives, and the run's folder is gone.

    Args:
        parent: Folder of all runs of this user on this node.
    """
    for base in parent.iterdir():
        with suppress(OSError), (base / _RUN).open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            output = (base / _RUN).read_text()
            if output and not Path(output).exists():
                shutil.rmtree(base, ignore_errors=True)
