"""State of the code that traces depend on: packages as wholes, modules of users, and what is installed."""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

from composer3d.processes import own_attribute

__all__ = [
    "folder_state",
    "installed_state",
    "is_installed",
    "is_own",
    "is_own_file",
    "library_environment",
    "own_modules",
    "package_folders",
    "plugin_packages",
    "state_of",
]


_INSTALLED = frozenset(("site-packages", "dist-packages"))  # folders of packages that do not change while they are used
_METADATA = (".dist-info", ".egg-info", ".egg-link", ".pth")
# Not `data`: that is the prefix, below which a user may work, as in /usr/src.
_SCHEME = ("stdlib", "platstdlib", "purelib", "platlib", "scripts")
_ENVIRONMENTS = ("TORCH", "PYTORCH", "HF_", "TRANSFORMERS_", "COMPOSER3D_", "XDG_", "CUDA_", "HIP_", "ROCR_")


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
    known = tuple(os.path.join(folder, "") for folder in folders)
    for name, module in list(sys.modules.items()):
        file = None if name.startswith("torch.") else own_attribute(module, "__file__")  # torch.ops has none that is
        if isinstance(file, str) and not file.startswith(known) and not is_installed(file):
            yield name, Path(file)


def is_own(module: str | None) -> bool:
    """Return whether a module of this name is the user's own: not installed, of Python, of torch, or of plugins."""
    name = module or ""
    top = name.partition(".")[0]
    if top == "torch" or top in plugin_packages():
        return False
    file = own_attribute(sys.modules.get(name), "__file__")
    return not is_installed(file) if isinstance(file, str) else top not in sys.stdlib_module_names


def is_own_file(file: str) -> bool:
    """Return whether a file of Python is the user's own, as `is_own` says it of a module."""
    known = tuple(os.path.join(folder, "") for folder in package_folders(plugin_packages()))
    return not file.startswith(known) and not is_installed(file)


@cache
def is_installed(file: str) -> bool:
    """Return whether a file belongs to Python, or to a package that is installed."""
    return file.startswith(_python_folders()) or not _INSTALLED.isdisjoint(file.split(os.sep))


@cache
def _python_folders() -> tuple[str, ...]:
    """Return the folders of this Python's own files, and of what is installed in it."""
    paths = sysconfig.get_paths()
    return tuple(os.path.join(paths[name], "") for name in _SCHEME)


def library_environment(*, but: str) -> list[tuple[str, str]]:
    """Return what torch, Hugging Face and composer3d read of the environment.

    Args:
        but: Name of a variable that is left out.
    """
    return sorted((name, value) for name, value in os.environ.items() if name.startswith(_ENVIRONMENTS) and name != but)


def plugin_packages() -> tuple[str, ...]:
    """Return the names of composer3d and of packages with plugins that are installed, wherever their files are."""
    return _plugin_packages(tuple(sys.path))


@cache
def _plugin_packages(_: tuple[str, ...]) -> tuple[str, ...]:
    """Return them for the folders that Python imports from; what is installed later is read as a user's own code is."""
    from composer3d.registry import Catalogue

    return ("composer3d", *Catalogue.installed().packages())


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
