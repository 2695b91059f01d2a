"""Writes into rows, slices and other views of a composed model's parameters: what they are on one device."""

from __future__ import annotations

import copy

import pytest
import torch
from support.models import write_manifest
from torch import nn

import composer3d
from composer3d.testing import run_ranks

LAYOUTS = {
    "fsdp2": (2, "[sharding.fsdp2]\n"),
    "ddp": (2, "[sharding.ddp]\n"),
    "tp": (2, "[mesh]\ntp = 2\n[sharding.tensor_parallel]\n"),
    "fsdp2, tp": (4, "[mesh]\ntp = 2\n[sharding.fsdp2]\n[sharding.tensor_parallel]\n"),
}
INDEX = torch.tensor([0, 3, 1])


def net(size):
    """Return a model of an odd number of rows, or of one that tensor parallelism divides."""
    first, norm = nn.Linear(6, 12), nn.LayerNorm(12)
    return nn.Sequential(first, norm, nn.Tanh(), nn.Linear(12, size), nn.Tanh(), nn.Linear(size, 1))


def scaled_pieces(p):
    for number, piece in enumerate(p.chunk(2)):
        piece.mul_(number + 2)


def seeded(write):
    def drawn(p):
        torch.manual_seed(3)
        write(p)

    return drawn


WRITES = {
    "row": lambda p: p.__setitem__(3, 0),
    "slices": lambda p: p.__setitem__((slice(1, 7, 2), slice(2, 5)), 0.5),
    "element": lambda p: p.__setitem__((3, 4), p[3, 4] + 1),
    "row of a row": lambda p: p[2:5][1].mul_(2),
    "rows": lambda p: p.narrow(0, 1, 6).add_(1),
    "diagonal": lambda p: p.diagonal().zero_(),
    "flat": lambda p: p.view(-1)[5:20].zero_(),
    "flattened": lambda p: p.flatten().mul_(2),
    "pieces": scaled_pieces,
    "column": lambda p: p.__setitem__((slice(None), 3), 0),
    "transposed": lambda p: p.T[3].zero_(),
    "itself": lambda p: p.__setitem__(slice(0, 4), p[4:8] * 2),
    "data": lambda p: p.data[:2].fill_(0.1),
    "mask": lambda p: p.__setitem__(p.abs() < 0.05, 0.0),
    "list": lambda p: p.__setitem__([0, 3, 1], 7.0),
    "plain row": lambda p: p[3].copy_(torch.arange(float(p.shape[1]))),
    "plain mask": lambda p: p.masked_fill_(torch.arange(p.numel()).reshape(p.shape) % 3 == 0, 0),
    "index_add_": lambda p: p.index_add_(0, INDEX, torch.ones(3, p.shape[1])),
    "index_fill_": lambda p: p.index_fill_(0, INDEX, 3.0),
    "scatter_": lambda p: p.scatter_(0, torch.zeros(1, p.shape[1], dtype=torch.long), 2.0),
    "addcmul_": lambda p: p.addcmul_(torch.ones(p.shape), torch.full(p.shape, 2.0)),
    "drawn row": seeded(lambda p: p[2].normal_()),
    "sparse_": seeded(lambda p: nn.init.sparse_(p, 0.3)),
    "orthogonal_": seeded(lambda p: nn.init.orthogonal_(p) if p.shape[0] >= p.shape[1] else None),
    "read by indices": lambda p: p.mul_(p[[0, 3, 1]].sum() + p.index_select(1, INDEX).sum()),
}


def differences(path, size):
    """Return what is off one device by name of the write, with the largest difference of any parameter."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = net(size)
    reference, initial = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    run, found = composer3d.compose(model, path), {}
    for name, write in WRITES.items():
        reference.load_state_dict(initial)
        run.model.load_state_dict(initial)
        with torch.no_grad():
            for number in (0, 3):
                write(reference[number].weight)
                write(run.model[number].weight)
        expected = dict(reference.named_parameters())
        errors = (run.full_tensor(fqn, p).detach() - expected[fqn].detach() for fqn, p in run.named_parameters())
        if not (error := max(float(each.abs().max()) for each in errors)) <= 1e-12:
            found[name] = error
    run.close()
    return found


@pytest.mark.parametrize("layout", [*list(LAYOUTS)[:3], pytest.param("fsdp2, tp", marks=pytest.mark.slow)])
def test_writes_into_views_are_those_of_one_device(layout):
    world_size, text = LAYOUTS[layout]
    size = 12 if "tp" in text else 9
    assert run_ranks(differences, world_size, write_manifest(text), size) == [{}] * world_size
