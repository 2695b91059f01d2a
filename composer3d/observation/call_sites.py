"""Call sites of torch functions: the module whose code calls, and the line of the user's code."""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Container
from pathlib import Path
from types import FrameType

__all__ = ["beside", "caller", "line_of", "raised_in"]


def caller(modules: Container[int]) -> tuple[int | None, str]:
    """Return the identity of the module whose method runs innermost, and file and line of the user's code.

    Found in the frames of this thread: nothing has to be noted where modules are called, and a recomputation, which
    calls no module, has them too.

    Args:
        modules: Identities of modules.
    """
    frame = sys._getframe(1)
    place, owner = "", None
    while frame is not None and (owner is None or not place):
        code = frame.f_code
        if not place and _is_users(code.co_filename, str(frame.f_globals.get("__name__"))):
            place = f"{Path(code.co_filename).name}:{frame.f_lineno}"
        if owner is None and ("self" in code.co_varnames or "self" in code.co_freevars):
            found = id(frame.f_locals.get("self"))
            owner = found if found in modules else None
        if frame.f_back is None:
            break
        frame = frame.f_back
    return owner, place


def beside(error: BaseException | None = None) -> str:
    """Return ` (file:line)` of the user's code that runs innermost, or in which an error was raised; else nothing."""
    place = caller(())[1] if error is None else line_of(error)
    return f" ({place})" if place else ""


def line_of(error: BaseException) -> str:
    """Return file and line of the innermost of the user's code in an error's traceback; empty where none is."""
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if _is_users_frame(frame):
            place = f"{Path(frame.f_code.co_filename).name}:{line}"
    return place


def raised_in(error: BaseException) -> str | None:
    """Return file and line of the user's code that raised an error, or called what did; None where composer3d did."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    is_own = str(frame.f_globals.get("__name__")).partition(".")[0].startswith("composer3d")
    return None if is_own and not _is_users_frame(frame) else line_of(error) or None


def _is_users_frame(frame: FrameType) -> bool:
    return _is_users(frame.f_code.co_filename, str(frame.f_globals.get("__name__")))


@functools.cache
def _is_users(filename: str, module: str) -> bool:
    import torch

    package, _, rest = module.partition(".")
    if package.startswith("composer3d"):  # a plugin's
        return package == "composer3d" and rest.startswith("models.")
    if package in sys.stdlib_module_names or package == "pluggy":  # which call on behalf of others
        return package == "__main__"
    return Path(torch.__file__).parent not in Path(filename).parents and not filename.startswith("<")
