"""Python references: the object that `use = "module:name"` names in a manifest."""

from __future__ import annotations

import importlib
import pkgutil
import re
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from composer3d.errors import ReferenceFailure, describe_error, did_you_mean, is_interrupt
from composer3d.processes.foreign_code import own_attribute, running

__all__ = ["FILL_IN", "make_importable", "note_extended", "resolve_reference"]

FILL_IN = "FILL_IN"  # module of references that an imported manifest leaves open

_REFERENCE = re.compile(r"([^\W\d]\w*(?:\.[^\W\d]\w*)*):([^\W\d]\w*(?:\.[^\W\d]\w*)*)")


# Folders of manifests that those of a folder extend.
_EXTENDED: dict[Path, list[Path]] = {}


def note_extended(folder: Path, base: Path) -> None:
    """Have modules that manifests of a folder name looked for beside a manifest that they extend too, after their own.

    Args:
        folder: Of the manifest that extends.
        base: Of the one that is extended.
    """
    if base not in _EXTENDED.setdefault(folder, []):
        _EXTENDED[folder].append(base)


def make_importable(folder: Path) -> None:
    """Put a manifest's folder at the end of `sys.path`, where it stays.

    Modules may import their neighbours later, and pickled objects must find their modules again. At the end, so that a
    file `json.py` or `torch.py` beside the manifest never stands in for the module that everybody else means by that
    name.
    """
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
        importlib.invalidate_caches()
    for base in _EXTENDED.pop(folder, ()):  # taken out first: manifests of two folders may extend one another
        make_importable(base)


def resolve_reference(reference: str, folder: Path) -> Any:
    """Import the object that `module:name` names; the manifest's folder is importable from then on.

    Args:
        reference: `module:name`, both dotted if need be.
        folder: Of the manifest.

    Raises:
        ReferenceFailure: It is no reference, there is no such module, importing it fails, whatever it raises, it
            comes from elsewhere than the manifest's folder which also has it, or it has no such name.
    """
    match = _REFERENCE.fullmatch(reference)
    if match is None:
        raise ReferenceFailure(
            f'"{_shortened(reference)}" is not a reference', hint=_form_of(reference, folder.absolute())
        )
    if match[1] == FILL_IN:
        raise ReferenceFailure(
            f'"{reference}" is to be filled in', hint="an import leaves it where its source is silent"
        )
    folder = folder.absolute()
    if match[1].endswith(".py") and _files(match[1].split(".")[0], folder):
        raise ReferenceFailure(f'"{reference}" names a file, not a module', hint=f'write "{match[1][:-3]}:{match[2]}"')
    make_importable(folder)
    holder = match[1]
    with running("imported", reference):
        found: Any = _import(match[1], folder)
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
    except BaseException as error:
        if is_interrupt(error):
            raise
        raise _import_failure(name, folder, error) from error
    _check_origin(name.partition(".")[0], folder)
    return module


def _near_modules(name: str, folder: Path) -> str | None:
    parent, _, last = name.rpartition(".")
    paths = list(own_attribute(sys.modules.get(parent), "__path__") or []) if parent else [str(folder)]
    for link in (Path(path, each) for path in paths for each in (f"{last}.py", last)):
        if link.is_symlink() and not link.exists():
            return f"{link.name} is a link to {link.readlink()}, which is not there"
    return did_you_mean(last, [module.name for module in pkgutil.iter_modules(paths) if module.name != last])


def _import_failure(name: str, folder: Path, error: BaseException) -> ReferenceFailure:
    said = describe_error(error)
    if isinstance(error, SyntaxError) and error.filename:
        file, line, said = error.filename, error.lineno, f"{type(error).__name__}: {error.msg}"
    else:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
        # The innermost line of the user's code is more informative than the library line that raised.
        own = [frame for frame in frames if Path(frame.filename).is_relative_to(folder)]
        others = [frame for frame in frames if frame.filename != __file__] or frames
        last = (own or others)[-1:]
        file, line = (last[0].filename, last[0].lineno) if last else (f"{name}.py", 1)
    shown = Path(file).relative_to(folder) if Path(file).is_relative_to(folder) else file
    return ReferenceFailure(
        f'the module "{name}" fails when imported, at {shown}:{line}: {said}', hint=_hidden_by(error, folder)
    )


def _hidden_by(error: BaseException, folder: Path) -> str | None:
    """Return the hint where a module was looked for in an installed one that has the name of a file in the folder."""
    top = (error.name or "").partition(".")[0] if isinstance(error, ImportError) else ""
    here = _files(top, folder)
    return f"the installed module of that name comes first: rename {here[0].relative_to(folder)}" if here else None


def _files(name: str, folder: Path) -> list[Path]:
    """Return the files of a top-level module in a folder."""
    candidates = [folder / f"{name}.py", folder / name / "__init__.py"]
    return [candidate for candidate in candidates if name and candidate.is_file()]


def _check_origin(name: str, folder: Path) -> None:
    """Refuse a module of the same name that was there first: it would be used silently.

    composer3d itself, installed and started inside a checkout of it, is meant as it is installed.
    """
    if name == __name__.partition(".")[0]:
        return
    origin = own_attribute(sys.modules[name], "__file__")
    here = _files(name, folder)
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
    except BaseException as error:
        if is_interrupt(error):
            raise
        raise ReferenceFailure(f'"{shown}" fails when asked for "{name}": {describe_error(error)}') from error


def _public_names(owner: Any) -> list[str]:
    """Return the objects that a reference can name, without modules that a module imports."""
    if isinstance(stated := getattr(owner, "__all__", None), list | tuple):
        return [str(name) for name in stated]
    found = vars(owner) if isinstance(owner, ModuleType) else dict.fromkeys(dir(owner))
    return [name for name, item in found.items() if not name.startswith("_") and not isinstance(item, ModuleType)]


def _shortened(reference: str) -> str:
    return reference if len(reference) <= 200 else f"{reference[:197]}..."


def _form_of(reference: str, folder: Path) -> str:
    """Return the nearest valid spelling of a reference."""
    path, colon, name = reference.rpartition(":")
    module = path.removesuffix(".py").removeprefix("./").replace("/", ".")
    if colon and _REFERENCE.fullmatch(f"{module}:{name}"):
        return f'write "{module}:{name}"'
    if not colon and _REFERENCE.fullmatch(dotted := ":".join(reference.rsplit(".", 1))):
        return f'write "{dotted}"'
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+(?<!\.py)", reference):
        return f'write "module:name", or for a Hugging Face model model.hf = "{reference}"'
    return 'write "module:name", for example "my_model:build"'
