"""Signals: in a rank they only ask it to stop at the next step boundary; in the parent they are kept for its loop."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from types import FrameType, TracebackType

__all__ = ["ParentSignals", "Preemption", "interrupt_once", "kill"]


class Preemption:
    """A rank's wish to stop: the handler sets a flag and nothing else.

    One signal may reach the ranks in different steps, and some not at all. So no rank acts on its own flag: the loop
    reduces `requested` over all ranks at a step boundary, and they save and return together. Whoever never asks for
    `requested` should not install this: without it the signal ends the process, as usual.

    Args:
        signals: The signals to take: SIGTERM (torchrun, Slurm, Kubernetes), SIGUSR1 (Slurm's `--signal`).

    Memory: none. Collectives: none.

    >>> with Preemption() as preemption:
    ...     preemption.requested
    False
    """

    def __init__(self, signals: Iterable[signal.Signals] = (signal.SIGTERM, signal.SIGUSR1)) -> None:
        self._signals = tuple(signals)
        self._before: dict[signal.Signals, object] = {}
        self._received: signal.Signals | None = None
        self._is_asked = False

    @property
    def requested(self) -> bool:
        """Return whether this process was requested to stop."""
        return self._received is not None or self._is_asked

    def request(self) -> None:
        """Ask for a stop without a signal; from any thread."""
        self._is_asked = True

    @property
    def received(self) -> signal.Signals | None:
        """Return the first signal that requested a stop; None if there was none."""
        return self._received

    def install(self) -> Preemption:
        """Take the signals; only the main thread may."""
        for number in self._signals:
            self._before[number] = signal.signal(number, self._note)
        return self

    def restore(self) -> None:
        """Give the signals back to whoever had them; once one asked to stop, they are ignored from here on.

        A group of processes often gets a signal twice, by its scheduler and by its parent, and the second must not kill
        a rank that has saved and is about to return.
        """
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if self.requested else handler)  # type: ignore[arg-type]
        self._before.clear()

    def __enter__(self) -> Preemption:
        return self.install()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = self._received or signal.Signals(number)


class ParentSignals:
    """The signals of the process that watches the ranks, kept until its loop looks at them.

    SIGTERM, SIGHUP and SIGUSR1 ask the ranks to save and stop, SIGINT (Ctrl-C) stops them; a second SIGINT kills them
    at once, even where the loop waits inside torch. torch's launcher installs handlers of its own whenever it starts
    ranks, so `install` is called again after each start.
    """

    def __init__(self) -> None:
        self.terminate = False
        self.interrupt = False
        self.pids: tuple[int, ...] = ()
        self._owner = os.getpid()
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
        self._before = {number: signal.getsignal(number) for number in numbers}

    def install(self) -> None:
        """Take the signals; SIGQUIT, and SIGHUP under nohup, stay as they were."""
        self.restore()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            if self._before[number] is not signal.SIG_IGN:
                signal.signal(number, self._on_terminate)
        signal.signal(signal.SIGINT, self._on_interrupt)

    def restore(self) -> None:
        """Restore all previous signal handlers."""
        for number, handler in self._before.items():
            if handler is not None:  # None: installed by something other than Python, which cannot be put back
                signal.signal(number, handler)

    def _on_terminate(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:
            os._exit(128 + number)  # a rank that was forked a moment ago and has no handler of its own yet
        self.terminate = True

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:
            os._exit(128 + number)
        if self.interrupt:
            for pid in self.pids:
                kill(pid, signal.SIGKILL)
        self.interrupt = True


def interrupt_once() -> None:
    """Make SIGINT raise KeyboardInterrupt once in this rank.

    A terminal sends Ctrl-C to the ranks, and so does their parent: the second must not interrupt the cleaning up. It
    is also what a rank gets when its parent dies.
    """

    def handler(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, handler)


def kill(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may have ended meanwhile."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
