"""More plugins that compute something wrong, in ways that people get it wrong less often."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist

from composer3d import Phase, StepAction, StepPoint, hookimpl, plugin
from support.composition_faults import local, parameters, root


@plugin(family="sharding", owns=("dp_replicate",))
class Reduced:
    """Data parallelism of one's own, wrong in one way.

    Args:
        fault: axis: averages over tp. maximum: takes the largest. waiting: uses gradients before they are there.
    """

    fault: Literal["axis", "maximum", "waiting"]

    @hookimpl
    def composer3d_shard(self, context):
        return root("reduced", Phase.DATA, lambda module, context: None, averages=("dp_replicate",))

    @hookimpl
    def composer3d_step_actions(self, context):
        return StepAction(name="reduced", point=StepPoint.GRADIENTS_LOCAL, run=self._reduce)

    def _reduce(self, state):
        group = state.context.mesh.get_group("tp" if self.fault == "axis" else "dp_replicate")
        for parameter in parameters(state):
            grad = parameter.grad
            if self.fault == "maximum":
                dist.all_reduce(grad, op=dist.ReduceOp.MAX, group=group)
            elif self.fault == "axis":
                dist.all_reduce(grad, group=group)
                grad.div_(2)
            else:
                there = grad.clone()
                dist.all_reduce(there, group=group, async_op=True).wait()


@plugin(family="communication")
class Update:
    """Changes what the optimizer does.

    Args:
        fault: twice: every update is done twice. decay: norms are decayed.
    """

    fault: Literal["twice", "decay"]

    @hookimpl
    def composer3d_step_actions(self, context):
        actions = [
            StepAction(name="before", point=StepPoint.BEFORE_OPTIMIZER, run=self._before),
            StepAction(name="after", point=StepPoint.AFTER_OPTIMIZER, run=self._after),
        ]
        context.state[self] = {}
        return actions

    def _before(self, state):
        kept = state.context.state[self]
        for index, parameter in enumerate(parameters(state)):
            kept[index] = local(parameter).detach().clone()

    def _after(self, state):
        kept = state.context.state[self]
        names = {id(p): fqn for fqn, p in state.context.named_parameters()}
        with torch.no_grad():
            for index, parameter in enumerate(parameters(state)):
                if self.fault == "twice":
                    local(parameter).add_(local(parameter) - kept[index])
                if self.fault == "decay" and "norm.weight" in names[id(parameter)]:
                    local(parameter).sub_(1e-3 * kept[index])


@plugin(family="communication")
class Unclip:
    """Gives the optimizer gradients as they were before they were clipped."""

    @hookimpl
    def composer3d_step_actions(self, context):
        context.state[self] = []
        return [
            StepAction(name="keep", point=StepPoint.UNSCALED, run=self._keep),
            StepAction(name="unclip", point=StepPoint.BEFORE_OPTIMIZER, run=self._restore),
        ]

    def _keep(self, state):
        state.context.state[self][:] = [local(parameter.grad).clone() for parameter in parameters(state)]

    def _restore(self, state):
        for parameter, kept in zip(parameters(state), state.context.state[self], strict=True):
            local(parameter.grad).copy_(kept)


@plugin(family="communication")
class Weights:
    """Begins with other weights.

    Args:
        fault: seed: those of the second rank are others. swapped: ranks along tp hold each other's pieces of `up`.
    """

    fault: Literal["seed", "swapped"]

    @hookimpl
    def composer3d_convert(self, context):
        return root("weights", Phase.MATERIALISE, self._change)

    def _change(self, module, context):
        with torch.no_grad():
            if self.fault == "seed" and context.rank == 1:
                for parameter in module.parameters():
                    local(parameter).add_(0.01)
            if self.fault == "swapped":
                for block in module.layers:
                    mine = block.up.weight.to_local()
                    pieces = [torch.empty_like(mine) for _ in range(2)]
                    dist.all_gather(pieces, mine.contiguous(), group=context.mesh.get_group("tp"))
                    mine.copy_(pieces[1 - context.coordinates["tp"]])


@plugin(family="scheduling")
class Hooked:
    """Does something to the blocks' inputs and outputs.

    Args:
        fault: dropped: drops once more. undropped: its dropout is off. detached: detaches its output. in_place:
            changes activations in place. rarely: it drops less than it should.
        block: Its number.
    """

    fault: Literal["dropped", "detached", "in_place", "undropped", "rarely"]
    block: int = 1

    @hookimpl
    def composer3d_reschedule(self, context):
        return root("hooked", Phase.RECOMPUTE, self._hook)

    def _hook(self, module, context):
        block = module.layers[self.block]
        if self.fault == "dropped":
            block.register_forward_hook(lambda block, args, output: torch.nn.functional.dropout(output, 0.1))
        elif self.fault == "detached":
            block.register_forward_hook(lambda block, args, output: output.detach() + 0.0 * block.up.bias.sum())
        elif self.fault == "undropped":
            block.dropout.eval()
        elif self.fault == "rarely":
            block.dropout.p = 0.1
        else:
            block.norm.register_forward_hook(lambda norm, args, output: output.mul_(1.0 + 1e-6))


@plugin(family="scheduling")
class Counting:
    """Runs micro-batches itself.

    Args:
        fault: dropped: not the last one. twice: the last one twice.
    """

    fault: Literal["dropped", "twice"]

    @hookimpl
    def composer3d_schedule(self, context, parts, loss_fn):
        fault = self.fault

        class Schedule:
            def train(self, microbatches):
                order = list(enumerate(microbatches))
                for index, batch in order:
                    last = index == len(microbatches) - 1
                    context.microbatches.begin(index, last, 0)
                    loss = loss_fn(parts[0].module(*batch.args), batch.target)
                    if last:
                        loss = loss * (0.0 if fault == "dropped" else 2.0)
                    loss.backward()
                    context.microbatches.end()

            def evaluate(self, microbatches):
                raise NotImplementedError

        return Schedule()


@plugin(family="communication")
class LateAverage:
    """Averages parameters over dp_replicate after the scales of float8 were computed from other ones."""

    @hookimpl
    def composer3d_step_actions(self, context):
        return [
            StepAction(name="apart", point=StepPoint.AFTER_OPTIMIZER, run=self._apart),
            StepAction(name="late", point=StepPoint.PARAMETERS_FINAL, run=self._average, after=("float8",)),
        ]

    def _apart(self, state):
        factor = 1.25 if state.context.coordinates["dp_replicate"] else 0.75
        with torch.no_grad():
            for parameter in parameters(state):
                local(parameter).mul_(factor)

    def _average(self, state):
        if state.step < 0:
            return
        group = state.context.mesh.get_group("dp_replicate")
        with torch.no_grad():
            for parameter in parameters(state):
                data = local(parameter)
                plain = getattr(data, "_tensor", data)
                dist.all_reduce(plain, group=group)
                plain.div_(2)
