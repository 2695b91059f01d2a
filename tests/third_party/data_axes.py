"""Plugins that own `cp` and `ep`, for models whose positions mix nowhere, and a layer of experts."""

from __future__ import annotations

import torch
from support.models import Block, Net
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from composer3d import Batch, ParameterMesh, Phase, Transform, hookimpl, plugin, torch_compat


class Experts(nn.Module):
    """Every expert sees every token; gates weigh what they return.

    Shapes: B sequences, S positions, D features, E experts.
    """

    def __init__(self, dim, num_experts):
        super().__init__()
        self.weight_EDD = nn.Parameter(torch.randn(num_experts, dim, dim) / dim)

    def forward(self, x_BSD, gates_BSE):
        return torch.einsum("bsd,edf,bse->bsf", x_BSD, self.weight_EDD, gates_BSE)


class Mixed(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.gate, self.experts = nn.Linear(dim, 4), Experts(dim, 4)

    def forward(self, x_BSD):
        return x_BSD + self.experts(torch.tanh(x_BSD), self.gate(x_BSD).softmax(-1))


class ExpertNet(Net):
    """Layers of experts between those of all tokens."""

    def __init__(self, dim=6):
        super().__init__(dim=dim, num_layers=1)
        self.layers = nn.ModuleList([Mixed(dim), Block(dim), Mixed(dim)])


@plugin(family="sharding", owns=("cp",))
class Sequences:
    """Shard batches along the sequence, for models that mix no positions.

    Memory: activations / cp. Collectives: none.
    """

    @hookimpl
    def composer3d_place_batch(self, context, batch):
        def piece(tensor_BS):
            return tensor_BS.chunk(context.degrees["cp"], 1)[context.coordinates["cp"]].contiguous()

        kwargs = {name: piece(tensor) for name, tensor in batch.kwargs.items()}
        return Batch(args=tuple(map(piece, batch.args)), kwargs=kwargs, target=piece(batch.target))


class Gathered(torch.autograd.Function):
    """All ranks' rows of dim 0; the gradient is the sum of all ranks', of this rank's rows."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _gathered(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return _scattered(gradient, ctx.group), None


class Scattered(torch.autograd.Function):
    """The sum of all ranks' rows, of this rank's; the gradient is gathered."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _scattered(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return _gathered(gradient, ctx.group), None


class Divided(torch.autograd.Function):
    """The same values; their gradient is divided."""

    @staticmethod
    def forward(ctx, x, divisor):
        ctx.divisor = divisor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient / ctx.divisor, None


def _gathered(x, group):
    result = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
    torch_compat.all_gather_single(result, x.contiguous(), group=group)
    return result


def _scattered(x, group):
    result = x.new_empty((x.shape[0] // group.size(), *x.shape[1:]))
    torch_compat.reduce_scatter_single(result, x.contiguous(), group=group)
    return result


@plugin(family="sharding", owns=("ep",))
class ExpertShards:
    """Shard experts over ep: tokens are gathered over it, and what the experts return is summed and scattered.

    Memory: experts / ep. Collectives: a layer 2 all-gathers and 1 reduce-scatter forward, the reverse backward.

    Args:
        shard_dim: Along which data-parallel plugins shard them.
        divides: Whether gradients are divided by ep; false is a fault.
    """

    shard_dim: int = 1
    divides: bool = True

    @hookimpl
    def composer3d_shard(self, context):
        return Transform(name="expert_shards", phase=Phase.TENSOR, select=self._select, apply=self._apply, uses=("ep",))

    def _select(self, model, context):
        context.state[self] = [fqn for fqn, module in model.named_modules() if isinstance(module, Experts)]
        return context.state[self]

    def _apply(self, model, fqns, context):
        mesh = context.expert_mesh()["ep"]
        for fqn in fqns:
            module = model.get_submodule(fqn)
            sharded = distribute_tensor(module.weight_EDD.data, mesh, [Shard(0)], src_data_rank=None)
            module.weight_EDD = nn.Parameter(sharded)
            module.forward = self._forward(module, mesh)
        return fqns

    def _forward(self, module, mesh):
        group, rank, degree = mesh.get_group(), mesh.get_local_rank(), mesh.size()

        def forward(x_BSD, gates_BSE):
            weight_EDD = Divided.apply(module.weight_EDD.to_local(), degree if self.divides else 1)
            gates_BSE = Gathered.apply(gates_BSE, group).chunk(degree, -1)[rank]
            out_BSD = torch.einsum("bsd,edf,bse->bsf", Gathered.apply(x_BSD, group), weight_EDD, gates_BSE)
            return Scattered.apply(out_BSD, group)

        return forward

    @hookimpl
    def composer3d_parameter_mesh(self, context, fqn):
        if fqn.rpartition(".")[0] not in context.state[self]:
            return None
        return ParameterMesh(mesh=context.expert_mesh(), shard_dim=self.shard_dim)


@plugin(family="sharding", owns=("ep",))
class HalfShards(ExpertShards):
    """Shard all parameters of experts, and say so of one only."""

    def _apply(self, model, fqns, context):
        for fqn in super()._apply(model, fqns, context):
            module = model.get_submodule(fqn)
            if hasattr(module, "scale"):
                shards = distribute_tensor(module.scale.data, context.expert_mesh()["ep"], [Shard(0)])
                module.scale = nn.Parameter(shards)
        return fqns

    @hookimpl
    def composer3d_parameter_mesh(self, context, fqn):
        return ParameterMesh(mesh=context.expert_mesh()) if fqn.endswith("weight_EDD") else None
