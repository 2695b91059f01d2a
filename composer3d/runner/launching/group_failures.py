"""The failures of groups since the last step that was made, and which of them ended a run."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Literal

from composer3d.runner.reporting.failures import Ending, FailureReport

__all__ = ["GroupFailures", "loss_of"]


class GroupFailures:
    """Reports of groups that were lost.

    Args:
        private: This launcher's private folder.
        num_ranks: Ranks per group.
    """

    def __init__(self, private: Path, num_ranks: int) -> None:
        self._private, self._num_ranks = private, num_ranks
        self._reports: list[tuple[int, FailureReport]] = []  # with the group's last committed step

    def add(self, report: FailureReport, *, committed: int, num_committed: int) -> None:
        """Keep a report, and none that the run has survived.

        Args:
            report: Of a lost group.
            committed: Step at whose commit it last took part.
            num_committed: Of all steps.
        """
        self._reports = [*self._unsurvived(num_committed), (committed, report)]

    def clear(self) -> None:
        """Forget all: the groups start again."""
        self._reports.clear()

    def cause(self, num_committed: int) -> FailureReport:
        """Return what failed first since the last step that a group has made."""
        reports = [report for _, report in self._unsurvived(num_committed)]
        causes = [report for report in reports if not report.consequence] or reports
        return min(causes, key=lambda report: report.time_ns) if causes else self.about_all("every group is lost")

    def about_all(self, message: str, *, is_recorded: bool = True) -> FailureReport:
        """Return a report of no rank."""
        anyone = Ending(rank=0, exit_code=None, time_ns=time.time_ns())
        report = FailureReport.from_ending(anyone, world_size=self._num_ranks, folder=self._private)
        kind: Literal["interrupted", "stuck"] = "interrupted" if message == "interrupted" else "stuck"
        report = replace(report, rank=None, pid=os.getpid(), phase=None)
        return replace(report, kind=kind, message=message, is_recorded=is_recorded)

    def _unsurvived(self, num_committed: int) -> list[tuple[int, FailureReport]]:
        """Return the failures after which no group has made a step."""
        return [each for each in self._reports if each[0] == num_committed]


def loss_of(report: FailureReport | None) -> str:
    """Return a report as the reason of a group's loss; an empty text where there is none."""
    return "" if report is None else report.render().rstrip().removeprefix("run failed: ")
