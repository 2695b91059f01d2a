"""From `use = "module:name"` to the object: every Python reference of a manifest goes through here."""

from __future__ import annotations

import importlib
import pkgutil
import re
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from composer3d.errors import ReferenceFailure, did_you_mean

__all__ = ["resolve_reference"]

_REFERENCE = re.compile(r"([^\W\d]\w*(?:\.[^\W\d]\w*)*):([^\W\d]\w*(?:\.[^\W\d]\w*)*)")


def resolve_reference(reference: str, folder: Path) -> Any:
    """Import the object that `module:name` names.

    The manifest's folder is put in front of `sys.path` and stays there: modules may import their neighbours later,
    and pickled objects must find their modules again.

    Args:
        reference: `module:name`, both dotted if need be.
        folder: Of the manifest.

    Raises:
        ReferenceFailure: It is no reference, there is no such module, importing it fails, it comes from elsewhere
            than the manifest's folder which also has it, or it has no such name.
    """
    match = _REFERENCE.fullmatch(reference)
    if match is None:
        raise ReferenceFailure(
            f'"{reference}" is not a reference', hint='write "module:name", for example "my_model:build"'
        )
    folder = folder.absolute()
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
        importlib.invalidate_caches()
    found: Any = _import(match[1], folder)
    holder = match[1]
    for name in match[2].split("."):
        found = _attribute(found, name, holder)
        holder = f"{holder}.{name}"
    return found


def _import(name: str, folder: Path) -> ModuleType:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _import_failure(name, folder, error) from error
        raise ReferenceFailure(f'there is no module "{error.name}"', hint=_near_modules(error.name, folder)) from None
    except (Exception, SystemExit) as error:
        raise _import_failure(name, folder, error) from error
    _check_origin(name.partition(".")[0], folder)
    return module


def _near_modules(name: str, folder: Path) -> str | None:
    parent, _, last = name.rpartition(".")
    paths = list(getattr(sys.modules.get(parent), "__path__", [])) if parent else [str(folder)]
    return did_you_mean(last, [module.name for module in pkgutil.iter_modules(paths)])


def _import_failure(name: str, folder: Path, error: BaseException) -> ReferenceFailure:
    said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, SyntaxError) and error.filename:
        file, line, said = error.filename, error.lineno, f"{type(error).__name__}: {error.msg}"
    else:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
        # The user's own line tells more than the library's in which the error ended.
        own = [frame for frame in frames if Path(frame.filename).is_relative_to(folder)]
        others = [frame for frame in frames if frame.filename != __file__] or frames
        file, line = (own or others)[-1].filename, (own or others)[-1].lineno
    shown = Path(file).relative_to(folder) if Path(file).is_relative_to(folder) else file
    return ReferenceFailure(f'the module "{name}" fails when imported, at {shown}:{line}: {said}')


def _check_origin(name: str, folder: Path) -> None:
    """Refuse a module of the same name that was there first: it would be used silently.

    composer3d itself, installed and started inside a checkout of it, is meant as it is installed.
    """
    if name == __name__.partition(".")[0]:
        return
    origin = getattr(sys.modules[name], "__file__", None)
    candidates = [folder / f"{name}.py", folder / name / "__init__.py"]
    here = [candidate for candidate in candidates if candidate.is_file()]
    if here and (origin is None or Path(origin).resolve() not in [candidate.resolve() for candidate in here]):
        raise ReferenceFailure(
            f'the module "{name}" was imported from {origin or "Python itself"}, not from the folder of the manifest',
            hint=f"rename {here[0].relative_to(folder)}",
        )


def _attribute(owner: Any, name: str, shown: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError:
        kind = "module " if isinstance(owner, ModuleType) else ""
        hint = did_you_mean(name, _public_names(owner))
        raise ReferenceFailure(f'{kind}"{shown}" has no "{name}"', hint=hint) from None


def _public_names(owner: Any) -> list[str]:
    """Return what a reference can mean: modules that a module imports are not offered."""
    if isinstance(stated := getattr(owner, "__all__", None), list | tuple):
        return [str(name) for name in stated]
    names = [name for name in dir(owner) if not name.startswith("_")]
    return [name for name in names if not isinstance(getattr(owner, name, None), ModuleType)]
