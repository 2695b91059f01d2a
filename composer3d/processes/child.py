"""Work in a forked child, so that this process stays one that has only imported and may fork ranks."""

from __future__ import annotations

import json
import os
import select
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from composer3d.errors import ArgumentError, ComposerError, describe_error
from composer3d.processes.foreign_code import Running, listen
from composer3d.processes.machine_errors import machine_error

__all__ = ["Child", "ChildError", "ForeignCodeError"]


class ChildError(ComposerError):
    """The child failed otherwise than by a mistake of the user.

    Its text says what it raised, with the traceback below, what the machine lacks, or how the child ended.
    """


class ForeignCodeError(ChildError):
    """Code that the manifest names hung, or ended the child's process.

    Args:
        code: The reference that was running, and what it was called for.
        how: What the code did, as a verb phrase of the message.
        hung: Whether it had to be ended.
    """

    def __init__(self, code: Running, how: str, *, hung: bool) -> None:
        self.code, self.how, self.hung = code, how, hung
        super().__init__(f'"{code.reference}" {how} when it was {code.doing}')


class Child:
    """A forked child that computes one JSON object.

    Code of others that runs in it (see `composer3d.processes.foreign_code`) is ended once its time is over.

    Args:
        function: What it computes.
        called: Name of its process in messages.

    Attributes:
        pid: Of the child; 0 once it has ended.

    Raises:
        ForkError: This process has run tensor operators, so the child would hang.
    """

    def __init__(
        self, function: Callable[[], Mapping[str, Any]], *, called: str = "the process that checks the manifest"
    ) -> None:
        from composer3d.processes.forking import fork, refuse_unsafe_fork

        refuse_unsafe_fork()
        self._called = called
        self._reader, writer = os.pipe()
        self._received = bytearray()
        self._answer: dict[str, Any] | None = None
        self._has_ended = False
        self._runs: Running | None = None
        self._since = self._waited_s = 0.0
        self.pid = fork()
        if self.pid == 0:
            os.close(self._reader)
            _answer(function, writer)
        os.close(writer)

    def ready(self) -> bool:
        """Return whether the result can be had without waiting, or nearly so."""
        self._receive(0.0)
        return self._answer is not None or self._has_ended

    def result(self) -> dict[str, Any]:
        """Wait for the result and return it.

        Raises:
            ComposerError: The function raised one.
            ForeignCodeError: Code of others did not come to an end, or ended the process.
            ChildError: It raised something else, or its process ended without a result.
        """
        hung = None
        while self._answer is None and not self._has_ended and hung is None:
            self._receive(self._left_s())
            if self._answer is None and self._left_s() == 0.0:
                hung = self._runs
                os.kill(self.pid, signal.SIGKILL)
        code = self._reaped()
        if hung is not None:
            raise ForeignCodeError(hung, f"had not come to an end after {hung.limit_s:g} s", hung=True)
        if self._answer is None:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            if self._runs is not None:
                raise ForeignCodeError(self._runs, f"ended the process, which {how},", hung=False)
            raise ChildError(f"{self._called} {how} and left no result")
        if "argument" in self._answer:
            mistake = ArgumentError(self._answer["argument"], self._answer["said"])
            mistake.shown = self._answer["shown"]
            raise mistake
        if "mistake" in self._answer:
            raise ComposerError(self._answer["mistake"])
        if "traceback" in self._answer:
            raise ChildError(f"{self._called} failed: {self._answer['traceback'].rstrip()}")
        result: dict[str, Any] = self._answer["result"]
        return result

    def end(self) -> None:
        """Kill the child, unless its result was asked for."""
        if self.pid != 0:
            os.kill(self.pid, signal.SIGKILL)
            self._reaped()

    def _reaped(self) -> int:
        """Wait for the process and return its exit code."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self._reader)
        self.pid = 0
        return code

    def _left_s(self) -> float | None:
        """Return the seconds that are left to the code of others that runs; None where none does.

        Not counted are those in which it could run and other processes had the cores.
        """
        if self._runs is None:
            return None
        waited_s = _waited_s(self.pid) - self._waited_s
        return max(0.0, self._since + self._runs.limit_s + waited_s - time.monotonic())

    def _receive(self, timeout_s: float | None) -> None:
        """Take in what the child wrote: a JSON object a line, notes of what runs before the answer."""
        if self._has_ended or not select.select([self._reader], [], [], timeout_s)[0]:
            return
        data = b""
        while not self._has_ended and b"\n" not in data and select.select([self._reader], [], [], 0.0)[0]:
            data = os.read(self._reader, 1 << 20)
            self._has_ended = not data
            self._received += data
        if b"\n" not in data:
            return
        *lines, self._received = self._received.split(b"\n")
        for line in lines:
            told: dict[str, Any] = json.loads(line)
            if "runs" not in told:
                self._answer = told
            else:
                self._runs = None if told["runs"] is None else Running(**told["runs"])
                self._since, self._waited_s = time.monotonic(), _waited_s(self.pid)


def _waited_s(pid: int) -> float:
    """Return how long a process has waited for a core so far; 0 where the system does not say."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def _answer(function: Callable[[], Mapping[str, Any]], writer: int) -> None:
    """Write what runs, then the function's result, and leave; never returns."""
    from composer3d.processes.forking import flush_output

    code, own = 0, os.getpid()

    def write(content: Mapping[str, Any]) -> None:
        data = json.dumps(content).encode() + b"\n"
        while data:
            data = data[os.write(writer, data) :]

    def note(code: Running | None) -> None:
        if os.getpid() == own:  # what this process forks is watched by itself
            write({"runs": None if code is None else code.to_json()})

    try:
        listen(note)
        try:
            answer: dict[str, Any] = {"result": function()}
        except ArgumentError as error:
            answer = {"argument": error.argument, "said": error.said, "shown": error.shown}
        except ComposerError as error:
            answer = {"mistake": str(error)}
        except BaseException as error:
            machine = machine_error(error)
            seen = f"{describe_error(error)}\n{traceback.format_exc()}"
            text = f"{machine}\ntry: {machine.advice}" if machine else seen
            answer = {"traceback": text}
        flush_output()  # what the factory printed
        write(answer)
    except BaseException:
        code = 1
    finally:
        os._exit(code)
