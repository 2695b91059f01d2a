"""State of the code that traces depend on: packages as wholes, modules of users, and what is installed."""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from composer3d.processes import own_attribute

__all__ = ["folder_state", "installed_state", "own_modules", "package_folders", "state_of"]

_INSTALLED = frozenset(("site-packages", "dist-packages"))  # folders of packages that do not change while they are used
_METADATA = (".dist-info", ".egg-info", ".egg-link", ".pth")


def package_folders(modules: Iterable[str]) -> list[str]:
    """Return the folders of the packages that modules belong to, but torch's, whose version says as much."""
    names = {name.split(".")[0] for name in modules} - {"torch"}
    packages = [sys.modules[name] for name in sorted(names) if name in sys.modules]
    return [folder for package in packages for folder in own_attribute(package, "__path__") or ()]


def own_modules(folders: Iterable[str]) -> Iterator[tuple[str, Path]]:
    """Yield the loaded modules that are neither installed nor inside of these folders: the user's own.

    Args:
        folders: Of packages that are digested as wholes.
    """
    known = tuple(os.path.join(folder, "") for folder in (*folders, *sysconfig.get_paths().values()))
    for name, module in list(sys.modules.items()):
        file = None if name.startswith("torch.") else own_attribute(module, "__file__")  # torch.ops has none that is
        if isinstance(file, str) and not file.startswith(known) and _INSTALLED.isdisjoint(Path(file).parts):
            yield name, Path(file)


def folder_state(folder: str | Path, *, suffix: str = "", most: int | None = None) -> str | None:
    """Return a digest of the names, sizes and times of the files in a folder and below.

    Args:
        folder: To walk.
        suffix: Of the files that count.
        most: None is returned for more files than these.
    """
    digest, number = hashlib.sha256(), 0
    for place, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted(name for name in files if name.endswith(suffix)):
            digest.update(state_of(Path(place, name)).encode())
            number += 1
        if most is not None and number > most:
            return None
    return digest.hexdigest()


def state_of(file: Path) -> str:
    """Return a file's name, size and time."""
    try:
        state = file.stat()
    except OSError:  # inside an archive
        return str(file)
    return f"{file} {state.st_size} {state.st_mtime_ns}"


def installed_state() -> str:
    """Return a digest of the distributions that are installed: names, versions, and when their metadata was written."""
    digest = hashlib.sha256()
    for folder in sys.path:
        with suppress(OSError), os.scandir(folder or ".") as entries:
            found = sorted(entry.path for entry in entries if entry.name.endswith(_METADATA))
            digest.update("\n".join(state_of(Path(path)) for path in found).encode())
    return digest.hexdigest()
