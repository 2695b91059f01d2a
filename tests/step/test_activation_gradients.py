"""Backwards that are not linear in their gradient have one device's: hooks on activations, own autograd functions."""

from __future__ import annotations

import pytest
import torch
from support.models import write_manifest
from torch import nn
from torch.nn.functional import mse_loss

import composer3d
from composer3d.step.activation_gradients import is_suspect
from composer3d.testing import run_ranks

LAYOUTS = {
    "fsdp2": (2, "[mesh]\ndp_shard = 2\n[sharding.fsdp2]\n"),
    "fsdp2, 3 ranks": (3, "[mesh]\ndp_shard = 3\n[sharding.fsdp2]\n"),
    "ddp": (2, "[mesh]\ndp_replicate = 2\n[sharding.ddp]\n"),
    "ddp, bucketed": (2, '[mesh]\ndp_replicate = 2\n[sharding.ddp]\nreducer = "bucketed"\n'),
    "recomputed": (2, "[mesh]\ndp_shard = 2\n[sharding.fsdp2]\n[scheduling.activation_checkpoint]\n"),
    "pp, fsdp2": (4, "[mesh]\npp = 2\ndp_shard = 2\n[sharding.fsdp2]\n[scheduling.pipeline]\n"),
}
LIMIT = 2e-3
TOLERANCE = 1e-12


def clipped(gradient):
    return gradient.clamp(-LIMIT, LIMIT)


class Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return clipped(gradient)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


def normalised(gradient):
    return gradient / (gradient.norm(dim=-1, keepdim=True) + LIMIT)


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.up, self.down, self.kind = nn.Linear(6, 9), nn.Linear(9, 6), kind

    def forward(self, x):
        h = torch.tanh(self.up(x))
        if self.kind in ("clamp", "normalise") and h.requires_grad:
            h.register_hook(clipped if self.kind == "clamp" else normalised)
        return x + self.down(Clip.apply(Double.apply(h)) if self.kind == "function" else h)


def net(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), Block(kind), Block(kind), nn.Linear(6, 2))
    if kind == "module":
        model[1].down.register_full_backward_hook(lambda module, into, outof: tuple(clipped(each) for each in into))
    return model


def differences(path, kinds):
    """Return the largest relative difference of gradients to one device's, of each kind and form of a loop."""
    torch.set_default_dtype(torch.float64)
    found = {}
    for kind in kinds:
        torch.manual_seed(1)
        x, y, reference, composed = torch.randn(12, 4), torch.randn(12, 2), net(kind), net(kind)
        mse_loss(reference(x), y).backward()
        run = composer3d.compose(composed, path, loss_fn=mse_loss, example=((x[:2],), {}))
        rank, size = run.context.data_parallel_rank, 12 // run.context.data_parallel_degree
        optimizer = run.optimizer(torch.optim.SGD, lr=0.0)
        mine, expected = slice(rank * size, (rank + 1) * size), dict(reference.named_parameters())
        for own in (False, True) if run.context.degrees["pp"] == 1 else (False,):
            if own:
                for half in (x[mine][::2], y[mine][::2]), (x[mine][1::2], y[mine][1::2]):
                    run.backward(mse_loss(run.model(half[0]), half[1]) / 2)
            else:
                run.forward_backward(x[mine], target=y[mine])
            run.clip_grad_norm_(float("inf"))
            each = {fqn: run.full_tensor(fqn, p.grad) - expected[fqn].grad for fqn, p in run.named_parameters()}
            found[kind, own] = max(float(d.abs().max() / expected[fqn].grad.abs().max()) for fqn, d in each.items())
            optimizer.step()
            optimizer.zero_grad()
        run.close()
    return found


@pytest.mark.parametrize(
    "layout", [name if name == "fsdp2" else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_what_is_not_linear_in_a_gradient_is_given_one_devices(layout):
    world_size, text = LAYOUTS[layout]
    path = write_manifest("model.blocks = '[12]'\ntrain.microbatch = 2\n" + text)
    for found in run_ranks(differences, world_size, path, ("clamp", "normalise", "function", "module")):
        assert max(found.values()) <= TOLERANCE, found


def kept_by_a_hook(path):
    """Return what hooks are given by the run, on an output and in a forward, and by the loop's own `autograd.grad`."""
    torch.set_default_dtype(torch.float64)
    seen, x = [], torch.ones(2, 4)
    run = composer3d.compose(net("none"), path)
    run.optimizer(torch.optim.SGD, lr=0.0)
    output = run.model(x)
    output.register_hook(seen.append)
    run.backward(output.mean())
    with run.rank_gradients():
        output = run.model(x)
        output.register_hook(seen.append)
        torch.autograd.grad(output.mean(), list(run.model.parameters()), allow_unused=True)
    run.close()
    return [float(each[0, 0]) for each in seen]


def test_a_hook_that_looks_is_given_one_devices_gradient_and_a_ranks_own_where_that_is_asked_for():
    assert run_ranks(kept_by_a_hook, 2, write_manifest(LAYOUTS["fsdp2"][1])) == [[1 / 8, 1 / 4]] * 2


def test_functions_with_linear_backwards_are_left_alone():
    assert is_suspect(Clip)
    assert not is_suspect(Double)
    assert not is_suspect(torch.utils.checkpoint.CheckpointFunction)
