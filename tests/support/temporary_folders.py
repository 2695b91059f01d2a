"""A temporary folder of each worker's own, which every test must leave unchanged."""

from __future__ import annotations

import getpass
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from composer3d.processes.private_folder import open_private, user_folder
from composer3d.processes.temporary_folder import remove_if_abandoned, temporary_folder

__all__ = ["leaving_nothing", "own_temporary_folder", "session_folder"]

SESSION = "until-the-session-ends"
# What other libraries and programs leave goes with the worker's folder.
OURS = ("composer3d-", "torchelastic_")
KEPT = frozenset({f"composer3d-{os.getuid()}", f"composer3d-ranks-{os.getuid()}"})  # of `user_folder`, there for good
ENDING_S = 60.0  # that processes which were killed in a test may take to end


@contextmanager
def own_temporary_folder() -> Iterator[Path]:
    """Give this process and its children a temporary folder, which is removed afterwards.

    pytest's own folders, which stay for three sessions, and what inductor has compiled remain where they would be
    without it, and ranks are counted over all processes of this user as before.
    """
    outer = tempfile.gettempdir()
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", outer)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(outer, f"torchinductor_{getpass.getuser()}")))
    counted = user_folder("composer3d-ranks")
    with ExitStack() as stack:
        folder = stack.enter_context(temporary_folder("tests"))
        before = os.environ.get("TMPDIR")
        stack.callback(_use, before)
        _use(str(folder))
        os.environ["PET_LOG_DIR"] = str(folder / SESSION / "torchrun")  # torchrun's --log-dir, which it never removes
        places = user_folder("composer3d-ranks")
        for name in ("queue", *(f"place-{place}" for place in range(8))):
            os.close(open_private(counted, name))
            (places / name).hardlink_to(counted / name)
        yield folder


def session_folder() -> Path:
    """Make a folder that goes with the worker's temporary folder: for files of ranks, which have no fixtures."""
    shared = Path(tempfile.gettempdir(), SESSION)
    shared.mkdir(exist_ok=True)
    return Path(tempfile.mkdtemp(dir=shared))


def _use(folder: str | None) -> None:
    os.environ.pop("TMPDIR", None)
    if folder is not None:
        os.environ["TMPDIR"] = folder
    tempfile.tempdir = None  # read anew


@contextmanager
def leaving_nothing() -> Iterator[None]:
    """Raise AssertionError for what composer3d or torchrun have in the temporary folder afterwards and had not before.

    A folder of a launcher that was killed is removed, as the next start on the machine would.
    """
    folder = Path(tempfile.gettempdir())
    before = _names(folder)
    yield
    deadline = time.monotonic() + ENDING_S
    while left := _names(folder) - before:
        for name in left:
            remove_if_abandoned(folder / name)
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    shown = {name: sorted(path.name for path in (folder / name).glob("*"))[:5] for name in sorted(left)}
    assert not left, f"stays behind in {folder}: {shown}"


def _names(folder: Path) -> set[str]:
    return {name for name in os.listdir(folder) if name.startswith(OURS)} - KEPT
