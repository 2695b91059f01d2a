"""The folder of a run's checkpoints: names, completeness, and the order of renames that a kill cannot break.

`<folder>/step-N` is a checkpoint, `<folder>/latest` a marker that names the newest, with the name's digest. A
checkpoint is written as `step-N.tmp`, synced, renamed, and only then named by the marker. Replacing one takes two
renames (old away, new in), so between them it is called `step-N.old`; readers know that name, and the next save puts it
back.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from composer3d.checkpoint.checksums import digest, open_file, write_file
from composer3d.checkpoint.foreign_files import foreign_in, own_files, refuse_foreign, refuse_foreign_marker
from composer3d.errors import CheckpointError

__all__ = ["complete", "discard", "latest", "prepare", "prune", "publish", "require", "require_name"]

MARKER = "latest"
METADATA = ".metadata"
STATE = "state.json"
BESIDE = ".tmp"
REPLACED = ".old"
_MAX_MARKER_BYTES = 1024  # a name in a folder has 255 at most

log = logging.getLogger(__name__)


def complete(path: Path) -> bool:
    """Return whether a folder is a whole checkpoint: it has its final name, DCP's `.metadata` and `state.json`.

    DCP writes `.metadata` after all data, and the folder gets its name after everything is on disk.
    """
    return path.suffix != BESIDE and (path / METADATA).is_file() and (path / STATE).is_file()


def require(path: Path) -> None:
    """Raise a CheckpointError with the cause, unless the path is a complete checkpoint."""
    if complete(path):
        return
    hint = _listed(list(_steps(path.parent)))
    if not path.is_dir():
        raise CheckpointError(f"{path}: there is no checkpoint here{hint}")
    if path.suffix == BESIDE:
        raise CheckpointError(f"{path}: this save was never finished{hint}")
    raise CheckpointError(f"{path}: half-written, or no checkpoint: {_missing(path)}{hint}")


def _missing(path: Path) -> str:
    lacking = [path / name for name in (METADATA, STATE) if not (path / name).is_file()]
    gone = " and ".join(file.name for file in lacking if not os.path.lexists(file))
    strange = [f"{file.name} is no ordinary file" for file in lacking if os.path.lexists(file)]
    return " and ".join([*([f"{gone} is missing"] if gone else []), *strange])


def _listed(steps: Sequence[tuple[int, Path]]) -> str:
    return f"; complete ones there: {', '.join(path.name for _, path in steps)}" if steps else ""


def latest(folder: Path) -> Path | None:
    """Return the newest complete checkpoint: the one that the marker names, else the highest complete step.

    Args:
        folder: Holds `step-N` folders and the marker; it need not exist.

    Raises:
        CheckpointError: The marker is damaged, or what it names is: another checkpoint would be an older one.
    """
    name = _marked(folder)
    steps = list(_steps(folder, replaced=True))
    if name is not None:
        candidates = _candidates(folder, name)
        for candidate in candidates:
            if complete(candidate):
                return candidate
        if any(map(os.path.lexists, candidates)):
            raise CheckpointError(
                f"{folder / name}: damaged: {_missing(folder / name)}, and {folder / MARKER} names it as the newest; "
                f"to go on from another one, name that{_listed(steps)}"
            )
        if steps:
            log.warning("%s names %s, which is gone; taking %s", folder / MARKER, name, steps[-1][1].name)
    return steps[-1][1] if steps else None


def prune(folder: Path, keep: int, *, spare: Collection[str] = ()) -> tuple[Path, ...]:
    """Remove all complete checkpoints but the last few, never the one that the marker names; return the removed.

    What no save wrote, an evaluation's results for example, is left in the folder of a removed one, and logged. Called
    by one rank.

    Args:
        folder: Holds the checkpoints.
        keep: How many to keep, at least 1.
        spare: Names of checkpoints that are kept besides these.
    """
    if keep < 1:
        raise CheckpointError(f"{folder}: keep = {keep} would remove every checkpoint; at least 1 stays")
    name = _marked(folder)
    others = [path for _, path in _steps(folder) if path.name not in spare]
    removed = tuple(path for path in others[:-keep] if path.name != name)
    for path in removed:
        if path.is_symlink() or not (foreign := foreign_in(path)):
            discard(path)
            continue
        log.warning("%s: %s, which no save wrote; the checkpoint is removed, and that is left", path, foreign)
        for file in own_files(path):
            file.unlink()
    return removed


def prepare(path: Path) -> Path:
    """Clear what killed runs left, put back a checkpoint caught between two renames, and make the folder to write to.

    Returns:
        The folder beside `path` in which the checkpoint is to be written.

    Raises:
        CheckpointError: There is something else than a checkpoint, which a save would delete; or nothing can be
            written there.
    """
    require_name(path)
    try:
        return _prepare(path)
    except OSError as error:
        raise CheckpointError(
            f"{path}: no checkpoint can be written there ({type(error).__name__}: {error}); save into a folder that "
            "this user may write to, on a disk that all ranks share"
        ) from error


def _prepare(path: Path) -> Path:
    folder = path.parent
    folder.mkdir(parents=True, exist_ok=True)
    refuse_foreign(path)
    for used in (_beside(path), _replaced(path)):
        refuse_foreign(used, beside=True)
    refuse_foreign_marker(folder / MARKER)
    stale = {found for found in folder.iterdir() if re.fullmatch(r"step-\d+\.(tmp|old)", found.name)}
    stale = {found for found in stale if not _is_left(found)} | {_beside(path), _replaced(path)}
    for found in sorted(stale):
        final = found.with_suffix("")
        if found.suffix == REPLACED and complete(found) and not complete(final) and not _is_left(final):
            discard(final)
            found.rename(final)
    for found in sorted(stale):
        discard(found)
    target = _beside(path)
    target.mkdir()
    return target


def require_name(path: Path) -> None:
    """Raise a CheckpointError unless a checkpoint can have the path's name."""
    if path.name in ("", "..", MARKER) or path.suffix in (BESIDE, REPLACED) or "\0" in str(path):
        shown = str(path).replace("\0", r"\0")
        raise CheckpointError(f'{shown}: a checkpoint cannot have this name; use for example "step-100"')


def _is_left(path: Path) -> bool:
    """Return whether a path that looks like a killed save's is left alone, and log it."""
    foreign = foreign_in(path)
    if foreign:
        log.warning("%s: %s, which no save wrote; it is left as it is", path, foreign)
    return bool(foreign)


def publish(path: Path) -> None:
    """Give a finished checkpoint its name, then point the marker at it; each step is on disk before the next."""
    _sync(_beside(path))
    if path.exists():
        path.rename(_replaced(path))
    _beside(path).rename(path)
    _sync(path.parent)
    marker = path.parent / f"{MARKER}{BESIDE}"
    write_file(marker, _marker(path.name))
    marker.replace(path.parent / MARKER)
    _sync(path.parent)
    discard(_replaced(path))


def discard(path: Path) -> None:
    """Remove a checkpoint; if killed half way, the rest is recognised as incomplete."""
    if not os.path.lexists(path):
        return
    beside = path if path.suffix == BESIDE else path.with_name(path.name.removesuffix(REPLACED) + BESIDE)
    if beside != path:
        _remove(beside)
        path.rename(beside)
    _remove(beside)


def _remove(folder: Path) -> None:
    """Remove a folder that a save in another thread, clearing what killed runs left, may be removing too.

    Of a link, such as to a checkpoint on another disk, only the link is removed, not its target.
    """
    while os.path.lexists(folder):
        with suppress(FileNotFoundError):
            if folder.is_dir() and not folder.is_symlink():
                shutil.rmtree(folder)
            else:
                folder.unlink()


def _steps(folder: Path, *, replaced: bool = False) -> Iterator[tuple[int, Path]]:
    """Yield the complete `step-N` of a folder by rising N; with `replaced`, also those caught between two renames."""
    found: dict[int, Path] = {}
    for path in folder.glob("step-*"):
        match = re.fullmatch(r"step-(\d+)(\.old)?", path.name)
        if match and complete(path) and (replaced or not match[2]):
            number = int(match[1])
            found[number] = path if not match[2] else found.get(number, path)
    yield from sorted(found.items())


def _marker(name: str) -> bytes:
    """Return the marker's content: a name, and below it the name's digest."""
    return f"{name}\n{digest(name.encode())}\n".encode()


def _marked(folder: Path) -> str | None:
    """Return the name in the marker, None where there is no marker.

    A marker of an earlier composer3d has the name alone.

    Raises:
        CheckpointError: The content differs from what was written.
    """
    file = folder / MARKER
    if not os.path.lexists(file):
        return None
    with open_file(file) as opened:
        data = opened.read(_MAX_MARKER_BYTES)
    name = data.partition(b"\n")[0].decode("utf-8", "replace")
    is_name = Path(name).name == name and name not in ("", "..") and "\0" not in name
    # Without a digest, a name that nothing has may be another name, damaged.
    is_plain = is_name and data == f"{name}\n".encode() and any(map(os.path.lexists, _candidates(folder, name)))
    if not is_name or not (is_plain or data == _marker(name)):
        raise CheckpointError(
            f"{file}: damaged: it does not name a checkpoint; remove it to take the highest step, or write "
            f"the name of a checkpoint into it, and a newline{_listed(list(_steps(folder, replaced=True)))}"
        )
    return name


def _candidates(folder: Path, name: str) -> tuple[Path, Path]:
    """Return where a checkpoint is that the marker names: between two renames, replaced, it has another name."""
    return folder / name, folder / f"{name}{REPLACED}"


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
