"""Plugins that each break one heading of the conformance suite, and one that breaks none."""

from __future__ import annotations

import os
import time
from typing import Literal

import torch
import torch.distributed as dist
from pydantic import Field

from composer3d import Metric, Phase, StepAction, StepPoint, Transform, hookimpl, plugin, torch_compat


def gradients(state):
    for part in state.parts:
        for parameter in part.module.parameters():
            if parameter.grad is not None:
                yield parameter.grad


def action(name, point, run):
    return StepAction(name=name, point=point, run=run)


@plugin(family="precision")
class Clamped:
    """Clamp gradients, and do all else as it should be done.

    Memory: none. Collectives: none.
    """

    limit: float = Field(default=0.001, gt=0, examples=[0.01])

    @hookimpl
    def composer3d_step_actions(self, context):
        return action("clamped", StepPoint.GRADIENTS_REDUCED, self._clamp)

    def _clamp(self, state):
        for grad in gradients(state):
            grad.clamp_(-self.limit, self.limit)


@plugin(family="communication")
class WrongGradients:
    """Scale gradients a little.

    Collectives: none.
    """

    @hookimpl
    def composer3d_step_actions(self, context):
        return action("wronggradients", StepPoint.GRADIENTS_REDUCED, self._scale)

    def _scale(self, state):
        for grad in gradients(state):
            grad.mul_(1.001)


@plugin(family="communication")
class Undeclared:
    """Add up a number over the ranks.

    Collectives: none.
    """

    @hookimpl
    def composer3d_step_actions(self, context):
        return action("undeclared", StepPoint.END, self._sum)

    def _sum(self, state):
        dist.all_reduce(torch.ones(1), group=state.context.mesh.get_group("dp_shard"))


@plugin(family="profiling")
class Swapped:
    """Measure the mean of two gradients' norms over ranks, of which the second rank sends the second first.

    Collectives: two all-reduces a step.
    """

    @hookimpl
    def composer3d_step_actions(self, context):
        return action("swapped", StepPoint.GRADIENTS_LOCAL, self._mean)

    def _mean(self, state):
        norms = [grad.to_local().norm().view(1) for grad in list(gradients(state))[:2]]
        for norm in reversed(norms) if state.context.rank else norms:
            dist.all_reduce(norm, group=state.context.mesh.get_group("dp_shard"))
        state.context.state[self] = float(norms[0] / norms[1])

    @hookimpl
    def composer3d_measure(self, context, step):
        return [Metric(name="swapped_ratio", value=context.state.get(self, 0.0))]


@plugin(family="profiling")
class SwappedBroadcast:
    """Measure two gradients' norms of the first rank, of which the second rank receives the second first.

    Collectives: two broadcasts a step.
    """

    @hookimpl
    def composer3d_step_actions(self, context):
        return action("swappedbroadcast", StepPoint.GRADIENTS_LOCAL, self._share)

    def _share(self, state):
        norms = [grad.to_local().norm().view(1) for grad in list(gradients(state))[:2]]
        for norm in reversed(norms) if state.context.rank else norms:
            dist.broadcast(norm, group=state.context.mesh.get_group("dp_shard"), group_src=0)
        state.context.state[self] = float(norms[0] / norms[1])

    @hookimpl
    def composer3d_measure(self, context, step):
        return [Metric(name="swapped_ratio", value=context.state.get(self, 0.0))]


@plugin(family="communication")
class PlannedOtherwise:
    """Add up a number over the ranks, but only in runs.

    Collectives: one all-reduce a step.
    """

    @hookimpl
    def composer3d_step_actions(self, context):
        return action("plannedotherwise", StepPoint.END, self._sum)

    def _sum(self, state):
        if state.context.purpose == "run":
            dist.all_reduce(torch.ones(1), group=state.context.mesh.get_group("dp_shard"))


@plugin(family="precision")
class LostState:
    """Add a part of the step before's gradients, and save none of them.

    Collectives: none.
    """

    @hookimpl
    def composer3d_step_actions(self, context):
        context.state[self] = {}
        return action("loststate", StepPoint.GRADIENTS_REDUCED, self._add)

    def _add(self, state):
        kept = state.context.state[self]
        for number, grad in enumerate(gradients(state)):
            now = grad.clone()
            grad.add_(kept.get(number, torch.zeros_like(grad)), alpha=0.9)
            kept[number] = now


@plugin(family="precision")
class LostEverySecond:
    """Add a step's gradients to those of the next, every second step, and save none of them between.

    Collectives: none.
    """

    @hookimpl
    def composer3d_step_actions(self, context):
        context.state[self] = []
        return action("losteverysecond", StepPoint.GRADIENTS_REDUCED, self._add)

    def _add(self, state):
        kept = state.context.state[self]
        if not kept:
            kept.extend(grad.clone() for grad in gradients(state))
            return
        for grad, before in zip(gradients(state), kept, strict=True):
            grad.add_(before)
        kept.clear()


@plugin(family="precision")
class OrderDependent:
    """Halve gradients where its table's name sorts first, else quarter them.

    Collectives: none.
    """

    @hookimpl
    def composer3d_step_actions(self, context):
        is_first = context.plugins[0].instance is self
        return action("orderdependent", StepPoint.GRADIENTS_REDUCED, self._halve if is_first else self._quarter)

    def _halve(self, state):
        for grad in gradients(state):
            grad.mul_(0.5)

    def _quarter(self, state):
        for grad in gradients(state):
            grad.mul_(0.25)


@plugin(family="scheduling")
class DoesNothing:
    """Claim to recompute blocks.

    Collectives: none.
    """

    @hookimpl
    def composer3d_reschedule(self, context):
        return Transform(
            name="doesnothing",
            phase=Phase.RECOMPUTE,
            select=lambda model, context: [""],
            apply=lambda model, fqns, context: fqns,
        )


@plugin(family="profiling")
class OpensFiles:
    """Write a file whenever it is configured.

    Collectives: none.
    """

    @hookimpl
    def composer3d_configure(self, context):
        with open(os.devnull, "w") as file:
            file.write(context.purpose)


@plugin(family="precision")
class FailsLater:
    """Round gradients, or fail where they are computed.

    Collectives: none.
    """

    mode: Literal["round", "fail"] = "round"

    @hookimpl
    def composer3d_step_actions(self, context):
        return action("failslater", StepPoint.GRADIENTS_REDUCED, self._round)

    def _round(self, state):
        if self.mode == "fail":
            raise ValueError("fail is not implemented")
        for grad in gradients(state):
            grad.copy_(grad.to(torch.bfloat16))


@plugin(family="profiling")
class Slow:
    """Wait in every step.

    Collectives: none.
    """

    @hookimpl
    def composer3d_step_actions(self, context):
        return action("slow", StepPoint.END, self._wait)

    def _wait(self, state):
        began = time.thread_time()
        while time.thread_time() - began < 0.2:
            pass


@plugin(family="profiling")
class FailsBeside:
    """Look for an attribute of other plugins that one of them does not have.

    Collectives: none.
    """

    @hookimpl
    def composer3d_configure(self, context):
        for other in context.plugins:
            if other.info.family == "scheduling":
                print(other.instance.no_such_option)


@plugin(family="profiling")
class CountsOperators:
    """Count the operators of every step as it dispatches them, which is no fault: it issues none itself.

    Collectives: none.
    """

    @hookimpl
    def composer3d_step_actions(self, context):
        return [
            action("begins_counting", StepPoint.BEGIN, self._begin),
            action("ends_counting", StepPoint.BEFORE_OPTIMIZER, self._end),
        ]

    @hookimpl
    def composer3d_measure(self, context, step):
        return [Metric(name="num_operators", value=float(context.state[self][1][0]))]

    def _begin(self, state):
        count = [0]

        def handle(operator, types, args, kwargs):
            if any(torch_compat.is_wrapper_subclass(cls) for cls in types):
                return NotImplemented
            count[0] += 1
            return operator(*args, **kwargs)

        mode = torch_compat.dispatch_mode(handle)
        mode.__enter__()
        state.context.state[self] = mode, count

    def _end(self, state):
        state.context.state[self][0].__exit__(None, None, None)


@plugin(family="profiling")
class SumsInBackward:
    """Add up, over ranks, what reaches the last block in a backward, while units are gathered: no fault either.

    Collectives: an all-reduce a micro-batch.
    """

    @hookimpl
    def composer3d_reschedule(self, context):
        return Transform(
            name="sumsinbackward",
            phase=Phase.MATERIALISE,
            select=lambda model, context: ["layers.1"],
            apply=lambda model, fqns, context: self._watch(model.get_submodule(fqns[0]), fqns, context),
        )

    @hookimpl
    def composer3d_measure(self, context, step):
        return [Metric(name="gradient_sum", value=context.state.get(self, 0.0))]

    def _watch(self, block, fqns, context):
        def summed(block, gradients_in, gradients_out):
            total = gradients_out[0].sum().view(1)
            dist.all_reduce(total, group=context.mesh.get_group("dp_shard"))
            context.state[self] = float(total)

        block.register_full_backward_hook(summed)
        return fqns
