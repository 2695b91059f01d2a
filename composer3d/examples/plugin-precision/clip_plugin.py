"""State in checkpoints: a moving average that a resumed run goes on with."""

from typing import Any

import torch
from pydantic import Field

from composer3d import RunContext, StepAction, StepPoint, StepState, hookimpl, plugin


class Average:
    """A moving average of each parameter's largest gradient: `state_dict` and `load_state_dict` are all it needs."""

    def __init__(self) -> None:
        self.by_fqn: dict[str, float] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"by_fqn": dict(self.by_fqn)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.by_fqn = dict(state["by_fqn"])


# What changes numbers on purpose belongs to this family: verify leaves it out in float64, where it compares gradients
# with one device tightly, and gives it to the one device too in the run's own dtypes.
@plugin(family="precision")
class MovingClip:
    """Clamp every gradient to a multiple of the moving average of its parameter's largest one.

    Memory: a number a parameter. Collectives: one all-reduce of those numbers over every axis above 1 and step.

    Args:
        factor: Multiple of the average.
        decay: What is left of the average in each step.
    """

    factor: float = Field(default=2.0, gt=0)
    decay: float = Field(default=0.9, ge=0, lt=1, examples=[0.5])

    @hookimpl
    def composer3d_configure(self, context: RunContext) -> None:
        # Instances are frozen, and nothing is kept in a module: what a run remembers is in context.state.
        context.state[self] = Average()
        context.claim("gradients", by=self)

    @hookimpl
    def composer3d_state(self, context: RunContext) -> dict[str, Average]:
        return {"average": context.state[self]}

    @hookimpl
    def composer3d_step_actions(self, context: RunContext) -> StepAction:
        return StepAction(name="moving_clip", point=StepPoint.UNSCALED, run=self._clip)

    def _clip(self, state: StepState) -> None:
        average = state.context.state[self].by_fqn
        for fqn, parameter in state.context.named_parameters():
            if parameter.grad is None:
                continue
            # A DTensor's maximum is that of the whole tensor: the ranks that hold its shards agree on it.
            largest = parameter.grad.detach().abs().max()
            whole = float(largest.full_tensor() if hasattr(largest, "full_tensor") else largest)
            limit = self.factor * average.get(fqn, whole)
            average[fqn] = self.decay * average.get(fqn, whole) + (1 - self.decay) * whole
            shard = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad
            with torch.no_grad():
                shard.clamp_(-limit, limit)
