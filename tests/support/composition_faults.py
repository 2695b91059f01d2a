"""Plugins and models that compute something wrong, each in one way that people get it wrong."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from composer3d import Batch, Phase, StepAction, StepPoint, Transform, hookimpl, plugin

VOCAB = 12


class Mlp(nn.Module):
    """A block whose hidden features can be sharded over 2 or 4 ranks."""

    def __init__(self, dim, dropout=0.0):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


class Latent(nn.Module):
    """What multi-head-latent attention does with its keys: a whole part joins what is projected up from the latent."""

    def __init__(self, dim):
        super().__init__()
        self.kv = nn.Linear(dim, dim + 1, bias=False)
        self.up = nn.Linear(dim, 2 * dim, bias=False)
        self.down = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x):
        latent, k_pe = self.kv(x).split([x.shape[-1], 1], dim=-1)
        return x + self.down(torch.tanh(self.up(latent) + k_pe))


class Even(nn.Module):
    """A token model with even sizes."""

    def __init__(self, dim=8, num_layers=2, *, block=Mlp, dropout=0.0, batch_norm=False, tied=False):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, dim)
        options = {"dropout": dropout} if block is Mlp else {}
        self.layers = nn.ModuleList(block(dim, **options) for _ in range(num_layers))
        self.statistics = nn.BatchNorm1d(dim) if batch_norm else None
        self.out = nn.Linear(dim, VOCAB, bias=False)
        if tied:
            self.out.weight = self.tok.weight

    def forward(self, tokens):
        x = self.tok(tokens)
        for layer in self.layers:
            x = layer(x)
        if self.statistics is not None:
            x = self.statistics(x.transpose(1, 2)).transpose(1, 2)
        return self.out(x) + 0.0


def parameters(state):
    return [p for part in state.parts for p in part.module.parameters() if p.grad is not None]


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def root(name, phase, apply, **options):
    def touch(module, fqns, context):
        apply(module, context)
        return fqns

    return Transform(name=name, phase=phase, select=lambda model, context: [""], apply=touch, **options)


@plugin(family="sharding", owns=("dp_replicate",))
class NotReduced:
    """Data parallelism that claims to average gradients, and does not."""

    @hookimpl
    def composer3d_shard(self, context):
        return root("not_reduced", Phase.DATA, lambda module, context: None, averages=("dp_replicate",))


@plugin(family="communication")
class Gradients:
    """Does something to the reduced gradients.

    Args:
        fault: add_up: reduces them once more. scale: multiplies them. unreduced_norms: takes partial sums for whole.
            lost_stage: zeroes those of the last stage. untied: zeroes the tied head's on the last stage. clip: clips
            them by the norm over dp_shard.
        factor: Of scale; of clip the norm.
    """

    fault: Literal["add_up", "scale", "unreduced_norms", "lost_stage", "untied", "clip"]
    factor: float = 1.0

    @hookimpl
    def composer3d_step_actions(self, context):
        local_first = self.fault == "unreduced_norms"
        point = StepPoint.GRADIENTS_LOCAL if local_first else StepPoint.GRADIENTS_REDUCED
        return StepAction(name="spoil_gradients", point=point, run=getattr(self, f"_{self.fault}"))

    def _add_up(self, state):
        for parameter in parameters(state):
            dist.all_reduce(local(parameter.grad), group=state.context.mesh.get_group("dp_replicate"))

    def _scale(self, state):
        for parameter in parameters(state):
            local(parameter.grad).mul_(self.factor)

    def _unreduced_norms(self, state):
        from torch.distributed.tensor import DTensor

        for parameter in parameters(state):
            grad = parameter.grad
            if isinstance(grad, DTensor) and any(placement.is_partial() for placement in grad.placements):
                parameter.grad = DTensor.from_local(grad.to_local(), grad.device_mesh, parameter.placements)

    def _clip(self, state):
        square = sum(local(parameter.grad).square().sum() for parameter in parameters(state))
        dist.all_reduce(square, group=state.context.mesh.get_group("dp_shard"))
        for parameter in parameters(state):
            local(parameter.grad).mul_(self.factor / (square.sqrt() + 1e-6))

    def _lost_stage(self, state):
        if state.parts[-1].is_last:
            self._scale(state)

    def _untied(self, state):
        module = state.parts[-1].module
        if state.parts[-1].is_last:
            local(module.out.weight.grad).zero_()


@plugin(family="scheduling")
class MeanOfMeans:
    """Every micro-batch weighs the same, whatever its number of valid tokens."""

    @hookimpl
    def composer3d_schedule(self, context, parts, loss_fn):
        class Schedule:
            def train(self, microbatches):
                for index, batch in enumerate(microbatches):
                    context.microbatches.begin(index, index == len(microbatches) - 1, 0)
                    loss = loss_fn(parts[0].module(*batch.args), batch.target)
                    (loss * 7 / (batch.target != -100).sum()).backward()
                    context.microbatches.end()

            def evaluate(self, microbatches):
                raise NotImplementedError

        return Schedule()


@plugin(family="sharding", owns=("tp",))
class HandMade:
    """Column- and row-wise sharding of every block's projections, by torch's own styles.

    Args:
        fault: bias: a bias once a rank. nothing: the patterns match nothing.
    """

    fault: Literal["bias", "nothing"] | None = None

    @hookimpl
    def composer3d_shard(self, context):
        return root("hand_made", Phase.TENSOR, self._apply, uses=("tp",))

    def _apply(self, module, context):
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        blocks = [] if self.fault == "nothing" else module.layers
        for block in blocks:
            parallelize_module(block, context.mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            if self.fault == "bias":
                block.down.register_forward_hook(
                    lambda down, _, output: output + (context.degrees["tp"] - 1) * down.bias.to_local()
                )


@plugin(family="scheduling")
class Freed:
    """Frees parameters after every forward, whatever the schedule needs."""

    @hookimpl
    def composer3d_collectives(self, context):
        def apply(module, context):
            for inner in module.modules():
                if hasattr(inner, "set_reshard_after_forward"):
                    inner.set_reshard_after_forward(True, recurse=False)

        return root("freed", Phase.COMMUNICATE, apply)


@plugin(family="scheduling")
class Seeded:
    """Seeds every micro-batch itself.

    Args:
        fault: ranks: alike on all ranks. microbatches: alike in all micro-batches of a rank.
    """

    fault: Literal["ranks", "microbatches"]

    @hookimpl
    def composer3d_step_actions(self, context):
        return StepAction(name="seeded", point=StepPoint.BEFORE_MICROBATCH, run=self._seed)

    def _seed(self, state):
        torch.manual_seed(state.index if self.fault == "ranks" else state.context.rank)


@plugin(family="sharding")
class SameBatch:
    """Gives every data-parallel rank the first one's batch."""

    @hookimpl
    def composer3d_place_batch(self, context, batch):
        for tensor in (*batch.args, batch.target):
            dist.broadcast(tensor, src=0)
        return Batch(args=batch.args, target=batch.target)


@plugin(family="communication")
class LocalClip:
    """Clips once more, by the norm of what this rank holds.

    Args:
        norm: To which.
    """

    norm: float

    @hookimpl
    def composer3d_step_actions(self, context):
        return StepAction(name="local_clip", point=StepPoint.BEFORE_OPTIMIZER, run=self._clip)

    def _clip(self, state):
        grads = [local(parameter.grad) for parameter in parameters(state)]
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        for grad in grads:
            grad.mul_(self.norm / norm)


@plugin(family="communication")
class Forgetful:
    """An optimizer that is not given the norms."""

    @hookimpl
    def composer3d_optimizer(self, context, cls, groups):
        names = {id(p): fqn for fqn, p in context.named_parameters()}
        made = cls(groups)

        def drop(optimizer, args, kwargs):
            for group in optimizer.param_groups:
                group["params"] = [p for p in group["params"] if "norm" not in names[id(p)]]

        made.register_step_pre_hook(drop)
        return made


@plugin(family="communication")
class Drift:
    """Moves the parameters of all but the first rank along an axis after the optimizer has.

    Args:
        axis: Which.
    """

    axis: str

    @hookimpl
    def composer3d_step_actions(self, context):
        return StepAction(name="drift", point=StepPoint.PARAMETERS_SYNCHRONISED, run=self._move)

    def _move(self, state):
        with torch.no_grad():
            for part in state.parts:
                for parameter in part.module.parameters():
                    local(parameter).mul_(1.0 + 1e-15 * 4 * state.context.coordinates[self.axis])
