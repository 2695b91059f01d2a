"""Runs with and without offloading, compared to the last bit."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composer3d.testing import count_collectives
from support.interrupted_runs import go_on
from support.models import Net, composed, full, mine, padded, seeded

FSDP = "[sharding.fsdp2]\n"
DDP = "[sharding.ddp]\n"
PP = "[mesh]\npp = 2\n[scheduling.pipeline]\n[train]\nmicrobatch = 6\n"
TP = '[mesh]\ntp = 2\n[sharding.tensor_parallel.plan]\n"layers.*.up" = "colwise"\n"layers.*.down" = "rowwise"\n'


class Even(Net):
    """With inner sizes that divide by tp, and matrices of 16384 elements."""

    def __init__(self, **options):
        super().__init__(dim=64, **options)
        for layer in self.layers:
            layer.up, layer.down = nn.Linear(64, 256), nn.Linear(256, 64)


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def trained(text, cls=torch.optim.AdamW, options=None, num_steps=3, factory=Even, dtype=torch.float32):
    """Train; return losses, full weights, the optimizer's state, and the collectives and metrics of the last step."""
    torch.set_default_dtype(dtype)
    run = composed(text, seeded(factory))
    optimizer = run.optimizer(cls, lr=1e-2, weight_decay=0.1, **(options or {}))
    tokens, targets = (mine(run, tensor) for tensor in padded())
    losses = []
    for number in range(num_steps):
        with run.step(number), count_collectives(run.mesh) as collectives:
            losses.append(float(run.forward_backward(tokens, target=targets)))
            run.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
    metrics = run.report(num_steps, {})
    weights = {name: full(p) for name, p in run.named_parameters()}
    state = {}
    with optimizer.plain_state(write=False) if hasattr(optimizer, "plain_state") else torch.no_grad():
        for name, p in run.named_parameters():
            for key, value in optimizer.state[p].items():
                # The file is gone when the run is closed.
                state[f"{name}/{key}"] = full(value).clone() if isinstance(value, torch.Tensor) else value
    run.close()
    return losses, weights, state, collectives.summary(), metrics


def assert_same(found, wanted):
    """Assert that two ranks' results of `trained` are equal to the last bit, and that something was learnt."""
    assert found[0] == wanted[0] and found[0][-1] < found[0][0]
    for one, other in zip(found[1:3], wanted[1:3], strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(torch.as_tensor(one[name]), torch.as_tensor(other[name])) for name in one)


def resumed(path, text, load, num_steps, factory=Even):
    """Train, saving after two steps; or go on from there. Return the full weights."""
    run = composed(text, seeded(factory))
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
    weights = go_on(run, optimizer, padded(), path, load=load, num_steps=num_steps, asynchronous=True)
    run.close()
    return weights
