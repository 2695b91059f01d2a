"""Source lines of the user's code, for messages about a model factory."""

from __future__ import annotations

import functools
import traceback
from pathlib import Path
from types import FrameType

__all__ = ["is_torch", "place_of_error", "user_place"]

_OWN = (f"{Path(__file__).parent}/", f"{Path(__file__).parent.parent / 'torch_compat'}/")


@functools.lru_cache(maxsize=1024)
def is_torch(filename: str) -> bool:
    """Return whether a source file belongs to torch itself: asked of few files, thousands of times for a model."""
    import torch

    return filename.startswith(str(Path(torch.__file__).parent) + "/")


def user_place(frame: FrameType | None) -> str:
    """Return `file:line: ` of the innermost frame that is neither torch's nor the recorder's.

    Below the recorder only torch may have run, if the factory is a class of torch: then its outermost frame counts.
    """
    place = ""
    while frame is not None:
        filename = frame.f_code.co_filename
        if filename.startswith(_OWN):
            if frame.f_code.co_name == "record":
                break
        else:
            place = f"{filename}:{frame.f_lineno}: "
            if not is_torch(filename):
                break
        frame = frame.f_back
    return place


def place_of_error(error: BaseException) -> str:
    """Return `file:line: ` of the innermost frame of a traceback that is neither torch's nor the recorder's.

    Nor is it the method that refuses to set an attribute of a frozen dataclass, which has no file.
    """
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        filename = frame.f_code.co_filename
        is_generated = filename == "<string>" and frame.f_code.co_name in ("__setattr__", "__delattr__")
        if not is_generated and not filename.startswith(_OWN) and not is_torch(filename):
            place = f"{filename}:{line}: "
    return place
