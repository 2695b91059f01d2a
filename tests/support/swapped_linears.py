"""A precision that puts other modules in the place of linear layers, and computes the same."""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn

from composer3d import Phase, Transform, hookimpl, plugin


class Other(nn.Module):
    """Replacement of a linear layer."""

    def __init__(self, layer):
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


@plugin(family="precision")
class Swapped:
    """Replaces every linear layer, those that a pipeline counts the calls of too."""

    @hookimpl
    def composer3d_convert(self, context):
        return Transform(name="swapped", phase=Phase.CONVERT, select=self._select, apply=self._apply)

    def _select(self, model, context):
        return [fqn for fqn, module in model.named_modules() if isinstance(module, nn.Linear)]

    def _apply(self, model, fqns, context):
        for fqn in fqns:
            parent, _, name = fqn.rpartition(".")
            setattr(model.get_submodule(parent), name, Other(model.get_submodule(fqn)))
        return fqns
