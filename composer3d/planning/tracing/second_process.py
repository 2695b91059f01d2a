"""Independent work in a forked process."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import traceback
from collections.abc import Callable, Hashable, Mapping
from types import TracebackType
from typing import Any, BinaryIO, TypeVar

from composer3d.errors import ForkError
from composer3d.processes import fork, refuse_unsafe_fork

__all__ = ["Beside", "halve"]

Key = TypeVar("Key", bound=Hashable)
logger = logging.getLogger(__name__)


class Beside:
    """Run a function in a forked process while this one continues.

    Where this process has one core, or cannot be forked, nothing runs, and there is no result.

    Args:
        function: Runs in the child; its result is pickled.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._pid = 0
        self._reader: BinaryIO | None = None

    def __enter__(self) -> Beside:
        """Fork, and start the function."""
        if len(os.sched_getaffinity(0)) == 1:
            return self
        try:
            refuse_unsafe_fork()
        except ForkError as error:
            logger.debug("no second process: %s", error)
            return self
        reader, writer = os.pipe()
        self._pid = fork()
        if self._pid == 0:
            os.close(reader)
            _answer(self._function, writer)
        os.close(writer)
        self._reader = os.fdopen(reader, "rb")
        return self

    def result(self) -> Any:
        """Wait for the result; None where there is no process, or where it failed: the reason is then logged."""
        if self._reader is None:
            return None
        with self._reader as pipe:
            text = pipe.read()
        self._reader = None
        answer, reason = pickle.loads(text) if text else (None, "it was killed")
        if reason:
            logger.info("the second process left no result: %s", reason)
        return answer

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Kill the child, if it still runs."""
        if self._reader is not None:
            self._reader.close()
            os.kill(self._pid, signal.SIGKILL)
        if self._pid:
            os.waitpid(self._pid, 0)


def _answer(function: Callable[[], Any], writer: int) -> None:
    """Write what the function returns and leave; never returns."""
    try:
        try:
            text = pickle.dumps((function(), ""))
        except Exception:
            text = pickle.dumps((None, traceback.format_exc()))
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(text)
    finally:
        os._exit(0)


def halve(costs: Mapping[Key, int], *, begin: tuple[Key, Key]) -> tuple[list[Key], list[Key]]:
    """Divide tasks between two processes, so that both take about as long.

    The costliest task goes first, to the process with the least work (Graham, Bounds on multiprocessing timing
    anomalies, 1969).

    Args:
        costs: Relative cost of every task.
        begin: First task of this process and of the other.

    Returns:
        The tasks of this process and of the other, each in the order of `costs` after its first.
    """
    shares: tuple[list[Key], list[Key]] = [begin[0]], [begin[1]]
    for key in sorted((key for key in costs if key not in begin), key=lambda key: -costs[key]):
        min(shares, key=lambda share: sum(costs[each] for each in share)).append(key)
    order = list(costs)
    for share in shares:
        share[1:] = sorted(share[1:], key=order.index)
    return shares
