"""Compiled blocks that are called in many ways: numbers, sizes and hooks that a loop changes are followed."""

from __future__ import annotations

import logging

import pytest
import torch
from support.models import write_manifest
from torch import nn

import composer3d
from composer3d.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
COMPILE = '[mesh]\ndp_shard = 2\n[sharding.fsdp2]\n[scheduling.compile]\nbackend = "aot_eager"\n'
SHIFTS = tuple(range(1, 21))


class Shifted(nn.Module):
    """Reads a number of its own of a table."""

    def __init__(self, number):
        super().__init__()
        self.number, self.linear = number, nn.Linear(16, 16)

    def forward(self, x):
        return x + torch.tanh(self.linear(x.roll(SHIFTS[self.number], 1)))


class Net(nn.Module):
    def __init__(self, num_layers):
        super().__init__()
        self.tok = nn.Embedding(8, 16)
        self.layers = nn.ModuleList(Shifted(number) for number in range(num_layers))
        self.out = nn.Linear(16, 8)

    def forward(self, tokens):
        x = self.tok(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def made(num_layers):
    torch.manual_seed(0)
    return Net(num_layers)


def loss_fn(output, targets):
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())


def trained(num_layers, changes):
    """Make a change before each step; return the largest error of a loss beside one process, and what was logged."""
    torch.set_default_dtype(torch.float64)
    torch._dynamo.reset()
    logged, handler = [], logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("composer3d_plugins.scheduling.compile").addHandler(handler)
    alone, errors = made(num_layers), []
    generator = torch.Generator().manual_seed(0)
    with composer3d.compose(made(num_layers), write_manifest(COMPILE), loss_fn=loss_fn) as run:
        for step, change in enumerate(changes):
            tokens, targets = torch.randint(0, 8, (2, 4, 13), generator=generator)
            for model in (alone, run.model):
                change(model.layers)
            rank = torch.distributed.get_rank()
            with run.step(step):
                loss = run.forward_backward(tokens[2 * rank :][:2], target=targets[2 * rank :][:2])
                errors.append(abs(float(loss.detach() - loss_fn(alone(tokens), targets).detach())))
                for _, parameter in run.named_parameters():
                    parameter.grad = None
    return max(errors), logged


def unchanged(layers):
    pass


def numbered(value):
    def change(layers):
        for layer in layers:
            layer.number = value

    return change


def hooked(layers):
    for layer in layers:
        layer.handle = layer.linear.register_forward_hook(lambda module, args, output: output + 0.1)


def unhooked(layers):
    for layer in layers:
        layer.handle.remove()


@pytest.mark.slow
def test_more_blocks_than_torch_compiles_forms_of_one_code():
    for error, logged in run_ranks(trained, 2, 10, [unchanged, unchanged]):
        assert error < 1e-12 and logged == []


def test_hooks_that_are_registered_between_steps_are_called():
    for error, logged in run_ranks(trained, 2, 2, [unchanged, hooked, unhooked]):
        assert error < 1e-12 and logged == []


@pytest.mark.slow
def test_numbers_that_change_in_every_step_run_as_they_are_in_the_end_and_are_named():
    for error, logged in run_ranks(trained, 2, 2, [numbered(number) for number in range(20)]):
        assert error < 1e-12
        assert logged == [
            f'compile: "layers.{number}" runs as it is where it is called in another way than before, since its code '
            "was compiled 16 times: sizes, or numbers that it reads, change all the time"
            for number in range(2)
        ]
