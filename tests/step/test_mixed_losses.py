"""Losses that relate samples: named once with their line where ranks relate their own, and no other loss is."""

from __future__ import annotations

import functools
import inspect
import logging

import pytest
import torch
import torch.nn.functional as F
from support.models import composed
from torch import nn

from composer3d.step.losses.mixed_values import relation
from composer3d.testing import run_ranks

DDP = "[sharding.ddp]\n[mesh]\ndp_replicate = 2\n"
N = 6
LABELS = torch.arange(N)
ORDER = torch.tensor([1, 0, 3, 2, 5, 4])
QUEUE = torch.randn(9, 5, generator=torch.Generator().manual_seed(0))
PRODUCT, BESIDE, DISTANCES = "a product of values", "values of samples beside those of each", "distances between"
RELATED = {
    "contrastive": (PRODUCT, lambda x: F.cross_entropy(x @ x.T, LABELS)),
    "normalised, both ways": (
        PRODUCT,
        lambda x: (F.cross_entropy(s := F.normalize(x) @ F.normalize(x).T, LABELS) + F.cross_entropy(s.T, LABELS)) / 2,
    ),
    "against detached": (PRODUCT, lambda x: F.cross_entropy(x @ x.detach().T, LABELS)),
    "einsum": (PRODUCT, lambda x: torch.einsum("id,jd->ij", x, x).sigmoid().log().mean()),
    "sigmoid": (PRODUCT, lambda x: -F.logsigmoid(F.linear(x, x) * (2 * torch.eye(N) - 1)).mean()),
    "covariance": (PRODUCT, lambda x: ((x - x.mean(0)).T @ (x - x.mean(0))).pow(2).mean()),
    "correlation": (PRODUCT, lambda x: (F.batch_norm(x, None, None, training=True).T @ x).pow(2).mean()),
    "distances": (DISTANCES, lambda x: torch.cdist(x, x).mean()),
    "pairs' distances": (DISTANCES, lambda x: F.pdist(x).mean()),
    "differences": (BESIDE, lambda x: (x[None] - x[:, None]).pow(2).mean()),
    "cosines": (BESIDE, lambda x: F.cosine_similarity(x[:, None], x[None], dim=-1).mean()),
    "centred": ("Mean over the samples", lambda x: (x - x.mean(0)).pow(2).mean()),
    "deviations": ("Std over the samples", lambda x: F.relu(1 - x.std(0)).mean()),
    "softmax over samples": ("LogSoftmax over the samples", lambda x: -x.log_softmax(0).mean()),
    "hardest": ("Topk over the samples", lambda x: x.pow(2).mean(1).topk(2).values.mean()),
    "hardest tokens": ("Topk over the samples", lambda x: x.pow(2).repeat(1, 2).view(-1, 5).mean(1).topk(3)[0].mean()),
    "hardest elements": ("Topk over the samples", lambda x: x.pow(2).flatten().topk(4).values.mean()),
    "sorted": ("Sort over the samples", lambda x: x.pow(2).mean(1).sort().values[-2:].mean()),
    "sums so far": ("Cumsum over the samples", lambda x: x.cumsum(0).mean()),
    "of losses so far": ("Cumsum over the samples", lambda x: x.pow(2).mean(1).cumsum(-1).mean()),
    "reversed": ("values of samples beside those of others", lambda x: (x * x.flip(0)).mean()),
    "another order": ("values of samples beside those of others", lambda x: (x - x[ORDER].exp()).pow(2).mean()),
    "neighbours": ("values of samples beside those of others", lambda x: (x - x.roll(1, 0)).pow(2).mean()),
}
PARAMETER = nn.Parameter(torch.ones(()))
WEIGHT, FROZEN = nn.Parameter(torch.ones(N, 5)), nn.Parameter(torch.ones(N, 5), requires_grad=False)
UNRELATED = {
    "cross entropy": lambda x: F.cross_entropy(x, LABELS % 5),
    "smoothed": lambda x: F.cross_entropy(x, LABELS % 5, label_smoothing=0.1),
    "squares": lambda x: (x - 1).pow(2).mean(0).mean(),
    "pairs": lambda x: ((x[::2] - x[1::2]) ** 2).mean(),
    "triplets": lambda x: F.triplet_margin_loss(x[:2], x[2:4], x[4:]),
    "a head": lambda x: F.cross_entropy(F.linear(x, WEIGHT), LABELS),
    "a frozen head": lambda x: F.cross_entropy(F.linear(x, FROZEN), LABELS),
    "a low-rank head": lambda x: (x @ (WEIGHT.T @ WEIGHT)).mean(),
    "a normalised head": lambda x: (x @ F.normalize(WEIGHT).T).mean(),
    "a queue": lambda x: F.cross_entropy(x @ QUEUE.T, LABELS),
    "attention": lambda x: F.scaled_dot_product_attention(*(x.view(N, 1, 5, 1),) * 3).mean(),
    "attention, by hand": lambda x: ((s := x.view(N, 5, 1)) @ s.transpose(1, 2)).softmax(-1).mean(),
    "learned weights of tasks": lambda x: PARAMETER.exp() * x.pow(2).mean() + PARAMETER,
    "a vector of means": lambda x: torch.stack([x.pow(2).mean(), x.abs().mean()]).sum(),
    "weights of samples": lambda x: (x.pow(2).mean(1) * torch.linspace(0, 1, N)).mean(),
    "layer norm": lambda x: F.layer_norm(x, (5,)).abs().mean(),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True).abs().mean(),
    "classes in order": lambda x: x.topk(2, dim=1).values.mean() + x.sort(-1).values[:, 0].mean() + x.cumsum(1).mean(),
    "labels' scores": lambda x: x[torch.arange(N), LABELS % 5].mean() + x.gather(1, LABELS[:, None] % 5).mean(),
    "reversed classes": lambda x: (x * x.flip(1)).mean(),
    "positions first": lambda x: x.view(3, 2, 5).mean(0).pow(2).mean(),
    "one minus a cosine": lambda x: 1 - F.cosine_similarity(x, x.detach().flip(1), dim=1).mean(),
}


@pytest.mark.parametrize("name", RELATED)
def test_graphs_tell_what_relates_samples(name):
    seen, loss_fn = RELATED[name]
    x = nn.Linear(5, 5)(torch.randn(N, 5))
    assert (relation(loss_fn(x).grad_fn, N) or "").startswith(seen)
    assert relation(loss_fn(x).grad_fn, 1) is None


@pytest.mark.parametrize("name", UNRELATED)
def test_graphs_of_other_losses_tell_nothing(name):
    x = nn.Linear(5, 5)(torch.randn(N, 5))
    assert relation(UNRELATED[name](x).grad_fn, N) is None


def test_what_a_model_relates_before_its_last_weights_is_its_own():
    """Attention over a batch, as between the columns of a table, is the model's; a loss has what follows weights."""
    x = nn.Linear(5, 5)(torch.randn(N, 5))
    mixed = nn.Linear(5, 5)((x @ x.T).softmax(-1) @ x)
    assert relation(F.cross_entropy(mixed, LABELS % 5).grad_fn, N) is None


class Contrastive(nn.Module):
    """A model that computes its loss, with a learned temperature."""

    def __init__(self):
        super().__init__()
        self.image, self.text, self.scale = nn.Linear(5, 4), nn.Linear(5, 4), nn.Parameter(torch.zeros(()))

    def forward(self, x):
        one, two = F.normalize(self.image(x), dim=-1), F.normalize(self.text(x), dim=-1)
        return F.cross_entropy(self.scale.exp() * one @ two.t(), torch.arange(len(x)))


def contrastive(output, target):
    return F.cross_entropy(output @ output.T, torch.arange(len(output)))


def said(layout):
    """Return what is warned of a loop's loss, of one that is stated to be a mean, of a model's, and of a loss_fn's."""
    records, found = [], []
    logging.getLogger("composer3d.step.losses.mixed_values").addFilter(
        lambda record: records.append(record.getMessage())
    )
    loops = {
        nn.Linear: [{}, {"reduction": "mean"}],
        Contrastive: [{}],
    }
    for make, options in loops.items():
        for option in options:
            run = composed(layout, model=nn.Linear(5, 5) if make is nn.Linear else make(), loss_fn=None)
            optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
            for _ in range(3):
                output = run.model(torch.randn(N, 5))
                run.backward(contrastive(output, None) if output.dim() else output, **option)
                optimizer.step()
                optimizer.zero_grad()
            run.close()
            found.append(list(records))
            records.clear()
    for options in ({}, {"loss_reduction": "mean"}):
        run = composed(layout, model=nn.Linear(5, 5), loss_fn=contrastive, **options)
        with run.step(0):
            run.forward_backward(torch.randn(N, 5), target=torch.zeros(N))
        run.close()
        found.append(list(records))
        records.clear()
    return found


@pytest.mark.parametrize("layout", [DDP, "[sharding.fsdp2]\n"])
def test_a_loss_that_relates_samples_is_named_once_with_its_line(layout):
    first, second = run_ranks(said, 2, layout)
    (own,), stated, (of_model,), (of_function,), stated_function = first
    start = inspect.getsourcelines(said)[1]
    line = next(
        start + i for i, text in enumerate(inspect.getsource(said).splitlines()) if "run.backward(contrastive" in text
    )
    assert own.startswith(
        f"test_mixed_losses.py:{line}: the loss relates samples of a batch to one another (a product of values of "
        "samples with one another), and each of the 2 data-parallel ranks relates its own alone"
    )
    assert 'write run.backward(loss, reduction="mean"), and nothing is said' in own
    assert of_model.startswith(f"test_mixed_losses.py:{line}: the loss relates")
    assert of_function.startswith(f"test_mixed_losses.py:{inspect.getsourcelines(contrastive)[1]}: the loss relates")
    assert 'write compose(loss_reduction="mean"), and nothing is said' in of_function
    assert not stated and not stated_function and not any(second)


def test_one_rank_says_nothing():
    assert run_ranks(functools.partial(said, ""), 1) == [[[]] * 5]
