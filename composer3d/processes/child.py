"""Work in a forked child, so that this process stays one that has only imported and may fork ranks."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from composer3d.errors import ComposerError
from composer3d.processes.machine_errors import machine_error

__all__ = ["Child", "ChildError"]


class ChildError(Exception):
    """The child failed otherwise than by a mistake of the user.

    Its text is the traceback, what the machine lacks, or how the child ended.
    """


class Child:
    """A forked child that computes one JSON object.

    Args:
        function: What it computes.

    Raises:
        ForkError: This process has run tensor operators, so the child would hang.
    """

    def __init__(self, function: Callable[[], Mapping[str, Any]]) -> None:
        from composer3d.processes.forking import fork, refuse_unsafe_fork

        refuse_unsafe_fork()
        self._reader, writer = os.pipe()
        self._pid = fork()
        if self._pid == 0:
            os.close(self._reader)
            _answer(function, writer)
        os.close(writer)

    def ready(self) -> bool:
        """Return whether the result can be had without waiting, or nearly so."""
        return bool(select.select([self._reader], [], [], 0)[0])

    def result(self) -> dict[str, Any]:
        """Wait for the result and return it.

        Raises:
            ComposerError: The function raised one.
            ChildError: It raised something else, or its process ended without a result.
        """
        with os.fdopen(self._reader, "rb") as pipe:
            text = pipe.read()
        code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        if not text:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            raise ChildError(f"the process that checks the manifest {how} and left no result")
        answer: dict[str, Any] = json.loads(text)
        if "mistake" in answer:
            raise ComposerError(answer["mistake"])
        if "traceback" in answer:
            raise ChildError(answer["traceback"].rstrip())
        result: dict[str, Any] = answer["result"]
        return result


def _answer(function: Callable[[], Mapping[str, Any]], writer: int) -> None:
    """Write the function's result, and leave; never returns."""
    code = 0
    try:
        try:
            answer: dict[str, Any] = {"result": function()}
        except ComposerError as error:
            answer = {"mistake": str(error)}
        except BaseException as error:
            machine = machine_error(error)
            text = f"{machine}\ntry: {machine.advice}" if machine else traceback.format_exc()
            answer = {"traceback": text}
        sys.stdout.flush()  # what the factory printed
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(json.dumps(answer).encode())
    except BaseException:
        code = 1
    finally:
        os._exit(code)
