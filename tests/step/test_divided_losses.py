"""Losses that a loop divides itself, on ranks with many targets, with one and with none."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from support.models import write_manifest
from torch import nn

import composer3d
from composer3d import LossError
from composer3d.step.losses.divided_sums import divided_sum, is_times_zero, refuse_groups
from composer3d.step.losses.total_divisors import Part, added_constants, total_divisor
from composer3d.testing import full, run_ranks

TIGHT = 1e-12
NUM_SAMPLES, SEQ_LEN, WIDTH, VOCAB = 2, 6, 4, 5  # samples of a rank and backward
LAYOUTS = {
    "fsdp2": "[sharding.fsdp2]\n",
    "ddp": "[sharding.ddp]\n[mesh]\ndp_replicate = -1\n",
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 8), nn.Linear(8, VOCAB)

    def forward(self, x):
        return self.second(self.first(x).tanh())


def losses_of(logits, targets):
    """Return the loss of every token, padding included, and where targets are valid; BS."""
    each = F.cross_entropy(logits.flatten(0, 1), targets.clamp(min=0).flatten(), reduction="none")
    return each.view(targets.shape), targets != -100


def divided(divide):
    """Return the masked mean with a divisor made from the number of targets."""

    def loss(logits, targets):
        each, mask = losses_of(logits, targets)
        return (each * mask).sum() / divide(mask.sum())

    return loss


def summed(add_up):
    """Return a clamped mean of a sum that is made from losses and mask."""

    def loss(logits, targets):
        each, mask = losses_of(logits, targets)
        return add_up(each, mask) / mask.sum().clamp(min=1)

    return loss


def selected(logits, targets):
    chosen = logits[targets != -100]
    return F.mse_loss(chosen, torch.ones_like(chosen))


def branching(logits, targets):
    return selected(logits, targets) if (targets != -100).any() else logits.sum() * 0.0


def two_terms(logits, targets):
    each, mask = losses_of(logits, targets)
    squares, num = logits.square().sum(-1), mask.sum().clamp(min=1)
    return (each * mask).sum() / num + 0.1 * (squares * mask).sum() / num


def policy(logits, targets):
    """A policy's gradient: advantages beside the mask."""
    mask = targets != -100
    ratio = logits.log_softmax(-1)[..., 0].exp()
    return -((ratio * (1 + targets.clamp(min=0))) * mask).sum() / mask.sum().clamp(min=1)


def weighed(logits, targets):
    """Ignored targets among weights that are not 0 there."""
    each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="none")
    weights = 0.5 + torch.arange(targets.numel()) % 3
    return (each * weights).sum() / (weights * (targets.flatten() != -100)).sum().clamp(min=1e-3)


LOSSES = {
    "cross entropy, weighed where it is ignored too": weighed,
    "sum / n": divided(lambda n: n),
    "clamp": divided(lambda n: n.clamp(min=1)),
    "clamp of floats": divided(lambda n: n.double().clamp(min=1.0)),
    "maximum": divided(lambda n: torch.maximum(n, torch.tensor(1))),
    "max of items": divided(lambda n: max(n.item(), 1)),
    "n + 1e-8": divided(lambda n: n + 1e-8),
    "n + 1": divided(lambda n: n + 1),
    "clamp, less a constant": lambda x, y: divided(lambda n: n.clamp(min=1))(x, y) * 2 - 0.5,
    "selected": summed(lambda each, mask: each[mask].sum()),
    "masked_select": summed(lambda each, mask: each.masked_select(mask).sum()),
    "where": summed(lambda each, mask: torch.where(mask, each, 0.0).sum()),
    "masked_fill": summed(lambda each, mask: each.masked_fill(~mask, 0.0).sum()),
    "squares": summed(lambda each, mask: (each * mask).square().sum()),
    "hinge": summed(lambda each, mask: (F.relu(each - 1.5) * mask).sum()),
    "sum of cross entropy": lambda x, y: (
        F.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="sum") / (y != -100).sum().clamp(min=1)
    ),
    "cross entropy": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten()),
    "cross entropy without nan": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten()).nan_to_num(),
    "selected mse": selected,
    "0 times the logits": branching,
    "two terms": two_terms,
    "policy": policy,
    "by samples": lambda x, y: (losses_of(x, y)[0] * (y != -100)).sum() / len(y),
    "by rows": lambda x, y: ((losses_of(x, y)[0] * (y != -100)).sum(1) / (y != -100).sum(1).clamp(min=1)).mean(),
}


def batch_of(counts, seed):
    """Return inputs and targets, of which rank r has counts[r] valid ones."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(len(counts) * NUM_SAMPLES, SEQ_LEN, WIDTH, generator=generator)
    targets = torch.full((len(counts), NUM_SAMPLES * SEQ_LEN), -100)
    for rank, count in enumerate(counts):
        places = torch.randperm(NUM_SAMPLES * SEQ_LEN, generator=generator)[:count]
        targets[rank, places] = torch.randint(0, VOCAB, (count,), generator=generator)
    return inputs, targets.view(-1, SEQ_LEN)


def part_of(rank, tensors):
    return [tensor[rank * NUM_SAMPLES : (rank + 1) * NUM_SAMPLES] for tensor in tensors]


def step_of(run, way, loss_fn, batches):
    """Run a step; return the loss that it returns."""
    mine = [part_of(run.context.data_parallel_rank, batch) for batch in batches]
    inputs, targets = (torch.cat(each) for each in zip(*mine, strict=True))
    if way == "loss_fn":
        return run.forward_backward(inputs, target=targets)
    for index, (x, y) in enumerate(mine, 1):
        loss = loss_fn(run.model(x), y)
        found = run.backward(loss if way == "target" else loss / len(mine), last=index == len(mine))
    return found


def errors(path, way, names, counts):
    """Return by loss how far a step's loss, and gradients, are from one device's."""
    torch.set_default_dtype(torch.float64)
    batches, found = [batch_of(each, seed) for seed, each in enumerate(counts)], {}
    for name in names:
        torch.manual_seed(0)
        model = Net()
        reference, loss_fn = copy.deepcopy(model), LOSSES[name]
        if way in ("loss_fn", "target"):  # one mean over everything
            expected = loss_fn(reference(torch.cat([x for x, _ in batches])), torch.cat([y for _, y in batches]))
        else:
            expected = sum(loss_fn(reference(x), y) / len(batches) for x, y in batches)
        expected.backward()
        run = composer3d.compose(model, path, **({"loss_fn": loss_fn} if way == "loss_fn" else {}))
        run.optimizer(torch.optim.SGD, lr=0.1)
        mine = [part_of(run.context.data_parallel_rank, batch)[1] for batch in batches]
        with run.step(0, target=torch.cat(mine) if way.startswith("target") else None):
            loss = step_of(run, way, loss_fn, batches)
            run.clip_grad_norm_(float("inf"))
            gradients = {fqn: full(p.grad) for fqn, p in run.named_parameters()}
        run.close()
        wanted = {fqn: p.grad for fqn, p in reference.named_parameters()}
        error = max(float((gradients[fqn] - wanted[fqn]).abs().max()) for fqn in wanted)
        found[name] = max(error, abs(float(loss) - float(expected.detach())))
    return found


def assert_one_device(layout, way, counts, names=None):
    text = LAYOUTS[layout] + (f"[train]\nmicrobatch = {NUM_SAMPLES}\n" if way == "loss_fn" else "")
    names = list(LOSSES) if names is None else names
    for found in run_ranks(errors, len(counts[0]), write_manifest(text), way, names, counts):
        assert {name: error for name, error in found.items() if not error <= TIGHT} == {}


@pytest.mark.parametrize("way", ["loss_fn", "target", "loop"])
def test_a_rank_without_targets_weighs_nothing(way):
    names = ["clamp", "clamp, less a constant", "max of items", "n + 1e-8", "cross entropy", "0 times the logits"]
    assert_one_device("fsdp2", way, [[0, 5]], names)


@pytest.mark.slow
@pytest.mark.parametrize("counts", [[[0, 1, 7]], [[0, 3, 2], [4, 0, 6]], [[3, 0, 2], [0, 1, 0]]])
@pytest.mark.parametrize("way", ["loss_fn", "target", "target, divided", "loop"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_that_a_loop_divides_are_those_of_one_device(layout, way, counts):
    assert_one_device(layout, way, counts)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["loss_fn", "target", "loop"])
def test_micro_batches_of_one_rank_without_targets(way):
    assert_one_device("fsdp2", way, [[0], [5], [2]] if way != "loop" else [[3], [5], [2]])


def parts(*pairs, numel=12, zero=()):
    return [
        Part(divisor=d, count=n, is_zero=n == 0 or index in zero, numel=numel) for index, (d, n) in enumerate(pairs)
    ]


def weighed(*given):
    return [Part(divisor=d, count=counts[1], numel=12, is_counted=False, counts=counts) for d, *counts in given]


@pytest.mark.parametrize(
    ("given", "total"),
    [
        (parts((3, 3), (5, 5)), 8),
        # A constant beside sums of weights, whose number is nearer to some divisors.
        (weighed((3.5, 2.5, 4), (6.25, 5.25, 6)), 8.75),
        (weighed((7.5, 2.5, 4), (10.25, 5.25, 9)), 12.75),
        (parts((1, 0), (5, 5)), 5),
        (parts((1, 0), (1, 1)), 1),
        (parts((1, 0), (1, 0)), 2),  # of a loss that is 0
        (parts((1, 0)), 1),
        (parts((8, 3), (8, 5), (9, 9)), 17),
        (parts((8, 3), (8, 8)), 16),  # samples, of which some have no target
        (parts((8, 3), (8, 5)), 16),
        (parts((4, 3), (6, 5)), 9),
        (parts((1e-8, 0), (5 + 1e-8, 5)), 5 + 1e-8),
        (parts((1 + 1e-8, 0), (5 + 1e-8, 5)), 5 + 1e-8),
        (parts((1e-8, 0), (5, 5)), 5),
        (parts((2, 5), (3, 7)), 5),
        (parts((2, None), (3, None)), 5),
        (parts((1, 1), (1, 1), zero=[0]), 2),
        (parts((1, 1), (7, 7), zero=[0]), 8),  # one target, whose loss is 0
    ],
)
def test_the_divisor_of_all_parts_is_one_devices(given, total):
    assert total_divisor(given) == pytest.approx(total, rel=1e-14)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (parts((1, None), (5, None), zero=[0]), "a part of the global batch has the loss 0, divided by 1, and its"),
        (parts((1, 0), (1, 1), numel=1), "the sums of the loss are divided by 1 everywhere, and add up 0 to 1 targets"),
        (parts((8, 7), (8, 7)), "the sums of the loss are divided by 8 everywhere, and add up 7 to 7 targets"),
    ],
)
def test_divisors_with_two_readings_are_refused_with_what_to_write(given, said):
    with pytest.raises(LossError) as caught:
        total_divisor(given)
    assert str(caught.value).startswith(said)
    assert str(caught.value).endswith(": run.backward(((loss * mask).sum(), mask.sum()))")


@pytest.mark.parametrize("name", [name for name in LOSSES if "cross entropy" not in name or name.startswith("sum")])
def test_graphs_show_how_many_targets_a_sum_adds_up(name):
    logits, targets = batch_of([5], 0)
    logits = torch.randn(NUM_SAMPLES, SEQ_LEN, VOCAB, requires_grad=True)
    found = divided_sum(LOSSES[name](logits, targets))
    assert (found is None) == (name in ("selected mse", "0 times the logits", "by rows"))
    assert found is None or found.part().count == 5


def test_zero_times_anything_is_nothing():
    x = torch.randn(3, requires_grad=True)
    for nothing in (x.sum() * 0.0, 0 * x.sum(), (x * 0.0).mean(), 0.0 * x.sum() / 4, x.sum() * torch.tensor(0.0)):
        assert is_times_zero(nothing)
    for something in (x.sum(), 2.0 * x.mean(), (x * torch.zeros(3)).sum(), x.sum() * 0.0 + x.mean()):
        assert not is_times_zero(something)


def test_one_divisor_of_all_parts_that_counts_nothing_is_refused():
    constant = Part(divisor=1000.0, count=None, is_counted=False)
    other = Part(divisor=24.0, count=None, is_counted=False)
    with pytest.raises(LossError, match="it divides a sum by 1000, and what it adds up does not show so many samples"):
        total_divisor([constant, constant])
    assert total_divisor([constant]) == 1000  # one device's
    assert total_divisor([]) == 0  # of a rank of a plan, whose losses are other ranks'
    assert total_divisor([constant, other]) == 1024  # ranks' own counts


def test_what_is_added_to_a_bounded_mean_and_not_seen_is_refused():
    given = [Part(divisor=1.0, count=0.0, constant=None), Part(divisor=5.0, count=5.0, constant=None)]
    with pytest.raises(LossError, match=r"divisors of all parts add up to 6, and one device's is 5, so that what is"):
        added_constants(given, 5.0)
    assert added_constants(given, 6.0) == 0.0
    known = [replace(part, constant=-0.5) for part in given]
    assert added_constants(known, 5.0) == pytest.approx(0.5)  # a sum of 6 times -0.5 is to be one of 5


def refused_unseen():
    """Return what is said to a loss of 0 of which nobody sees how many targets it has."""
    run = composer3d.compose(Net(), write_manifest(LAYOUTS["fsdp2"]))
    rank = run.context.data_parallel_rank
    with pytest.raises(LossError) as caught, run.step(0):
        rest = run.model(torch.randn(3, WIDTH)).clamp(5, 6).sub(0 if rank else 5)  # 0 on the first rank
        run.backward(rest.cumsum(0).sum() / torch.tensor(5 if rank else 1))
    return str(caught.value)


def test_a_zero_of_unknown_origin_is_refused_on_all_ranks():
    for said in run_ranks(refused_unseen, 2):
        assert said.startswith("a part of the global batch has the loss 0, divided by 1, and its graph does not show")


def terms(path, counts, divide, reduction):
    """Return how far loss and gradients of a mean beside a divided sum are from one device's."""
    import torch.distributed as dist

    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, (inputs, targets) = Net(), batch_of(counts, 0)
    reference = copy.deepcopy(model)
    each, mask = losses_of(whole := reference(inputs), targets)
    expected = whole.square().mean() + each[mask].sum() / mask.sum().clamp(min=1)
    expected.backward()
    run = composer3d.compose(model, path)
    run.optimizer(torch.optim.SGD, lr=0.1)
    with run.step(0):
        x, y = part_of(run.context.data_parallel_rank, (inputs, targets))
        each, mask = losses_of(logits := run.model(x), y)
        everywhere = mask.sum()
        dist.all_reduce(everywhere)
        squares = logits.square().mean()
        if reduction == "sum":
            squares = logits.square().sum() / (logits.numel() * len(counts))
        loss = run.backward(squares + each[mask].sum() / divide(mask.sum(), everywhere), reduction=reduction)
        run.clip_grad_norm_(float("inf"))
        gradients = {fqn: full(p.grad) for fqn, p in run.named_parameters()}
    wanted = {fqn: p.grad for fqn, p in reference.named_parameters()}
    error = max(float((gradients[fqn] - wanted[fqn]).abs().max()) for fqn in wanted)
    return error if reduction == "sum" else max(error, abs(float(loss - expected.detach())))


BOUNDS = {
    "clamp": lambda own, _: own.clamp(min=1),
    "max of items": lambda own, _: max(own.item(), 1),
    "maximum": lambda own, _: torch.maximum(own, torch.tensor(1)),
    "n + 1e-8": lambda own, _: own + 1e-8,
}


@pytest.mark.parametrize(
    ("counts", "divide"), [([1, 0], "clamp"), ([0, 5], "clamp"), *(([3, 0], name) for name in list(BOUNDS)[1:])]
)
def test_a_bound_that_one_rank_meets_in_a_term_applies_to_the_sum_over_ranks(counts, divide):
    path = write_manifest(LAYOUTS["fsdp2"])
    for error in run_ranks(terms, 2, path, counts, BOUNDS[divide], None):
        assert error <= (1e-8 if divide == "n + 1e-8" else TIGHT)


def test_terms_divided_by_targets_of_all_ranks_are_one_devices():
    path = write_manifest(LAYOUTS["fsdp2"])
    for error in run_ranks(terms, 2, path, [1, 0], lambda _, everywhere: everywhere.clamp(min=1), "sum"):
        assert error <= TIGHT


def test_terms_divided_by_the_mean_number_of_targets_of_ranks_are_one_devices():
    path = write_manifest(LAYOUTS["fsdp2"])
    for error in run_ranks(terms, 2, path, [2, 1], lambda _, everywhere: everywhere / 2, "mean"):
        assert error <= TIGHT


def test_class_weights_beside_smoothed_labels_are_one_divisor():
    """Both terms divide by the weights of the targets, which no count of samples is."""
    x, y = torch.randn(6, 5, requires_grad=True) * 1, torch.tensor([-100, 0, 1, 2, 3, 4])
    loss = torch.nn.functional.cross_entropy(x, y, weight=torch.linspace(0.2, 0.9, 5), label_smoothing=0.1)
    refuse_groups(loss, 6, (5,))
    assert divided_sum(loss, (5, 6)) is None
