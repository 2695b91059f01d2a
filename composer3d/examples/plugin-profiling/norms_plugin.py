"""Metrics of every step: measured on each rank, reduced over all, written to metrics.jsonl and taken by others."""

import logging
from collections.abc import Mapping, Sequence

import torch
from pydantic import Field

from composer3d import Metric, RunContext, StepAction, StepPoint, StepState, hookimpl, plugin

logger = logging.getLogger(__name__)


@plugin(family="profiling")
class BlockNorms:
    """Report the largest gradient of each block, and log blocks whose gradients vanish.

    Memory: a number a block. Collectives: none of its own; metrics of all plugins share one a row.

    Args:
        every: Measure in one step of so many.
        smallest: Log a block whose largest gradient is below.
    """

    every: int = Field(default=1, ge=1)
    smallest: float = Field(default=1e-12, ge=0)

    @hookimpl
    def composer3d_step_actions(self, context: RunContext) -> StepAction:
        context.state[self] = {}
        # It reads gradients and changes none: a run whose optimizer steps in the backward has none to read.
        return StepAction(name="block_norms", point=StepPoint.BEFORE_OPTIMIZER, run=self._measure)

    @hookimpl
    def composer3d_measure(self, context: RunContext, step: int) -> Sequence[Metric]:
        found = context.state[self]
        return [Metric(name=f"largest_grad_{block}", value=value, reduction="max") for block, value in found.items()]

    @hookimpl
    def composer3d_metrics(self, context: RunContext, step: int, metrics: Mapping[str, float]) -> None:
        # Called with the reduced metrics of all plugins, on every rank.
        small = [name for name in metrics if name.startswith("largest_grad_") and metrics[name] < self.smallest]
        if small and context.rank == 0:
            logger.warning("step %s: gradients vanish in %s", step, ", ".join(small))

    def _measure(self, state: StepState) -> None:
        if state.step % self.every:
            return
        found: dict[str, float] = {}
        for fqn, parameter in state.context.named_parameters():
            if parameter.grad is not None:
                shard = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad
                block = ".".join(fqn.split(".")[:2])
                largest = float(torch.linalg.vector_norm(shard, float("inf"))) if shard.numel() else 0.0
                found[block] = max(found.get(block, 0.0), largest)
        state.context.state[self].clear()
        state.context.state[self].update(found)
