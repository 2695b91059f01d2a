"""Numbers that a forward adds its samples to: named where ranks count their own, silent where they count alike."""

from __future__ import annotations

import functools
import logging

import pytest
import torch
import torch.distributed as dist
from support.models import composed, mine
from torch import nn

from composer3d.testing import full, run_ranks

TIGHT = 1e-12
LAYOUTS = ["[sharding.ddp]\n[mesh]\ndp_replicate = 2\n", "[sharding.fsdp2]\n"]


class Kept(nn.Linear):
    """A layer that keeps a number, as an int64 or float buffer, or in Python."""

    def __init__(self, add, kind=torch.int64, name="seen"):
        super().__init__(3, 1)
        self.add, self.name = add, name
        if kind is int:
            setattr(self, name, 0)
        else:
            self.register_buffer(name, torch.zeros((), dtype=kind))

    def forward(self, x):
        if self.training and torch.is_grad_enabled():
            setattr(self, self.name, getattr(self, self.name) + self.add(x))
        return super().forward(x.flatten(0, -2)).sum() * 0.1


class Normalised(nn.Sequential):
    """Statistics that are as they should be: batch norm's, an average, and lengths that are looked up."""

    def __init__(self):
        super().__init__(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        self.register_buffer("average", torch.zeros(3))
        self.longest = self.latest = 0

    def forward(self, x):
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        self.longest, self.latest = max(self.longest, len(x)), len(x)
        return super().forward(x).sum() * 0.1


def warned(cases, layout=LAYOUTS[0], steps=4):
    """Return what a rank warns of in the first steps of each case: how its model is made, and the shape of inputs."""
    records, found = [], {}
    logging.getLogger("composer3d.step.sample_counters").addFilter(lambda record: records.append(record.getMessage()))
    torch.manual_seed(0)
    for name, (make, shape) in cases.items():
        run = composed(layout, model=make(), loss_fn=None)
        optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
        for _ in range(steps):
            run.backward(run.model(torch.randn(shape)), reduction="sum")
            optimizer.step()
            optimizer.zero_grad()
        run.close()
        found[name] = list(records)
        records.clear()
    return found


SAMPLES = {
    "samples": (lambda x: x.shape[0], (2, 3)),
    "tokens": (lambda x: x.shape[0] * x.shape[1], (1, 5, 3)),
    "one sample": (lambda x: x.shape[0], (1, 3)),
    "three times": (lambda x: 3 * x.shape[0], (2, 3)),
    "elements": (lambda x: x.numel(), (2, 3)),
}
FORWARDS = {
    "forwards": (lambda x: 1, (2, 3), "seen"),
    "forwards of one sample": (lambda x: 1, (1, 3), "num_steps"),
    "all ranks' samples": (lambda x: x.shape[0] * dist.get_world_size(), (2, 3), "seen"),
    "nothing": (lambda x: 0, (2, 3), "seen"),
}


@pytest.mark.parametrize("kind", [torch.int64, torch.float32, int])
def test_numbers_of_a_ranks_samples_are_named_once(kind):
    cases = {name: (functools.partial(Kept, add, kind), shape) for name, (add, shape) in SAMPLES.items()}
    first, second = run_ranks(warned, 2, cases)
    for name, (add, shape) in SAMPLES.items():
        (message,) = first[name]
        added = add(torch.empty(shape))
        unless = "unless it counts forwards, " if added == 1 else ""
        assert f'"seen" (+{added:g}): {unless}a forward of {shape[0]} samples adds to what the model' in message
        assert "counts those of all 2 data-parallel ranks" in message and "summed_buffers" in message
    assert not any(second.values())


def test_numbers_of_forwards_and_of_all_samples_are_not_named():
    cases = {name: (functools.partial(Kept, add, name=key), shape) for name, (add, shape, key) in FORWARDS.items()}
    cases["statistics and lengths"] = Normalised, (4, 3)
    for found in run_ranks(warned, 2, cases):
        assert not any(found.values()), found


def test_a_number_that_varies_with_the_samples_is_named():
    """Some of a batch's samples, which no comparison with their number finds."""
    cases = {"positive": (lambda: Kept(lambda x: int((x[:, 0] > 0).sum()) + 1), (9, 3))}
    first, second = run_ranks(warned, 2, cases)
    (message,) = first["positive"]
    assert message.startswith('"seen" (+') and not second["positive"]


class CountingLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = 0

    def forward(self, output, target):
        self.seen += len(target)
        return ((output - target) ** 2).sum()


def warned_of_loss():
    records = []
    logging.getLogger("composer3d.step.sample_counters").addFilter(lambda record: records.append(record.getMessage()))
    run = composed(LAYOUTS[0] + "[train]\nmicrobatch = 2\n", model=nn.Linear(3, 1), loss_fn=CountingLoss())
    with run.step(0):
        run.forward_backward(torch.randn(6, 3), target=torch.randn(6, 1))
    run.close()
    return records


def test_a_loss_function_that_counts_is_named():
    (message,), none = run_ranks(warned_of_loss, 2)
    assert message.startswith('"loss_fn.seen" (+2): a forward of 2 samples') and not none


class Scaled(nn.Linear):
    """An output that is scaled by the samples of all steps before, as the warning says to write it."""

    summed_buffers = ("new",)

    def __init__(self):
        super().__init__(3, 1)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("new", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x):
        if self.training and torch.is_grad_enabled():
            self.new += len(x)
        return super().forward(x) / (1 + self.seen)

    def after_step(self):
        self.seen += self.new
        self.new.zero_()


def scaled(layout):
    """Return the error of parameters after steps of samples that are counted over all ranks, and what is warned of."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, reference, x = Scaled(), Scaled(), torch.randn(4, 8, 3)
    reference.load_state_dict(model.state_dict())
    records = []
    logging.getLogger("composer3d.step.sample_counters").addFilter(lambda record: records.append(record.getMessage()))
    run = composed(layout, model=model, loss_fn=None)
    optimizer, plain = run.optimizer(torch.optim.SGD, lr=0.1), torch.optim.SGD(reference.parameters(), lr=0.1)
    for batch in x:
        (reference(batch) ** 2).mean().backward()
        run.backward((run.model(mine(run, batch)) ** 2).mean())
        for each in (plain, optimizer):
            each.step()
            each.zero_grad()
        reference.after_step()
    error = max(
        float((full(p.detach()) - q.detach()).abs().max())
        for p, q in zip(model.parameters(), reference.parameters(), strict=True)
    )
    run.close()
    return error, int(model.seen), records


@pytest.mark.parametrize("layout", LAYOUTS)
def test_samples_that_are_counted_in_summed_buffers_are_those_of_one_device(layout):
    for error, seen, records in run_ranks(scaled, 2, layout):
        assert error < TIGHT and seen == 32 and not records


class Codebook(nn.Module):
    """A layer that is given the nearest of some vectors, whose sizes and sums a forward averages over time."""

    def __init__(self, total):
        super().__init__()
        self.inner, self.total = nn.Linear(3, 3), total
        self.register_buffer("sizes", torch.ones(4, dtype=torch.float64))
        self.register_buffer("sums", torch.randn(4, 3, dtype=torch.float64))

    def forward(self, x):
        x = self.inner(x.flatten(0, -2))
        vectors = self.sums / self.sizes[:, None]
        chosen = torch.nn.functional.one_hot(torch.cdist(x, vectors).argmin(1), 4).to(x.dtype).detach()
        self.sizes.mul_(0.9).add_(self.total(chosen.sum(0)), alpha=0.1)
        self.sums.mul_(0.9).add_(self.total(chosen.T @ x.detach()), alpha=0.1)
        return (x - chosen @ vectors).square().mean()


def total(values):
    dist.all_reduce(values)
    return values


def codebooks(total, microbatch):
    """Return what is warned of in four steps of a loop or a run, and how far buffers are from one device's."""
    records = []
    logging.getLogger("composer3d.step.buffers").addFilter(lambda record: records.append(record.getMessage()))
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    reference, batches = Codebook(lambda values: values), torch.randn(4, 8, 3)
    text = LAYOUTS[1] + f"[train]\nmicrobatch = {microbatch}\n" * (microbatch is not None)
    run = composed(text, model=Codebook(total), loss_fn=None, loss_reduction="mean")
    run.model.load_state_dict(reference.state_dict())
    optimizers = [torch.optim.SGD(reference.parameters(), lr=0.1), run.optimizer(torch.optim.SGD, lr=0.1)]
    for step, x in enumerate(batches):
        reference(x).backward()
        if microbatch is None:
            run.backward(run.model(mine(run, x)))
        else:
            with run.step(step):
                run.forward_backward(mine(run, x), target=None)
                optimizers[1].step()
        for optimizer in optimizers[: None if microbatch is None else 1]:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    found = {name: float((buffer - getattr(run.model, name)).abs().max()) for name, buffer in reference.named_buffers()}
    run.close()
    return records, found


@pytest.mark.parametrize("microbatch", [None, 4])
def test_buffers_that_ranks_update_from_their_samples_are_named_in_the_first_steps(microbatch):
    ((told,), _), (others, _) = run_ranks(codebooks, 2, lambda values: values, microbatch)
    assert others == []
    assert told == (
        "buffers that the model updates from a rank's own samples differ between data-parallel ranks: sizes, sums; a "
        "forward that uses them computes on every rank with its own; for one device's reduce what a forward adds to "
        "them over all ranks in the model (dist.all_reduce of a batch's sums and counts), as torch.nn.SyncBatchNorm "
        "does; where they are means over as many samples on every rank, run.sync_buffers() after every "
        "optimizer.step(), which averages them, is enough, and of sums and counts, as of the sizes of a codebook's "
        "clusters, it leaves a rank's mean; into a queue of samples, as MoCo's, write those of all ranks, which "
        "dist.all_gather brings"
    )


def test_what_the_warning_says_to_write_makes_buffers_one_devices():
    for records, found in run_ranks(codebooks, 2, total, None):
        assert records == []
        assert max(found.values()) < TIGHT
