"""Private names of torch for copies of composed models."""

from __future__ import annotations

import copy
import threading

import pytest
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
    twin = torch_compat.copy_modules(model, {})
    twin[0].register_forward_hook(lambda *_: None)
    twin[0].seen.append(1)
    assert not model[0]._forward_hooks and model[0].seen == [] and twin[1].seen == [1]
    assert [len(each._forward_hooks) for each in twin.modules()] == [1, 1, 0]
    plain = copy.deepcopy(model)
    for one, other in zip(twin.modules(), plain.modules(), strict=True):
        assert vars(one).keys() == vars(other).keys()
        assert [type(value) for value in vars(one).values()] == [type(value) for value in vars(other).values()]


class Asked(nn.Linear):
    """A module that says how it is copied."""

    def __deepcopy__(self, memo):
        memo[id(self)] = twin = Asked(1, 1)
        twin.was_asked = True
        return twin


class Stateful(nn.Module):
    """A module whose state is not its attributes."""

    def __init__(self):
        super().__init__()
        self.number = 1

    def __getstate__(self):
        return {**vars(self), "number": self.number + 1}


def test_copies_share_what_the_model_shares_and_ask_modules_that_have_a_way_of_their_own():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), Asked(2, 2), Stateful(), nn.Linear(2, 2))
    model.again, model.listed, model.by_name = model[0], [model[3]], {"weight": model[0].weight, "deep": {"x": [1]}}
    model[3].weight = model[0].weight
    model[0].__deepcopy__ = lambda memo: model[0] if memo is None else nn.Identity()
    model[3].register_buffer("lost", None)
    kept = nn.Linear(3, 3)
    model.kept = kept
    twin = torch_compat.copy_modules(model, {id(kept): kept})
    assert isinstance(twin[0], nn.Identity) and twin.again is twin[0], "an object may say it too"
    assert twin[1].was_asked and twin[2].number == 2 and twin.kept is kept
    assert twin.listed == [twin[3]] and twin[3] is not model[3] and twin[3].lost is None
    assert twin.by_name["weight"] is twin[3].weight is not model[0].weight
    assert twin.by_name["deep"] == {"x": [1]} and twin.by_name["deep"]["x"] is not model.by_name["deep"]["x"]
    assert torch.equal(twin[3].weight, model[0].weight) and [*twin.state_dict()] == [*copy.deepcopy(model).state_dict()]


class Watched:
    """An object with a lock, as writers of logs are."""

    def __init__(self, inside):
        self.lock, self.inside = threading.Lock(), inside


class Answering:
    """An object that answers to every name."""

    def __init__(self):
        self.lock = threading.Lock()

    def __getattr__(self, name):
        return 3 if not name.startswith("__reduce") else super().__getattribute__(name)


def test_what_has_no_copy_is_shared_unless_it_holds_modules(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2))
    numbers = {"a": [1], 2: {3}}
    model.functional, model.lock, model.numbers = nn.functional, threading.Lock(), (iter([1]), numbers, numbers.keys())
    model.writer, model.answering = Watched({"log": tmp_path}), Answering()
    itself = []
    itself.append(itself)
    model.itself = [itself]
    twin = torch_compat.copy_modules(model, {})
    assert twin.functional is nn.functional and twin.lock is model.lock and twin.writer is model.writer
    assert twin.answering is model.answering
    assert twin.numbers[2] is model.numbers[2], "a view of what it was made of"
    assert twin.numbers[1] == numbers and twin.numbers[1] is not numbers and twin.numbers[1][2] is not numbers[2]
    assert twin.itself[0][0] is twin.itself[0] is not itself
    model.writer = Watched({"probe": [model[0]]})
    with pytest.raises(TypeError, match="cannot pickle '_thread.lock' object"):
        torch_compat.copy_modules(model, {})
