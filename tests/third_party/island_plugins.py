"""A plugin that owns an axis along which ranks train models of their own, and averages them now and then."""

from __future__ import annotations

import torch
import torch.distributed as dist

from composer3d import Axis, Phase, Role, StepAction, StepPoint, Transform, hookimpl, plugin


@plugin(family="communication", owns=("island",), axes=(Axis(name="island", role=Role.INDEPENDENT),))
class Islands:
    """Average parameters over islands.

    Memory: none. Collectives: one all-reduce a parameter in every `every`-th step.

    Args:
        every: Steps from one average to the next.
    """

    every: int = 2

    @hookimpl
    def composer3d_step_actions(self, context):
        return StepAction(name="islands", point=StepPoint.PARAMETERS_SYNCHRONISED, run=self._average)

    def _average(self, state):
        if (state.step + 1) % self.every:
            return
        group, degree = state.context.mesh.get_group("island"), state.context.degrees["island"]
        for _, parameter in state.context.named_parameters():
            held = getattr(parameter, "to_local", lambda parameter=parameter: parameter.data)()
            with torch.no_grad():
                dist.all_reduce(held, group=group)
                held.div_(degree)


@plugin(family="sharding")
class Spread:
    """Shard parameters over an axis that another plugin owns.

    Args:
        axis: Its name.
    """

    axis: str = "island"

    @hookimpl
    def composer3d_shard(self, context):
        return Transform(
            name="spread",
            phase=Phase.DATA,
            select=lambda model, context: [""],
            apply=lambda model, fqns, context: list(fqns),
            uses=(self.axis,),
        )


@plugin(family="sharding", owns=("island",))
class Rival:
    """Owns what islands own."""
