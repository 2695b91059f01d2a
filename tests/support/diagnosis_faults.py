"""What verify once did not see, named wrongly, or called wrong: plugins, models and losses, one after the other."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from composer3d import Batch, Phase, StepAction, StepPoint, hookimpl, plugin
from support.composition_faults import Even, Mlp, local, root
from support.subtle_faults import named_gradients
from support.unusual_models import DIM, Unusual


@plugin(family="communication")
class Points:
    """Does something wrong at a point of the step.

    Args:
        fault: Which.
    """

    fault: str

    @hookimpl
    def composer3d_step_actions(self, context):
        points = {
            "seeded": StepPoint.BEFORE_MICROBATCH,
            "scaled": StepPoint.GRADIENTS_REDUCED,
            "narrow": StepPoint.GRADIENTS_REDUCED,
            "decayed": StepPoint.AFTER_OPTIMIZER,
            "rounded": StepPoint.AFTER_OPTIMIZER,
        }
        return StepAction(name="points", point=points[self.fault], run=getattr(self, f"_{self.fault}"))

    def _seeded(self, state):
        torch.manual_seed(1000 * state.context.rank + state.index)

    def _scaled(self, state):
        for _, parameter in named_gradients(state):
            local(parameter.grad).mul_(0.75)

    def _narrow(self, state):
        for _, parameter in named_gradients(state):
            grad = local(parameter.grad)
            grad.copy_(grad.to(torch.bfloat16))

    def _decayed(self, state):
        for part in state.parts:
            for parameter in part.module.parameters():
                parameter.data.mul_(1.0 - 1e-5)

    def _rounded(self, state):
        for part in state.parts:
            for parameter in part.module.parameters():
                with torch._C.DisableTorchFunction():
                    share = local(parameter.data)
                    share.copy_(share.to(torch.float32))


@plugin(family="sharding", owns=("dp_replicate",))
class Handing:
    """Hands the first rank's gradients to all."""

    @hookimpl
    def composer3d_shard(self, context):
        axes = ("dp_replicate",)
        return root("handing", Phase.DATA, lambda module, context: None, uses=axes, averages=axes)

    @hookimpl
    def composer3d_step_actions(self, context):
        return StepAction(name="handing", point=StepPoint.GRADIENTS_LOCAL, run=self._hand)

    def _hand(self, state):
        for _, parameter in named_gradients(state):
            dist.broadcast(local(parameter.grad), group=state.context.mesh.get_group("dp_replicate"), group_src=0)


@plugin(family="sharding")
class Dropping:
    """Leaves out the mask of a batch."""

    @hookimpl
    def composer3d_place_batch(self, context, batch):
        return Batch(args=batch.args, target=batch.target)


@plugin(family="scheduling")
class Changing:
    """Changes modules.

    Args:
        fault: quiet: dropout is off on the second rank. detached: a block's branch has no gradient for what is before.
            stale: in one layer every micro-batch adds the gradient of the one before.
    """

    fault: str

    @hookimpl
    def composer3d_collectives(self, context):
        return root("changing", Phase.COMMUNICATE, getattr(self, f"_{self.fault}"))

    def _quiet(self, module, context):
        for inner in module.modules() if context.rank == 1 else ():
            if isinstance(inner, nn.Dropout):
                inner.eval()

    def _detached(self, module, context):
        block = module.layers[1]
        block.forward = lambda x: x + block.down(torch.tanh(block.up(block.norm(x.detach()))))

    def _stale(self, module, context):
        layer, last = module.layers[1].up, []

        def late(grad):
            last.append(grad.clone())
            return last[-2] if len(last) > 1 else grad

        def first(*_):
            handle.remove()
            layer.weight.register_hook(late)

        # Parameters are others once the weights are there.
        handle = layer.register_forward_pre_hook(first)


def with_dropout():
    return Even(dropout=0.5)


class Hiding(Even):
    """Hides tokens, where a mask says which."""

    def forward(self, tokens, mask=None):
        x = self.tok(tokens)
        x = x if mask is None else x * mask[..., None]
        for layer in self.layers:
            x = layer(x)
        return self.out(x) + 0.0


class Functional(nn.Module):
    """Attention as many write it: fused, sizes hard-coded, softmax in float32, functional dropout of the weights."""

    def __init__(self):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, DIM // 2)).transpose(1, 2) for part in self.c_attn(x).split(DIM, dim=2))
        shares = F.softmax(q @ k.transpose(-2, -1) / math.sqrt(DIM // 2), dim=-1, dtype=torch.float32).type_as(q)
        out = F.dropout(shares, 0.2, self.training) @ v
        return x + self.c_proj(out.transpose(1, 2).reshape(x.shape))


class Attending(nn.Module):
    """torch's own attention, which drops inside of one function."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(DIM, 2, dropout=0.2, batch_first=True)

    def forward(self, x):
        return x + self.attention(x, x, x, need_weights=False)[0]


class Penalty(nn.Module):
    """Asks for gradients in its forward."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(DIM, DIM)

    def forward(self, x):
        given = x if x.requires_grad else x.requires_grad_()
        (slope,) = torch.autograd.grad(torch.tanh(self.lin(given)).sum(), given, create_graph=True)
        return x + slope


class Seeding(nn.Module):
    """Has the same random features in every forward, by its own seed."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(DIM, DIM)

    def forward(self, x):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            features = torch.randn(DIM, DIM, dtype=x.dtype)
        return x + self.lin(torch.tanh(x @ features))


class Normed(nn.Module):
    """Keeps the vectors of a power iteration from forward to forward."""

    def __init__(self):
        super().__init__()
        self.lin = nn.utils.parametrizations.spectral_norm(nn.Linear(DIM, DIM))

    def forward(self, x):
        return x + self.lin(x)


def functional():
    return Unusual(Functional(), Functional())


def attending():
    return Unusual(Attending(), Attending())


def penalty():
    return Unusual(Penalty(), Penalty())


def seeding():
    return Unusual(Seeding(), Seeding())


def normed():
    return Unusual(Normed(), Normed())


def shared_inside():
    """Blocks that share a layer."""
    model = Unusual(Mlp(DIM), Mlp(DIM))
    model.layers[1].up = model.layers[0].up
    return model


WEIGHTS = torch.linspace(0.5, 2.0, 12)


def weighted(logits, targets):
    """A sum of weighted losses, and the sum of their weights, as in torch's weighted mean."""
    weights, flat = WEIGHTS.to(logits.dtype), targets.flatten()
    total = F.cross_entropy(logits.flatten(0, 1), flat, weight=weights, reduction="sum")
    return total, torch.where(flat == -100, 0.0, weights[flat.clamp(min=0)]).sum()


def mean_of_weights(logits, targets):
    """The weighted mean of one micro-batch."""
    return F.cross_entropy(logits.flatten(0, 1), targets.abs().flatten() % 12, weight=WEIGHTS.to(logits.dtype))


def contrastive(logits, targets):
    """Tells the samples of a micro-batch apart."""
    codes = F.normalize(logits.mean(1), dim=-1)
    return F.cross_entropy(codes @ codes.t(), torch.arange(len(codes)), reduction="sum"), len(codes)
