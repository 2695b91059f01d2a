"""Warnings of many ranks: equal ones are shown once."""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["warning_once"]


def warning_once(folder: Path, function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Run a function, in a rank of its own, so that of all ranks' equal warnings the first alone is shown.

    A proof composes the same model a dozen times, on as many ranks, and a library that warns of it would warn as often.
    Warnings are equal by category and text, log records by logger and text, whatever line they come from. The process
    is changed: it is to end with the function.

    Args:
        folder: Of the record of shown warnings; the same for all processes that share it.
        function: What to run; importable by name where ranks are spawned.
        args: Positional arguments of `function`.

    Memory: a file of no bytes for each warning. Collectives: none.
    """
    shown = folder / "shown"
    shown.mkdir(exist_ok=True)

    def is_first(*parts: str) -> bool:
        name = hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()
        try:
            (shown / name).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def passes(record: logging.LogRecord) -> bool:
        return record.levelno < logging.WARNING or is_first(record.name, str(record.msg), str(record.args))

    show = warnings.showwarning

    def show_first(message: Warning | str, category: type[Warning], *where: Any, **options: Any) -> None:
        if is_first(category.__name__, str(message)):
            show(message, category, *where, **options)

    # Libraries that a rank imports make their loggers then.
    class Logger(logging.getLoggerClass()):  # type: ignore[misc]
        def __init__(self, name: str, level: int = logging.NOTSET) -> None:
            super().__init__(name, level)
            self.addFilter(passes)

    warnings.showwarning = show_first
    logging.setLoggerClass(Logger)
    for logger in [logging.root, *logging.root.manager.loggerDict.values()]:
        if isinstance(logger, logging.Logger):
            logger.addFilter(passes)
    return function(*args)
