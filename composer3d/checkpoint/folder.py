"""The folder of a run's checkpoints: names, completeness, and the order of renames that a kill cannot break.

`<folder>/step-N` is a checkpoint, `<folder>/latest` a marker that names the newest. A checkpoint is written as
`step-N.tmp`, synced, renamed, and only then named by the marker. Replacing one takes two renames (old away, new in),
so between them it is called `step-N.old`; readers know that name, and the next save puts it back.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from composer3d.errors import CheckpointError

__all__ = ["complete", "discard", "latest", "prepare", "prune", "publish", "require"]

MARKER = "latest"
METADATA = ".metadata"
STATE = "state.json"
BESIDE = ".tmp"
REPLACED = ".old"


def complete(path: Path) -> bool:
    """Tell whether a folder is a whole checkpoint: it has its final name, DCP's `.metadata` and `state.json`.

    DCP writes `.metadata` after all data, and the folder gets its name after everything is on disk.
    """
    return path.suffix != BESIDE and (path / METADATA).is_file() and (path / STATE).is_file()


def require(path: Path) -> None:
    """Raise a CheckpointError that says what is wrong with the path, unless it is a complete checkpoint."""
    if complete(path):
        return
    others = ", ".join(found.name for _, found in _steps(path.parent))
    hint = f"; complete ones there: {others}" if others else ""
    if not path.is_dir():
        raise CheckpointError(f"{path}: there is no checkpoint here{hint}")
    if path.suffix == BESIDE:
        raise CheckpointError(f"{path}: this save was never finished{hint}")
    missing = " and ".join(name for name in (METADATA, STATE) if not (path / name).is_file())
    raise CheckpointError(f"{path}: half-written, or no checkpoint: {missing} is missing{hint}")


def latest(folder: Path) -> Path | None:
    """Return the newest complete checkpoint: the one that the marker names, else the highest complete step.

    Args:
        folder: Holds `step-N` folders and the marker; it need not exist.
    """
    name = _marked(folder)
    if name is not None:
        for candidate in (folder / name, folder / f"{name}{REPLACED}"):
            if complete(candidate):
                return candidate
    steps = list(_steps(folder, replaced=True))
    return steps[-1][1] if steps else None


def prune(folder: Path, keep: int) -> tuple[Path, ...]:
    """Remove all complete checkpoints but the last few, never the one that the marker names; return the removed.

    Called by one rank.

    Args:
        folder: Holds the checkpoints.
        keep: How many to keep, at least 1.
    """
    if keep < 1:
        raise CheckpointError(f"{folder}: keep = {keep} would remove every checkpoint; at least 1 stays")
    name = _marked(folder)
    removed = tuple(path for _, path in list(_steps(folder))[:-keep] if path.name != name)
    for path in removed:
        discard(path)
    return removed


def prepare(path: Path) -> Path:
    """Clear what killed runs left, put back a checkpoint caught between two renames, and make the folder to write to.

    Returns:
        The folder beside `path` in which the checkpoint is to be written.
    """
    if path.name in ("", MARKER) or path.suffix in (BESIDE, REPLACED):
        raise CheckpointError(f'{path}: a checkpoint cannot have this name; use for example "step-100"')
    folder = path.parent
    folder.mkdir(parents=True, exist_ok=True)
    stale = {found for found in folder.iterdir() if re.fullmatch(r"step-\d+\.(tmp|old)", found.name)}
    stale |= {_beside(path), _replaced(path)}
    for found in sorted(stale):
        final = found.with_suffix("")
        if found.suffix == REPLACED and complete(found) and not complete(final):
            discard(final)
            found.rename(final)
    for found in sorted(stale):
        discard(found)
    target = _beside(path)
    target.mkdir()
    return target


def publish(path: Path) -> None:
    """Give a finished checkpoint its name, then point the marker at it; each step is on disk before the next."""
    _sync(_beside(path))
    if path.exists():
        path.rename(_replaced(path))
    _beside(path).rename(path)
    _sync(path.parent)
    marker = path.parent / f"{MARKER}{BESIDE}"
    with marker.open("w", encoding="utf-8") as file:
        file.write(path.name + "\n")
        file.flush()
        os.fsync(file.fileno())
    marker.replace(path.parent / MARKER)
    _sync(path.parent)
    discard(_replaced(path))


def discard(path: Path) -> None:
    """Remove a checkpoint; a kill half way leaves only what is known to be incomplete."""
    if not path.exists():
        return
    beside = path if path.suffix == BESIDE else path.with_name(path.name.removesuffix(REPLACED) + BESIDE)
    if beside != path:
        if beside.exists():
            _remove(beside)
        path.rename(beside)
    _remove(beside)


def _remove(folder: Path) -> None:
    """Remove a folder that a save in another thread, clearing what killed runs left, may be removing too."""
    while folder.exists():
        with suppress(FileNotFoundError):
            shutil.rmtree(folder)


def _steps(folder: Path, *, replaced: bool = False) -> Iterator[tuple[int, Path]]:
    """Yield the complete `step-N` of a folder by rising N; with `replaced`, also those caught between two renames."""
    found: dict[int, Path] = {}
    for path in folder.glob("step-*"):
        match = re.fullmatch(r"step-(\d+)(\.old)?", path.name)
        if match and complete(path) and (replaced or not match[2]):
            number = int(match[1])
            found[number] = path if not match[2] else found.get(number, path)
    yield from sorted(found.items())


def _marked(folder: Path) -> str | None:
    """Return the name in the marker, None where there is no marker or it names no folder beside itself."""
    try:
        name = (folder / MARKER).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return name if name and Path(name).name == name else None


def _beside(path: Path) -> Path:
    return path.with_name(path.name + BESIDE)


def _replaced(path: Path) -> Path:
    return path.with_name(path.name + REPLACED)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
