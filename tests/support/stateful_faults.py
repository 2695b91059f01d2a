"""Models that keep something, scatter by a rank's own numbers, or norm sharded features, and plugins for them."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from composer3d import Batch, Phase, StepAction, StepPoint, hookimpl, plugin
from support.composition_faults import Even, Mlp, root
from support.located_faults import Added, AddedBack, Sequence, shard


class Cached(Mlp):
    """Keeps keys of the step before, in training too; it knows steps by their first micro-batch."""

    kept = None

    def forward(self, x):
        y = super().forward(x)
        if self.kept is not None and self.kept.shape == y.shape:
            y = y + 0.1 * self.kept
        self.kept = y.detach()
        return y


class Warming(Mlp):
    """Counts its forwards in an attribute of Python, and grows with them."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return x + min(1.0, 0.25 * self.calls) * (super().forward(x) - x)


class Bags(nn.Module):
    """Adds to every token the mean of all tokens of its kind in the sequence, by `index_add_`.

    Args:
        group: Called without arguments: over which the sums are added up; None adds up nothing.
    """

    group = None

    def __init__(self, dim):
        super().__init__()
        self.up = nn.Linear(dim, dim)

    def forward(self, x):
        y = torch.tanh(self.up(x))
        kinds = torch.arange(x.shape[1]) % 2
        bags = torch.zeros(x.shape[0], 2, x.shape[2], dtype=x.dtype).index_add(1, kinds, y)
        if self.group is not None:
            bags = Summed.apply(bags, self.group())
        return x + bags[:, kinds]


class Summed(torch.autograd.Function):
    """Adds up over a group, forwards and back."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Positioned(Even):
    """Takes the positions of its tokens as an argument."""

    def __init__(self):
        super().__init__()
        self.places = nn.Embedding(4, 8)

    def forward(self, tokens, positions):
        x = self.tok(tokens) + self.places(positions)
        for layer in self.layers:
            x = layer(x)
        return self.out(x) + 0.0


class Numbered(Even):
    """Numbers its tokens itself."""

    def __init__(self):
        super().__init__()
        self.places = nn.Embedding(4, 8)

    def forward(self, tokens):
        x = self.tok(tokens) + self.places(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.out(x) + 0.0


@plugin(family="sharding", owns=("cp",))
class Pieces:
    """Shards sequences over cp.

    Args:
        fault: labels: rank 1's labels are shifted. positions: they begin at zero on every rank. "": right.
        bags: `Bags` are added up over cp.
    """

    fault: Literal["", "labels", "positions"] = ""
    bags: bool = False

    @hookimpl
    def composer3d_shard(self, context):
        return root("pieces", Phase.DATA, self._apply, uses=("cp",), averages=("cp",))

    def _apply(self, module, context):
        for inner in module.modules():
            if isinstance(inner, Bags) and self.bags:
                inner.group = lambda: context.mesh.get_group("cp")

    @hookimpl
    def composer3d_step_actions(self, context):
        return StepAction(name="pieces", point=StepPoint.GRADIENTS_LOCAL, run=Sequence._reduce.__get__(self))

    @hookimpl
    def composer3d_place_batch(self, context, batch):
        index, degree = context.coordinates["cp"], context.degrees["cp"]

        def cut(tensor):
            return tensor.chunk(degree, 1)[index].contiguous()

        target, named = cut(batch.target), {name: cut(tensor) for name, tensor in batch.kwargs.items()}
        if self.fault == "labels" and index == 1:
            target = F.pad(target[:, 1:], (0, 1), value=-100)
        if self.fault == "positions":
            named["positions"] = torch.arange(target.shape[1]).expand_as(target).contiguous()
        return Batch(args=tuple(map(cut, batch.args)), kwargs=named, target=target)


class Rms(nn.Module):
    """A norm by the root of the mean square."""

    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, dim))

    def forward(self, x):
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.weight


class Normed(nn.Module):
    """A block that norms its hidden features."""

    def __init__(self, dim):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(dim, 2 * dim), Rms(2 * dim), nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x):
        return x + self.down(self.norm(torch.tanh(self.up(x))))


@plugin(family="sharding", owns=("tp",))
class CutNorm:
    """Cuts hidden features over tp by hand, and with them the norm among them.

    Args:
        fault: local: each rank norms by its own features. "": right.
    """

    fault: Literal["", "local"] = ""

    @hookimpl
    def composer3d_shard(self, context):
        return root("cut_norm", Phase.TENSOR, self._apply, uses=("tp",))

    def _apply(self, module, context):
        mesh = context.mesh["tp"]
        for block in module.layers:
            self._cut(block, mesh, mesh.get_group())

    def _cut(self, block, mesh, group):
        up, norm, down = block.up, block.norm, block.down
        for inner, name, dim in ((up, "weight", 0), (up, "bias", 0), (norm, "weight", 0), (down, "weight", 1)):
            shard(inner, name, dim, mesh)

        def normed(x):
            square = x.square().mean(-1, keepdim=True)
            square = square if self.fault else Summed.apply(square, group) / 2
            return x * (square + 1e-6).rsqrt() * norm.weight.to_local()

        up.forward = lambda x: F.linear(AddedBack.apply(x, group), up.weight.to_local(), up.bias.to_local())
        norm.forward = normed
        down.forward = lambda x: Added.apply(F.linear(x, down.weight.to_local()), group)


class Chosen(nn.Module):
    """A mixture of four experts, of which each token takes two.

    Args:
        apart: On the second rank of several, one.
    """

    def __init__(self, dim=8, *, apart=False):
        super().__init__()
        self.apart = apart
        self.router = nn.Linear(dim, 4, bias=False)
        self.up = nn.Parameter(torch.randn(4, dim, dim) / 3)

    def weigh(self, x):
        top = 1 if dist.get_world_size() > 1 and dist.get_rank() == 1 and self.apart else 2
        shares, chosen = self.router(x).softmax(-1).topk(top, dim=-1)
        return torch.zeros(*x.shape[:-1], 4, dtype=x.dtype).scatter(-1, chosen, shares)

    def forward(self, x):
        return x + torch.einsum("bsd,edf,bse->bsf", x, self.up, self.weigh(x))


@plugin(family="scheduling")
class Wire:
    """Rounds what the first stage sends on, or what comes back.

    Args:
        fault: forward: activations. backward: their gradients. narrow: activations, where they are in float32.
        dtype: To which.
    """

    fault: Literal["forward", "backward", "narrow"]
    dtype: str = "bfloat16"

    @hookimpl
    def composer3d_collectives(self, context):
        return root("wire", Phase.COMMUNICATE, self._hook)

    def _hook(self, module, context):
        if context.coordinates["pp"] == 0:
            module.register_forward_hook(lambda module, args, output: self._round(output))

    def _round(self, output):
        dtype = getattr(torch, self.dtype)
        if self.fault == "backward":
            return Rounded.apply(output, dtype)
        if self.fault == "narrow" and output.dtype != torch.float32:
            return output
        return output + (output.to(dtype).to(output.dtype) - output).detach()


class Rounded(torch.autograd.Function):
    """Rounds what comes back."""

    @staticmethod
    def forward(ctx, x, dtype):
        ctx.dtype = dtype
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.to(ctx.dtype).to(grad.dtype), None


@plugin(family="scheduling")
class Merged:
    """Runs micro-batches other than those that the batch was split into.

    Args:
        fault: halves: the second half of each is left out, the first counts twice. "": two at a time, which is right.
    """

    fault: Literal["", "halves"] = ""

    @hookimpl
    def composer3d_schedule(self, context, parts, loss_fn):
        fault = self.fault

        class Schedule:
            def train(self, microbatches):
                pairs = [microbatches[index : index + 2] for index in range(0, len(microbatches), 2)]
                for index, pair in enumerate(pairs):
                    context.microbatches.begin(index, index == len(pairs) - 1, 0)
                    tokens = torch.cat([one.args[0] for one in pair])
                    target = torch.cat([one.target for one in pair])
                    if fault:
                        half = len(tokens) // 2
                        tokens, target = tokens[:half].repeat(2, 1), target[:half].repeat(2, 1)
                    loss_fn(parts[0].module(tokens), target).backward()
                    context.microbatches.end()

            def evaluate(self, microbatches):
                raise NotImplementedError

        return Schedule()


@plugin(family="sharding", owns=("dp_replicate",))
class Claims:
    """Data parallelism whose claims differ from what it does.

    Args:
        fault: sums: it says that it averages, and sums up. averages: it says that it sums up, and averages.
    """

    fault: Literal["sums", "averages"]

    @hookimpl
    def composer3d_shard(self, context):
        says = ("dp_replicate",) if self.fault == "sums" else ()
        return root("claims", Phase.DATA, lambda module, context: None, uses=("dp_replicate",), averages=says)

    @hookimpl
    def composer3d_step_actions(self, context):
        return StepAction(name="claims", point=StepPoint.GRADIENTS_LOCAL, run=self._reduce)

    def _reduce(self, state):
        for parameter in (p for part in state.parts for p in part.module.parameters() if p.grad is not None):
            dist.all_reduce(parameter.grad, group=state.context.mesh.get_group("dp_replicate"))
            if self.fault == "averages":
                parameter.grad.div_(2)


@plugin(family="sharding")
class Placing:
    """Hands the model less than the batch: the last sample is left out."""

    @hookimpl
    def composer3d_configure(self, context):
        context.claim("samples", by=self)

    @hookimpl
    def composer3d_place_batch(self, context, batch):
        return Batch(args=(batch.args[0][:-1],), target=batch.target[:-1])


@plugin(family="precision")
class Clamp:
    """Clamps every element of gradients.

    Args:
        fault: early: before they are reduced. "": right.
    """

    fault: Literal["", "early"] = ""

    @hookimpl
    def composer3d_step_actions(self, context):
        point = StepPoint.AFTER_MICROBATCH if self.fault else StepPoint.GRADIENTS_REDUCED
        return StepAction(name="clamp", point=point, run=self._clamp)

    def _clamp(self, state):
        for part in state.parts:
            for parameter in part.module.parameters():
                if parameter.grad is not None:
                    parameter.grad.clamp_(-1e-3, 1e-3)
