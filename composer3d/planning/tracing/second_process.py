"""Independent work in a forked process."""

from __future__ import annotations

import base64
import logging
import os
import pickle
from collections.abc import Callable, Hashable, Mapping
from types import TracebackType
from typing import Any, TypeVar

from composer3d.errors import ComposerError, ForkError
from composer3d.processes import Child

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
        self._child: Child | None = None

    def __enter__(self) -> Beside:
        """Fork, and start the function."""
        if len(os.sched_getaffinity(0)) > 1:
            try:
                self._child = Child(self._pickled, called="the second process")
            except ForkError as error:
                logger.debug("no second process: %s", error)
        return self

    def _pickled(self) -> dict[str, str]:
        return {"pickled": base64.b64encode(pickle.dumps(self._function())).decode()}

    def result(self) -> Any:
        """Wait for the result; None where there is no process, or where it failed: the reason is then logged."""
        if self._child is None:
            return None
        try:
            text = self._child.result()["pickled"]
        except ComposerError as error:
            logger.info("no result of a second process: %s", error)
            return None
        return pickle.loads(base64.b64decode(text))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Kill the child, if it still runs."""
        if self._child is not None:
            self._child.end()


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
