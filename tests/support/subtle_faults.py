"""Plugins that compute something wrong on one rank, in one step or in the last digits only."""

from __future__ import annotations

from typing import Literal

import torch

from composer3d import Batch, Phase, StepAction, StepPoint, hookimpl, plugin
from support.composition_faults import local, root


def named_gradients(state):
    return [(fqn, p) for fqn, p in state.context.named_parameters() if p.grad is not None]


@plugin(family="communication")
class Subtle:
    """Changes gradients after they were reduced, or what becomes of them.

    Args:
        fault: shared: that of the embedding counts twice. narrow: they are rounded. leftover: those of the step before
            are still there. frozen: rank 1 has none of one layer. slow: rank 1 goes half as far. again: clipped twice.
    """

    fault: Literal["shared", "narrow", "leftover", "frozen", "slow", "again"]

    @hookimpl
    def composer3d_step_actions(self, context):
        context.state[self] = {}
        return [
            StepAction(name="reduced", point=StepPoint.GRADIENTS_REDUCED, run=self._reduced),
            StepAction(name="before", point=StepPoint.BEFORE_OPTIMIZER, run=self._before),
            StepAction(name="after", point=StepPoint.AFTER_OPTIMIZER, run=self._after),
        ]

    def _reduced(self, state):
        kept = state.context.state[self]
        for fqn, parameter in named_gradients(state):
            grad = local(parameter.grad)
            if self.fault == "shared" and fqn == "tok.weight":
                grad.mul_(2)
            if self.fault == "narrow":
                grad.copy_(grad.bfloat16())
            if self.fault == "leftover":
                own = grad.clone()
                grad.add_(kept.get(fqn, 0.0))
                kept[fqn] = own

    def _before(self, state):
        for fqn, parameter in named_gradients(state):
            if self.fault == "again":
                local(parameter.grad).mul_(0.5)
            if self.fault == "frozen" and fqn == "layers.0.up.weight" and state.context.rank == 1:
                parameter.grad = None
            if self.fault == "slow":
                state.context.state[self][fqn] = local(parameter).detach().clone()

    def _after(self, state):
        if self.fault != "slow" or state.context.rank != 1:
            return
        with torch.no_grad():
            for fqn, parameter in state.context.named_parameters():
                before = state.context.state[self].get(fqn)
                if before is not None:
                    local(parameter).add_(before).div_(2)


@plugin(family="scheduling")
class Labels:
    """Gives the loss of rank 1 other targets than the batch has.

    Args:
        fault: unmasked: what is to be left out counts. shifted: each is the neighbour's. rows: of another sample.
    """

    fault: Literal["unmasked", "shifted", "rows"]

    @hookimpl
    def composer3d_schedule(self, context, parts, loss_fn):
        fault = self.fault

        class Schedule:
            def train(self, microbatches):
                for index, batch in enumerate(microbatches):
                    context.microbatches.begin(index, index == len(microbatches) - 1, 0)
                    target = batch.target
                    if context.rank == 1 and fault == "unmasked":
                        target = target.clamp(min=0)
                    if context.rank == 1 and fault == "shifted":
                        target = target.roll(1, dims=1)
                    if fault == "rows":
                        target = microbatches[len(microbatches) - 1 - index].target
                    loss_fn(parts[0].module(*batch.args), target).backward()
                    context.microbatches.end()

            def evaluate(self, microbatches):
                raise NotImplementedError

        return Schedule()


@plugin(family="scheduling")
class Scaled:
    """Scales the output of a sharded module, as a wrong scale of attention would."""

    @hookimpl
    def composer3d_collectives(self, context):
        return root("scaled", Phase.COMMUNICATE, self._hook)

    def _hook(self, module, context):
        module.layers[1].up.register_forward_hook(lambda up, args, output: output * 1.01)


@plugin(family="sharding")
class Overlapping:
    """Gives the second rank the first rank's last sample for its own first one."""

    @hookimpl
    def composer3d_place_batch(self, context, batch):
        import torch.distributed as dist

        tensors = []
        for tensor in (*batch.args, batch.target):
            last = tensor[-1].clone()
            dist.broadcast(last, src=0)
            tensors.append(torch.cat([last[None], tensor[1:]]) if context.rank == 1 else tensor)
        return Batch(args=tuple(tensors[:-1]), target=tensors[-1])
