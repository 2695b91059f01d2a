"""Backwards through a forward of before an optimizer's step."""

from __future__ import annotations

import copy

import pytest
import torch
from support.models import write_manifest
from torch import nn
from torch.nn.functional import mse_loss

import composer3d
from composer3d.errors import StepError
from composer3d.testing import run_ranks

TIGHT = 1e-12
LAYOUT = "model.blocks = 'layers.*'\n[mesh]\ndp_shard = {}\ndp_replicate = {}\n[sharding.fsdp2]\nzero = {}\n"
SLOW = ((2, 1, 1), (2, 1, 2), (1, 1, 3), (2, 2, 3))


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 4)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x).tanh()
        return self.last(x)


def two_forwards(path, steps_between):
    """Return what the backward of the second of two forwards was answered, and the difference from one device."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = Blocks()
    single = copy.deepcopy(model)
    x, y = torch.randn(2, 8, 6), torch.randn(2, 8, 4)
    with composer3d.compose(model, path, loss_fn=mse_loss) as run:
        size = 8 // run.context.data_parallel_degree
        own = slice(run.context.data_parallel_rank * size, (run.context.data_parallel_rank + 1) * size)
        optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
        answers = []
        for net, backward, update, part in (
            (run.model, run.backward, optimizer, own),
            (single, torch.Tensor.backward, torch.optim.SGD(single.parameters(), lr=0.1), slice(8)),
        ):
            losses = [mse_loss(net(x[i, part]), y[i, part]) for i in range(2)]
            backward(losses[0])
            if steps_between:
                update.step()
                update.zero_grad()
            try:
                backward(losses[1])
                answers.append(None)
            except (RuntimeError, StepError) as error:
                answers.append(error)
        expected = dict(single.named_parameters())
        if steps_between:  # what was refused leaves a run that goes on
            for net, backward, part in ((run.model, run.backward, own), (single, torch.Tensor.backward, slice(8))):
                net.zero_grad()
                backward(mse_loss(net(x[1, part]), y[1, part]))
        pairs = [(run.full_tensor(fqn, p.grad.detach()), expected[fqn].grad) for fqn, p in run.named_parameters()]
    return answers, [float((whole - other).abs().max()) for whole, other in pairs]


@pytest.mark.parametrize(
    ("shards", "replicas", "zero"), [(2, 1, 3), *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)]
)
def test_a_forward_of_before_an_optimizers_step_has_no_backward(shards, replicas, zero):
    path = write_manifest(LAYOUT.format(shards, replicas, zero))
    for answers, differences in run_ranks(two_forwards, shards * replicas, path, True):
        ours, theirs = answers
        assert isinstance(theirs, RuntimeError) and "modified by an inplace operation" in str(theirs)
        assert isinstance(ours, StepError) and str(ours).startswith('a backward begins from a graph of "')
        assert "has been written since" in str(ours)
        assert len(differences) == 8 and max(differences) < TIGHT


@pytest.mark.parametrize(
    ("shards", "replicas", "zero"), [(2, 1, 3), *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)]
)
def test_two_forwards_before_their_backwards_are_one_devices(shards, replicas, zero):
    path = write_manifest(LAYOUT.format(shards, replicas, zero))
    for answers, differences in run_ranks(two_forwards, shards * replicas, path, False):
        assert answers == [None, None]
        assert len(differences) == 8 and max(differences) < TIGHT
