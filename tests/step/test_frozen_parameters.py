"""Parameters that a loop freezes and unfreezes between steps, beside one device: gradual unfreezing, GANs, probing."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from support.models import write_manifest
from torch import nn

import composer3d
from composer3d.testing import run_ranks

TIGHT = 1e-12
DDP = "[mesh]\ndp_replicate = 2\n[sharding.ddp]\n"
BUCKETED = DDP + 'reducer = "bucketed"\n'
LAYOUTS = {
    "unit": DDP,
    "bucketed": BUCKETED,
    "unused": BUCKETED + "find_unused_parameters = true\ngradient_as_bucket_view = true\n",
    "static": BUCKETED + "static_graph = true\n",
    "zero 3": "[sharding.fsdp2]\n",
    "zero 1": "[sharding.fsdp2]\nzero = 1\n",
    "tp": "[mesh]\ntp = 2\n[sharding.tensor_parallel]\n",
    "compiled": '[sharding.fsdp2]\n[scheduling.compile]\nbackend = "aot_eager"\n',
    "recomputed": "[sharding.fsdp2]\n[scheduling.activation_checkpoint]\n",
    "offloaded": "[sharding.fsdp2]\n[sharding.cpu_offload]\n",
    "offloaded gradients": '[sharding.fsdp2]\n[sharding.cpu_offload]\nmode = "gradients"\n',
    "on disk": "[sharding.fsdp2]\n[sharding.nvme_offload]\n",
}
ALL = "enter layers leave"
# What is trained before compose, and in each step.
TRAINED = {
    "frozen for the first step": [ALL, "layers leave", ALL, ALL],
    "frozen for a later step": [ALL, ALL, "layers leave", ALL],
    "unfrozen from the top": ["leave", "leave", "layers.1 leave", "layers leave", ALL],
    "turns": [ALL, "enter", "leave", "enter", "leave", ALL],
    "blocks in turns": [ALL, "enter leave layers.1", "enter leave layers.0", ALL],
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(5, 8), nn.Linear(8, 3)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(2)
        )

    def forward(self, x):
        x = self.enter(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.leave(x)


def train_only(model, names):
    for fqn, parameter in model.named_parameters():
        parameter.requires_grad_(fqn.startswith(tuple(names.split())))


def error(path, before, steps, num_microbatches):
    """Return the largest distance of gradients and weights from one device's, which may have other Nones than zeros."""
    torch.manual_seed(0)
    model, worst = Net(), 0.0
    reference = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, reference)]
    for each in (model, reference):
        train_only(each, before)
    run = composer3d.compose(model, path)
    run.prepare(optimizers[0])
    rank, size = run.context.data_parallel_rank, 8 // run.context.data_parallel_degree
    for names in steps:
        for each in (run.model, reference):
            train_only(each, names)
        for _ in range(num_microbatches):
            x, y = torch.randn(8, 5), torch.randn(8, 3)
            (F.mse_loss(reference(x), y) / num_microbatches).backward()
            with run.accumulate(num_microbatches):
                mine = slice(rank * size, (rank + 1) * size)
                run.backward(F.mse_loss(run.model(x[mine]), y[mine]))
                run.clip_grad_norm_(float("inf"))  # after which gradients are final in every layout
                pairs = zip(run.named_parameters(), reference.parameters(), strict=True)
                for (fqn, one), other in pairs if run.sync_gradients else ():
                    assert (one.grad is None) == (other.grad is None), fqn
                    if one.grad is not None:
                        worst = max(worst, float((run.full_tensor(fqn, one.grad) - other.grad).abs().max()))
                optimizers[0].step()
                optimizers[0].zero_grad()
        optimizers[1].step()
        optimizers[1].zero_grad()
        for (fqn, one), other in zip(run.named_parameters(), reference.parameters(), strict=True):
            worst = max(worst, float((run.full_tensor(fqn, one.detach()) - other.detach()).abs().max()))
    run.close()
    return worst


def errors(path):
    torch.set_default_dtype(torch.float64)
    return {name: error(path, trained[0], trained[1:], 1 + (name == "turns")) for name, trained in TRAINED.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parameters_frozen_and_unfrozen_between_steps_are_those_of_one_device(layout):
    for found in run_ranks(errors, 2, write_manifest(LAYOUTS[layout])):
        assert max(found.values()) <= TIGHT, found


class Weighed(nn.Module):
    """A weight of the loss that the loop reads by itself, and a layer that nothing uses."""

    def __init__(self):
        super().__init__()
        self.layer, self.log_variance, self.unused = nn.Linear(5, 3), nn.Parameter(torch.zeros(1)), nn.Linear(2, 2)

    def forward(self, x):
        return self.layer(x)

    def loss(self, x, y):
        return torch.exp(-self.log_variance[0]) * F.mse_loss(self(x), y) + self.log_variance.sum()


def error_of_weighed(path):
    """Return the distance of two steps' gradients, whose loss reads a parameter that no forward uses."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, worst = Weighed(), 0.0
    reference = copy.deepcopy(model)
    run = composer3d.compose(model, path)
    optimizers = run.optimizer(torch.optim.SGD, lr=0.1), torch.optim.SGD(reference.parameters(), lr=0.1)
    rank = run.context.data_parallel_rank
    for _ in range(2):
        x, y = torch.randn(8, 5), torch.randn(8, 3)
        reference.loss(x, y).backward()
        run.backward(run.model.loss(x[4 * rank : 4 * rank + 4], y[4 * rank : 4 * rank + 4]))
        for (fqn, one), other in zip(run.named_parameters(), reference.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None) == fqn.startswith("unused")
            worst = worst if other.grad is None else max(worst, float((one.grad - other.grad).abs().max()))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    run.close()
    return worst


def test_buckets_that_find_unused_parameters_reduce_those_that_a_loop_reads_by_itself():
    assert max(run_ranks(error_of_weighed, 2, write_manifest(LAYOUTS["unused"]))) <= TIGHT


def said_of_compressed(path, at_first, later):
    run = composer3d.compose(Net(), path)
    optimizer, x = run.optimizer(torch.optim.SGD, lr=0.1), torch.randn(4, 5)
    with pytest.raises(composer3d.StepError) as caught:
        for names in (at_first, later):
            train_only(run.model, names)
            run.backward(run.model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    return str(caught.value)


def test_buckets_that_another_plugin_reduces_refuse_parameters_that_are_unfrozen_later():
    manifest = write_manifest(BUCKETED + '[communication.compression]\ngradients = "int8"\n')
    assert set(run_ranks(said_of_compressed, 2, manifest, "leave", "layers.1 leave")) == {
        'requires_grad of "layers.1.0.weight" is another one than in the first forward, in which torch\'s '
        "DistributedDataParallel learned what it reduces, and another plugin has replaced what it reduces with; write "
        'reducer = "unit" in [sharding.ddp]'
    }
