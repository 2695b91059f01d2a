"""Faults of an exchange of tokens between experts: each passes every other test of a run."""

from __future__ import annotations

from typing import Literal

import torch
from composer3d_plugins.sharding.expert_parallel import stacked_experts, token_exchange

from composer3d import Phase, Transform, hookimpl, plugin


@plugin(family="profiling")
class Misrouted:
    """Changes what experts of other ranks compute, or what comes back.

    Args:
        fault: router: weights pass no gradient. twice: gradients of experts are divided once more. position: results
            come back to the neighbours of their tokens. weights: those of a token's experts change places. side:
            weights are applied to tokens, and not to results. dropped: a token's results do not come back. recomputed:
            where a block is recomputed, tokens choose the experts of their neighbours.
    """

    fault: Literal["router", "twice", "position", "weights", "side", "dropped", "recomputed"]

    @hookimpl
    def composer3d_reschedule(self, context):
        if context.degrees["ep"] == 1:
            return None
        return Transform(name="misrouted", phase=Phase.RECOMPUTE, select=_experts, apply=self._apply)

    def _apply(self, model, fqns, context):
        if self.fault == "twice":
            stacked_experts.send_tokens = lambda *given, degree, **options: token_exchange.send_tokens(
                *given, degree=degree**2, **options
            )
        for fqn in fqns:
            module = model.get_submodule(fqn)
            module.forward = self._around(module.forward)
        return fqns

    def _around(self, forward):
        def faulty(hidden, index, weights):
            if self.fault == "router":
                weights = weights.detach()
            if self.fault == "weights":
                weights = weights.flip(1)
            if self.fault == "recomputed" and torch._C._current_graph_task_id() != -1:
                index = index.roll(1, 0)
            if self.fault == "side":
                choices = range(index.shape[1])
                ones = torch.ones_like(weights[:, :1])
                return sum(forward(hidden * weights[:, k : k + 1], index[:, k : k + 1], ones) for k in choices)
            out = forward(hidden, index, weights)
            if self.fault == "dropped":
                out = torch.cat([torch.zeros_like(out[:1]), out[1:]])
            return out.roll(1, 0) if self.fault == "position" else out

        faulty.composer3d_eager = True
        return faulty


def _experts(model, context):
    return [fqn for fqn in context.fqns if fqn.endswith(".experts")]
