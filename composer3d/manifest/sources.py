"""Finding manifests: files by their path, shipped ones by their name."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from composer3d.errors import Problem

__all__ = ["Source", "find", "find_base", "kind_of_file", "missing", "missing_base", "read_source", "shipped"]

_LARGEST_BYTES = 1 << 20
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


@dataclass(frozen=True, kw_only=True)
class Source:
    """A manifest before it is read.

    Args:
        file: How the user names it in messages.
        content: What to read; None for text that is there already.
        is_shipped: Whether it came by its shipped name; it then extends shipped manifests only.
    """

    file: str
    content: Traversable | None = None
    is_shipped: bool = False

    @property
    def path(self) -> Path | None:
        """The file on this machine; None for text, and for a manifest inside an archive."""
        return self.content if isinstance(self.content, Path) else None

    @property
    def identity(self) -> str:
        """The same for every way to name one file."""
        return str(self.path.resolve() if self.path else self.content or self.file)

    @property
    def beside(self) -> str | None:
        """The file from whose folder the bases count; None is the working folder."""
        return None if self.content is None or self.is_shipped else self.file


def shipped_folder() -> Traversable:
    """Return the folder of the manifests that are part of composer3d."""
    return resources.files("composer3d").joinpath("manifests")


def shipped() -> Mapping[str, Traversable]:
    """Return the shipped manifests by name, sorted."""
    folder = shipped_folder()
    entries = folder.iterdir() if folder.is_dir() else ()
    found = {entry.name.removesuffix(".toml"): entry for entry in entries if entry.name.endswith(".toml")}
    return dict(sorted(found.items()))


def find(name: str | Path, *, beside: str | None = None) -> Source | None:
    """Find a manifest: the file of that path if there is one, else the shipped manifest of that name.

    Args:
        name: A path, or a shipped name. A `Path` is never a shipped name.
        beside: The file, as the user names it, from whose folder a relative path counts; default: the working folder.
    """
    file = _beside(name, beside)
    by_name = shipped().get(name) if isinstance(name, str) else None
    try:
        exists = Path(file).exists() and not (by_name and Path(file).is_dir())
    except (OSError, ValueError):  # a name that is too long, for example, or holds a NUL
        exists = False
    if exists:
        return Source(file=file, content=Path(file))
    return None if by_name is None else Source(file=str(name), content=by_name, is_shipped=True)


def find_base(name: str, source: Source) -> Source | None:
    """Find the bases of a manifest; a shipped one extends shipped ones only, never files of the working folder."""
    if source.is_shipped:
        content = shipped().get(name)
        return None if content is None else Source(file=name, content=content, is_shipped=True)
    return find(name, beside=source.beside)


def missing(name: str | Path, *, beside: str | None = None) -> Problem:
    """Return the problem of a manifest that `find` does not find."""
    names = list(shipped())
    if (leads := _leads_nowhere(_beside(name, beside))) is not None:
        return Problem(message=f'"{name}" is a symbolic link that leads {leads}')
    try:
        entries = sorted(Path(_beside(name, beside)).parent.glob("*.toml"))
    except (OSError, ValueError):
        entries = []
    siblings = [str(Path(name).parent / entry.name) for entry in entries]
    near = get_close_matches(str(name), [*names, *siblings], n=1, cutoff=0.6)
    hints = [f'did you mean "{near[0]}"?'] if near else []
    hints += ["shipped manifests: " + ", ".join(names)] if names else []
    return Problem(
        message=f'there is no file "{name}" and no shipped manifest of that name', hint=" ".join(hints) or None
    )


def _leads_nowhere(file: str) -> str | None:
    """Return where a symbolic link leads that leads to no file; None of anything else."""
    if not os.path.islink(file):
        return None
    try:
        Path(file).stat()
    except FileNotFoundError:
        return f'to "{os.readlink(file)}", which is not there'
    except OSError as error:
        return "round in a circle" if error.errno == errno.ELOOP else f"nowhere: {error.strerror}"
    return None


def missing_base(name: str, source: Source) -> Problem:
    """Return the problem of a base that `find_base` does not find."""
    return missing(name, beside=source.beside)


def read_source(source: Source) -> str | Problem:
    """Return the text of a manifest, or why it cannot be read."""
    assert source.content is not None, "text is not read"
    try:
        kind = kind_of_file(source.path) if source.path else None
        if kind is not None:
            return _unreadable(source, f"it is {kind}")
        with source.content.open("rb") as file:
            content = file.read(_LARGEST_BYTES + 1)
    except OSError as error:
        return _unreadable(source, (error.strerror or str(error)).lower())
    if len(content) > _LARGEST_BYTES:
        return _unreadable(source, "it is larger than 1 MiB")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = content[: error.start]
        return Problem(
            message=f"is not UTF-8: byte 0x{content[error.start]:02x}",
            file=source.file,
            line=before.count(b"\n") + 1,
            column=len(before.rpartition(b"\n")[2].decode("utf-8-sig")) + 1,
            hint="save the file as UTF-8",
        )


def kind_of_file(path: Path) -> str | None:
    """Return `a FIFO`, `a device`, `a socket` or `a folder`; None for a file that can be read to its end.

    Raises:
        OSError: There is nothing to look at.
    """
    mode = path.stat().st_mode
    return next((words for is_kind, words in _KINDS if is_kind(mode)), None)


def _unreadable(source: Source, reason: str) -> Problem:
    return Problem(message=f"cannot be read: {reason}", file=source.file)


def _beside(name: str | Path, beside: str | None) -> str:
    return str(name) if beside is None else os.path.normpath(os.path.join(os.path.dirname(beside), name))
