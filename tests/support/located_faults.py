"""Faults that have a place: a module, a stage, a piece of a tensor, a later micro-batch or a later step."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from composer3d import Batch, Loss, Phase, StepAction, StepPoint, hookimpl, plugin
from support.composition_faults import VOCAB, Mlp, local, parameters, root


class Added(torch.autograd.Function):
    """Adds up over a group; the gradient comes back as it is."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class AddedBack(torch.autograd.Function):
    """Identity whose gradient is summed over a group."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def shard(module, name, dim, mesh):
    from torch.distributed.tensor import Shard, distribute_tensor

    whole = getattr(module, name).detach()
    module.register_parameter(name, nn.Parameter(distribute_tensor(whole, mesh, [Shard(dim)], src_data_rank=None)))


class Grouped(nn.Module):
    """Attention whose heads share keys and values in groups of two; their projections have biases."""

    def __init__(self, dim, *, packed=False):
        super().__init__()
        self.heads, self.kv, self.width = 4, 4 if packed else 2, dim // 4
        if packed:
            self.qkv = nn.Linear(dim, 3 * dim)
        else:
            self.q = nn.Linear(dim, dim)
            self.k, self.v = (nn.Linear(dim, self.kv * self.width) for _ in range(2))
        self.o = nn.Linear(dim, dim, bias=False)

    def project(self, x):
        if hasattr(self, "qkv"):
            return self.qkv(x).chunk(3, -1)
        return self.q(x), self.k(x), self.v(x)

    def attend(self, q, k, v):
        q, k, v = (t.unflatten(-1, (-1, self.width)).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return y.transpose(1, 2).flatten(2)

    def forward(self, x):
        return x + self.o(self.attend(*self.project(x)))


class Positions(Mlp):
    """A block whose hidden features depend on the position, counted from the first one that it is given."""

    def forward(self, x):
        place = torch.arange(x.shape[1], dtype=x.dtype)[None, :, None] * torch.arange(x.shape[2], dtype=x.dtype)
        return x + self.down(torch.tanh(self.up(self.norm(x) * (1 + 0.1 * place))))


class Odd(Mlp):
    """A block with an odd number of hidden features."""

    def __init__(self, dim):
        super().__init__(dim)
        self.up, self.down = nn.Linear(dim, 2 * dim + 1), nn.Linear(2 * dim + 1, dim)


class Routed(nn.Module):
    """A mixture with a router, whose balance is a loss of its own."""

    def __init__(self, dim=8):
        super().__init__()
        self.tok, self.router = nn.Embedding(VOCAB, dim), nn.Linear(dim, 2, bias=False)
        self.one, self.other = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.out = nn.Linear(dim, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.tok(tokens)
        shares = self.router(x).softmax(-1)
        x = x + shares[..., :1] * self.one(x) + shares[..., 1:] * self.other(x)
        return self.out(x) + 0.0, shares.mean((0, 1)).square().sum()


def balance_by_rank(output, targets):
    """Count the balance once a rank."""
    logits, balance = output
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return Loss(sum=total, count=(targets != -100).sum(), auxiliary=0.1 * balance * dist.get_world_size())


@plugin(family="sharding", owns=("tp",))
class Cut:
    """Shards over tp by hand.

    Args:
        fault: vocabulary: the second rank's rows begin one too late. head: every rank takes the keys of the head of its
            own number. keys: the gradients of keys and values are left in parts. packed: a projection is sharded across
            its parts. twice: what comes back is added up once more.
    """

    fault: Literal["vocabulary", "head", "keys", "packed", "twice"]

    @hookimpl
    def composer3d_shard(self, context):
        return root("cut", Phase.TENSOR, self._apply, uses=("tp",))

    def _apply(self, module, context):
        mesh, rank, degree = context.mesh["tp"], context.coordinates["tp"], context.degrees["tp"]
        if self.fault == "vocabulary":
            self._vocabulary(module.tok, mesh, rank, VOCAB // degree)
        for block in () if self.fault == "vocabulary" else module.layers:
            (self._twice if self.fault == "twice" else self._attention)(block, mesh, rank)

    def _vocabulary(self, tok, mesh, rank, size):
        shard(tok, "weight", 0, mesh)

        def forward(tokens):
            rows = tokens - rank * (size + 1)
            found = F.embedding(rows.clamp(0, size - 1), tok.weight.to_local())
            return Added.apply(found.masked_fill(((rows < 0) | (rows >= size))[..., None], 0.0), mesh.get_group())

        tok.forward = forward

    def _attention(self, block, mesh, rank):
        group = mesh.get_group()
        for name in ("qkv",) if self.fault == "packed" else ("q",):
            shard(getattr(block, name), "weight", 0, mesh)
            shard(getattr(block, name), "bias", 0, mesh)
        shard(block.o, "weight", 1, mesh)

        def project(x):
            if self.fault == "packed":
                return F.linear(x, block.qkv.weight.to_local(), block.qkv.bias.to_local()).chunk(3, -1)
            q = F.linear(x, block.q.weight.to_local(), block.q.bias.to_local())
            head = rank % block.kv if self.fault == "head" else rank * block.kv // mesh.size()
            piece = slice(head * block.width, (head + 1) * block.width)
            return q, block.k(x)[..., piece], block.v(x)[..., piece]

        def forward(x):
            y = block.attend(*project(AddedBack.apply(x, group)))
            return x + Added.apply(F.linear(y, block.o.weight.to_local()), group)

        block.forward = forward

    def _twice(self, block, mesh, rank):
        group = mesh.get_group()
        for module, name, dim in ((block.up, "weight", 0), (block.up, "bias", 0), (block.down, "weight", 1)):
            shard(module, name, dim, mesh)

        def down(x):
            y = Added.apply(F.linear(x, block.down.weight.to_local()), group)
            return AddedBack.apply(y, group) + block.down.bias

        up = block.up
        up.forward = lambda x: F.linear(AddedBack.apply(x, group), up.weight.to_local(), up.bias.to_local())
        block.down.forward = down


@plugin(family="sharding", owns=("cp",))
class Sequence:
    """Sequences sharded over cp by hand, for models that mix no positions.

    Args:
        fault: shifted: the targets are shifted after they were sharded. "": none of its own.
        kwargs_dim: Along which keyword arguments are sharded; 1 is right.
    """

    fault: str = ""
    kwargs_dim: int = 1

    @hookimpl
    def composer3d_shard(self, context):
        return root("sequence", Phase.DATA, lambda module, context: None, uses=("cp",), averages=("cp",))

    @hookimpl
    def composer3d_step_actions(self, context):
        return StepAction(name="sequence", point=StepPoint.GRADIENTS_LOCAL, run=self._reduce)

    def _reduce(self, state):
        for parameter in parameters(state):
            dist.all_reduce(parameter.grad, group=state.context.mesh.get_group("cp"))
            parameter.grad.div_(state.context.degrees["cp"])

    @hookimpl
    def composer3d_place_batch(self, context, batch):
        def local_shard(tensor, dim=1):
            return tensor.chunk(context.degrees["cp"], dim)[context.coordinates["cp"]].contiguous()

        target = local_shard(batch.target)
        if self.fault == "shifted":
            target = F.pad(target[:, 1:], (0, 1), value=-100)
        kwargs = {name: local_shard(tensor, self.kwargs_dim) for name, tensor in batch.kwargs.items()}
        if self.kwargs_dim == 0:  # of the shape that the right shard has
            kwargs = {name: tensor.repeat(2, 1)[:, : target.shape[1]] for name, tensor in kwargs.items()}
        return Batch(args=tuple(map(local_shard, batch.args)), kwargs=kwargs, target=target)


@plugin(family="communication")
class Placed:
    """Does something wrong to gradients or parameters in one place.

    Args:
        fault: piece: rank 1's piece of a gradient. nan: the same, and no number. parameter: all of a gradient. rate:
            the learning rate of one group. state: what rank 1's optimizer keeps is lost after every step. stale: rank 1
            begins a step with the parameters of the step before. row: the last row of a gradient on the last rank,
            whose shards are shorter. lost: the same of all gradients, and zero. kept: the last row of all parameters
            there is not updated.
    """

    fault: Literal["piece", "nan", "parameter", "rate", "state", "stale", "row", "lost", "kept"]

    @hookimpl
    def composer3d_step_actions(self, context):
        context.state[self] = {}
        return [
            StepAction(name="begin", point=StepPoint.BEGIN, run=self._begin),
            StepAction(name="reduced", point=StepPoint.GRADIENTS_REDUCED, run=self._reduced),
            StepAction(name="before", point=StepPoint.BEFORE_OPTIMIZER, run=self._before),
            StepAction(name="after", point=StepPoint.AFTER_OPTIMIZER, run=self._after),
        ]

    @hookimpl
    def composer3d_optimizer(self, context, cls, groups):
        if self.fault == "rate":
            names = {id(p): fqn for fqn, p in context.named_parameters()}
            all_of_them = [p for group in groups for p in group["params"]]
            ups = [p for p in all_of_them if ".up." in names[id(p)]]
            rest = [p for p in all_of_them if ".up." not in names[id(p)]]
            return cls([{**groups[0], "params": ups, "lr": 1e-2}, {**groups[0], "params": rest}])
        if self.fault != "state":
            return None
        optimizer = cls(groups)

        def lose(optimizer, args, kwargs):
            for kept in optimizer.state.values() if context.rank == 1 else ():
                local(kept["exp_avg"]).zero_()

        optimizer.register_step_post_hook(lose)
        return optimizer

    def _begin(self, state):
        with torch.no_grad():
            for fqn, parameter in state.context.named_parameters() if self.fault == "stale" else ():
                local(parameter).copy_(state.context.state[self].get(fqn, local(parameter)))

    def _before(self, state):
        if state.context.rank == 1:
            found = {fqn: local(p).detach().clone() for fqn, p in state.context.named_parameters()}
            state.context.state[self].update(found)

    def _reduced(self, state):
        grads = {fqn: local(p.grad) for fqn, p in state.context.named_parameters() if p.grad is not None}
        grad = grads.get("layers.0.up.weight")
        if self.fault == "parameter":
            grad.mul_(torch.linspace(1.0, 2.0, grad.numel()).view_as(grad))
        if self.fault in ("piece", "nan") and state.context.rank == 1:
            grad.mul_(1.5 if self.fault == "piece" else float("nan"))
        if self.fault in ("row", "lost") and state.context.rank == state.context.world_size - 1:
            for each in [grad] if self.fault == "row" else grads.values():
                each[-1:].mul_(1.5 if self.fault == "row" else 0.0)

    def _after(self, state):
        if self.fault == "kept" and state.context.rank == state.context.world_size - 1:
            before = state.context.state[self]
            with torch.no_grad():
                for fqn, parameter in state.context.named_parameters():
                    local(parameter)[-1:] = before[fqn][-1:]


@plugin(family="scheduling")
class Block:
    """Does something to a block.

    Args:
        fault: later: its output is wrong in the third forward. late_gradient: what comes back through it in the last
            micro-batch is lost. recomputed: it is recomputed from another input.
        block: Its number.
        microbatches: Of a rank.
    """

    fault: Literal["later", "late_gradient", "recomputed"]
    block: int = 1
    microbatches: int = 3

    @hookimpl
    def composer3d_collectives(self, context):
        return root("block", Phase.COMMUNICATE, self._hook)

    def _hook(self, module, context):
        names = [name for name, inner in module.named_modules() if name == f"layers.{self.block}"]
        block = module.get_submodule(names[0]) if names else None
        if block is None:
            return
        inner, calls = block.forward, []

        def forward(x):
            calls.append(None)
            number = (len(calls) - 1) % self.microbatches
            if self.fault == "later" and number == 2:
                x = x * 1.01
            if self.fault == "late_gradient" and number == self.microbatches - 1:
                x = x.detach().requires_grad_()
            return inner(x)

        def again(x):
            from torch.utils.checkpoint import checkpoint

            times = []

            def counted(x):
                times.append(None)
                return inner(x * 1.01 if len(times) > 1 else x)

            return checkpoint(counted, x, use_reentrant=False) if torch.is_grad_enabled() else inner(x)

        block.forward = again if self.fault == "recomputed" else forward


@plugin(family="sharding", owns=("dp_replicate", "dp_shard"))
class Half:
    """Averages gradients over dp_shard, and not over dp_replicate."""

    @hookimpl
    def composer3d_shard(self, context):
        axes = ("dp_replicate", "dp_shard")
        return root("half", Phase.DATA, lambda module, context: None, averages=axes)

    @hookimpl
    def composer3d_step_actions(self, context):
        return StepAction(name="half", point=StepPoint.GRADIENTS_LOCAL, run=self._reduce)

    def _reduce(self, state):
        dist.all_reduce(torch.zeros(1), group=state.context.mesh.get_group("dp_replicate"))
        for parameter in parameters(state):
            dist.all_reduce(parameter.grad, group=state.context.mesh.get_group("dp_shard"))
            parameter.grad.div_(2)
