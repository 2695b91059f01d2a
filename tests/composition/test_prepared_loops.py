"""`run.prepare`: what a loop has made for one device, adopted in place."""

from __future__ import annotations

import re
from bisect import bisect_right

import pytest
import torch
from support.models import composed, mean_loss, mine, seeded, unpadded, write_manifest
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import composer3d
from composer3d import StepError
from composer3d.testing import run_ranks

LAYOUTS = {
    "fsdp2": "[sharding.fsdp2]\n",
    "tensors of two kinds": "[mesh]\ntp = 2\n[sharding.tensor_parallel]\nsequence_parallel = false\n",
    "ddp": "[sharding.ddp]\n",
}


class WarmupMultiStep(lr_scheduler.LRScheduler):
    """A user's: its milestones are as many as the optimizer's groups."""

    def __init__(self, optimizer):
        self.milestones = [1, 2]
        super().__init__(optimizer)

    def get_lr(self):
        return [rate * 0.1 ** bisect_right(self.milestones, self.last_epoch) for rate in self.base_lrs]


SCHEDULERS = {
    "milestones": WarmupMultiStep,
    "lambdas": lambda o: torch.optim.lr_scheduler.LambdaLR(o, [lambda step: 1 / (1 + step), lambda step: 0.5**step]),
    "sequence": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.ConstantLR(o, 0.5, 2), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
        milestones=[2],
    ),
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.tok, self.out = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, tokens):
        x = self.tok(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def made(model, make):
    groups = [
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0, "lr": 3e-3},
        {"params": [p for p in model.parameters() if p.dim() >= 2]},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, betas=(0.8, 0.9))
    return optimizer, make(optimizer)


def trained(layout, make, after):
    """Train two steps alone and prepared; return how far the weights are apart, and the rates of both."""
    torch.set_default_dtype(torch.float64)
    tokens, targets = unpadded()
    alone, model = Model(), Model()
    optimizer, scheduler = made(alone, make)
    for _ in range(3):
        mean_loss(alone(tokens), targets).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    rates = sorted({group["lr"] for group in optimizer.param_groups})
    own = made(model, make) if not after else ()
    run = composer3d.compose(model, write_manifest(layout))
    own = own or made(run.model, make)
    held = own[0].step
    model, optimizer, scheduler = run.prepare(model, *own)
    assert (optimizer, scheduler) == own and model is run.model and optimizer.step != held
    for _ in range(3):
        run.backward(mean_loss(model(mine(run, tokens)), mine(run, targets)))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    wanted = {name: p.detach() for name, p in alone.named_parameters()}
    error = max(float((run.full_tensor(n, p.detach()) - wanted[n]).abs().max()) for n, p in run.named_parameters())
    return error, rates, sorted({group["lr"] for group in optimizer.param_groups}), len(optimizer.param_groups)


@pytest.mark.parametrize(
    ("make", "after"),
    [("lambdas", False), ("sequence", True), ("milestones", True)],
    ids=["before compose", "after it", "a user's"],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_optimizer_of_one_device_trains_as_there(layout, make, after):
    for error, rates, own_rates, num_groups in run_ranks(trained, 2, LAYOUTS[layout], SCHEDULERS[make], after):
        assert error < 1e-12 and rates == own_rates
        assert num_groups == 2


def refusals():
    model = seeded()
    stepped = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    partial = torch.optim.SGD([p for n, p in model.named_parameters() if "layers" in n], lr=0.1)
    foreign = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    orphan = torch.optim.lr_scheduler.StepLR(foreign, 1)
    mean_loss(model(unpadded()[0]), unpadded()[1]).backward()
    stepped.step()
    model.zero_grad()
    run = composer3d.compose(model, write_manifest("[sharding.fsdp2]\n"))
    found = []
    for thing in (stepped, partial, foreign, orphan, nn.Linear(2, 2), 3, torch.optim.LBFGS(model.parameters())):
        with pytest.raises(StepError) as refused:
            run.prepare(thing)
        found.append(str(refused.value))
    two = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model.layers, model.tok)]
    with pytest.raises(StepError) as refused:
        run.prepare(model, *two)
    found.append(str(refused.value))
    run.prepare(torch.optim.SGD(run.model.parameters(), lr=0.1))
    with pytest.raises(StepError) as refused:
        run.prepare(orphan)
    return [*found, str(refused.value)]


def test_what_cannot_be_adopted_is_refused():
    expected = [
        "the SGD has stepped, and its state is of one device's tensors",
        'the SGD leaves out "[a-z_.]+", which requires gradients',
        "group 0 of the SGD has a tensor that is no parameter of the model that was composed",
        "run.prepare takes an optimizer before its schedulers",
        "run.prepare was given a Linear that is not the model of this composition",
        "run.prepare was given a int; it takes the model, an optimizer, schedulers of it, and DataLoaders",
        "the LBFGS calls a closure again, and a composed step runs once",
        "run.prepare was given 2 optimizers, SGD and SGD, and a composition has one, with groups; give one optimizer ",
        "the StepLR is of another optimizer than the composition's",
    ]
    for found in run_ranks(refusals, 2):
        for message, pattern in zip(found, expected, strict=True):
            assert re.match(pattern, message), message


def orders():
    """Return two epochs' batches of a shuffled loader with a generator, alone and of all ranks, the first one left."""
    run, found = composed("[sharding.fsdp2]\n"), []
    for prepare in (lambda loader: loader, run.prepare):
        data = TensorDataset(torch.arange(12))
        order = torch.Generator().manual_seed(3)
        loader = prepare(DataLoader(data, shuffle=True, generator=order, batch_size=4))
        left = [batch.tolist() for (batch,), _ in zip(loader, range(2), strict=False)]
        found.append(left + [batch.tolist() for (batch,) in loader])
    return found


def test_a_loader_with_a_generator_has_its_order_of_one_device():
    (alone, first), (_, second) = run_ranks(orders, 2)
    assert alone == [a + b for a, b in zip(first, second, strict=True)] and alone[:2] != alone[2:4]


def with_a_dict(folder):
    run = composed("[sharding.fsdp2]\n")
    progress = {"step": 3, "best": 0.5, "draw": torch.arange(3)}
    run.attach("progress", progress)
    run.save(folder / "a")
    progress.clear()
    progress["step"] = 9
    run.load(folder / "a")
    return progress


def test_a_dict_is_saved_and_filled(tmp_path):
    for progress in run_ranks(with_a_dict, 2, tmp_path):
        assert progress.pop("draw").tolist() == [0, 1, 2] and progress == {"step": 3, "best": 0.5}
