"""Optimizers and loops that step wrongly: on one rank, twice, from stale shards, or with ties that do not last."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from composer3d import Phase, StepAction, StepPoint, hookimpl, plugin
from support.composition_faults import local, root
from support.subtle_faults import named_gradients


def second(run):
    """Return whether this is the second rank of several."""
    return run.context.rank == 1


class Secretive(torch.optim.AdamW):
    """Steps with other options than its groups have, which is what ranks compare."""

    def __init__(self, params, *, other, **options):
        super().__init__(params, **options)
        self.other = other

    def step(self, closure=None):
        stated = [{name: group[name] for name in self.other} for group in self.param_groups]
        for group in self.param_groups:
            group.update(self.other)
        super().step()
        for group, options in zip(self.param_groups, stated, strict=True):
            group.update(options)


def adamw_with(**other):
    """Return what makes AdamW, which steps with other options on the second rank."""

    def make(run):
        return run.optimizer(Secretive, lr=1e-3, other=other if second(run) else {})

    return make


class Eager(torch.optim.AdamW):
    """Steps a given number of times from the same gradients."""

    def __init__(self, params, *, times=1, **options):
        super().__init__(params, **options)
        self.times = times

    def step(self, closure=None):
        for _ in range(self.times):
            super().step(closure)


def eager(run):
    return run.optimizer(Eager, lr=1e-3, times=2 if second(run) else 1)


@plugin(family="communication")
class Groups:
    """Makes the optimizer.

    Args:
        fault: twice: the embedding is in it twice. "": every parameter is in a group of its own.
    """

    fault: Literal["", "twice"] = ""

    @hookimpl
    def composer3d_optimizer(self, context, cls, groups):
        every = [p for group in groups for p in group["params"]]
        made = cls([{**groups[0], "params": [parameter]} for parameter in every])
        if self.fault:
            made.param_groups[0]["params"].append(made.param_groups[0]["params"][0])
        return made


@plugin(family="communication")
class OnStage:
    """Multiplies the gradients of the last stage, before they are clipped or after.

    Args:
        fault: scale: a loss scale of another size. clip: another norm to clip to.
    """

    fault: Literal["scale", "clip"]

    @hookimpl
    def composer3d_step_actions(self, context):
        point = StepPoint.UNSCALED if self.fault == "scale" else StepPoint.BEFORE_OPTIMIZER
        return StepAction(name="on_stage", point=point, run=self._change)

    def _change(self, state):
        for _, parameter in named_gradients(state) if state.parts[-1].is_last else ():
            local(parameter.grad).mul_(0.5)


@plugin(family="sharding", owns=("dp_replicate",))
class Owners:
    """Gradients are averaged; each rank updates the parameters whose number it has, and hands them to the other.

    Args:
        fault: stale: they are handed over as they were before the step. "": right.
    """

    fault: Literal["", "stale"] = ""

    @hookimpl
    def composer3d_shard(self, context):
        return root("owners", Phase.DATA, lambda module, context: None, averages=("dp_replicate",))

    @hookimpl
    def composer3d_step_actions(self, context):
        context.state[self] = {}
        return [
            StepAction(name="reduce", point=StepPoint.GRADIENTS_LOCAL, run=self._reduce),
            StepAction(name="owned", point=StepPoint.BEFORE_OPTIMIZER, run=self._own),
            StepAction(name="hand_over", point=StepPoint.AFTER_OPTIMIZER, run=self._hand_over),
        ]

    def _reduce(self, state):
        for _, parameter in named_gradients(state):
            dist.all_reduce(parameter.grad, group=state.context.mesh.get_group("dp_replicate"))
            parameter.grad.div_(2)

    def _own(self, state):
        for number, (fqn, parameter) in enumerate(named_gradients(state)):
            state.context.state[self][fqn] = number % 2, parameter.detach().clone()
            if number % 2 != state.context.rank:
                parameter.grad = None

    def _hand_over(self, state):
        with torch.no_grad():
            for fqn, parameter in state.context.named_parameters():
                owner, before = state.context.state[self][fqn]
                sent = before.clone() if self.fault else parameter.detach().clone()
                dist.broadcast(sent, src=owner)
                if owner != state.context.rank:
                    parameter.copy_(sent)


@plugin(family="communication")
class Untied:
    """Unties the head from the embedding after the first step."""

    @hookimpl
    def composer3d_step_actions(self, context):
        return StepAction(name="untied", point=StepPoint.END, run=self._untie)

    def _untie(self, state):
        module = state.parts[0].module
        if module.out.weight is module.tok.weight:
            module.out.weight = nn.Parameter(module.out.weight.detach().clone())


@plugin(family="communication")
class Largest:
    """Leaves of the reduced gradients the largest elements alone, on all ranks alike.

    Args:
        share: What is left of them; 1 is right.
    """

    share: float

    @hookimpl
    def composer3d_step_actions(self, context):
        return StepAction(name="largest", point=StepPoint.GRADIENTS_REDUCED, run=self._cut)

    def _cut(self, state):
        for _, parameter in named_gradients(state):
            grad = local(parameter.grad)
            if grad.numel():
                grad.mul_(grad.abs() >= grad.abs().quantile(1.0 - self.share))


@plugin(family="sharding")
class FrozenHere:
    """Freezes a layer.

    Args:
        ranks: Where.
        phase: before: data-parallel plugins are applied, or after.
    """

    ranks: tuple[int, ...]
    phase: Literal["before", "after"] = "before"

    @hookimpl
    def composer3d_convert(self, context):
        phase = Phase.CONVERT if self.phase == "before" else Phase.COMMUNICATE
        return root("frozen_here", phase, self._freeze)

    def _freeze(self, module, context):
        if context.rank in self.ranks:
            module.layers[0].up.requires_grad_(False)
