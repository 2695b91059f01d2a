"""Import of torch while a thread loads its library, which takes a fifth of the time that the import takes."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import sys
import threading
from pathlib import Path

__all__ = ["import_torch"]

# As torch loads them, in this order: what others depend on for all to see, then its operators, 400 MB of them.
_LIBRARIES = (("libtorch_global_deps.so", os.RTLD_NOW | os.RTLD_GLOBAL), ("libtorch_cpu.so", os.RTLD_NOW))
# Whose own libraries sympy imports; the loader has one lock, and whoever wants to load another waits for torch's.
_WITH_LIBRARIES = ("array", "cmath", "decimal", "dis", "random", "shutil", "subprocess", "typing", "unicodedata")


def import_torch() -> None:
    """Import torch, and sympy while a thread loads torch's library: DTensor needs both, and Python code only one.

    The loader needs no interpreter, and sympy's import little else: on two cores 0.2 s less. Nothing is done where
    torch was imported, and where there is no such file, or one core, torch is imported as it ever is. The files of its
    library are private (torch 2.11-2.15).
    """
    if "torch" in sys.modules:
        return
    folder = _library_folder()
    if folder is not None and len(os.sched_getaffinity(0)) > 1:
        for name in _WITH_LIBRARIES:
            importlib.import_module(name)
        thread = threading.Thread(target=_load, args=(folder,))
        thread.start()
        try:
            importlib.import_module("sympy")
        finally:
            thread.join()
    importlib.import_module("torch")


def _library_folder() -> Path | None:
    """Return where torch keeps its library, without importing it."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    folder = Path(found.origin).parent / "lib"
    return folder if all((folder / name).is_file() for name, _ in _LIBRARIES) else None


def _load(folder: Path) -> None:
    """Load torch's library; where that is impossible, `import torch` does it otherwise, or says why."""
    # The function itself: ctypes.CDLL would hold the interpreter while it loads.
    load = getattr(ctypes.CDLL(None), "dlopen", None)
    if load is None:
        return
    load.restype, load.argtypes = ctypes.c_void_p, [ctypes.c_char_p, ctypes.c_int]
    for name, how in _LIBRARIES:
        if not load(os.fsencode(folder / name), how):
            return
