"""Metrics in TensorBoard."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

from composer3d import PluginError, RunContext, hookimpl, plugin

__all__ = ["TensorBoard"]


@plugin(family="profiling", extra="tensorboard")
class TensorBoard:
    """Write every metric of every step as a scalar for TensorBoard.

    Memory: the events of two minutes.
    Collectives: none; the first rank writes.

    Args:
        folder: Of the event files; default: `tensorboard` in the run's folder.
    """

    folder: str | None = None

    @hookimpl
    def composer3d_configure(self, context: RunContext) -> None:
        """Refuse a run without TensorBoard."""
        if importlib.util.find_spec("tensorboard") is None:
            raise PluginError("tensorboard is not installed", hint='pip install "composer3d[tensorboard]"')

    @hookimpl
    def composer3d_metrics(self, context: RunContext, step: int, metrics: Mapping[str, float]) -> None:
        """Write a step's row; the writer's own thread brings it to the file."""
        if context.rank != 0 or context.purpose != "run":
            return
        if self not in context.state:
            from torch.utils.tensorboard import SummaryWriter

            context.state[self] = SummaryWriter(self.folder or str(context.output / "tensorboard"))
        for name, value in metrics.items():
            if isinstance(value, int | float):
                context.state[self].add_scalar(name, value, step)

    @hookimpl
    def composer3d_close(self, context: RunContext, error: BaseException | None) -> None:
        """Write what is left."""
        if self in context.state:
            context.state[self].close()
