"""`p.data = tensor` of a composed model's parameters, and writes into gathered ones: what they are on one device."""

from __future__ import annotations

import copy

import pytest
import torch
from support.models import write_manifest
from torch import nn
from torch.nn.functional import mse_loss

import composer3d
from composer3d.testing import run_ranks

LAYOUTS = {
    "one rank": (1, "[sharding.fsdp2]\n"),
    "fsdp2": (3, "[sharding.fsdp2]\n"),
    "ddp": (2, "[sharding.ddp]\n"),
    "tp": (2, "[mesh]\ntp = 2\n[sharding.tensor_parallel]\n"),
}


def plain(model, shadow):
    for number, p in enumerate(model.parameters()):
        p.data = torch.randn(p.shape, generator=torch.Generator().manual_seed(number))


def own_updates(model, shadow):
    for p in model.parameters():
        if p.grad is not None:
            p.data, p.grad.data = p.data - 0.1 * p.grad, p.grad.data * 0.5


def vector(model, shadow):
    size = sum(p.numel() for p in model.parameters())
    torch.nn.utils.vector_to_parameters(torch.linspace(-1, 1, size), model.parameters())


def swapped(model, shadow):
    backup = {}
    for name, p in model.named_parameters():
        shadow[name] = 0.9 * shadow.get(name, p.data) + 0.1 * p.data
        backup[name], p.data = p.data, shadow[name]
    with torch.no_grad():
        model(torch.ones(6, 6))
    for name, p in model.named_parameters():
        p.data = backup[name] if name < "3" else shadow[name].clone()


def put_back(model, shadow):
    shadow["old"] = shadow.get("old") or copy.deepcopy([p.data for p in model.parameters()])
    for p, old in zip(model.parameters(), shadow["old"], strict=True):
        p.data = old.clone()


def shared(model, shadow):
    values = [p.data * 0.1 for p in model.parameters()]
    for p, value in zip(model.parameters(), values, strict=True):
        p.data = value
    for value in values:
        value.mul_(0.5)
    model[1].weight.data = model[1].bias.data


def gathered(model, shadow):
    model(torch.ones(6, 6))
    for number, p in enumerate(model.parameters()):
        if number % 2:
            p.data = p.data * 0.9
        else:
            with torch.no_grad():
                p.mul_(0.9)


BODIES = (plain, own_updates, vector, swapped, put_back, shared, gathered)


def trained(model, optimizer, backward, body, x, y):
    shadow = {}
    for _ in range(2):
        body(model, shadow)
        backward(mse_loss(model(x), y))
        own_updates(model, shadow) if body is own_updates else None
        optimizer.step()
        optimizer.zero_grad()


def differences(path, body):
    """Return the largest difference of any parameter to one device's, relative to its largest value."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10), nn.Tanh(), nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 1))
    reference, x, y = copy.deepcopy(model), torch.randn(6, 6), torch.randn(6, 1)
    run = composer3d.compose(model, path)
    rank, size = run.context.data_parallel_rank, 6 // run.context.data_parallel_degree
    mine = slice(rank * size, (rank + 1) * size)
    trained(reference, torch.optim.SGD(reference.parameters(), lr=0.1), torch.Tensor.backward, body, x, y)
    trained(run.model, run.optimizer(torch.optim.SGD, lr=0.1), run.backward, body, x[mine], y[mine])
    whole = dict(reference.named_parameters())
    found = max(
        float(((run.full_tensor(fqn, p) - whole[fqn]).abs().max() / whole[fqn].abs().max()).detach())
        for fqn, p in run.named_parameters()
    )
    run.close()
    return found


def all_differences(path):
    found = {body.__name__: differences(path, body) for body in BODIES}
    return {name: value for name, value in found.items() if not value <= 1e-12}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_that_a_loop_assigns_are_those_of_one_device(layout):
    world_size, text = LAYOUTS[layout]
    assert run_ranks(all_differences, world_size, write_manifest(text)) == [{}] * world_size


def refused(path):
    """Return what is said of values that a sharded parameter cannot have, or cannot share memory with."""
    run = composer3d.compose(nn.Linear(4, 5), path)
    weight, value, found = run.model.weight, torch.ones(5, 4), []

    def written_late():
        weight.data = value
        value.mul_(2)
        run.model(torch.ones(2, 4))

    def assigned_again():
        weight.data = value
        with torch.no_grad():
            weight.mul_(2)
        weight.data = value

    def of_another_shape():
        weight.data = torch.ones(4, 5)

    def of_another_dtype():
        weight.data = value.double()

    for wrong in (written_late, assigned_again, of_another_shape, of_another_dtype):
        with pytest.raises(composer3d.StepError) as caught:
            wrong()
        found.append(str(caught.value))
    run.close()
    return found


def test_what_cannot_be_assigned_is_refused_with_the_line_to_write():
    for found in run_ranks(refused, 2, write_manifest(LAYOUTS["fsdp2"][1])):
        late, again, shape, dtype = found
        assert "was written into afterwards" in late and late.endswith("write p.data = tensor.clone()")
        assert "was written before with the same tensor" in again and again.endswith("write p.data = tensor.clone()")
        assert shape.endswith(
            "p.data = tensor of shape [4, 5], and the sharded p has [5, 4]; change the model before compose"
        )
        assert dtype.endswith("write p.data = tensor.to(p.dtype)")
