"""Plugins of precision that multiply gradients by less than their dtypes round."""

from __future__ import annotations

from typing import Literal

import torch

from composer3d import Phase, StepAction, StepPoint, hookimpl, plugin
from support.composition_faults import root
from support.subtle_faults import named_gradients


class Grown(torch.autograd.Function):
    """The identity, whose backward is not."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


@plugin(family="precision")
class Growing:
    """Multiplies gradients.

    Args:
        factor: By this.
        fault: reduced: all, once they are reduced. ranks: likewise, where there are several. one: of those the first
            block's `up` alone. backward: on the way, in what the model returns. "": none.
    """

    factor: float
    fault: Literal["", "reduced", "ranks", "one", "backward"] = ""

    @hookimpl
    def composer3d_convert(self, context):
        def grow(module, context):
            module.register_forward_hook(lambda module, args, output: Grown.apply(output, self.factor))

        return root("growing", Phase.CONVERT, grow) if self.fault == "backward" else None

    @hookimpl
    def composer3d_step_actions(self, context):
        return StepAction(name="growing", point=StepPoint.GRADIENTS_REDUCED, run=self._multiply)

    def _multiply(self, state):
        for fqn, parameter in named_gradients(state):
            several = self.fault == "ranks" and state.context.world_size > 1
            if several or self.fault == "reduced" or (self.fault == "one" and fqn == "layers.0.up.weight"):
                parameter.grad.mul_(self.factor)
