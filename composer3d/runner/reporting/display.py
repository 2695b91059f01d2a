"""Progress display of a run: a progress bar on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["Display"]

REDRAW_S = 0.25
_NARROW = 100  # columns of a terminal that hold step, bar, figures and time


class Display:
    """Shows the progress of a run; ranks other than the first have a silent one.

    Args:
        num_steps: Of the whole run.
        log_every: Steps between lines where standard error is no terminal.
        silent: Show nothing.
    """

    def __init__(self, num_steps: int, *, log_every: int = 10, silent: bool = False) -> None:
        from rich.console import Console

        self._num_steps, self._log_every = num_steps, log_every
        # In a notebook rich shows HTML by the kernel's own connection, which a forked rank has not. A folder ":x:" is
        # none of rich's emoji, and their table takes as long to import as a tenth of torch.
        self._console = Console(
            stderr=True, quiet=silent, highlight=False, emoji=False, soft_wrap=True, force_jupyter=False
        )
        self._is_bar = self._console.is_terminal and not silent
        self._progress: Progress | None = None
        self._task: Any = None
        self._redraw_at = 0.0

    def message(self, text: str) -> None:
        """Show a line."""
        (self._progress.console if self._progress else self._console).print(text, markup=False)

    def step(self, row: Mapping[str, Any]) -> None:
        """Show a step's row of metrics."""
        step = int(row["step"])
        if self._is_bar:
            self._advance(step, _figures(row))
        elif step % self._log_every == 0 or step in (1, self._num_steps):
            self.message(f"step {step}/{self._num_steps}  {_figures(row)}")

    def _advance(self, step: int, figures: str) -> None:
        if self._progress is None:
            self._progress, self._task = self._start(step)
        self._progress.update(self._task, completed=step, figures=figures)
        if time.monotonic() > self._redraw_at or step == self._num_steps:
            self._progress.refresh()
            self._redraw_at = time.monotonic() + REDRAW_S

    def _start(self, step: int) -> tuple[Progress, Any]:
        from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
        from rich.table import Column

        # Where there is little room the step stays, and the figures lose their end.
        width = len(f"step {self._num_steps}/{self._num_steps}")
        total = f"{{task.completed:>{len(str(self._num_steps))}}}/{self._num_steps}"
        columns: list[ProgressColumn] = [
            TextColumn(f"step {total}", markup=False, table_column=Column(no_wrap=True, min_width=width)),
            TextColumn("{task.fields[figures]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
        ]
        if self._console.width >= _NARROW:
            columns.insert(1, BarColumn(bar_width=max(10, min(40, self._console.width - 96))))
            columns.append(TimeRemainingColumn())
        progress = Progress(
            *columns,
            console=self._console,
            auto_refresh=False,  # redrawn by the loop: a thread would wake up in the middle of steps
        )
        progress.start()
        return progress, progress.add_task("train", total=self._num_steps, completed=step, figures="")

    def close(self) -> None:
        """Leave the bar as it is and give the terminal back."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def __enter__(self) -> Display:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _figures(row: Mapping[str, Any]) -> str:
    """Return loss, rates and what else is worth seeing."""
    loss = row["loss"]
    shown = [f"loss {loss:.4f}" if abs(loss) < 1e6 else f"loss {loss:.3e}"]
    if row.get("evaluation_loss") is not None:
        shown.append(f"evaluation {row['evaluation_loss']:.4f}")
    shown += [f"norm {row['grad_norm']:.3f}", f"lr {row['lr']:.2e}"]
    shown += [f"{row[f'{unit}_per_s']:,.0f} {unit}/s" for unit in ("tokens", "samples") if f"{unit}_per_s" in row]
    if "mfu" in row:
        shown.append(f"MFU {row['mfu']:.1%}")
    if row.get("skipped_steps"):
        shown.append(f"skipped {row['skipped_steps']}")
    return "  ".join(shown)
