"""Modules that only some ranks call, and parameters that only some ranks use, under data parallelism."""

from __future__ import annotations

import time

import pytest
import torch
from support.models import write_manifest
from torch import nn
from torch.nn.functional import mse_loss

import composer3d
from composer3d.composition.blocks import find_blocks
from composer3d.testing import full, run_ranks

TIGHT = 1e-12


class Experts(nn.Module):
    """Experts in a loop, each called only where a row goes to it: the sign of a row's first number says which."""

    def __init__(self, hidden):
        super().__init__()
        self.enter, self.leave, self.never = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, size), nn.Linear(size, 4)) for size in hidden)

    def forward(self, x):
        h = self.enter(x)
        y = torch.zeros_like(h)
        for index, expert in enumerate(self.experts):
            mask = (x[:, 0] > 0) == bool(index)
            if mask.any():
                y[mask] = expert(h[mask])
        return self.leave(h + y)


def routes(x):
    """Return the experts that rows go to, and each one's mask."""
    signs = (x[:, 0] > 0).tolist()
    return {index: torch.tensor([sign == index for sign in signs]) for index in sorted(set(signs))}


class Chosen(Experts):
    """The same, routed outside of the class around the list: nothing but a run shows that experts are skipped."""

    def forward(self, x):
        h = self.enter(x)
        y = torch.zeros_like(h)
        for index, mask in routes(x).items():
            y[mask] = self.experts[index](h[mask])
        return self.leave(h + y)


# Signs of the first number of eight rows, of which each of two ranks has four, in micro-batches of two or at once.
ROUTES = {
    "every rank another": (1, 1, 1, 1, -1, -1, -1, -1),
    "one has both": (1, 1, 1, 1, 1, -1, 1, -1),
    "one is idle": (1,) * 8,
    "one is idle and one has both": (1, 1, 1, 1, 1, 1, -1, 1),
    "other micro-batches": (1, 1, -1, -1, -1, -1, 1, 1),
}


def step(path, model_type, hidden, signs):
    """Return, for a step of one rank, how far its gradients are from one device's, and who has none on one of both."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, reference = model_type(hidden), model_type(hidden)
    reference.load_state_dict(model.state_dict())
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    x[:, 0] = x[:, 0].abs() * torch.tensor(signs)
    mse_loss(reference(x), y).backward()
    run = composer3d.compose(model, path, loss_fn=mse_loss)
    chosen = slice(4 * run.context.data_parallel_rank, 4 * run.context.data_parallel_rank + 4)
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
    with run.step(0):
        run.forward_backward(x[chosen], target=y[chosen])
        run.clip_grad_norm_(float("inf"))
        wanted = {fqn: parameter.grad for fqn, parameter in reference.named_parameters()}
        found = {fqn: p.grad if p.grad is None else full(p.grad) for fqn, p in run.named_parameters()}
        optimizer.step()
    run.close()
    differ = [fqn for fqn, grad in wanted.items() if (grad is None) != (found[fqn] is None)]
    there = [(found[fqn], grad) for fqn, grad in wanted.items() if grad is not None and found[fqn] is not None]
    return max(float((one - two).abs().max() / two.abs().max()) for one, two in there), differ


TABLES = {
    "zero 3": "[sharding.fsdp2]\n",
    "zero 2": "[sharding.fsdp2]\nzero = 2\n",
    "zero 1": "[sharding.fsdp2]\nzero = 1\n",
    "ddp": "[sharding.ddp]\n",
    "recomputed": '[sharding.fsdp2]\n[scheduling.activation_checkpoint]\nunits = ["experts.*"]\n',
}


def compared(table, route, *, hidden=(4, 4), microbatch=4, model_type=Experts):
    path = write_manifest(f"[train]\nmicrobatch = {microbatch}\n{table}")
    for error, differ in run_ranks(step, 2, path, model_type, hidden, ROUTES[route]):
        assert differ == []
        assert error < TIGHT


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("table", ["zero 3", "ddp"])
def test_experts_that_a_rank_does_not_call_get_the_gradients_of_one_device(table, route):
    compared(TABLES[table], route, hidden=(4, 6))


@pytest.mark.parametrize("table", ["zero 2", "zero 1", "recomputed", "ddp"])
def test_and_so_they_do_when_micro_batches_call_others(table):
    compared(TABLES[table], "other micro-batches", microbatch=2)


class Exiting(nn.Module):
    """Layers that a row leaves early, each row by itself: a rank calls a layer as often as it has rows for it."""

    def __init__(self, hidden):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in hidden)

    def forward(self, x):
        rows = []
        for row in x:
            for layer in self.layers[: 1 if row[0] > 0 else None]:
                row = torch.tanh(layer(row))
            rows.append(row)
        return torch.stack(rows)


@pytest.mark.parametrize("route", [route for route in ROUTES if route != "other micro-batches"])
@pytest.mark.parametrize("table", ["[sharding.ddp]\n", "[sharding.fsdp2]\nunits = []\n"])
def test_layers_that_are_called_again_and_again_are_reduced_once(table, route):
    compared(table, route, hidden=(4, 4, 4), microbatch=2, model_type=Exiting)


@pytest.mark.parametrize("route", ["every rank another", "one has both"])
def test_replicas_reduce_in_one_order_whatever_ranks_call(route):
    compared('[sharding.ddp]\nunits = ["experts.*", "leave"]\n', route, model_type=Chosen)


def test_experts_of_a_loop_are_no_blocks():
    assert find_blocks(Experts((4, 4))) is None
    assert find_blocks(Chosen((4, 4))) == "experts.*"


class Dropped(nn.Module):
    """Layers of which the signs of the rows decide how many are called."""

    def __init__(self, hidden=(4, 4, 4)):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in hidden)

    def forward(self, x):
        kept = len(routes(x)) if x[0, 0] > 0 else len(self.layers)
        for layer in self.layers[-kept:]:
            x = layer(x)
        return x


def refused(path, model_type, signs):
    started = time.monotonic()
    with pytest.raises(composer3d.StepError) as caught:
        step(path, model_type, (4, 4, 4), signs)
    return str(caught.value), time.monotonic() - started


ADVICE = (
    "; a unit of sharded data parallelism must be called on every rank, in the same order. Write units = [], or the "
    "patterns of modules that every rank calls, as the layer around experts, in the manifest's table"
)
OTHER_ORDERS = [
    (Chosen, "every rank another", "rank 1 (dp_shard 1) gathers experts.0, where rank 0 gathers experts.1"),
    (Chosen, "one is idle and one has both", "rank 1 (dp_shard 1) gathers experts.0, where rank 0 gathers experts.1"),
    (Dropped, "every rank another", "rank 1 (dp_shard 1) gathers layers.0, where rank 0 gathers layers.2"),
    (Dropped, "one has both", "rank 1 (dp_shard 1) gathers layers.1, where rank 0 gathers layers.2"),
]


@pytest.mark.parametrize(("model_type", "route", "difference"), OTHER_ORDERS)
def test_units_that_ranks_call_in_another_order_end_the_run_before_anything_is_sent(model_type, route, difference):
    units = "layers.*" if model_type is Dropped else "experts.*"
    path = write_manifest(f'[sharding.fsdp2]\nunits = ["{units}"]\n')
    for text, seconds in run_ranks(refused, 2, path, model_type, ROUTES[route]):
        assert text == f"ranks call other modules in step 0: {difference}{ADVICE}"
        assert seconds < 250  # the timeout is 300


def several(path, *steps):
    """Run steps, each with the signs of all rows, and return what ended them, and how many questions were asked."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    run = composer3d.compose(Dropped(), path, loss_fn=mse_loss)
    optimizer, mine = run.optimizer(torch.optim.SGD, lr=0.1), run.context.data_parallel_rank
    counted = []
    count, run.context.flight.questions.count = (
        run.context.flight.questions.count,
        lambda *of: counted.append(of) or count(*of),
    )
    try:
        for number, signs in enumerate(steps):
            x, counted[:] = torch.rand(8, 4) * torch.tensor(signs)[:, None], []
            x = x[4 * mine : 4 * mine + 4]
            if number == 3:
                run.evaluate(x, target=x)
            with run.step(number):
                run.forward_backward(x, target=x)
                optimizer.step()
                optimizer.zero_grad()
    except composer3d.StepError as error:
        return str(error)
    finally:
        run.close()
    return len(counted)


BOTH, ALL, FEW = (1, -1, 1, -1) * 2, (-1,) * 8, (1,) * 8


def test_an_order_that_changes_on_all_ranks_alike_is_right_and_a_steady_one_needs_no_word():
    path = write_manifest('[train]\nmicrobatch = 4\n[sharding.fsdp2]\nunits = ["layers.*"]\n')
    assert run_ranks(several, 2, path, ALL, ALL, ALL) == [0, 0]
    first, second = run_ranks(several, 2, path, ALL, FEW, BOTH)
    assert isinstance(first, int) and first > 0 and second > 0


def test_an_order_that_one_rank_leaves_later_ends_the_run():
    path = write_manifest('[train]\nmicrobatch = 4\n[sharding.fsdp2]\nunits = ["layers.*"]\n')
    for text in run_ranks(several, 2, path, ALL, ALL, (*ALL[:4], *FEW[:4])):
        assert text == (
            "ranks call other modules in step 2: rank 1 (dp_shard 1) gathers layers.2, where rank 0 gathers layers.0"
            + ADVICE
        )


def test_an_evaluation_in_which_ranks_call_other_units_ends_the_run():
    path = write_manifest('[train]\nmicrobatch = 4\n[sharding.fsdp2]\nunits = ["layers.*"]\n')
    for text in run_ranks(several, 2, path, ALL, ALL, ALL, (*ALL[:4], *FEW[:4])):
        assert text.startswith("ranks call other modules in evaluation 1: rank 1 (dp_shard 1) gathers layers.2")
