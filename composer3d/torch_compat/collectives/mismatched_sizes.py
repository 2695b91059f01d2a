"""Ends of processes whose gloo thread receives a message of another size than the collective expects."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

__all__ = ["on_mismatched_size"]

# gloo throws it in a thread of its own, where nothing can catch it: C++ ends the process (torch 2.11-2.15).
_EXCEPTION = b"4gloo13EnforceNotMet"
_watchers: list[Callable[[], None]] = []


def on_mismatched_size(answer: Callable[[], None]) -> Callable[[], None]:
    """Call a function before gloo ends this process because a message has another size than it expects.

    The main thread waits in that collective, and can be woken no more. Where `answer` returns, the process aborts.

    Args:
        answer: Called in gloo's thread, of several the newest one first.

    Returns:
        A function that takes `answer` away again.
    """
    _install()
    _watchers.append(answer)

    def remove() -> None:
        if answer in _watchers:
            _watchers.remove(answer)

    return remove


@functools.cache
def _install() -> Any:
    """Register a termination handler of C++, once a process; return what must stay alive for it."""
    try:
        library = ctypes.CDLL("libstdc++.so.6")
        register, kind = library._ZSt13set_terminatePFvvE, library.__cxa_current_exception_type
    except (OSError, AttributeError):  # another C++ library: gloo's abort stays what it is
        return None
    register.argtypes, register.restype, kind.restype = [ctypes.c_void_p], ctypes.c_void_p, ctypes.c_void_p
    form = ctypes.CFUNCTYPE(None)
    before: list[Callable[[], None]] = []

    def terminated() -> None:
        # A type_info is a pointer to its table, and one to its name.
        info = kind()
        name = ctypes.cast(info, ctypes.POINTER(ctypes.c_char_p))[1] if info else None
        if name is not None and _EXCEPTION in name:
            for answer in reversed(_watchers):
                answer()
        before[0]()

    handler = form(terminated)
    before.append(form(register(ctypes.cast(handler, ctypes.c_void_p))))
    return handler
