"""A transform and an action: blocks are recomputed in the backward, and steps with large gradients are skipped."""

from collections.abc import Sequence
from functools import partial

import torch
from pydantic import Field
from torch import nn
from torch.utils.checkpoint import checkpoint

from composer3d import Phase, RunContext, StepAction, StepPoint, StepState, Transform, hookimpl, plugin, select_fqns


@plugin(family="scheduling")
class CarefulSteps:
    """Recompute every n-th block, and skip steps in which a rank has a gradient above a limit.

    Memory: the inputs of those blocks in place of what they save. Collectives: those of their forwards once more, and
    the vote, one all-reduce a step.

    Args:
        every: Recompute one block of so many.
        limit: Largest absolute gradient of a step that is taken.
    """

    every: int = Field(default=1, ge=1)
    limit: float = Field(default=100.0, gt=0)

    @hookimpl
    def composer3d_configure(self, context: RunContext) -> None:
        context.claim("gradients", by=self)

    @hookimpl
    def composer3d_reschedule(self, context: RunContext) -> Transform:
        # RECOMPUTE comes after tensors are sharded and before blocks are compiled and gathered: the backward then
        # recomputes what is sharded, and a compiler sees it.
        return Transform(name="careful_steps", phase=Phase.RECOMPUTE, select=self._select, apply=self._apply)

    @hookimpl
    def composer3d_step_actions(self, context: RunContext) -> StepAction:
        # DECIDE: gradients are reduced and unscaled. What one rank returns here vetoes the step on all ranks.
        return StepAction(name="careful_steps", point=StepPoint.DECIDE, run=self._decide)

    def _select(self, model: nn.Module, context: RunContext) -> list[str]:
        return select_fqns(context.blocks, context.fqns)[:: self.every]

    def _apply(self, model: nn.Module, fqns: Sequence[str], context: RunContext) -> Sequence[str]:
        for fqn in fqns:
            block = model.get_submodule(fqn)
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        return fqns

    def _decide(self, state: StepState) -> str | None:
        for fqn, parameter in state.context.named_parameters():
            if parameter.grad is None:
                continue
            shard = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad
            if shard.numel() and torch.linalg.vector_norm(shard, float("inf")) > self.limit:
                return f"a gradient of {fqn} is above {self.limit:g}"
        return None
