"""Modules and methods that a loop calls itself, or a model's forward beside the units' own forwards."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from support.models import write_manifest
from torch import nn

import composer3d
from composer3d.testing import full, run_ranks

TIGHT = 1e-12
LAYOUTS = {
    "zero 3": "[sharding.fsdp2]\n",
    "zero 2": "[sharding.fsdp2]\nzero = 2\n",
    "reshard_root": "[sharding.fsdp2]\nreshard_root = true\n",
    "unit": "[sharding.ddp]\n[mesh]\ndp_replicate = 2\n",
}


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.scale = nn.Parameter(torch.full((dim,), 0.5))

    def encode(self, x):
        return self.up(x).tanh()

    def decode(self, h):
        return self.down(h) * self.scale

    def forward(self, x):
        return x + self.decode(self.encode(x))


class Autoencoder(nn.Module):
    """A model without a forward of its own."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block(6) for _ in range(2))
        self.enter, self.leave = nn.Linear(6, 6), nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.full((1,), 2.0))

    def encode(self, x):
        return self.layers[0](self.enter(x))

    def decode(self, z):
        return self.leave(self.layers[1](z * self.scale))

    def by_halves(self, x):
        for layer in self.layers:
            x = x + layer.decode(layer.encode(x))
        return self.leave(x)

    def forward(self, x):
        return self.by_halves(self.enter(x))


def methods(model, x):
    z = model.encode(x)
    return (model.decode(z) - x).pow(2).mean() + z.pow(2).mean()


def decoder_first(model, x):
    return (model.decode(x.clone().requires_grad_()) - model.encode(x)).pow(2).mean()


def parts(model, x):
    h = model.enter(x)
    for layer in model.layers:
        h = layer(h)
    return model.leave(h).pow(2).mean()


def units_first(model, x):
    return model.leave(model.layers[1](model.layers[0](x)) * 2).pow(2).mean()


def halves(model, x):
    return (model(x) - x).pow(2).mean()


def halves_and_whole(model, x):
    """A unit's parts, and then the unit: the first have no hook that says when their gradients are there."""
    layer = model.layers[0]
    return (layer.down(layer.up(x)) + layer(layer(x))).pow(2).mean()


LOSSES = [methods, decoder_first, parts, units_first, halves, halves_and_whole]


def errors(path, loss_of):
    """Return, for each of two steps, the errors of gradients and of a forward without gradients after each."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = Autoencoder()
    reference = copy.deepcopy(model)
    run = composer3d.compose(model, path)
    optimizer, other = run.optimizer(torch.optim.SGD, lr=0.05), torch.optim.SGD(reference.parameters(), lr=0.05)
    rank, found = run.context.data_parallel_rank, []
    for number in range(2):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(number))
        loss_of(reference, x).backward()
        with torch.no_grad():
            found.append(float((loss_of(run.model, x) - loss_of(reference, x)).abs()))
        run.backward(loss_of(run.model, x[4 * rank : 4 * rank + 4]))
        expected = {fqn: p.grad for fqn, p in reference.named_parameters()}
        largest = max(float(grad.abs().max()) for grad in expected.values() if grad is not None)
        for fqn, parameter in run.named_parameters():
            assert (parameter.grad is None) == (expected[fqn] is None), fqn
            if parameter.grad is not None:
                found.append(float((full(parameter.grad) - expected[fqn]).abs().max()) / largest)
        for each in (optimizer, other):
            each.step()
            each.zero_grad()
    run.close()
    return found


def all_errors(path):
    return {loss_of.__name__: max(errors(path, loss_of)) for loss_of in LOSSES}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_modules_and_methods_that_a_loop_calls_equal_one_device(layout):
    for found in run_ranks(all_errors, 2, write_manifest(LAYOUTS[layout])):
        assert max(found.values()) <= TIGHT, found


class Halves(nn.Module):
    """Blocks whose halves a loop may call, which their own forward calls too."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Embedding(12, 6), nn.Linear(6, 12)
        self.layers = nn.ModuleList(Block(6) for _ in range(2))
        for layer in self.layers:
            layer.scale.requires_grad_(False)

    def forward(self, tokens):
        x = self.enter(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.leave(x)


def over_tp(path):
    """Return the loss of blocks that the loop calls, with one device's, and the error for what is inside of one."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, tokens = Halves(), torch.randint(12, (4, 5))
    reference = copy.deepcopy(model)
    run = composer3d.compose(model, path, example=((tokens,), {}))
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
    loss = run.backward(run.model.leave(run.model.layers[0](run.model.enter(tokens))).pow(2).mean())
    optimizer.step()
    optimizer.zero_grad()
    expected = reference.leave(reference.layers[0](reference.enter(tokens))).pow(2).mean()
    with pytest.raises(composer3d.LossError) as caught:
        run.backward(run.model.layers[0].encode(run.model.enter(tokens)).pow(2).mean())
    run.close()
    return float((loss - expected).detach().abs()), str(caught.value)


def test_shards_inside_of_a_block_are_no_loss_of_the_loop():
    for error, message in run_ranks(over_tp, 2, write_manifest("[mesh]\ntp = 2\n[sharding.tensor_parallel]\n")):
        assert error <= TIGHT
        assert re.fullmatch(
            r"ranks of tensor parallelism computed other losses of the same batch: they differ by \d\S+, of \d\S+\. "
            r"What a loop or a loss function calls inside of a block, or reads there, is a rank's shard: call the "
            r"model, or its blocks as a whole, and compute the loss of what these return",
            message,
        )


class Described(Autoencoder):
    """Methods that name parameters, and are no forwards."""

    def extra_repr(self):
        return f"scale of {self.scale.shape}"

    def size(self):
        return self.scale.numel()

    @torch.no_grad()
    def rescaled(self, x):
        return x * self.scale


def on_one_rank(path):
    """Return what the first rank alone reads of a model; and how stale a forward between clipping and a step is."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = Described()
    run = composer3d.compose(model, path)
    optimizer = run.optimizer(torch.optim.SGD, lr=0.05)
    alone = ("scale of" in str(run.model), run.model.size()) if run.context.rank == 0 else None
    x, found = torch.ones(2, 6), []
    for _ in range(2):
        run.backward(run.model(x).pow(2).mean() + run.model.encode(x).mean() + run.model.decode(x).pow(2).mean())
        run.clip_grad_norm_(1.0)
        run.model.rescaled(x)
        run.model.decode(run.model.encode(x))
        optimizer.step()
        optimizer.zero_grad()
        scale = run.full_tensor("scale", dict(run.named_parameters())["scale"])
        found.append(float((run.model.rescaled(x) - scale).abs().max()))
    run.close()
    return alone, found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_descriptions_gather_nothing_and_what_is_gathered_is_not_stale(layout):
    (alone, *found), (nothing, *other) = run_ranks(on_one_rank, 2, write_manifest(LAYOUTS[layout]))
    assert (alone, nothing) == ((True, 1), None)
    assert found == other == [[0.0, 0.0]]
