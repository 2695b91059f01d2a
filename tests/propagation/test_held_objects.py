"""Objects that code can reach from a module."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

from composer3d.propagation import reached_from, tensors_of


class Holder:
    def __init__(self, kept):
        self.kept = kept


class Empty(dict):
    """A container of a model's own."""


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = nn.Linear(2, 2)
        self.size, self.name, self.nothing, self.later = 2, "model", None, []
        self.holders = [Holder({"first": torch.ones(1)}), (torch.ones(2), 3)]
        self.own = Empty()
        kept = torch.ones(3)
        self.hook = lambda kept=kept: kept


def test_tensors_are_reached_through_containers_objects_and_functions():
    found = {value.numel(): (type(owner), name) for owner, name, value in reached_from(Model()) if tensors(value)}
    assert found == {1: (dict, "kept"), 2: (tuple, "holders"), 3: (tuple, "hook")}


def tensors(value):
    return isinstance(value, torch.Tensor) and [*tensors_of(value)]


def test_numbers_texts_and_empty_containers_of_python_are_left_out():
    left_out = (int, float, str, bool, type(None))
    values = [value for _, _, value in reached_from(Model())]
    assert not [value for value in values if isinstance(value, left_out)]
    assert not [value for value in values if type(value) in (dict, OrderedDict, list, tuple, set) and not value]
    assert [value for value in values if type(value) is Empty] == [{}]
