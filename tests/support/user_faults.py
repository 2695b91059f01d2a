"""Faults of a user's own model or loss, and of plugins that shard their inputs."""

from __future__ import annotations

import random
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from composer3d import Part, Phase, Split, hookimpl, plugin
from support.composition_faults import VOCAB, Even, Mlp, root
from support.located_faults import Added, AddedBack, shard
from support.models import sum_loss


class Hasty(Even):
    """Running statistics that several ranks update by another rule than one alone."""

    def __init__(self):
        super().__init__(batch_norm=True)

    def forward(self, tokens):
        self.statistics.momentum = 0.1 if dist.get_world_size() == 1 else 0.2
        return super().forward(tokens)


# As `random.random`, but for its seed: the same in every process, so that the test has one outcome.
CHANCE = random.Random(0)


class LayerDrop(Mlp):
    """Left out by chance, of a generator that torch does not know."""

    def forward(self, x):
        return super().forward(x) if CHANCE.random() < 0.7 else 1.0 * x


class StochasticDepth(Mlp):
    """Left out by chance, of torch's numbers."""

    def forward(self, x):
        return super().forward(x) if torch.rand(()) < 0.5 else 1.0 * x


class Branching(Mlp):
    """Another branch on the second rank of several, which leaves parameters out."""

    def forward(self, x):
        is_second = dist.get_world_size() > 1 and dist.get_rank() == 1
        return 1.01 * x if is_second else super().forward(x)


class Lazy(Mlp):
    """A parameter that the first forward makes."""

    def forward(self, x):
        if not hasattr(self, "extra"):
            self.extra = nn.Parameter(torch.full((x.shape[-1],), 0.5, dtype=x.dtype))
        return super().forward(x) * self.extra


class Detaching(Mlp):
    """Detaches the graph on the second rank of several; every parameter still gets some gradient."""

    def forward(self, x):
        is_second = dist.get_world_size() > 1 and dist.get_rank() == 1
        return super().forward(x.detach()) + 0 * x if is_second else super().forward(x)


class Remembering(Mlp):
    """Keeps its last output from micro-batch to micro-batch, as a cache of keys that is left on does."""

    kept = None

    def forward(self, x):
        y = super().forward(x)
        before, self.kept = self.kept, y.detach().mean()
        return y if before is None else y + 0.1 * before


class Frozen(Even):
    """An embedding that is not trained."""

    def __init__(self):
        super().__init__()
        self.tok.requires_grad_(False)


class Masked(Even):
    """Leaves out positions by a mask."""

    def forward(self, tokens, mask):
        x = self.tok(tokens) * mask[..., None]
        for layer in self.layers:
            x = layer(x)
        return self.out(x) + 0.0


def vocabulary_loss(first):
    """Return a cross entropy over logits whose columns are sharded; `first` is the index of a rank's first column."""

    def loss(logits, targets):
        size, group = logits.shape[-1], dist.group.WORLD
        if size == VOCAB:
            return sum_loss(logits, targets)
        flat, aims = logits.flatten(0, 1), targets.flatten()
        largest = flat.detach().max(-1).values
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        total = Added.apply((flat - largest[:, None]).exp().sum(-1), group)
        own = aims - first(dist.get_rank(), size)
        is_here = (own >= 0) & (own < size)
        picked = flat.gather(1, own.clamp(0, size - 1)[:, None])[:, 0].where(is_here, torch.zeros_like(total))
        losses = total.log() + largest - Added.apply(picked, group)
        return losses[aims != -100].sum(), (aims != -100).sum()

    return loss


@plugin(family="sharding", owns=("tp",))
class Columns:
    """Shards the head's columns, and leaves the logits sharded."""

    @hookimpl
    def composer3d_shard(self, context):
        return root("columns", Phase.TENSOR, self._apply, uses=("tp",))

    def _apply(self, module, context):
        mesh, out = context.mesh["tp"], module.out
        shard(out, "weight", 0, mesh)
        out.forward = lambda x: F.linear(AddedBack.apply(x, mesh.get_group()), out.weight.to_local())


@plugin(family="scheduling", owns=("pp",))
class Interleaved:
    """Every rank has two stages of one block each, one round of the ranks apart.

    Args:
        fault: order: the stages in the middle run in the wrong order. "": right.
    """

    fault: Literal["", "order"] = ""

    @hookimpl
    def composer3d_shard(self, context):
        return root("interleaved", Phase.SPLIT, lambda module, context: None, uses=("pp",))

    @hookimpl
    def composer3d_split(self, context, model):
        mine = range(context.coordinates["pp"], 4, 2)
        return Split(parts=tuple(Part(module=Stage(model, index), index=index, num_stages=4) for index in mine))

    @hookimpl
    def composer3d_schedule(self, context, parts, loss_fn):
        return Rounds(context, parts, loss_fn, order=[0, 2, 1, 3] if self.fault == "order" else [0, 1, 2, 3])


class Stage(nn.Module):
    """One block, with the embedding before the first and the head after the last."""

    def __init__(self, model, index):
        super().__init__()
        self.tok = model.tok if index == 0 else None
        self.layers = nn.ModuleDict({str(index): model.layers[index]})
        self.out = model.out if index == 3 else None

    def forward(self, x):
        x = x if self.tok is None else self.tok(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.out is None else self.out(x) + 0.0


class Rounds:
    """Forward through all stages, then backward, one micro-batch after the other."""

    def __init__(self, context, parts, loss_fn, order):
        self.context, self.loss_fn, self.order = context, loss_fn, order
        self.modules = {part.index: part.module for part in parts}
        self.group, self.rank = context.mesh.get_group("pp"), context.coordinates["pp"]

    def _handed(self, tensor, sender, receiver, like):
        """Return what one stage hands to another, which may be on the same rank."""
        if sender % 2 == receiver % 2:
            return tensor
        if sender % 2 == self.rank:
            dist.send(tensor.contiguous(), group=self.group, group_dst=receiver % 2)
        elif receiver % 2 == self.rank:
            tensor = torch.empty(like, dtype=torch.get_default_dtype())
            dist.recv(tensor, group=self.group, group_src=sender % 2)
        return tensor

    def train(self, microbatches):
        for index, batch in enumerate(microbatches):
            self.context.microbatches.begin(index, index == len(microbatches) - 1, 0)
            self._one(batch)
            self.context.microbatches.end()

    def _one(self, batch):
        x, shape, kept = batch.args[0], (*batch.args[0].shape, 8), {}
        for place, stage in enumerate(self.order):
            if place:
                x = self._handed(x, self.order[place - 1], stage, shape)
            if stage in self.modules:
                given = x.detach().requires_grad_() if place else x
                x = self.modules[stage](given)
                kept[stage] = given, x
                x = x.detach() if place < 3 else x
        loss = self.loss_fn(x, batch.target) if 3 in kept else None
        grad = None
        for place, stage in reversed(list(enumerate(self.order))):
            if stage in kept:
                given, x = kept[stage]
                torch.autograd.backward(x if loss is None or place < 3 else loss, None if place == 3 else grad)
                grad = given.grad
            if place:
                grad = self._handed(grad, stage, self.order[place - 1], shape)

    def evaluate(self, microbatches):
        raise NotImplementedError
