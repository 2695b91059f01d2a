"""Writing of a run of several groups of ranks: the group that leads writes, and one that takes over what is missing."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from composer3d.runner.reporting.display import Display
from composer3d.runner.reporting.metrics import MetricsFile

if TYPE_CHECKING:
    from composer3d import Composition

__all__ = ["SharedWriting"]

_KEPT = 64  # rows: a group that led was lost before it wrote the last of them


class SharedWriting:
    """Metrics and display of a run, which one rank writes.

    Every group computes the same rows. The first one that takes part writes them; where it is lost, the next one
    writes what the file lacks.

    Args:
        run: The composition.
        metrics: The file.
        display: For the user.
    """

    def __init__(self, run: Composition, metrics: MetricsFile, display: Display) -> None:
        self._run, self._metrics, self._display = run, metrics, display
        self._rows: deque[Mapping[str, Any]] = deque(maxlen=_KEPT)
        self._has_led = False

    @property
    def leads(self) -> bool:
        """Whether this rank's group is the one that writes."""
        return self._run.replicas is None or self._run.replicas.leads

    @property
    def is_first(self) -> bool:
        """Whether this rank writes."""
        return self._run.context.rank == 0 and self.leads

    def message(self, text: str) -> None:
        """Show a line."""
        if self.leads:
            self._display.message(text)

    def begin(self, num_steps: int) -> None:
        """Drop the rows of steps that are repeated."""
        self._metrics.keep(num_steps)
        self._has_led = True

    def row(self, row: Mapping[str, Any]) -> None:
        """Write a step's row, and show it."""
        if self._run.replicas is not None:
            self._rows.append(row)
        if self.is_first:
            if self._has_led:
                self._metrics.write(row)
            else:
                self._take_over()
        elif self._has_led:
            self._metrics.close()  # the group that leads now may put another file in its place
        self._has_led = self.is_first
        if self.leads:
            self._display.step(row)

    def _take_over(self) -> None:
        """Write the rows that the group which led before has not written."""
        last = self._metrics.last_step()
        for row in self._rows:
            if row["step"] > last:
                self._metrics.write(row)
