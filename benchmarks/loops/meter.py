"""What a loop measures of itself: wall-clock and CPU time of every step, losses, and the peak of resident memory."""

from __future__ import annotations

import json
import os
import resource
import sys
import time

from torch import Tensor

__all__ = ["Meter"]


class Meter:
    """Measures steps. With `turns` on the command line a line on standard input starts each of them, so that several
    worlds can run in turn, and one on standard output says that it is over.
    """

    def __init__(self) -> None:
        self._turns = "turns" in sys.argv
        self._step_s: list[float] = []
        self._cpu_s: list[float] = []
        self._losses: list[float] = []
        self._start()

    def _start(self) -> None:
        if self._turns:
            sys.stdout.write("\n")
            sys.stdout.flush()
            sys.stdin.readline()
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def step(self, loss: Tensor) -> None:
        """End a step."""
        self._losses.append(float(loss.detach()))
        self._step_s.append(time.perf_counter() - self._wall)
        self._cpu_s.append(time.process_time() - self._cpu)
        self._start()

    def report(self) -> None:
        """Write one line of JSON."""
        result = {
            "rank": int(os.environ.get("RANK", "0")),
            "step_s": self._step_s,
            "cpu_s": self._cpu_s,
            "losses": self._losses,
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()
