"""Standard streams of a command: those that it was started without, and those that cannot be written to."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from typing import TextIO

__all__ = ["OutputError", "discard", "flush", "open_missing_streams", "output", "reserved_output", "writing_output"]

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))  # by their descriptors
_OUTPUT, _ERRORS = 1, 2
_reserved: TextIO | None = None


class OutputError(Exception):
    """Standard output cannot be written to; the text names it, and says why.

    Not one of ComposerError: nothing is wrong with what was asked, or with the run.

    Args:
        error: Of the system.
    """

    def __init__(self, error: OSError) -> None:
        self.is_read_no_more = isinstance(error, BrokenPipeError)
        place = _place(output())
        text = f"standard output{place} cannot be written to: {(error.strerror or str(error)).lower()}"
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        super().__init__(text + ("\ntry: free space there, or write to another file" if is_full else ""))


def open_missing_streams() -> None:
    """Open /dev/null in place of standard streams that this process was started without, as daemons may be.

    Their descriptors too: the next file that is opened would get one of them, and what a library or a child process
    prints would be written into that file.
    """
    for descriptor, (name, mode) in enumerate(_STREAMS):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            os.dup2(opened, descriptor)  # inheritable, which nothing else that is opened is
            os.set_inheritable(descriptor, True)  # dup2 changes nothing where both are one
            if opened != descriptor:
                os.close(opened)
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))


def output() -> TextIO:
    """Return the stream that what a command prints is written to."""
    return sys.stdout if _reserved is None else _reserved


@contextmanager
def reserved_output() -> Iterator[None]:
    """Keep standard output for what the command itself prints: what others write to it goes to standard error.

    Others are a model's code, libraries, also those in C, and processes that are started inside.
    """
    global _reserved
    before = sys.stdout
    with ExitStack() as stack:
        _flush_all(before)
        kept = os.dup(_OUTPUT)
        stack.callback(os.close, kept)
        os.dup2(_ERRORS, _OUTPUT)
        stack.callback(os.dup2, kept, _OUTPUT)
        stack.callback(_flush_all, before)  # into standard error
        stack.enter_context(redirect_stdout(sys.stderr))
        is_own = _descriptor(before) == _OUTPUT
        _reserved = open(kept, "w", encoding=before.encoding, closefd=False) if is_own else before
        try:
            yield
        finally:
            try:
                flush()
            except OutputError:
                discard(_reserved)
                raise
            finally:
                _reserved = None


def _flush_all(stream: TextIO) -> None:
    """Write what Python and C hold for standard output."""
    import ctypes

    with suppress(OSError, ValueError):  # of a stream that a model has closed
        stream.flush()
    ctypes.CDLL(None).fflush(None)


def _descriptor(stream: TextIO) -> int | None:
    try:
        return stream.fileno()
    except (OSError, ValueError):
        return None


@contextmanager
def writing_output() -> Iterator[None]:
    """Raise an OutputError where what is written to standard output meets an error of the system."""
    try:
        yield
    except OSError as error:
        raise OutputError(error) from error


def flush() -> None:
    """Write what standard output still holds.

    Raises:
        OutputError: It cannot be written to.
    """
    with writing_output():
        output().flush()


def discard(stream: TextIO) -> None:
    """Send what a stream still holds to /dev/null: Python writes it as it ends, and would fail once more."""
    with suppress(OSError, ValueError):  # a stream without a descriptor
        descriptor = stream.fileno()
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, descriptor)
        os.close(nothing)


def _place(stream: TextIO) -> str:
    """Return the file that a stream writes to, in brackets; nothing where that is no file, or not known."""
    try:
        path = os.readlink(f"/proc/self/fd/{stream.fileno()}")
    except (OSError, ValueError):
        return ""
    return f" ({path})" if path.startswith("/") else ""
