"""Plugins of somebody's own that reduce, clip, place or hold back wrongly."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
import torch.distributed as dist

from composer3d import Batch, Phase, StepAction, StepPoint, hookimpl, plugin
from support.composition_faults import local, root
from support.subtle_faults import named_gradients


@plugin(family="sharding", owns=("dp_replicate",))
class Own:
    """Data parallelism of one's own, wrong in one way.

    Args:
        fault: compressed: rank 1 sends its large gradients alone, and forgets the rest. twice: averaged twice.
            forgotten: one layer is left out. clipped: gradients are clipped after every micro-batch.
    """

    fault: Literal["compressed", "twice", "forgotten", "clipped"]

    @hookimpl
    def composer3d_shard(self, context):
        return root("own", Phase.DATA, lambda module, context: None, averages=("dp_replicate",))

    @hookimpl
    def composer3d_step_actions(self, context):
        return [
            StepAction(name="own.clip", point=StepPoint.AFTER_MICROBATCH, run=self._clip),
            StepAction(name="own", point=StepPoint.GRADIENTS_LOCAL, run=self._reduce),
        ]

    def _clip(self, state):
        if self.fault == "clipped":
            torch.nn.utils.clip_grad_norm_([p for part in state.parts for p in part.module.parameters()], 0.05)

    def _reduce(self, state):
        for fqn, parameter in named_gradients(state):
            grad = parameter.grad
            if self.fault == "compressed" and state.context.rank == 1:
                grad.mul_(grad.abs() >= grad.abs().median())
            if self.fault == "forgotten" and fqn.startswith("layers.0.up"):
                continue
            dist.all_reduce(grad, group=state.context.mesh.get_group("dp_replicate"))
            grad.div_(4 if self.fault == "twice" else 2)


@plugin(family="communication")
class Elements:
    """Does something to each element of reduced gradients, or gives them to another parameter.

    Args:
        fault: absolute. cut: each by itself is cut off. swapped: of two layers. late: of the step before. cut_late: cut
            off each by itself, after the core has clipped. shared: those of the embedding, which is tied, twice.
    """

    fault: Literal["absolute", "cut", "swapped", "late", "cut_late", "shared"]

    @hookimpl
    def composer3d_step_actions(self, context):
        context.state[self] = {}
        point = StepPoint.BEFORE_OPTIMIZER if self.fault == "cut_late" else StepPoint.GRADIENTS_REDUCED
        return StepAction(name="elements", point=point, run=self._change)

    def _change(self, state):
        found, kept = {fqn: local(p.grad) for fqn, p in named_gradients(state)}, state.context.state[self]
        for fqn, grad in found.items():
            if self.fault == "absolute":
                grad.abs_()
            if self.fault in ("cut", "cut_late"):
                grad.clamp_(-0.01, 0.01)
            if self.fault == "late":
                own = grad.clone()
                grad.copy_(kept.get(fqn, own))
                kept[fqn] = own
            if self.fault == "shared" and fqn == "tok.weight":
                grad.mul_(2)
        if self.fault == "swapped":
            one, other = found["layers.0.up.weight"], found["layers.1.up.weight"]
            first = one.clone()
            one.copy_(other)
            other.copy_(first)


@plugin(family="sharding")
class Placing:
    """Hands the model something else than the batch.

    Args:
        fault: doubled: every sample twice. permuted: the inputs in another order than the targets.
    """

    fault: Literal["doubled", "permuted"]

    @hookimpl
    def composer3d_place_batch(self, context, batch):
        if self.fault == "permuted":
            return Batch(args=(batch.args[0].flip(0),), target=batch.target)
        return Batch(args=(torch.cat([batch.args[0]] * 2),), target=torch.cat([batch.target] * 2))


@plugin(family="scheduling")
class Trained:
    """Trains frozen parameters, or loses digits or a micro-batch.

    Args:
        fault: thawed: the embedding is trained. narrow: fsdp2 reduces in bfloat16. scaled: the loss of the second of
            three micro-batches counts three times.
    """

    fault: Literal["thawed", "narrow", "scaled"]

    @hookimpl
    def composer3d_reschedule(self, context):
        return root("thawed", Phase.SPLIT, self._thaw) if self.fault == "thawed" else None

    @hookimpl
    def composer3d_collectives(self, context):
        return None if self.fault == "thawed" else root("trained", Phase.COMMUNICATE, getattr(self, f"_{self.fault}"))

    def _thaw(self, module, context):
        module.tok.requires_grad_(True)

    def _narrow(self, module, context):
        from composer3d.torch_compat import fsdp_groups

        for inner in module.modules():
            for group, _, _ in fsdp_groups(inner):
                group.mp_policy = dataclasses.replace(group.mp_policy, reduce_dtype=torch.bfloat16)

    def _scaled(self, module, context):
        calls = []

        def hook(out, args, output):
            calls.append(None)
            if len(calls) % 3 == 2 and output.requires_grad:
                output.register_hook(lambda grad: 3 * grad)

        for name, inner in module.named_modules():
            if name == "out":
                inner.register_forward_hook(hook)
