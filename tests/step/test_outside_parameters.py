"""Parameters of a criterion, beside a composed model."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from support.models import write_manifest
from torch import nn

import composer3d
from composer3d.testing import run_ranks


class Criterion(nn.Module):
    """Regression with a learned variance."""

    def __init__(self):
        super().__init__()
        self.log_variance = nn.Parameter(torch.randn(()))
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, output, target):
        return ((output - target) ** 2 * (-self.log_variance).exp() + self.log_variance).mean()


def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, 6, generator=generator), torch.randn(4, 1, generator=generator)


def steps(model, criterion, optimizer, backward, x, y):
    for _ in range(3):
        backward(criterion(model(x), y))
        optimizer.step()
        optimizer.zero_grad()


def trained(text, folder):
    """Train a criterion in a group of the composition's optimizer; return how far it is from one device's, and both."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, criterion = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)), Criterion()
    reference, expected = copy.deepcopy(model), copy.deepcopy(criterion)
    one_device = torch.optim.AdamW([*reference.parameters(), *expected.parameters()], lr=0.1)
    steps(reference, expected, one_device, torch.Tensor.backward, *batch())
    run = composer3d.compose(model, write_manifest(text))
    optimizer = run.optimizer(torch.optim.AdamW, lr=0.1)
    if run.context.rank:
        criterion.log_variance.data.add_(1.0)  # as of another seed
    optimizer.add_param_group({"params": list(criterion.parameters())})
    mine = slice(2 * run.context.data_parallel_rank, 2 * run.context.data_parallel_rank + 2)
    steps(run.model, criterion, optimizer, run.backward, *(tensor[mine] for tensor in batch()))
    run.save(folder / "saved")
    moment = optimizer.state[criterion.log_variance]["exp_avg"].clone()
    optimizer.state[criterion.log_variance]["exp_avg"].zero_()
    run.load(folder / "saved")
    restored = bool(optimizer.state[criterion.log_variance]["exp_avg"] == moment)
    run.close()
    error = float((criterion.log_variance - expected.log_variance).abs().detach())
    return error, float(criterion.log_variance.detach()), restored


@pytest.mark.parametrize("text", ["[sharding.fsdp2]\n", "[sharding.ddp]\n"], ids=["fsdp2", "ddp"])
def test_parameters_that_are_added_to_the_optimizer_are_trained_as_on_one_device(text, tmp_path):
    (error, value, restored), (_, other, _) = run_ranks(trained, 2, text, tmp_path)
    assert error < 1e-12 and value == other and restored


def warned():
    """Return what is logged at the first backwards of a model alone, with a penalty, and with a plain criterion."""
    records, found = [], []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("composer3d").addHandler(handler)
    x, y = batch()
    criterion = Criterion()
    for loss_of in (
        lambda model: (model(x) - y).square().mean(),
        lambda model: (model(x) - y).square().mean() + sum(p.square().sum() for p in model.parameters()),
        lambda model: criterion(model(x), y),
    ):
        run = composer3d.compose(nn.Linear(6, 1), write_manifest("[sharding.fsdp2]\n"))
        penalty = sum(p.square().sum() for p in run.model.parameters())  # of shards: nothing is gathered yet
        run.backward(loss_of(run.model) + 0.1 * penalty)
        run.close()
        found.append(list(records))
        records.clear()
    return found


def test_a_loss_that_depends_on_other_parameters_is_a_warning_with_the_line_to_write():
    expected = (
        "the loss depends on 1 parameters of no composed model (the first of shape []): their gradients are this "
        "rank's alone, and ranks would train different ones. Put them into the model before compose, or write "
        'optimizer.add_param_group({"params": list(criterion.parameters())}) on the optimizer that run.optimizer(...) '
        "returned, which averages them"
    )
    assert run_ranks(warned, 2) == [[[], [], [expected]]] * 2


def added_alone(text):
    """Return what is said where one rank alone adds a group, and on which ranks."""
    run = composer3d.compose(nn.Linear(6, 1), write_manifest(text), timeout_s=5)
    optimizer, (x, y) = run.optimizer(torch.optim.SGD, lr=0.1), batch()
    try:
        for step in range(2):
            if step and run.context.rank:
                optimizer.add_param_group({"params": list(Criterion().parameters())})
            run.backward((run.model(x) - y).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    except composer3d.StepError as error:
        return str(error)
    finally:
        run.close()


def test_a_group_that_one_rank_alone_adds_is_named_on_all_ranks():
    for said in run_ranks(added_alone, 2, "[sharding.ddp]\n"):
        assert "rank 1 (dp_" in said and "is at optimizer.add_param_group before step 1" in said
        assert said.endswith("are at step 1; call it on all ranks")


def test_a_group_that_one_rank_adds_while_others_gather_weights_is_named():
    for said in run_ranks(added_alone, 2, "[sharding.fsdp2]\n"):
        assert "rank 1 (dp_shard 1): after step 0, in optimizer.add_param_group, at test_outside_parameters.py" in said
