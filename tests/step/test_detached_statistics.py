"""Statistics of a rank's samples that are detached: named with their line, in a forward and in a loss."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.models import composed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composer3d.testing import run_ranks


def running(model, h):
    model.kept.mul_(0.9).add_(0.1 * h.detach().abs().mean())
    return h / model.kept


def quantised(model, h):
    """A codebook of moving averages, as in VQ-VAE."""
    nearest = torch.cdist(h, model.codes).argmin(1)
    with torch.no_grad():
        sums = F.one_hot(nearest, len(model.codes)).to(h.dtype).T @ h
        model.codes.data.mul_(0.9).add_(0.1 * sums)
    return h + (model.codes[nearest] - h).detach()


def gathered(model, h):
    size = h.detach().abs().mean()
    dist.all_reduce(size)
    return h / size


@torch.no_grad()
def centre(h):
    return h.mean(0)


def hardest(losses):
    weights = torch.zeros_like(losses)
    weights[losses.detach().topk(2).indices] = 1.0
    return losses * weights


def confident(losses):
    mask = (losses.detach() < 1.0).float()
    return (losses * mask).sum() / mask.sum().clamp(min=1)


CLASSES = torch.tensor([0, 0, 1, 2, 2, 2])
FORWARDS = {
    "a mean": ("mean", lambda model, h: h / h.detach().abs().mean()),
    "a running mean": ("mean", running),
    "without gradients": ("mean", lambda model, h: (h - centre(h)).pow(2)),
    "data": ("std", lambda model, h: h / h.data.std()),
    "a codebook": ("matmul", quantised),
    "of all ranks": ("", gathered),
    "of each sample": ("", lambda model, h: h / h.detach().abs().amax(-1, keepdim=True)),
    "of a weight": ("", lambda model, h: h * model.up.weight.detach().norm()),
    "straight through": ("", lambda model, h: h + (h.round() - h).detach()),
}
LOSSES = {
    "weights": ("mean", lambda losses: losses * (losses.detach() / losses.detach().mean())),
    "hardest": ("topk", hardest),
    "its own size": ("detach", lambda losses: losses.mean() / losses.mean().detach()),
    "neighbours": ("detach", lambda losses: (losses - losses.roll(1, 0).detach()).pow(2)),
    "neighbours, detached": ("roll", lambda losses: (losses - losses.detach().roll(1, 0)).pow(2)),
    "reversed": ("flip", lambda losses: (losses - losses.detach().flip(0)).pow(2)),
    "classes": ("bincount", lambda losses: losses / torch.bincount(CLASSES)[CLASSES]),
    "classes' means": (
        "bincount",
        lambda losses: torch.zeros(3).scatter_add(0, CLASSES, losses) / torch.bincount(CLASSES),
    ),
    "focal": ("", lambda losses: losses * (1 - torch.exp(-losses.detach())) ** 2),
    "confident": ("", confident),
}


class Model(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.up, self.down, self.change = nn.Linear(4, 8), nn.Linear(8, 3), change
        self.register_buffer("kept", torch.ones(()))
        self.register_buffer("codes", torch.linspace(-1, 1, 5)[:, None].expand(5, 8).clone())

    def forward(self, x):
        return self.down(self.change(self, torch.tanh(self.up(x))))


def said(names):
    """Return what is warned of each, in scheduled forwards and in a loop's own."""
    records, found = [], {}
    logging.getLogger("composer3d.step.losses.mixed_values").addFilter(
        lambda record: records.append(record.getMessage())
    )
    for name in names:
        change = FORWARDS[name][1] if name in FORWARDS else lambda model, h: h
        weigh = LOSSES[name][1] if name in LOSSES else lambda losses: losses

        def loss_fn(output, target, weigh=weigh):
            losses = weigh(F.cross_entropy(output, target, reduction="none"))
            return losses.mean() if losses.dim() else losses

        for own in (False, True) if name != "its own size" else (False,):
            torch.manual_seed(0)
            run = composed("[sharding.fsdp2]\n", Model(change), loss_fn=loss_fn)
            optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
            for _ in range(3):
                x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))
                _ = run.backward(loss_fn(run.model(x), y)) if own else run.forward_backward(x, target=y)
                optimizer.step()
                optimizer.zero_grad()
            assert not torch.overrides._get_current_function_mode_stack()
            run.close()
            found[name, own] = list(records)
            records.clear()
    return found


@pytest.mark.parametrize("kind", [FORWARDS, LOSSES], ids=["forwards", "losses"])
def test_detached_statistics_of_a_ranks_samples_are_named_with_their_line(kind):
    first, second = run_ranks(said, 2, list(kind))
    assert not any(second.values())
    for (name, _), messages in first.items():
        if kind[name][0]:
            (message,) = messages
            of = "a batch" if kind[name][0] == "bincount" else "detached values"
            assert f"({kind[name][0]} of {of} in test_detached_statistics.py:" in message
        else:
            assert messages == [], name


def surrogate(place):
    """A loop of PPO whose advantages are normalised at a place; return what is warned in two updates."""
    records = []
    logging.getLogger("composer3d.step.losses.mixed_values").addFilter(
        lambda record: records.append(record.getMessage())
    )
    run = composed("[sharding.fsdp2]\n", nn.Linear(4, 3), loss_fn=None)
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
    rows = torch.randn(24, 4), torch.randint(0, 3, (24, 1)), torch.randn(24), torch.rand(24).round()
    for x, y, advantage, mask in run.loader(DataLoader(TensorDataset(*rows), batch_size=12)):

        def normalised(value, here):
            return (value - value.mean()) / (value.std() + 1e-8) if here == place else value

        advantage = normalised(advantage, "before a forward")
        if place == "an old policy":
            with torch.no_grad():
                advantage = normalised(advantage - run.model(x).log_softmax(-1).gather(1, y)[:, 0], place)
        chosen = run.model(x).log_softmax(-1).gather(1, y)[:, 0]
        run.backward(-(chosen * normalised(advantage, "after") * mask).sum() / mask.sum().clamp(min=1))
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    return records


def test_advantages_that_a_loop_normalises_are_named_with_their_line():
    for place in ("an old policy", "after", "before a forward"):
        first, second = run_ranks(surrogate, 2, place)
        assert not second and len(first) == 1 and "mean of detached values in test_detached_statistics.py:" in first[0]
    assert run_ranks(surrogate, 2, "nowhere") == [[], []]


def opposed():
    """Train a generator and a discriminator, each composed by itself; return what is warned, and the distance."""
    torch.set_default_dtype(torch.float64)
    records, drawn = [], torch.randn(3, 8, 4, generator=torch.Generator().manual_seed(0))
    logging.getLogger("composer3d.step.losses.mixed_values").addFilter(
        lambda record: records.append(record.getMessage())
    )

    def nets():
        torch.manual_seed(0)
        return nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))

    def play(generator, critic, steps, backwards, rows):
        for z in drawn[:, rows]:
            made = generator(z)
            backwards[1](F.softplus(critic(made.detach())).mean() + F.softplus(-critic(z.flip(1))).mean())
            steps[1].step()
            backwards[0](F.softplus(-critic(made)).mean())
            steps[0].step()
            for each in steps:
                each.zero_grad()

    reference, plain = nets(), torch.Tensor.backward
    play(*reference, [torch.optim.SGD(each.parameters(), lr=0.1) for each in reference], (plain, plain), slice(8))
    runs = [composed("[sharding.fsdp2]\n", each, loss_fn=None) for each in nets()]
    optimizers = [run.optimizer(torch.optim.SGD, lr=0.1) for run in runs]
    rank = runs[0].context.rank
    mine = slice(4 * rank, 4 * rank + 4)
    play(*(run.model for run in runs), optimizers, [run.backward for run in runs], mine)
    errors = [
        float((run.full_tensor(fqn, p.detach()) - wanted.get_parameter(fqn)).abs().max().detach())
        for run, wanted in zip(runs, reference, strict=True)
        for fqn, p in run.named_parameters()
    ]
    for run in runs:
        run.close()
    return records, max(errors)


def test_two_compositions_whose_forwards_alternate_are_one_devices_and_nothing_is_named():
    for records, error in run_ranks(opposed, 2):
        assert records == [] and error < 1e-12
