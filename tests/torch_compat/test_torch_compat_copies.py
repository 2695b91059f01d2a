"""Private names of torch for copies of composed models."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from composer3d import torch_compat
from composer3d.testing import fake_world


def test_the_class_before_units_is_the_modules_own():
    with fake_world(2):
        module = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)))
        assert type(module) is not nn.Linear
        assert torch_compat.class_before_units(module) is nn.Linear
    assert torch_compat.class_before_units(nn.GELU()) is nn.GELU


def test_a_graph_does_not_see_writes_that_are_taken_back():
    weight = torch.ones(2, requires_grad=True)
    squared = weight.square().sum()
    with torch.no_grad(), torch_compat.unchanged_versions([weight]):
        weight.mul_(3.0)
    with torch.no_grad(), torch_compat.unchanged_versions([weight]):
        weight.div_(3.0)
    squared.backward()
    assert weight.grad.tolist() == [2.0, 2.0]


def test_copies_have_containers_of_their_own():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model.register_forward_hook(lambda *_: None)
    model[0].seen = model[1].seen = []
    twin = copy.deepcopy(model, torch_compat.empty_containers(model.modules()))
    twin[0].register_forward_hook(lambda *_: None)
    twin[0].seen.append(1)
    assert not model[0]._forward_hooks and model[0].seen == [] and twin[1].seen == [1]
    assert [len(each._forward_hooks) for each in twin.modules()] == [1, 1, 0]
    plain = copy.deepcopy(model)
    for one, other in zip(twin.modules(), plain.modules(), strict=True):
        assert vars(one).keys() == vars(other).keys()
        assert [type(value) for value in vars(one).values()] == [type(value) for value in vars(other).values()]
